"""The experts of gspo_jax/model/experts.py, with its keys: loops in float64."""

import numpy as np

from gspo_jax.model.lora import Experts


def random_experts(rng, e, width, outputs, adapters=False, bias=False):
  """The projection [e, width, outputs], of rank 3 if it has adapters."""
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return Experts(
    normal(e, width, outputs),
    normal(e, width, 3) if adapters else None,
    normal(e, 3, outputs) if adapters else None,
    normal(e, outputs) if bias else None,
  )


def weighted_sum(
  x_MD, weights_Mk, experts_Mk, gate_up, down, limit, cotangent_MD
):
  """The output [M, D], its gradients, and the pairs; outside 0..e-1 is none."""
  inputs = x_MD, weights_Mk, gate_up, down
  x_MD, weights_Mk, gate_up, down = (_float64(x) for x in inputs)
  dx, dweights, up_sums, down_sums = (
    _zeros(x) for x in (x_MD, weights_Mk, gate_up, down)
  )
  y, pairs = np.zeros_like(cotangent_MD, float), 0
  for (m, j), e in np.ndenumerate(experts_Mk):
    if not 0 <= e < len(gate_up.weight):
      continue
    pairs += 1
    w, dy = weights_Mk[m, j], np.float64(cotangent_MD[m])
    h = _product(x_MD[m], gate_up, e)
    hidden, d_gate, d_up = _gated(*np.split(h, 2), limit)
    out = _product(hidden, down, e)
    y[m] += w * out
    dweights[m, j] = dy @ out
    d_hidden = _pull(w * dy, hidden, down, down_sums, e)
    dh = np.concatenate([d_hidden * d_gate, d_hidden * d_up])
    dx[m] += _pull(dh, x_MD[m], gate_up, up_sums, e)
  return y, (dx, dweights, up_sums, down_sums), pairs


def _float64(x):
  if isinstance(x, Experts):
    return Experts(*(None if part is None else _float64(part) for part in x))
  return np.asarray(x).astype(np.float64)


def _zeros(x):
  if isinstance(x, Experts):
    return Experts(*(None if part is None else _zeros(part) for part in x))
  return np.zeros(x.shape)


def _matrix(experts, e):
  low = 0 if experts.a is None else experts.a[e] @ experts.b[e]
  return experts.weight[e] + low


def _product(x, experts, e):
  bias = 0 if experts.bias is None else experts.bias[e]
  return x @ _matrix(experts, e) + bias


def _pull(dy, x, experts, sums, e):
  """The gradient of `x`; adds those of the projection to `sums`."""
  d_matrix = np.outer(x, dy)
  sums.weight[e] += d_matrix
  if experts.a is not None:
    sums.a[e] += d_matrix @ experts.b[e].T
    sums.b[e] += experts.a[e].T @ d_matrix
  if experts.bias is not None:
    sums.bias[e] += dy
  return _matrix(experts, e) @ dy


def _gated(gate, up, limit):
  """The hidden row, and its derivatives by gate and by up."""
  if limit is None:
    s = 1 / (1 + np.exp(-gate))
    return gate * s * up, up * s * (1 + gate * (1 - s)), gate * s
  passes_gate, passes_up = gate < limit, np.abs(up) < limit
  gate, up = np.where(passes_gate, gate, limit), np.clip(up, -limit, limit)
  s = 1 / (1 + np.exp(-1.702 * gate))
  slope = s * (1 + 1.702 * gate * (1 - s))
  hidden = (up + 1) * gate * s
  return hidden, (up + 1) * slope * passes_gate, gate * s * passes_up
