"""The FLOPs of one HLO instruction, and the HBM bytes that it moves.

Each HBM operand and result of a fusion or kernel counts once, without padding
of layouts. A slice, a gather or an update in place counts only the elements
that it reads or writes.
"""

import math
import re

from gspo_jax.plan.hlo import gpu_kernels
from gspo_jax.plan.hlo.collectives import is_collective
from gspo_jax.plan.hlo.cost import Work
from gspo_jax.plan.hlo.kernels import (
  attention_flops,
  grouped_product,
  unread_bytes,
)
from gspo_jax.plan.hlo.module import Computation, Instruction, Module

# These move no bytes: names, aliases, and the end of an asynchronous operation,
# whose bytes count at its start.
_FREE = frozenset(
  (
    "after-all", "async-update", "bitcast", "constant", "get-tuple-element",
    "opt-barrier", "parameter", "partition-id", "recv", "replica-id", "send",
    "tuple",
  )
)  # fmt: skip
_FREE_CALLS = ("AllocateBuffer", "AssumeGatherIndicesInBound")
_SLICES = ("dynamic-slice", "gather", "slice")
_IN_PLACE = ("dynamic-update-slice", "scatter")
# The compiler states this number, the largest int64, without an estimate.
_UNKNOWN_CYCLES = 2**63 - 1
_COPIES = ("bitcast", "convert", "copy", "reshape", "transpose")


def _is_free(i: Instruction) -> bool:
  if i.op == "custom-call":
    return gpu_kernels.target(i) in _FREE_CALLS
  return i.op in _FREE or i.op.endswith("-done")


def work(
  module: Module, computation: Computation, i: Instruction, filled: float = 1.0
) -> Work:
  if grouped := grouped_product(computation, i, filled):
    return grouped
  if product := gpu_kernels.product(computation, i, filled):
    product.hbm_bytes = hbm_bytes(module, computation, i)
    return product
  return Work(
    flops(module, computation, i),
    attention_flops=attention_flops(computation, i),
    sorted_bytes=sorted_bytes(i),
    hbm_bytes=hbm_bytes(module, computation, i) - unread_bytes(computation, i),
  )


def estimated_cycles(i: Instruction) -> float | None:
  """The cycles that the compiler states; None if it states none."""
  cycles = int(i.find(r'"estimated_cycles":"(\d+)"') or 0)
  return cycles if 0 < cycles < _UNKNOWN_CYCLES else None


# Bytes.


