"""The collectives of a compiled module: kind, group of devices and bytes."""

import itertools
import math
import re
from typing import NamedTuple

from gspo_jax.plan.hlo.module import Computation, Instruction, Module

_KINDS = (
  "all-gather", "all-reduce", "all-to-all", "collective-broadcast",
  "collective-permute", "ragged-all-to-all", "reduce-scatter",
)  # fmt: skip


class Collective(NamedTuple):
  kind: str  # the HLO opcode without "-start"; "network" between slices
  # The first group of devices, or the first pair of a permute: indices into
  # the device order.
  members: tuple[int, ...]
  result: float  # bytes of the result
  # What `awaited` returns for the instruction that waits for it; None if
  # synchronous.
  key: str | None = None
  in_vmem: float = 0.0  # bytes of operands and result outside HBM

  @property
  def wire(self) -> float:
    """Bytes that a device sends, with ring algorithms."""
    n = len(self.members)
    if self.kind in ("collective-permute", "network"):
      return self.result
    if self.kind == "reduce-scatter":
      return self.result * (n - 1)
    share = self.result * (n - 1) / n
    return 2 * share if self.kind == "all-reduce" else share

  @property
  def passes(self) -> int:
    """How often bytes cross the group one after the other."""
    return 2 if self.kind == "all-reduce" else 1

  @property
  def hbm_bytes(self) -> float:
    """HBM bytes of operand and result; bytes passed on stay in fast memory."""
    n = len(self.members)
    operand = self.result
    if self.kind == "all-gather":
      operand = self.result / n
    elif self.kind == "reduce-scatter":
      operand = self.result * n
    return max(operand + self.result - self.in_vmem, 0.0)


def is_collective(i: Instruction) -> bool:
  return i.op.removesuffix("-start") in _KINDS


def started(
  module: Module, computation: Computation, i: Instruction, devices: int
) -> list[Collective]:
  """The collectives that an instruction is, starts or (fusion) contains."""
  if is_collective(i):
    key = i.name if i.op.endswith("-start") else None
    arrays = [a for x in computation.operands(i) for a in x.arrays]
    in_vmem = sum(a.bytes for a in (*arrays, *_results(i)) if a.space)
    one = _collective(i, devices, key)
    return [one._replace(in_vmem=in_vmem)]
  if i.op == "send" and "_xla_megascale_transfer_type" in i.attributes:
    # The first and the last device are in different slices.
    return [Collective("network", (0, devices - 1), i.arrays[0].bytes, i.name)]
  if i.op != "fusion":
    return []
  callee = module.callee(i)
  inner = [x for x in callee if is_collective(x)]
  if any(_CHAIN in x.attributes for x in inner):
    if not _calls(callee, "AsyncCollectiveStart"):
      return []  # a later fusion of the chain
    return [_collective(x, devices, _channel(x)) for x in inner]
  return [_as_reduce_scatter(_collective(x, devices, None), i) for x in inner]


def awaited(module: Module, i: Instruction) -> str | None:
  """The key of the asynchronous collective that an instruction awaits."""
  if i.op.endswith("-done"):
    return i.operands[0]
  if i.op == "fusion":
    callee = module.callee(i)
    if _calls(callee, "AsyncCollectiveDone"):
      return next((_channel(x) for x in callee if is_collective(x)), None)
  return None


# Marks a collective that runs beside a chain of fusions.
_CHAIN = "chain_id="


def _calls(callee, target):
  return any(f'custom_call_target="{target}"' in x.attributes for x in callee)


def _channel(i):
  return f"channel {i.find(r'channel_id=([0-9]+)')}"


def _as_reduce_scatter(c, fusion):
  """A reduce-scatter, if the fusion keeps one slice of the all-reduce's sum."""
  if c.kind != "all-reduce" or 2 * fusion.bytes > c.result:
    return c
  part = c.result / len(c.members)
  return c._replace(kind="reduce-scatter", result=part)


def _collective(i, devices, key) -> Collective:
  result = sum(a.bytes for a in _results(i))
  members = group(i.attributes, devices)
  return Collective(i.op.removesuffix("-start"), members, result, key)


def _results(i):
  if i.op in ("all-gather-start", "collective-permute-start"):
    # The result is (operands..., results..., context...).
    n = len(i.operands)
    return i.arrays[n : 2 * n]
  return i.arrays


def group(attributes: str, devices: int) -> tuple[int, ...]:
  pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", attributes)
  if pairs:
    return int(pairs[1]), int(pairs[2])
  listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
  if listed:
    return tuple(int(n) for n in listed[1].split(","))
  iota = re.search(
    r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
  )
  if iota:
    numbers = lambda text: [int(n) for n in (text or "").split(",") if n]
    return _iota(int(iota[1]), numbers(iota[2]), numbers(iota[3]))
  mesh = re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", attributes)
  if mesh:
    return _mesh(mesh[1], mesh[2])
  return tuple(range(devices))


def _iota(size, dims, order) -> tuple[int, ...]:
  """The first elements of arange in shape `dims`, transposed."""
  strides = [math.prod(dims[axis + 1 :]) for axis in range(len(dims))]
  order = order or range(len(dims))
  grid = itertools.product(
    *(range(0, dims[a] * strides[a], strides[a]) for a in order)
  )
  return tuple(sum(place) for place in itertools.islice(grid, size))


def _mesh(mesh, axes) -> tuple[int, ...]:
  """The first group along mesh axes: `'a'=16,'b'=4` and `'a':(2)4,'b'`.

  `'a':(2)4`: axis a is split into 2 x 4 x rest; the group extends along the 4.
  """
  sizes = [(n, int(s)) for n, s in re.findall(r"'([^']+)'=(\d+)", mesh)]
  strides, after = {}, 1
  for name, size in reversed(sizes):
    strides[name], after = after, after * size
  sizes = dict(sizes)
  steps = []
  for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes):
    part = int(part or sizes[name])
    inner = sizes[name] // (int(before or 1) * part)
    stride = strides[name] * inner
    steps.append(range(0, part * stride, stride))
  return tuple(sum(place) for place in itertools.product(*steps))
