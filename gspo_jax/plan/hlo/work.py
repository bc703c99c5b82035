"""The FLOPs of one HLO instruction, and the HBM bytes that it moves.

Bytes are counted at the boundary of a fusion or kernel, once for each operand
and result in HBM, without the padding of tiles. A slice, a gather or an update
in place counts only the elements that it reads or writes.
"""

import math
import re

from gspo_jax.plan.hlo.collectives import is_collective
from gspo_jax.plan.hlo.module import Computation, Instruction, Module

# These move no bytes: names, aliases, and the second half of an asynchronous
# operation, whose bytes count at its start.
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

# Matrix products in each kernel of splash attention, which reports no FLOPs:
# scores and output; scores, dV, dP, dK (and dQ if fused); scores, dP, dQ.
_SPLASH = {"_fwd": 2, "_dkv": 4, "_dq": 3}
# Its block size: 512 rows and columns, or 256 or 128 where 512 does not divide
# the number of tokens. The same as `_BLOCK` in gspo_jax/model/attention.py.
_SPLASH_BLOCK = 512


def is_free(i: Instruction) -> bool:
  if i.op == "custom-call":
    return i.find(r'custom_call_target="([^"]*)"') in _FREE_CALLS
  return i.op in _FREE or i.op.endswith("-done")


# Bytes.


def hbm_bytes(module: Module, computation: Computation, i: Instruction):
  """The bytes that an instruction reads from HBM and writes to it."""
  if is_free(i):
    return 0.0
  if i.op == "copy-start":  # (destination, source, context)
    return sum(a.bytes for a in i.arrays[:2] if a.space == 0)
  read = 0.0
  for position, name in enumerate(i.operands):
    operand = computation.get(name)
    if operand is not None and operand.hbm_bytes:
      read += _read(module, computation, i, position, operand.hbm_bytes)
  return read + _written(module, computation, i)


def _read(module, computation, i, position, size) -> float:
  """The bytes that an instruction reads of an operand of `size` bytes."""
  if position == 0 and i.op in _SLICES:
    return min(size, i.bytes)
  if position == 0 and i.op in _IN_PLACE:
    return 0.0
  if i.op == "tuple" or is_collective(i):  # passed on, not read
    return 0.0
  if i.op == "fusion":
    callee = module[i.called("calls")[0]]
    parameter = callee.parameters[position].name
    return _read_by_all(module, callee, parameter, size)
  if i.op == "bitcast":
    return _read_by_all(module, computation, i.name, size)
  return size


def _read_by_all(module, computation, name, size) -> float:
  if name == computation.root.name:  # a fusion of bitcasts passes on all of it
    return size
  total = sum(
    _read(module, computation, user, position, size)
    for user, position in computation.uses.get(name, ())
  )
  return min(size, total)


def _written(module, computation, i) -> float:
  """The bytes of a result that are written to HBM."""
  if i.op != "fusion":
    return min(i.hbm_bytes, _changed(module, computation, i))
  callee = module[i.called("calls")[0]]
  if callee.root.op != "tuple" or len(i.arrays) != len(callee.root.operands):
    return min(i.hbm_bytes, _changed(module, callee, callee.root))
  return sum(
    min(array.bytes, _changed(module, callee, callee.get(name)))
    for array, name in zip(i.arrays, callee.root.operands, strict=True)
    if array.space == 0
  )


def _changed(module, computation, i) -> float:
  """The bytes of a value that are new; the rest aliases an operand."""
  if i.op == "parameter" or is_collective(i):
    return 0.0
  if i.op == "dynamic-update-slice":
    return computation.get(i.operands[1]).bytes
  if i.op == "scatter":  # also reads the rows that it adds to
    return 2 * computation.get(i.operands[-1]).bytes
  if i.op == "bitcast":
    return _changed(module, computation, computation.get(i.operands[0]))
  if i.op == "fusion":
    callee = module[i.called("calls")[0]]
    return _changed(module, callee, callee.root)
  return i.bytes


# FLOPs.


def flops(module: Module, computation: Computation, i: Instruction) -> float:
  """The multiplications and additions of matrix products alone."""
  if i.op == "fusion":
    callee = module[i.called("calls")[0]]
    return sum(flops(module, callee, inner) for inner in callee)
  if i.op == "custom-call":
    estimate = i.find(r'"cost_estimate":\{[^}]*"flops":"(\d+)"')
    if estimate:
      return float(estimate)
    return attention_flops(computation, i)
  if i.op not in ("convolution", "dot"):
    return 0.0
  left, right = (computation.get(name).arrays[0] for name in i.operands)
  count = _dot if i.op == "dot" else _convolution
  return 2.0 * count(i, left.dims, right.dims)


def is_unknown_kernel(computation: Computation, i: Instruction) -> bool:
  """Whether an instruction is a kernel that reports no FLOPs."""
  return (
    i.op == "custom-call"
    and 'custom_call_target="tpu_custom_call"' in i.attributes
    and '"cost_estimate"' not in i.attributes
    and not attention_flops(computation, i)
    and not i.name.startswith("ragged-dot-metadata")  # no matrix product
  )


def attention_flops(computation: Computation, i: Instruction) -> float:
  """The FLOPs of a kernel of splash attention; 0 for any other instruction.

  The kernel computes the blocks of scores that are not entirely masked: of
  n x n blocks, the n (n + 1) / 2 on and below the diagonal.
  """
  kernel = re.match(r"splash_m[hq]a(_fwd|_dkv|_dq)", i.name)
  if not kernel or i.op != "custom-call":
    return 0.0
  floats = [
    a
    for name in i.operands
    for a in computation.get(name).arrays
    if a.dtype in ("bf16", "f32") and len(a.dims) > 1
  ]
  query, key = floats[:2]
  products = _SPLASH[kernel[1]]
  # A fused backward pass also returns dQ, in parts along one more axis.
  if kernel[1] == "_dkv":
    products += any(len(a.dims) > len(query.dims) for a in i.arrays)
  tokens = key.dims[-2]
  n = tokens // math.gcd(tokens, _SPLASH_BLOCK)
  return products * math.prod(query.dims) * tokens * (n + 1) / n


def _dot(i, left, right) -> int:
  contracted = i.find(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
  return math.prod(i.arrays[0].dims) * math.prod(
    left[int(d)] for d in contracted.split(",") if d
  )


def _convolution(i, left, right) -> int:
  """The multiplications of a convolution, without those of padding.

  On TPUs a batched matrix product is compiled to a convolution in which most
  positions are padding or dilation.
  """
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
  """The arguments of `_overlaps` for one axis of `window={...}`."""
  fields = (i.find(r"window=\{([^}]*)\}") or "").split()
  given = {k: v.split("x")[axis] for k, v in (f.split("=") for f in fields)}
  return {
    "stride": int(given.get("stride", 1)),
    "low": int(given.get("pad", "0_0").split("_")[0]),
    "lhs_dilate": int(given.get("lhs_dilate", 1)),
    "rhs_dilate": int(given.get("rhs_dilate", 1)),
  }


def _overlaps(left, right, out, *, stride, low, lhs_dilate, rhs_dilate) -> int:
  """The pairs of an output o and a kernel tap k that use an input element.

  They use element (o * stride - low + k * rhs_dilate) / lhs_dilate, if that is
  an integer in [0, left). All others are padding or dilation.

  Args:
    left: the elements of the input.
    right: the taps of the kernel.
    out: the elements of the output.
    stride: of the window.
    low: the padding before the first element.
    lhs_dilate: the distance of the input's elements.
    rhs_dilate: the distance of the kernel's taps.
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
