"""KL penalties: their values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import kl_penalty

x = np.array([[-1.0, -2.0, -0.5, -30.0], [-1.0, -1.5, np.nan, np.inf]])
f = np.array([[-1.5, -2.0, -3.0, -1.0], [-1.0, -1.0, np.inf, np.inf]])
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
o = np.array([[-1.5, -1.0, -0.7, -55.0], [-1.0, -2.5, np.nan, np.inf]])
X, F, OLD = x.astype(np.float32), f.astype(np.float32), o.astype(np.float32)


def expected_value_and_slope(estimator, x, f, o):
  if estimator == "k3_unbiased":
    k3, slope = expected_value_and_slope("k3", x, f, o)
    ratio = np.exp(min(max(x - o, -20), 20))
    return ratio * k3, ratio * (slope + (abs(x - o) <= 20) * k3)
  gap = f - x
  sign = int(abs(gap) <= 20)  # no gradient beyond the clamp
  gap = min(max(gap, -20), 20)
  if estimator == "k2":
    return gap**2 / 2, -sign * gap
  return np.exp(gap) - gap - 1, sign * (1 - np.exp(gap))


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_unbiased"])
def test_value_and_gradient(estimator):
  old = {"old_logps": OLD} if estimator == "k3_unbiased" else {}

  def total(x):
    penalty = kl_penalty(x, F, MASK, estimator=estimator, **old)
    return penalty.sum(), penalty

  with jax.debug_nans(True):
    grad, penalty = jax.grad(total, has_aux=True)(X)
  expected = np.zeros((2, *X.shape))
  for i, t in zip(*np.nonzero(MASK), strict=True):
    expected[:, i, t] = expected_value_and_slope(
      estimator, x[i, t], f[i, t], o[i, t]
    )
  np.testing.assert_allclose(penalty, expected[0], rtol=1e-5)
  np.testing.assert_allclose(grad, expected[1], rtol=1e-5)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_unbiased"])
def test_expected_gradient_is_that_of_a_divergence(estimator):
  """Summed over a vocabulary: KL(p || f), for k3 KL(f || p).

  `k3_unbiased` is summed with the old policy's probabilities; its value is the
  divergence, too.
  """
  draws = np.random.default_rng(0).normal(size=(3, 1, 7)).astype(np.float32)
  logits, log_f, log_o = draws[0], *map(jax.nn.log_softmax, draws[1:])
  unbiased = estimator == "k3_unbiased"

  def expectation(logits):
    log_p = jax.nn.log_softmax(logits)
    probs = jnp.exp(log_o if unbiased else jax.lax.stop_gradient(log_p))
    old = {"old_logps": log_o} if unbiased else {}
    mask = jnp.ones_like(log_f)
    penalty = kl_penalty(log_p, log_f, mask, estimator=estimator, **old)
    return (probs * penalty).sum()

  def divergence(logits):
    log_p = jax.nn.log_softmax(logits)
    a, b = (log_f, log_p) if estimator == "k3" else (log_p, log_f)
    return (jnp.exp(a) * (a - b)).sum()

  found, expected = (
    jax.value_and_grad(f)(logits) for f in (expectation, divergence)
  )
  rtol = 1e-4 if unbiased else 1e-7
  np.testing.assert_allclose(found[1], expected[1], rtol, atol=1e-6)
  if unbiased:
    np.testing.assert_allclose(found[0], expected[0], rtol, atol=1e-6)


def test_reference_and_old_policy_have_no_gradient():
  def total(f, o):
    return kl_penalty(X, f, MASK, estimator="k3_unbiased", old_logps=o).sum()

  assert not any(grad.any() for grad in jax.grad(total, (0, 1))(F, OLD))


def test_k1_is_refused_with_the_reason():
  with pytest.raises(ValueError, match="zero expected gradient on-policy"):
    kl_penalty(X, F, MASK, estimator="k1")
  with pytest.raises(ValueError, match="got 'k4'"):
    kl_penalty(X, F, MASK, estimator="k4")
  with pytest.raises(ValueError, match="'k3_unbiased' needs old_logps"):
    kl_penalty(X, F, MASK, estimator="k3_unbiased")


def test_wrong_arrays_are_refused():
  with pytest.raises(TypeError, match="reference_logps must be float32"):
    kl_penalty(X, F.astype(np.float16), MASK)
  with pytest.raises(ValueError, match="reference_logps"):
    kl_penalty(X, F[:, 1:], MASK)
