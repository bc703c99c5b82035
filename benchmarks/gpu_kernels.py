"""The kernels of a GPU beside oracles in float32: errors and milliseconds.

  python -m benchmarks.gpu_kernels [--quick]

attention  `attention.attend` of packed segments, forward and backward, at the
           heads of Qwen3-0.6B
experts    `grouped_matmul.matmul`, forward and backward, at the width of
           OLMoE's experts, two of which get no row
pages      `paged_attention.read` of one query a row, at the heads of Qwen3-0.6B

An error is the root mean square of the difference from the oracle, over that of
the oracle. Each is shown for the kernel and for the same operation in XLA, both
in bfloat16. A kernel fails whose error is above 1 %.

Dimension key: B rows, T tokens, N query heads, K key-value heads, H head width,
A sorted rows, e groups, D and F widths, n pages of t tokens, W pages of a row.
"""

import argparse
import json
import math
import re
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.model import attention, grouped_matmul, paged_attention

_LIMIT = 0.01
_RUNS = 10


def _normal(seed: int, *shape):
  return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _passes(f: Callable, backward: bool) -> Callable:
  """Of operands and the gradient of the result: the result, its gradients."""

  def both(operands, dy):
    y, pull = jax.vjp(f, *operands)
    return y, *pull(dy.astype(y.dtype))

  return jax.jit(both if backward else lambda operands, _: (f(*operands),))


def _kernels(run: Callable, *arguments) -> list[str]:
  """Triton or Mosaic, if it calls kernels of theirs."""
  text = run.lower(*arguments).as_text()
  return sorted(set(re.findall(r"custom_call @.*?(triton|mosaic_gpu)", text)))


def compare(forms: dict[str, Callable], oracle, operands, dy, names) -> dict:
  """Errors and milliseconds of each form.

  Args:
    forms: functions of `operands`; the first is the one that may fail.
    oracle: the function that takes them in float32.
    operands: arrays in bfloat16.
    dy: the gradient of the result, or None for no backward pass.
    names: of the result and the gradients.
  """
  wide = [x.astype(jnp.float32) for x in operands]
  with jax.default_matmul_precision("highest"):
    exact = _passes(oracle, dy is not None)(wide, dy)
  wide_array = lambda x: np.asarray(x, np.float64)
  rms = lambda x: math.sqrt(np.square(wide_array(x)).mean())
  found = {}
  for form, f in forms.items():
    run = _passes(f, dy is not None)
    got = jax.block_until_ready(run(operands, dy))
    start = time.monotonic()
    for _ in range(_RUNS):
      got = run(operands, dy)
    jax.block_until_ready(got)
    row = {"ms": 1e3 * (time.monotonic() - start) / _RUNS}
    row["kernels"] = _kernels(run, operands, dy)
    for name, x, want in zip(names, got, exact, strict=True):
      row[f"error of {name}"] = rms(wide_array(x) - want) / rms(want)
    found[form] = row
  kernel = next(iter(found.values()))
  errors = [x for name, x in kernel.items() if name.startswith("error")]
  if not all(x < _LIMIT for x in errors):  # nor a NaN
    raise ValueError(f"an error above {_LIMIT}: {found}")
  if jax.default_backend() == "gpu" and not kernel["kernels"]:
    raise ValueError(f"no kernel ran: {found}")
  return found


def attend(quick: bool) -> dict:
  B, T, N, K, H = (1, 256, 4, 2, 32) if quick else (2, 4096, 16, 8, 128)
  q, k, v = (
    _normal(0, B, T, N, H),
    _normal(1, B, T, K, H),
    _normal(2, B, T, K, H),
  )
  starts = np.random.default_rng(0).random((B, T)) < 8 / T
  segments = jnp.asarray(1 + np.cumsum(starts, axis=1))

  def oracle(q, k, v):
    seen = segments[:, None] == segments[..., None]
    seen &= np.tri(T, dtype=bool)
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(H)
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)

  forms = {
    "kernel": lambda q, k, v: attention.attend(q, k, v, segments),
    "in XLA": lambda q, k, v: attention.in_blocks(q, k, v, segments),
  }
  dy = _normal(3, B, T, N, H)
  return compare(forms, oracle, [q, k, v], dy, ("y", "dq", "dk", "dv"))


def multiply(quick: bool) -> dict:
  A, e, D, F = (256, 8, 64, 32) if quick else (16_384, 64, 2048, 2048)
  x, weights = _normal(0, A, D), _normal(1, e, D, F)
  share_e = np.random.default_rng(0).dirichlet(np.ones(e))
  share_e[[1, e // 2]] = 0
  sizes_e = np.floor(A * share_e).astype(np.int32)
  end_e = np.cumsum(sizes_e)
  sizes = jnp.asarray(sizes_e)

  def oracle(x, weights):
    row_A1 = jnp.arange(A)[:, None]

    def add(y, group):
      start, end, w = group
      own = jnp.where((row_A1 >= start) & (row_A1 < end), x, 0)
      return y + own @ w, None

    groups = jnp.asarray(end_e - sizes_e), jnp.asarray(end_e), weights
    y = jax.lax.scan(add, jnp.zeros((A, F)), groups)[0]
    return y[: end_e[-1]]

  def defined(product):
    """Rows beyond the groups, and their gradients, are undefined."""
    real = jnp.arange(A)[:, None] < end_e[-1]
    masked = lambda x: jnp.where(real, x, 0)
    return lambda x, weights: product(masked(x), weights, sizes)[: end_e[-1]]

  forms = {
    "kernel": defined(grouped_matmul.matmul),
    "in XLA": defined(grouped_matmul.in_blocks),
  }
  dy = _normal(2, int(end_e[-1]), F)
  return compare(forms, oracle, [x, weights], dy, ("y", "dx", "dweights"))


def read(quick: bool) -> dict:
  B, N, K, H, t, W = (
    (3, 4, 2, 32, 16, 5) if quick else (256, 16, 8, 128, 64, 32)
  )
  n = B * W
  q, k, v = (
    _normal(0, B, 1, N, H),
    _normal(1, K, n, t, H),
    _normal(2, K, n, t, H),
  )
  rng = np.random.default_rng(0)
  table = jnp.asarray(rng.permutation(n).reshape(B, W).astype(np.int32))
  lengths = jnp.asarray(rng.integers(1, W * t + 1, B).astype(np.int32))

  def oracle(q, k, v):
    k, v = (x[:, table].reshape(K, B, W * t, H) for x in (k, v))
    scores = jnp.einsum("bkuh,kbsh->bkus", q.reshape(B, K, N // K, H), k)
    seen = jnp.arange(W * t) < lengths[:, None, None, None]
    scores = jnp.where(seen, scores / math.sqrt(H), -jnp.inf)
    y = jnp.einsum("bkus,kbsh->bkuh", jax.nn.softmax(scores), v)
    return y.reshape(q.shape)

  def in_xla(q, k, v):
    q = q.reshape(B, K, N // K, H)
    y = paged_attention.by_blocks(q, k, v, table, lengths, H**-0.5)
    return y.reshape(B, 1, N, H)

  kernel = lambda q, k, v: paged_attention.read(q, k, v, table, lengths)
  forms = {"kernel": kernel, "in XLA": in_xla}
  return compare(forms, oracle, [q, k, v], None, ("y",))


KERNELS = {"attention": attend, "experts": multiply, "pages": read}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  args = parser.parse_args()
  found = {name: measure(args.quick) for name, measure in KERNELS.items()}
  print(json.dumps(found))


if __name__ == "__main__":
  main()
