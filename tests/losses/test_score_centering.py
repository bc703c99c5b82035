"""The mean score under the sampler against sums over all ids in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import score_centering

B, T, V, H = 2, 3, 12, 4
MASK = np.array([[1, 1, 0], [1, 1, 1]], bool)
WEIGHTS = {
  "none": lambda r: np.ones_like(r),
  "tis": lambda r: np.minimum(r, 1.3),
  "mis": lambda r: np.where((r >= 0.8) & (r <= 1.3), r, 0),
}


def softmax(x):
  p = np.exp(x - x.max(1, keepdims=True))
  return p / p.sum(1, keepdims=True)


def distributions(spread=0.5, rest=None):
  """Logits of p, and q, [B, V, T] float64; outside the head q is rest * p."""
  rng = np.random.default_rng(0)
  logits = 2 * rng.standard_normal((B, V, T))
  q = softmax(logits + spread * rng.standard_normal((B, V, T)))
  if rest is not None:
    p = softmax(logits)
    q[:, H:] = rest * p[:, H:]
    head, tail = (x.sum(1, keepdims=True) for x in (q[:, :H], q[:, H:]))
    q[:, :H] *= (1 - tail) / head
  return logits, q


def centering(logits, q, size, advantages=1.0, **options):
  """Its gradient with respect to the logits of A C, and its metric."""
  log_q = np.log(np.maximum(q[:, :size], 1e-30)).astype(np.float32)

  def total(x):
    logps = jax.nn.log_softmax(x, axis=1)[:, :size]
    terms, metrics = score_centering(logps, log_q, MASK, **options)
    return (advantages * terms).sum(), metrics

  grads, metrics = jax.grad(total, has_aux=True)(
    jnp.asarray(logits, jnp.float32)
  )
  return np.asarray(grads), metrics["mismatch/centered"].value()


@pytest.mark.parametrize("method", WEIGHTS)
@pytest.mark.parametrize(
  ("size", "rest"), [(V, None), (H, 0.9), (H, 1.1), (H, 1.5), (H, 0.7)]
)
def test_the_gradient_is_the_mean_score_of_all_ids(method, size, rest):
  """Of a head, too, if the rest of q is as assumed: in and out of bounds."""
  logits, q = distributions(rest=rest)
  p = softmax(logits)
  mass = q * WEIGHTS[method](p / q)
  advantages = np.random.default_rng(1).standard_normal((B, T))
  # sum_v mass_v grad log p_v, by the logits
  expected = (mass - mass.sum(1, keepdims=True) * p) * MASK[:, None]
  found, _ = centering(
    logits, q, size, advantages, method=method, cap=1.3, floor=0.8
  )
  np.testing.assert_allclose(found, advantages[:, None] * expected, atol=2e-6)
  assert np.abs(expected).max() > 0.01


def test_a_sampler_that_agrees_has_no_mean_score():
  logits, _ = distributions()
  for size in (H, V):
    grads, centered = centering(logits, softmax(logits), size)
    assert np.abs(grads).max() < 1e-6 > centered


def test_the_metric_is_the_gradient_by_the_logits():
  """Of all ids that is q - p; of a head with nearly all of p it is near."""
  logits, q = distributions()
  for size in (H, V):
    grads, centered = centering(logits, q, size)
    moved = np.abs(grads[:, :size]).sum(1)[MASK]
    np.testing.assert_allclose(centered, moved.mean(), rtol=1e-5)
  gap = np.abs(q - softmax(logits)).sum(1)[MASK].mean()
  np.testing.assert_allclose(centered, gap, rtol=1e-5)
  logits[:, H:] -= 16
  nearly = softmax(logits + 0.02 * np.arange(V)[:, None])
  gap = np.abs(nearly - softmax(logits)).sum(1)[MASK].mean()
  _, centered = centering(logits, nearly, H)
  np.testing.assert_allclose(centered, gap, rtol=1e-3)


def test_places_without_an_id_and_masked_tokens_are_never_read():
  logits, q = distributions()
  expected = centering(logits, q, H)
  logps = np.log(softmax(logits))[:, [*range(H), 0]].astype(np.float32)
  log_q = np.log(q[:, [*range(H), 0]]).astype(np.float32)
  log_q[:, H] = -np.inf
  for x in (logps, log_q):
    x[0, :, 2] = np.nan
  with jax.debug_nans(True):
    terms, metrics = score_centering(logps, log_q, MASK)
  assert np.isfinite(terms).all()
  assert terms[0, 2] == 0
  np.testing.assert_allclose(
    metrics["mismatch/centered"].value(), expected[1], rtol=1e-5
  )


def test_wrong_arguments_are_refused():
  x = np.zeros((B, H, T), np.float32)
  with pytest.raises(ValueError, match="'mis', got method='is'"):
    score_centering(x, x, MASK, method="is")
  for wrong in ((x, x[:, 1:], MASK), (x, x, MASK[:, 1:]), (x[0], x[0], MASK)):
    with pytest.raises(ValueError, match="expected \\[B, H, T\\] twice"):
      score_centering(*wrong)
