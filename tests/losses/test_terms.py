"""`Terms` against loops in float64, in every policy loss."""

import jax
import numpy as np
import oracles
import pytest
from oracles import B, T, random_case
from run_loss import assert_is_oracle, compiled, run, with_terms

import gspo_jax
from gspo_jax import Terms, router_log_weight

LOSSES = list(oracles.SETTINGS)
CLIPPED = [name for name in LOSSES if name not in oracles.UNCLIPPED]
every_loss = pytest.mark.parametrize("name", LOSSES)


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
  c = 1 + oracles.SETTINGS[name][1] * (
    0.1 if name in oracles.SEQUENCE_RATIO else 1.2
  )
  dual = assert_is_oracle(name, case, c)
  _, without = oracles.loss(name, case)
  high = "clip_frac/token_high"
  assert dual[high].value() > without[high]


@pytest.mark.parametrize("name", ["gspo", "rspo", "cispo"])
def test_shift_and_weights_have_no_gradient(name):
  case = with_terms(name)
  keys = ["weights", "router_shift" if name == "rspo" else "shift"]

  def f(arrays):
    terms = dict(zip(keys, arrays, strict=True))
    return compiled(name)(case.x, case._replace(**terms))[0][0]

  grads = jax.grad(f)([getattr(case, key) for key in keys])
  assert not any(grad.any() for grad in grads)


def test_gmpo_with_the_router_log_weight_equals_rspo():
  case = random_case("rspo")
  shift = router_log_weight(case.router_shift, case.m)
  result = run("gmpo", case._replace(router_shift=None, shift=shift))
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
    run(name, random_case(name), {"dual_clip": 3.0})


@pytest.mark.parametrize("c", [1.0, 0.2])
def test_dual_clip_below_one_is_refused(c):
  with pytest.raises(ValueError, match=f"above 1, got {c}"):
    run("grpo", random_case("grpo"), {"dual_clip": c})


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
