"""`Terms` against loops in float64, in every policy loss."""

import functools

import jax
import numpy as np
import oracles
import pytest
from oracles import B, T, random_case

import gspo_jax
from gspo_jax import Terms, router_log_weight
from gspo_jax.losses import kl_penalty

LOSSES = list(oracles.SETTINGS)
CLIPPED = [name for name in LOSSES if name not in oracles.UNCLIPPED]
every_loss = pytest.mark.parametrize("name", LOSSES)
# Terms are applied in two shared places: one loss of each kind is enough.
some_losses = pytest.mark.parametrize("name", ["gspo", "rspo", "cispo"])


@functools.cache
def compiled(name, dual_clip=None):
  def f(x, case, **arrays):
    penalty = case.reference
    if penalty is not None:
      penalty = kl_penalty(x, penalty, case.m, estimator="k2")
    if case.router_shift is not None:
      arrays["router_shift"] = case.router_shift
    terms = Terms(case.shift, case.weights, penalty, dual_clip)
    loss = getattr(gspo_jax, f"{name}_loss")
    return loss(x, *case[1:4], terms=terms, **arrays)

  return jax.jit(jax.value_and_grad(f, has_aux=True))


def run(name, case, dual_clip=None, **arrays):
  f = compiled(name, dual_clip)
  (loss, metrics), grad = f(case.x, case, **arrays)
  return np.asarray(loss), jax.device_get(metrics), np.asarray(grad)


def with_terms(name, seed=0, extreme=False):
  """A case with every array of `Terms`, but no shift for RSPO."""
  case = random_case(name, seed, extreme=extreme)
  rng = np.random.default_rng(seed + 100)
  shift, weights, reference = rng.standard_normal((3, B, T)).astype(np.float32)
  if name != "rspo":
    case = case._replace(shift=oracles.SETTINGS[name][1] * shift)
  return case._replace(weights=weights, reference=case.x + reference)


def assert_close(got, expected, rtol=2e-5):
  atol = 1e-7 + rtol * np.max(np.abs(expected))
  np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)


def assert_is_oracle(name, case, dual_clip=None):
  loss, metrics, grad = run(name, case, dual_clip)
  expected, values = oracles.loss(name, case, dual_clip)
  assert_close(loss, expected)
  assert_close(grad, oracles.gradient(name, case, dual_clip))
  assert metrics.keys() == values.keys()
  for key in ("loss/policy", "loss/penalty", "clip_frac/token_high"):
    if key in metrics:
      assert_close(metrics[key].value(), values[key])
  return metrics


@some_losses
@pytest.mark.parametrize("term", ["shift", "weights", "reference"])
def test_one_term_equals_the_oracle(name, term):
  case = random_case(name)._replace(**{term: getattr(with_terms(name), term)})
  assert_is_oracle(name, case)


@every_loss
@pytest.mark.parametrize("extreme", [False, True])
def test_all_terms_equal_the_oracle(name, extreme):
  case = with_terms(name, 1, extreme)
  metrics = assert_is_oracle(name, case)
  assert metrics["loss/penalty"].count == metrics["loss/policy"].count


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize("extreme", [False, True])
def test_dual_clip_equals_the_oracle(name, extreme):
  case = with_terms(name, extreme=extreme)
  # The ratios of sequences have a smaller std than those of tokens.
  c = 1 + oracles.SETTINGS[name][1] * (0.1 if "gspo" in name else 1.2)
  dual = assert_is_oracle(name, case, c)
  _, without = oracles.loss(name, case)
  high = "clip_frac/token_high"
  assert dual[high].value() > without[high]


def test_dual_clip_bounds_the_loss():
  case = random_case("grpo", extreme=True)
  losses = [run("grpo", case, c)[0] for c in (None, 3.0)]
  assert losses[1] < 3 * np.abs(case.a).max() < losses[0]


@some_losses
def test_neutral_terms_change_nothing(name):
  case = random_case(name)
  one, nothing = np.ones((2, B, T), np.float32) * [[[1]], [[0]]]
  shift = None if name == "rspo" else nothing.astype(np.float32)
  neutral = case._replace(weights=one.astype(np.float32), shift=shift)
  same = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
  jax.tree.map(same, run(name, neutral), run(name, case))


@some_losses
def test_metrics_of_ratios_leave_the_shift_out(name):
  case = with_terms(name)
  plain = run(name, case._replace(shift=None))[1]
  shifted = run(name, case)[1]
  for key in plain:
    if key.startswith(("ratio", "kl")):
      jax.tree.map(np.testing.assert_array_equal, shifted[key], plain[key])


