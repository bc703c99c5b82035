"""The clipped value loss against a loop in float64."""

import functools

import jax
import numpy as np
import oracles
import pytest

from gspo_jax import value_loss

B, T = 5, 8


def random_case(seed=0):
  """v, v_old, R and a ragged mask with an empty row."""
  rng = np.random.default_rng(seed)
  values, old, returns = rng.normal(size=(3, B, T)).astype(np.float32)
  mask = np.arange(T) < rng.integers(1, T + 1, B)[:, None]
  mask[1] = False
  return old + 0.3 * values, old, returns, mask


@functools.cache
def compiled(**static):
  f = functools.partial(value_loss, **static)
  return jax.jit(jax.value_and_grad(f, has_aux=True))


def run(data, **keywords):
  (loss, metrics), grad = compiled(**keywords)(*data)
  return np.asarray(loss), jax.device_get(metrics), np.asarray(grad)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("clip", [0.2, 0.05])
def test_value_gradient_and_metrics_equal_the_oracle(seed, clip):
  data = random_case(seed)
  values, _, returns, mask = data
  loss, metrics, grad = run(data, clip=clip)
  losses, cuts, slopes = oracles.value_loss(*data, clip)
  n = mask.sum()
  np.testing.assert_allclose(loss, losses.sum() / n, rtol=1e-5)
  np.testing.assert_allclose(grad, slopes / n, rtol=1e-4, atol=1e-7)
  assert metrics["loss/value"].count == n
  np.testing.assert_allclose(metrics["loss/value"].value(), loss, rtol=1e-6)
  np.testing.assert_allclose(metrics["clip_frac/value"].value(), cuts.sum() / n)
  assert 0 < cuts.sum() < n
  error, spread = (
    metrics[f"value/{key}_std"].value() for key in ("error", "return")
  )
  np.testing.assert_allclose(error, (returns - values)[mask].std(), rtol=1e-4)
  np.testing.assert_allclose(spread, returns[mask].std(), rtol=1e-4)


def test_first_update_is_least_squares():
  """At v = v_old both errors are equal, and the gradient is not halved."""
  _, old, returns, mask = random_case()
  _, _, grad = run((old, old, returns, mask))
  expected = np.where(mask, old - returns, 0) / mask.sum()
  np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-7)


def test_micro_batches_add_and_packed_rows_change_nothing():
  data = random_case()
  loss, metrics, grad = run(data)
  parts = [run([x[i : i + 1] for x in data], normalizer=1.0) for i in range(B)]
  count = metrics["loss/value"].count
  np.testing.assert_allclose(sum(p[0] for p in parts) / count, loss, rtol=1e-6)
  rows = np.concatenate([p[2] for p in parts]) / count
  np.testing.assert_allclose(rows, grad, rtol=1e-6)
  packed, _ = value_loss(
    *(x.reshape(1, -1) for x in data), segment_ids=np.zeros((1, 40))
  )
  np.testing.assert_allclose(packed, loss, rtol=1e-6)


def test_garbage_under_the_mask_is_never_read():
  data = random_case()
  mask = data[3]
  clean = run(data)
  garbage = np.resize([np.nan, np.inf, -np.inf], mask.shape)
  dirty = [np.where(mask, x, garbage).astype(np.float32) for x in data[:3]]
  with jax.debug_nans(True):
    jax.grad(value_loss, has_aux=True)(*dirty, mask)
    result = run((*dirty, mask))
  jax.tree.map(np.testing.assert_array_equal, result, clean)
  loss, metrics, grad = run((*dirty, np.zeros_like(mask)))
  assert loss == 0
  assert not grad.any()
  assert np.isnan(metrics["loss/value"].value())


def test_only_the_values_have_a_gradient():
  data = random_case()
  f = jax.grad(lambda *x: value_loss(*x, data[3])[0], (0, 1, 2))
  assert [bool(g.any()) for g in f(*data[:3])] == [True, False, False]


@pytest.mark.parametrize("position", [0, 1, 2])
def test_wrong_arrays_are_refused(position):
  name = ["values", "old_values", "returns"][position]
  for bad, error in ((np.float16, TypeError), (np.float32, ValueError)):
    data = list(random_case())
    data[position] = data[position].astype(bad)
    if error is ValueError:
      data[position] = data[position][:, 1:]
    with pytest.raises(error, match=name):
      value_loss(*data)
