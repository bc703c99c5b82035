"""What int8 would change in a decode step: a layer compiled for a TPU.

  python -m benchmarks.int8_decode [--out=FILE.json]

The experts of one layer of Qwen3-30B-A3B, and the read of its full pages, on
one device of v5p:4x4x4 as configs/moe_tpu_v5.py decodes there: 128 rows a
device, experts shared by 8. Both in bfloat16, and with int8 weights (a scale
for each output of each expert) or int8 pages (a scale for each token and head)
in the forms that `lax.ragged_dot` and JAX's kernel of paged attention have.
Microseconds at best and by libtpu's cycles; nothing runs on a chip.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import estimates, record
from gspo_jax.plan import chips
from gspo_jax.plan import compile as plan_compile

TOPOLOGY = "v5p:2x2x1"  # the least slice of the chip; each device does the same
BF16, INT8, F32 = jnp.bfloat16, jnp.int8, jnp.float32
R, E, D, F = 1280, 16, 2048, 768  # rows of a chunk, a device's experts, widths
B, N, K, H = 128, 32, 4, 128  # rows, query heads, key-value heads, head width
PAGES, TOKENS, W = 6000, 128, 136  # of a device, of a page, pages of a row


def swiglu(x_RD, gate_up, down, product):
  """The experts, as gspo_jax/model/experts.py multiplies them."""
  gate, up = jnp.split(product(x_RD, gate_up), 2, axis=-1)
  h_RF = (jax.nn.silu(gate.astype(F32)) * up.astype(F32)).astype(BF16)
  return product(h_RF, down)


def bfloat16_experts(x_RD, sizes, gate_up, _, down, __):
  product = lambda x, w: jax.lax.ragged_dot(x, w.astype(BF16), sizes)
  return swiglu(x_RD, gate_up, down, product)


def unscaled_experts(x_RD, sizes, gate_up, _, down, __):
  """The wrong result, and the least that int8 weights cost."""
  product = lambda x, w: jax.lax.ragged_dot(x, w, sizes)
  return swiglu(x_RD, gate_up, down, product)


def scaled_experts(x_RD, sizes, gate_up, gate_up_scale, down, down_scale):
  """Scales by a product with the expert of each row, one-hot: no gather."""
  ends, row = jnp.cumsum(sizes), jnp.arange(R)[:, None]
  expert_RE = ((row < ends) & (row >= ends - sizes)).astype(BF16)

  def product(x, weight_and_scale):
    weight, scale = weight_and_scale
    y = jax.lax.ragged_dot(x, weight, sizes).astype(F32)
    scale = jnp.matmul(
      expert_RE, scale.astype(BF16), preferred_element_type=F32
    )
    return (y * scale).astype(BF16)

  return swiglu(x_RD, (gate_up, gate_up_scale), (down, down_scale), product)


def read(q, lengths, table, k, v, *scales):
  from jax.experimental.pallas.ops.tpu import paged_attention as pa
  from jax.experimental.pallas.ops.tpu.paged_attention import (
    quantization_utils,
  )

  if scales:
    quantized = quantization_utils.QuantizedTensor
    k, v = (quantized(*pair) for pair in zip((k, v), scales, strict=True))
  return pa.paged_attention(q, k, v, lengths, table, pages_per_compute_block=4)


def weights(dtype):
  up, down = (((E, D, 2 * F), dtype), ((E, F, D), dtype))
  return [up, ((E, 2 * F), F32), down, ((E, D), F32)]


def pages(dtype, scale=None):
  whole = [((K, PAGES, TOKENS, H), dtype)] * 2
  return whole + [((K, PAGES, TOKENS, 1), scale)] * 2 * (scale is not None)


ROWS = [((R, D), BF16), ((E,), jnp.int32)]
QUERIES = [((B, N, H), F32), ((B,), jnp.int32), ((B, W), jnp.int32)]
PROGRAMS = {
  "experts, bfloat16": (bfloat16_experts, ROWS + weights(BF16)),
  "experts, int8 cast first": (bfloat16_experts, ROWS + weights(INT8)),
  "experts, int8": (scaled_experts, ROWS + weights(INT8)),
  "experts, int8 without scales": (unscaled_experts, ROWS + weights(INT8)),
  "pages, bfloat16": (read, QUERIES + pages(BF16)),
  "pages, int8, float32 scales": (read, QUERIES + pages(INT8, F32)),
  "pages, int8, bfloat16 scales": (read, QUERIES + pages(INT8, BF16)),
}


def measure(function, arrays, mesh) -> dict:
  """HBM bytes and microseconds of a device."""
  every = PartitionSpec()
  arguments = [
    jax.ShapeDtypeStruct(*array, sharding=NamedSharding(mesh, every))
    for array in arrays
  ]
  whole = jax.shard_map(
    function, mesh=mesh, in_specs=every, out_specs=every, check_vma=False
  )
  module = plan_compile.compile_one(jax.jit(whole).lower(*arguments)).module
  return estimates.of(module, TOPOLOGY, mesh.size, unit="us")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  libtpu = plan_compile.prepare()
  devices = plan_compile.devices(chips.parse(TOPOLOGY), 1)
  mesh, found = Mesh(np.array(devices), ("device",)), {}
  for name, (function, arrays) in PROGRAMS.items():
    found[name] = measure(function, arrays, mesh)
    print(name, {key: round(value) for key, value in found[name].items()})
  record.finish("int8_decode", {"libtpu": libtpu, "layer": found}, args.out)


if __name__ == "__main__":
  main()