@some_losses
def test_garbage_in_terms_under_the_mask_is_never_read(name):
  case = with_terms(name)
  clean = run(name, case)
  garbage = np.resize([np.nan, np.inf, -np.inf], (B, T)).astype(np.float32)
  terms = {
    key: np.where(case.m, value, garbage)
    for key in ("shift", "weights", "reference", "router_shift")
    if (value := getattr(case, key)) is not None
  }
  with jax.debug_nans(True):
    dirty = run(name, case._replace(**terms))
  jax.tree.map(np.testing.assert_array_equal, dirty, clean)


@some_losses
def test_micro_batches_with_terms_add(name):
  case = with_terms(name)
  loss, metrics, grad = run(name, case)
  row, one = np.arange(B)[:, None], np.float32(1)
  parts = [
    run(name, case._replace(m=case.m & (row // 2 == i)), normalizer=one)
    for i in range(B // 2)
  ]
  count = metrics["loss/policy"].count
  assert_close(sum(part[0] for part in parts) / count, loss)
  assert_close(sum(part[2] for part in parts) / count, grad)


@some_losses
def test_packed_rows_with_terms(name):
  case = with_terms(name)
  loss, _, grad = run(name, case)
  a = np.broadcast_to(case.a[:, None], case.m.shape)
  pairs = type(case)(
    *(
      None if v is None else np.reshape(v, (B // 2, 2 * T))
      for v in case._replace(a=a)
    )
  )
  ids = np.repeat([[0] * T + [1] * T], B // 2, axis=0)
  packed, _, packed_grad = run(name, pairs, segment_ids=ids)
  assert_close(packed, loss)
  assert_close(packed_grad.reshape(grad.shape), grad)


@some_losses
def test_shift_and_weights_have_no_gradient(name):
  case = with_terms(name)
  keys = ["weights", "router_shift" if name == "rspo" else "shift"]

  def f(arrays):
    terms = dict(zip(keys, arrays, strict=True))
    return compiled(name)(case.x, case._replace(**terms))[0][0]

  grads = jax.grad(f)([getattr(case, key) for key in keys])
  assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("name", ["gmpo", "grpo", "cispo"])
def test_router_log_weight_works_in_any_loss(name):
  """GMPO with it equals RSPO."""
  case = random_case("rspo")
  shift = router_log_weight(case.router_shift, case.m)
  plain = random_case("rspo")._replace(router_shift=None)
  assert_is_oracle(name, plain._replace(shift=np.asarray(shift)))
  if name == "gmpo":
    result = run(name, plain._replace(shift=shift))
    jax.tree.map(np.testing.assert_array_equal, result, run("rspo", case))


def test_router_log_weight():
  shift = np.array([[0.0, 0.1, 5.0, np.inf, np.nan]], np.float32)
  mask = np.array([[1, 1, 1, 1, 0]])
  with jax.debug_nans(True):
    weights = np.exp(router_log_weight(shift, mask, floor=0.7))
  np.testing.assert_allclose(
    weights, [[1, np.exp(-0.1), 0.7, 0.7, 1]], rtol=1e-6
  )
  assert not jax.grad(lambda d: router_log_weight(d, mask).sum())(shift).any()


@pytest.mark.parametrize("floor", [0, -1, 1.1])
def test_router_floor_outside_its_range_is_refused(floor):
  with pytest.raises(ValueError, match=f"floor={floor}"):
    router_log_weight(np.zeros((1, 1)), np.ones((1, 1)), floor=floor)


@pytest.mark.parametrize("name", oracles.UNCLIPPED)
def test_dual_clip_is_refused_by_losses_without_one(name):
  with pytest.raises(ValueError, match="has no dual clip"):
    run(name, random_case(name), dual_clip=3.0)


@pytest.mark.parametrize("c", [1.0, 0.2])
def test_dual_clip_below_one_is_refused(c):
  with pytest.raises(ValueError, match=f"above 1, got {c}"):
    run("grpo", random_case("grpo"), dual_clip=c)


def test_rspo_refuses_a_second_log_ratio_shift():
  case = random_case("rspo")._replace(shift=np.zeros((B, T), np.float32))
  with pytest.raises(ValueError, match="its log_ratio_shift"):
    run("rspo", case)


@pytest.mark.parametrize("term", ["log_ratio_shift", "weights", "penalty"])
def test_wrong_terms_are_refused(term):
  case = random_case("gspo")
  for bad, error in (
    (np.zeros((B, T), np.float16), TypeError),
    (np.zeros((B, T - 1), np.float32), ValueError),
    (np.zeros(B, np.float32), ValueError),
  ):
    with pytest.raises(error, match=term):
      gspo_jax.gspo_loss(*case[:4], terms=Terms(**{term: bad}))
