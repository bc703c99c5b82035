"""Matrix products in the custom calls of a program for NVIDIA GPUs.

They state no FLOPs, which follow from the shapes. A kernel is known by its name
or by the operation of tokamax that it was compiled from.
"""

import math
import re

from gspo_jax.plan.hlo.cost import Work
from gspo_jax.plan.hlo.module import Computation, Instruction

CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul")
_KERNELS = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2")
# Products in attention kernels by the number of results, of a backward pass:
# scores, dP, dQ; scores, dP, dK, dV; the two in one kernel.
_BACKWARD = {1: 3, 2: 4, 3: 7}


def target(i: Instruction) -> str | None:
  return i.find(r'custom_call_target="([^"]*)"')


def name(i: Instruction) -> str | None:
  """The kernel's name if it is a Triton or Mosaic kernel, else None."""
  if target(i) not in _KERNELS:
    return None
  return (
    i.find(r'tokamax:.*?"__type\\":\\"[\w.]*?(\w+)\\"')
    # JAX appends the sizes of its blocks to the name.
    or i.find(r'\bname = "(paged_attention|\w+)')
    or i.name
  )


def product(
  computation: Computation, i: Instruction, filled: float = 1.0
) -> Work | None:
  """The FLOPs of a custom call; None if they are unknown or it has none.

  `filled` is the share of the rows of grouped products that the groups hold.
  """
  if i.op != "custom-call":
    return None
  operands = [a for x in computation.operands(i) for a in x.arrays[:1]]
  if target(i) in CUBLAS:
    axes = i.find(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
    sizes = (operands[0].dims[int(d)] for d in re.findall(r"\d+", axes))
    return Work(2.0 * math.prod(i.arrays[0].dims) * math.prod(sizes))
  kernel = name(i) or ""
  floats = [a for a in operands if a.dtype in ("bf16", "f16", "f32")]
  if "FlashAttention" in kernel:
    return _attention(i, floats, backward=kernel.endswith("Vjp"))
  if "RaggedDot" in kernel:
    return _grouped(i, floats, filled)
  if kernel == "grouped_weight_gradient":
    (M, K), N = floats[0].dims, floats[1].dims[1]
    return Work(2.0 * M * filled * K * N)
  return None


def _attention(i, floats, backward) -> Work:
  """The causal half of the pairs of queries [..., T, N, H] and keys."""
  query, V = floats[0].dims, floats[2].dims[-1]
  T, _, H = query[-3:]
  products = _BACKWARD[len(i.arrays)] if backward else 2
  flops = products * (H + V) * (math.prod(query) // H) * (T + 1) / 2
  return Work(flops, attention_flops=flops)


def _grouped(i, floats, filled) -> Work:
  """The product of rows [M, K] with the matrices [G, K, N] of their groups.

  A partly filled block of rows costs as much as a full one; groups rarely end
  at the edge of a block, so G groups add G - 1 blocks.
  """
  (matrices,) = (a for a in floats if len(a.dims) == 3)
  M, N = i.arrays[0].dims
  (rows,) = (a for a in floats if len(a.dims) == 2)
  K, G = rows.dims[1], matrices.dims[0]
  block = int(i.find(r'\\"block_m\\":(\d+)') or 1)
  flops = 2.0 * M * filled * K * N
  padded = 2.0 * (math.ceil(M * filled / block) + G - 1) * block * K * N
  return Work(flops, padding_flops=padded - flops)
