"""Policy losses run on the cases of `oracles`, and compared with them."""

import functools

import jax
import numpy as np
import oracles
from oracles import B, Case, T, random_case

import gspo_jax
from gspo_jax import Terms, kl_penalty
from gspo_jax.losses import EDGES, Histogram


def loss_of(name):
  return getattr(gspo_jax, f"{name}_loss")


def call(name, x, case, dual_clip=None, **keywords):
  """The loss of a case at the log-probs `x`, with the case's terms."""
  penalty = case.reference
  if penalty is not None:
    penalty = kl_penalty(x, penalty, case.m, estimator="k2")
  if case.router_shift is not None:
    keywords["router_shift"] = case.router_shift
  terms = Terms(case.shift, case.weights, penalty, dual_clip)
  return loss_of(name)(x, *case[1:4], terms=terms, **keywords)


@functools.cache
def compiled(name, **static):
  f = functools.partial(call, name, **static)
  return jax.jit(jax.value_and_grad(f, has_aux=True))


def run(name, case, static=None, **arrays):
  """(loss, metrics, gradient), in numpy."""
  f = compiled(name, **static or {})
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


def map_arrays(f, case):
  return Case(*(None if v is None else f(v) for v in case))


def assert_close(got, expected, rtol=2e-5):
  # 1e-7: terms of either sign and of size 1 may add up to almost nothing.
  atol = 1e-7 + rtol * np.max(np.abs(expected))
  np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)


def assert_same(got, expected):
  """Compares two results of `run`, up to the order of float32 sums."""
  jax.tree.map(functools.partial(assert_close, rtol=3e-6), got, expected)


def assert_is_oracle(name, case, dual_clip=None):
  """Value, gradient and metrics; returns the metrics."""
  # Without one it is the program of other tests.
  static = {"dual_clip": dual_clip} if dual_clip else {}
  loss, metrics, grad = run(name, case, static)
  expected, values = oracles.loss(name, case, dual_clip)
  assert_close(loss, expected)
  assert_close(grad, oracles.gradient(name, case, dual_clip))
  assert metrics.keys() == values.keys()
  for key, metric in metrics.items():
    if isinstance(metric, Histogram):
      places = np.searchsorted(EDGES, values[key], side="right") - 1
      counts = np.bincount(places, minlength=len(EDGES) - 1)
      np.testing.assert_array_equal(metric.value(), counts)
    elif key.startswith("loss"):
      assert_close(metric.value(), values[key])
    else:
      # Both are small differences of large numbers.
      rtol = {"kl/old_new": 1e-3}.get(key, 1e-4 if "std" in key else 2e-6)
      np.testing.assert_allclose(metric.value(), values[key], rtol)
  return metrics