def sorted_bytes(i: Instruction) -> float:
  """Bytes that a sort moves through the vector registers; else 0.

  In a bitonic network (Batcher, 1968), 2**k elements pass the registers k (k +
  1) / 2 times, all operands together.
  """
  if i.op != "sort":
    return 0.0
  axis = int(i.find(r"dimensions=\{(\d+)\}"))
  length = i.arrays[0].dims[axis]
  k = max(math.ceil(math.log2(length)), 1)
  # An element takes 32 bits of a register, or more if its type is wider.
  words = sum(math.prod(a.dims) * max(a.bits // 32, 1) for a in i.arrays)
  return 4.0 * words * 2**k / length * k * (k + 1) / 2


def hbm_bytes(module: Module, computation: Computation, i: Instruction):
  if _is_free(i):
    return 0.0
  if i.op == "copy-start":  # (destination, source, context)
    return sum(a.bytes for a in i.arrays[:2] if a.space == 0)
  read = 0.0
  for position, name in enumerate(i.operands):
    operand = computation.get(name)
    if operand is not None and operand.hbm_bytes:
      bits = operand.arrays[0].bits
      read += _read(module, i, position, operand.hbm_bytes, bits)
  if i.op in _IN_PLACE:
    return read + min(i.hbm_bytes, _updated(computation, i))
  return read + _written(module, i)


def _read(module, i, position, size, bits) -> float:
  """Bytes that it reads of an operand with `size` bytes in HBM."""
  if i.op == "fusion":
    fused = module.inlined(i.called("calls")[0])
    name = fused.parameters[position].name
    return _read_of(fused, name, size, bits, as_result=size)
  if position == 0 and i.op in _SLICES:
    return min(size, math.prod(i.arrays[0].dims) * bits / 8)
  if position == 0 and i.op in _IN_PLACE:
    return 0.0
  if i.op == "tuple" or is_collective(i):  # passed on, not read
    return 0.0
  return size


def _read_of(fused, name, size, bits, as_result) -> float:
  """Bytes that a fusion reads of a parameter; if it slices a copy, the slice.

  `as_result`: the bytes to count if `name` is its result.
  """
  total = as_result if name == fused.root.name else 0.0
  # Else it is a parameter, or an alias of one.
  is_copy = lambda: _origin(fused, fused.get(name), ("bitcast",)).op in _COPIES
  for user, position in fused.uses.get(name, ()):
    if user.op in _COPIES:
      total += _read_of(fused, user.name, size, bits, as_result)
    elif position == 0 and user.op in _IN_PLACE:
      total += _read_of(fused, user.name, size, bits, as_result=0.0)
    elif user.op == "tuple" and user.root and is_copy():
      total += as_result
    else:
      total += _read(None, user, position, size, bits)
  return min(size, total)


def _origin(fused, i, aliases) -> Instruction:
  """The value from which operations of these kinds made `i`."""
  while i.op in aliases:
    i = fused.get(i.operands[0])
  return i


def _written(module, i) -> float:
  if i.op != "fusion":
    # All other results of such a product are scratch memory.
    is_product = gpu_kernels.target(i) in gpu_kernels.CUBLAS
    return i.arrays[0].bytes if is_product else i.hbm_bytes
  fused = module.inlined(i.called("calls")[0])
  if fused.root.op != "tuple" or len(i.arrays) != len(fused.root.operands):
    return min(i.hbm_bytes, _changed(fused, fused.root))
  return sum(
    min(array.bytes, _changed(fused, fused.get(name)))
    for array, name in zip(i.arrays, fused.root.operands, strict=True)
    if array.space == 0
  )


def _changed(fused, i) -> float:
  """Bytes of a value that are new; the rest aliases a parameter."""
  if i.op == "parameter" or is_collective(i):
    return 0.0
  # Updated in place, perhaps in a new layout or type.
  is_update = _origin(fused, i, _COPIES).op in _IN_PLACE
  if i.op == "bitcast" or (i.op in _COPIES and is_update):
    return _changed(fused, fused.get(i.operands[0]))
  if i.op in _IN_PLACE:
    old = _origin(fused, fused.get(i.operands[0]), _COPIES)
    return min(i.bytes, _changed(fused, old) + _updated(fused, i))
  return i.bytes


def _updated(computation, i) -> float:
  if i.op == "dynamic-update-slice":
    return computation.get(i.operands[1]).bytes
  # A scatter also reads the rows that it adds to.
  return 2 * computation.get(i.operands[-1]).bytes


# FLOPs.


def flops(module: Module, computation: Computation, i: Instruction) -> float:
  """FLOPs of matrix products alone."""
  if i.op == "fusion":
    callee = module.callee(i)
    return sum(flops(module, callee, inner) for inner in callee)
  if i.op == "custom-call":
    estimate = i.find(r'"cost_estimate":\{[^}]*"flops":"(\d+)"')
    if estimate:
      return float(estimate)
    if product := gpu_kernels.product(computation, i):
      return product.flops
    return attention_flops(computation, i)
  if i.op not in ("convolution", "dot"):
    return 0.0
  left, right = (x.arrays[0] for x in computation.operands(i))
  count = _dot if i.op == "dot" else _convolution
  return 2.0 * count(i, left.dims, right.dims)


def is_unknown_kernel(computation: Computation, i: Instruction) -> bool:
  if gpu_kernels.name(i):
    return not gpu_kernels.product(computation, i)
  return (
    i.op == "custom-call"
    and 'custom_call_target="tpu_custom_call"' in i.attributes
    and '"cost_estimate"' not in i.attributes
    and not attention_flops(computation, i)
    and not i.name.startswith("ragged-dot-metadata")  # no matrix product
  )


def kernel_name(i: Instruction) -> str:
  return gpu_kernels.name(i) or i.name.rpartition(".")[0] or i.name


def _dot(i, left, right) -> int:
  contracted = i.find(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
  return math.prod(i.arrays[0].dims) * math.prod(
    left[int(d)] for d in contracted.split(",") if d
  )


def _convolution(i, left, right) -> int:
  """Multiplications without padding; batched products are mostly padding."""
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
  left_labels, right_labels, out_labels = labels.groups()
  out = i.arrays[0].dims
  total = out[out_labels.index("b")] * out[out_labels.index("f")]
  total *= right[right_labels.index("i")]
  spatial = sorted(label for label in out_labels if label.isdigit())
  for axis, label in enumerate(spatial):
    total *= _overlaps(
      left[left_labels.index(label)],
      right[right_labels.index(label)],
      out[out_labels.index(label)],
      **_window(i, axis),
    )
  return total


def _window(i, axis) -> dict[str, int]:
  fields = (i.find(r"window=\{([^}]*)\}") or "").split()
  window = {k: v.split("x")[axis] for k, v in (f.split("=") for f in fields)}
  names = "stride", "lhs_dilate", "rhs_dilate"
  numbers = {name: int(window.get(name, 1)) for name in names}
  return numbers | {"low": int(window.get("pad", "0_0").split("_")[0])}


def _overlaps(left, right, out, *, stride, low, lhs_dilate, rhs_dilate) -> int:
  """Counts pairs of an output o and a kernel tap k that use an input element.

  This is element (o * stride - low + k * rhs_dilate) / lhs_dilate if that is an
  integer in [0, left); else it is padding (`low` before the first) or dilation.
  """
  shared = math.gcd(stride, lhs_dilate)
  period = lhs_dilate // shared
  inverse = pow(stride // shared, -1, period) if period > 1 else 0
  total = 0
  for tap in range(right):
    shift = low - tap * rhs_dilate  # the position is o * stride - shift
    if shift % shared:
      continue
    first = max(math.ceil(shift / stride), 0)
    last = min((shift + (left - 1) * lhs_dilate) // stride, out - 1)
    phase = shift // shared * inverse % period
    count = lambda n, phase=phase: (n - phase) // period + 1
    total += max(count(last) - count(first - 1), 0)
  return total
