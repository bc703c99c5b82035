"""Importance weights from sampler to trainer against loops in float64."""

import jax
import numpy as np
import oracles
import pytest

from gspo_jax import mismatch_weights, off_policy_mask

B, T = 4, 7


def random_case():
  """o, q and a ragged mask with an empty row; some ratios far out of bounds."""
  rng = np.random.default_rng(0)
  old = rng.uniform(-4, -0.1, (B, T)).astype(np.float32)
  gap = 0.8 * rng.standard_normal((B, T))
  gap[0, 1], gap[0, 2] = 50, -50
  gap[2] += 0.9
  mask = np.arange(T) < np.array([[7], [0], [5], [3]])
  return old, (old - gap).astype(np.float32), mask


@pytest.mark.parametrize("method", ["tis", "mis"])
@pytest.mark.parametrize("unit", ["token", "sequence"])
@pytest.mark.parametrize("bounds", [(2.0, 0.5), (1.2, 0.9)])
def test_weights_and_metrics_equal_the_oracle(method, unit, bounds):
  cap, floor = bounds
  keywords = {"method": method, "unit": unit, "cap": cap, "floor": floor}
  weights, metrics = mismatch_weights(*random_case(), **keywords)
  expected, fraction, mean = oracles.mismatch_weights(
    *random_case(), **keywords
  )
  np.testing.assert_allclose(weights, expected, rtol=1e-5)
  np.testing.assert_allclose(
    metrics["mismatch/cut"].value(), fraction, rtol=1e-6
  )
  np.testing.assert_allclose(
    metrics["mismatch/weight"].value(), mean, rtol=1e-5
  )
  assert 0 < fraction < 1
  assert weights.dtype == np.float32


def test_packed_rows_equal_unpacked_rows():
  old, sampled, mask = random_case()
  expected, _ = mismatch_weights(old, sampled, mask, unit="sequence")
  ids = np.repeat([[0] * T + [1] * T], 2, axis=0)
  arrays = [v.reshape(2, 2 * T) for v in (old, sampled, mask)]
  packed, _ = mismatch_weights(*arrays, unit="sequence", segment_ids=ids)
  np.testing.assert_allclose(packed.reshape(B, T), expected, rtol=1e-5)


def test_equal_logps_give_weights_of_one():
  old, _, mask = random_case()
  for method in ("tis", "mis"):
    weights, metrics = mismatch_weights(old, old, mask, method=method)
    np.testing.assert_array_equal(weights, mask)
    assert metrics["mismatch/cut"].value() == 0


def test_garbage_under_the_mask_is_never_read():
  old, sampled, mask = random_case()
  garbage = np.resize([np.nan, np.inf, -np.inf], mask.shape)
  dirty = [
    np.where(mask, v, garbage).astype(np.float32) for v in (old, sampled)
  ]
  for unit in ("token", "sequence"):
    expected = mismatch_weights(old, sampled, mask, unit=unit)
    with jax.debug_nans(True):
      result = mismatch_weights(*dirty, mask, unit=unit)
    jax.tree.map(np.testing.assert_array_equal, result, expected)


def test_there_is_no_gradient():
  old, sampled, mask = random_case()
  f = lambda o, q: mismatch_weights(o, q, mask)[0].sum()
  assert not any(g.any() for g in jax.grad(f, (0, 1))(old, sampled))


@pytest.mark.parametrize(
  ("keywords", "message"),
  [({"method": "is"}, "method='is'"), ({"unit": "batch"}, "unit='batch'"),
   ({"cap": 0.4}, "cap=0.4"), ({"floor": -0.1}, "floor=-0.1")],
)  # fmt: skip
def test_wrong_settings_are_refused(keywords, message):
  with pytest.raises(ValueError, match=message):
    mismatch_weights(*random_case(), **keywords)


def test_wrong_arrays_are_refused():
  old, sampled, mask = random_case()
  with pytest.raises(TypeError, match="sampler_logps must be float32"):
    mismatch_weights(old, sampled.astype(np.float16), mask)
  with pytest.raises(ValueError, match="sampler_logps"):
    mismatch_weights(old, sampled[1:], mask)


ADVANTAGES = np.random.default_rng(1).standard_normal((B, T)).astype(np.float32)


@pytest.mark.parametrize("threshold", [0.1, 1.0, 4.0])
def test_off_policy_mask_equals_the_oracle(threshold):
  """The sequences with large gaps, at the tokens with A < 0."""
  sampled, logps, mask = random_case()
  weights, metrics = off_policy_mask(
    logps, sampled, ADVANTAGES, mask, threshold=threshold
  )
  expected, fraction = oracles.off_policy_mask(
    logps, sampled, ADVANTAGES, mask, threshold
  )
  np.testing.assert_array_equal(weights, expected)
  np.testing.assert_allclose(
    metrics["mismatch/off_policy"].value(), fraction, rtol=1e-6
  )
  assert (fraction > 0) == (threshold < 4)
  one_each = ADVANTAGES[:, 0]
  whole, _ = off_policy_mask(
    logps, sampled, one_each, mask, threshold=threshold
  )
  for row, kept, advantage in zip(mask, whole, one_each, strict=True):
    assert len(set(np.asarray(kept)[row].tolist())) <= 1
    assert advantage < 0 or kept[row].all()


def test_off_policy_mask_of_packed_rows():
  sampled, logps, mask = random_case()
  arrays = (logps, sampled, ADVANTAGES, mask)
  expected, metrics = off_policy_mask(*arrays, threshold=0.1)
  ids = np.repeat([[0] * T + [1] * T], 2, axis=0)
  packed = [v.reshape(2, 2 * T) for v in arrays]
  garbage = [np.where(packed[3], v, np.nan) for v in packed[:3]]
  with jax.debug_nans(True):
    weights, others = off_policy_mask(
      *(v.astype(np.float32) for v in garbage),
      packed[3],
      threshold=0.1,
      segment_ids=ids,
    )
  np.testing.assert_array_equal(weights.reshape(B, T), expected)
  jax.tree.map(np.testing.assert_array_equal, others, metrics)


def test_off_policy_mask_has_no_gradient_and_refuses_thresholds():
  sampled, logps, mask = random_case()
  total = lambda x: off_policy_mask(
    x, sampled, ADVANTAGES, mask, threshold=1.0
  )[0].sum()
  assert not jax.grad(total)(logps).any()
  with pytest.raises(ValueError, match="threshold=0"):
    off_policy_mask(logps, sampled, ADVANTAGES, mask, threshold=0)
