"""Policy losses against loops in float64, and their invariants."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from oracles import B, T, random_case
from processes import python
from run_loss import (
  assert_close,
  assert_is_oracle,
  assert_same,
  call,
  loss_of,
  map_arrays,
  run,
  with_terms,
)

import gspo_jax
from gspo_jax.losses import Histogram

LOSSES = list(oracles.SETTINGS)
every_loss = pytest.mark.parametrize("name", LOSSES)
TWO = np.float32(2)


def extras(case):
  """The keyword arguments of a direct call."""
  shift = case.router_shift
  return {} if shift is None else {"router_shift": shift}


def per_token(case):
  """The case with advantages [B, T]."""
  return case._replace(a=np.broadcast_to(case.a[:, None], case.m.shape))


@every_loss
@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_value_gradient_and_metrics_equal_the_oracle(name, seed, extreme):
  assert_is_oracle(name, random_case(name, seed, extreme=extreme))


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in oracles.SMOOTH])
def test_random_cases_clip_some_tokens_and_not_all(name):
  fractions = [
    run(name, random_case(name, seed))[1][f"clip_frac/token_{side}"].value()
    for seed in range(4)
    for side in ("low", "high")
    if (name, side) != ("cispo", "low")
  ]
  assert 0.05 < np.mean(fractions) < 0.45


@pytest.mark.parametrize(
  "name", [n for n in LOSSES if n not in oracles.PER_SEQUENCE]
)
def test_advantages_per_token_equal_the_oracle(name):
  assert_is_oracle(name, random_case(name, per_token=True))


def pack(array):
  """[B, T] -> [B / 2, 2 T], two sequences a row, their tokens interleaved."""
  array = np.reshape(array, (B // 2, 2 * T))
  merged = np.empty_like(array)
  for i, row in enumerate(array):
    is_second = np.random.default_rng(i).permutation(np.arange(2 * T) >= T)
    merged[i, ~is_second], merged[i, is_second] = row[:T], row[T:]
  return merged


def packed(name):
  """Static arguments, a packed case with all terms, its segment ids."""
  static = {"max_length": 7} if name in oracles.FIXED_LENGTH else {}
  ids = pack(np.arange(B)[:, None] % 2 * (2 * T - 1) + np.zeros((B, T), int))
  return static, map_arrays(pack, per_token(with_terms(name))), ids


def at(ids):
  """The arrays beside a packed case."""
  return {"segment_ids": ids, "normalizer": TWO}


@every_loss
def test_packed_micro_batches_of_any_normalizer_add_to_unpacked_rows(name):
  static, case, ids = packed(name)
  loss, metrics, grad = run(name, with_terms(name), static)
  # Micro-batches of one row, the others masked: one shape to compile.
  masks = [case.m & (np.arange(B // 2)[:, None] == i) for i in range(B // 2)]
  parts = [run(name, case._replace(m=m), static, **at(ids)) for m in masks]
  total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), parts)
  assert_same(total[1], metrics)
  count = total[1]["loss/policy"].count
  assert_same(total[0] * TWO / count, loss)
  assert_same(total[2] * TWO / count, pack(grad))
  over_tokens = dict.fromkeys(oracles.OVER_TOKENS, case.m.sum())
  fixed_length = dict.fromkeys(oracles.FIXED_LENGTH, 5 * 7)
  assert count == (over_tokens | fixed_length).get(name, 5)


@every_loss
def test_garbage_under_the_mask_is_never_read(name):
  static, case, ids = packed(name)
  clean = run(name, case, static, **at(ids))
  rng = np.random.default_rng(0)

  def with_garbage(v):
    garbage = rng.choice([np.nan, np.inf, -np.inf, 1e30], v.shape)
    return np.where(case.m, v, garbage).astype(np.float32)

  dirty = map_arrays(with_garbage, case)._replace(m=case.m)
  strays = rng.choice([-1, 2 * T, 10**9], ids.shape)
  dirty_ids = np.where(case.m, ids, strays)
  with jax.debug_nans(True):
    result = run(name, dirty, static, **at(dirty_ids))
    # Under jit debug_nans checks the outputs only.
    f = lambda x: call(name, x, dirty, segment_ids=dirty_ids)
    jax.grad(f, has_aux=True)(dirty.x)
  jax.tree.map(np.testing.assert_array_equal, result, clean)
  assert not result[2][~case.m].any()


@every_loss
def test_gradient_is_finite_at_the_clamp_and_zero_beyond(name):
  case = random_case(name)
  for gap in (20.0, -20.0, 88.0, -88.0, np.inf, -np.inf):
    # The old policy moves: the loss of CISPO and VESPO contains x itself.
    o = np.where(case.m, case.x - np.float32(gap), 0.0)
    with jax.debug_nans(True):
      loss, _, grad = run(name, case._replace(o=o.astype(np.float32)))
    assert np.isfinite(loss)
    assert np.isfinite(grad).all()
    if abs(gap) > 20 and name not in ("cispo", "vespo"):
      assert not grad.any()


@every_loss
def test_empty_batch(name):
  case = random_case(name)
  loss, metrics, grad = run(name, case._replace(m=np.zeros_like(case.m)))
  assert loss == 0
  assert not grad.any()
  for metric in metrics.values():
    if isinstance(metric, Histogram):
      assert not metric.value().any()
    else:
      assert np.isnan(metric.value())


@pytest.mark.parametrize("name", ["gspo", "rspo", "cispo"])
def test_only_new_logps_have_a_gradient(name):
  case = random_case(name)

  def everything(x, o, a):
    loss, metrics = call(name, x, case._replace(o=o, a=a))
    return loss, sum(metric[0].sum() for metric in metrics.values())

  f = jax.jit(jax.jacrev(everything, (0, 1, 2)))
  of_loss, of_metrics = f(case.x, case.o, case.a)
  assert [bool(grad.any()) for grad in of_loss] == [True, False, False]
  assert not any(grad.any() for grad in of_metrics)


def test_gspo_differs_from_gspo_token_for_advantages_per_token():
  case = random_case("gspo", per_token=True)
  loss, _, grad = run("gspo", case, segment_ids=np.zeros((B, T), int))
  token_loss, _, token_grad = run("gspo_token", case)
  assert_same(loss, token_loss)
  assert np.max(np.abs(grad - token_grad)) > 0.01
  assert_close(grad, oracles.gradient("gspo", case))
  assert_close(token_grad, oracles.gradient("gspo_token", case))


@every_loss
def test_zero_advantages_are_never_clipped(name):
  case = random_case(name, extreme=True)
  loss, metrics, grad = run(name, case._replace(a=np.zeros_like(case.a)))
  assert loss == 0
  assert not grad.any()
  fractions = [v for key, v in metrics.items() if key.startswith("clip_frac")]
  assert not any(fraction.value() for fraction in fractions)


@every_loss
def test_on_policy_ratio_is_exactly_one(name):
  case = random_case(name)
  case = case._replace(x=case.o)
  loss, metrics, grad = run(name, case)
  assert_close(loss, oracles.loss(name, case)[0])
  assert_close(grad, oracles.gradient(name, case))
  assert grad.any()
  for key in ("ratio/moved", "ratio/token_std", "clip_frac/token"):
    assert metrics[key].value() == 0
  counts = metrics["ratio/token_log"].value()
  assert counts[len(counts) // 2] == counts.sum() == case.m.sum()


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_a_mask_of_numbers_equals_one_of_bools(dtype):
  case = random_case("gspo")
  result = run("gspo", case._replace(m=case.m.astype(dtype)))
  assert_same(result, run("gspo", case))


@every_loss
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float64])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_other_floats_are_refused(name, position, dtype):
  data = list(random_case(name)[:4])
  data[position] = data[position].astype(dtype)
  argument = ["logps", "old_logps", "advantages"][position]
  with pytest.raises(TypeError, match=f"^{argument} must be float32"):
    loss_of(name)(*data, **extras(random_case(name)))


@every_loss
def test_wrong_shapes_are_refused(name):
  case = random_case(name)
  x, o, a, m = case[:4]
  ids = np.zeros((B, T), int)
  bad = [
    ((x, o[:, 1:], a, m), {}, r"\(6, 8\)"),
    ((x, o, a, m[1:]), {}, r"\(5, 9\)"),
    ((x[0], o[0], a[0], m[0]), {}, r"\[B"), ((x, o, a[1:], m), {}, r"\(5,\)"),
    ((x, o, per_token(case).a, m), {"segment_ids": ids[1:]}, r"\(5, 9\)"),
    ((x, o, a, m), {"segment_ids": ids}, r"\(6,\), packed=True"),
  ]  # fmt: skip
  for arguments, keywords, message in bad:
    with pytest.raises(ValueError, match=message):
      loss_of(name)(*arguments, **keywords, **extras(case))


def test_wrong_masks_and_segment_ids_are_refused():
  """Outside of jit, as a packer that numbers the whole batch gives them."""
  x, o, a, m = per_token(random_case("gspo"))[:4]
  rows = np.arange(B)[:, None] + np.zeros((B, T), int)
  for mask, ids, message in (
    (m, rows * T, f"segment_ids: expected 0 to T - 1 = {T - 1} in each row"),
    (m, -1 - rows, "segment_ids: expected 0 to .* got -1; ids that count over"),
    (np.where(m, 0.5, 0), rows, "mask: expected bool or 0/1, got 0.5"),
  ):
    call = functools.partial(gspo_jax.gspo_loss, x, o, a, segment_ids=ids)
    with pytest.raises(ValueError, match=message):
      call(mask)
    with pytest.raises(ValueError, match=message):
      jax.grad(
        lambda x, ids=ids, mask=mask: gspo_jax.gspo_loss(
          x, o, a, mask, segment_ids=jnp.asarray(ids)
        )[0]
      )(x)


def test_a_mask_may_be_a_constant_of_a_jitted_caller():
  x, o, a, m = per_token(random_case("gspo"))[:4]
  mask, ids = jnp.asarray(m), jnp.zeros((B, T), jnp.int32)
  loss = lambda x: gspo_jax.gspo_loss(x, o, a, mask, segment_ids=ids)[0]
  np.testing.assert_allclose(jax.jit(loss)(x), loss(x), rtol=1e-5)


@pytest.mark.parametrize("name", oracles.PER_SEQUENCE)
def test_sequence_level_losses_refuse_advantages_per_token(name):
  case = random_case(name, per_token=True)
  with pytest.raises(ValueError, match="gspo_token_loss takes"):
    loss_of(name)(*case[:4], **extras(case))


def test_import_is_light_and_touches_no_device():
  heavy = "flax orbax grain transformers tensorflow optax ml_collections"
  code = f"""
import sys, gspo_jax
assert not [name for name in {heavy.split()} if name in sys.modules]
import jax
try:
  jax.devices()
except RuntimeError:
  print("the first touch of a device fails")
"""
  env = os.environ | {"JAX_PLATFORMS": "nowhere"}
  done = python("-c", code, env=env)
  assert "first touch" in done.stdout, done.stderr
