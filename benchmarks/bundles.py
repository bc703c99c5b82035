"""What TPU kernels issue, each compiled alone: bundles, and TensorCores.

  python -m benchmarks.bundles --out=benchmarks/bundles.json
  python -m benchmarks.bundles --topology=v5p --only=paged

The kernels of Qwen3-30B-A3B with the shapes of a device of v5p:4x4x4. Nothing
runs on a TPU. For each kernel: whether both TensorCores of a v5p run it, and
its loops. `bundles` are those of a trip without the inner loops, and
`conditional` the parts of them that a branch may skip; a bundle takes at least
a cycle. `gspo_jax.plan` reads the same from the programs that it compiles.
"""

import argparse
import dataclasses
import functools
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import paged_attention as pa

from benchmarks import record
from gspo_jax.model import attention, grouped_matmul, paged_attention
from gspo_jax.plan import chips
from gspo_jax.plan import compile as plan_compile
from gspo_jax.runtime import sharding

# The smallest slices whose hosts are whole.
_SLICES = {
  "v5e": "v5e:2x2",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:2x2",
  "tpu7x": "tpu7x:2x2x1",
}
B, T, N, K, H, TOKENS = 128, 17_408, 32, 4, 128, 768_000
D, F, E = 2048, 768, 32  # of experts, which are E on a device
ROWS = 174_080  # of grouped products in an update


def _pages(page):
  n, W = TOKENS // page, -(-T // page)
  kv = ((K, n, page, H), jnp.bfloat16)
  return kv, kv, ((B, W), jnp.int32), ((B,), jnp.int32)


def _jax_paged(mode, page, block):
  k, v, table, lengths = _pages(page)
  call = functools.partial(
    pa.paged_attention,
    pages_per_compute_block=block // page,
    megacore_mode=mode,
  )
  query = (B, N, H), jnp.float32
  pad = lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % (block // page))))
  function = lambda q, k, v, lengths, table: call(q, k, v, lengths, pad(table))
  return function, (query, k, v, lengths, table)


def _read(page, queries, window=None):
  """With a window, gpt-oss-20b's heads, side by side, and its sinks."""
  k, v, table, lengths = _pages(page)
  query = (B, queries, N, H), jnp.bfloat16
  if window is None:
    return paged_attention.read, (query, k, v, table, lengths)

  def function(q, k, v, table, lengths, sinks):
    return paged_attention.read(
      q, k, v, table, lengths, window=window, sinks_N=sinks
    )

  query, sinks = ((B, queries, 64, 64), jnp.bfloat16), ((64,), jnp.float32)
  return function, (query, k, v, table, lengths, sinks)


def _splash(fused=True):
  most = attention._PARTS_BYTES if fused else 0

  def function(q, k, v, segments, dout):
    with mock.patch.object(attention, "_PARTS_BYTES", most):
      attend = lambda q, k, v: attention.splash(q, k, v, segments)
      out, pull = jax.vjp(attend, q, k, v)
      return out, pull(dout)

  heads = lambda n: ((1, T, n, H), jnp.bfloat16)
  return function, (heads(N), heads(K), heads(K), ((1, T), jnp.int32), heads(N))


def _grouped(k, n):
  def function(x, weights, sizes, dy):
    y, pull = jax.vjp(
      lambda x, w: grouped_matmul.matmul(x, w, sizes), x, weights
    )
    return y, pull(dy)

  floats = lambda *shape: (shape, jnp.bfloat16)
  return function, (
    floats(ROWS, k), floats(E, k, n), ((E,), jnp.int32), floats(ROWS, n),
  )  # fmt: skip


def _kernels(cores):
  for mode in (None, "kv_head") if cores == 2 else (None,):
    for page, block in ((128, 512), (128, 1024), (512, 512), (512, 1024)):
      yield f"paged, {mode}, {page}, {block}", _jax_paged(mode, page, block)
  for page, queries in ((128, 1), (512, 1), (128, 5)):
    yield f"paged, read, {page}, {queries} queries", _read(page, queries)
  yield "paged, read, 128, window", _read(128, 1, 128)
  yield "splash", _splash()
  yield "splash, separate dq", _splash(fused=False)
  yield "grouped, gate and up", _grouped(D, 2 * F)
  yield "grouped, down", _grouped(F, D)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--topology", nargs="+", choices=_SLICES, default=_SLICES)
  parser.add_argument("--only", default="", help="part of a kernel's name")
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  plan_compile.prepare()
  found = {}
  for kind in args.topology:
    where = chips.parse(_SLICES[kind])
    device = plan_compile.devices(where, 1)[0]
    mesh = sharding.make_mesh([device])
    place = sharding.replicated(mesh)
    found[kind] = {}
    for name, (function, operands) in _kernels(where.chip.cores):
      if args.only not in name:
        continue
      shapes = [jax.ShapeDtypeStruct(*x, sharding=place) for x in operands]
      with jax.set_mesh(mesh):
        lowered = jax.jit(function).lower(*shapes)
        done = plan_compile.compile_one(lowered)
      found[kind][name] = done.reason or {
        kernel: dataclasses.asdict(issued)
        for kernel, issued in sorted(done.kernels.items())
        if issued.body.inner and "metadata" not in kernel
      }
      print(kind, name, found[kind][name], flush=True)
  record.finish("bundles", found, args.out)


if __name__ == "__main__":
  main()
