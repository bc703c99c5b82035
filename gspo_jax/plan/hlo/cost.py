"""The cost of a compiled computation on one device, and sums of costs.

FLOPs, bytes and seconds at best; `walk` computes them.
"""

import collections
import dataclasses
from typing import NamedTuple


@dataclasses.dataclass
class Work:
  flops: float = 0.0  # of matrix products
  attention_flops: float = 0.0  # the part of `flops` in attention kernels
  padding_flops: float = 0.0  # not in `flops`: padding of grouped products
  sorted_bytes: float = 0.0  # moved through the vector registers by a sort
  hbm_bytes: float = 0.0  # read from HBM and written to it


class CollectiveKind(NamedTuple):
  """What the collectives that are added up have in common."""

  kind: str  # the HLO opcode, or "network" between slices
  group: int  # devices


@dataclasses.dataclass
class Traffic:
  """The sum over collectives of one `CollectiveKind`."""

  count: float = 0
  wire: float = 0.0  # bytes that each device sends
  # The longer of two times: to send the bytes, and to read and write HBM.
  seconds: float = 0.0
  hbm_bytes: float = 0.0  # read and written by each device


@dataclasses.dataclass
class OperationCost:
  """The sum over the instructions of one JAX operation."""

  seconds: float = 0.0  # at best
  flops: float = 0.0
  hbm_bytes: float = 0.0
  compiler_seconds: float = 0.0


@dataclasses.dataclass
class DataDependent:
  """A loop or a branch that depends on data."""

  source: str  # the JAX operation
  state_bytes: float  # of the loop state, or of the branch's result
  times: float  # how often the program executes it
  cost: "HloCost"  # of one trip, or of the most expensive branch


@dataclasses.dataclass
class Reading:
  """Seconds of the kernels that read pages."""

  row: float = 0.0  # for each row
  block: float = 0.0  # for each block of a row's tokens
  full: float = 0.0  # with all pages full, as counted


def add(total, other, times: float = 1) -> None:
  """Adds the numbers of a dataclass to those of another one of its class."""
  for name, value in vars(other).items():
    if isinstance(value, int | float):
      setattr(total, name, getattr(total, name) + times * value)


@dataclasses.dataclass
class HloCost(Work):
  """Of a computation; `hbm_bytes` are also those of collectives."""

  hbm_seconds: float = 0.0  # for `hbm_bytes` alone
  roofline_seconds: float = 0.0  # of all operations except collectives
  estimated_seconds: float = 0.0  # part of it that the compiler estimated
  # Part of it for blocks of scores, all up to the diagonal; see
  # `packing.needed_blocks`.
  block_seconds: float = 0.0
  # Time in which the compiler's schedule waits for collectives.
  stalled_seconds: float = 0.0
  collectives: dict[CollectiveKind, Traffic] = dataclasses.field(
    default_factory=lambda: collections.defaultdict(Traffic)
  )
  # By the name of a JAX operation.
  by_source: dict[str, OperationCost] = dataclasses.field(
    default_factory=lambda: collections.defaultdict(OperationCost)
  )
  # How often each kernel of unknown FLOPs runs.
  unknown_kernels: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  reading: Reading = dataclasses.field(default_factory=Reading)
  loops: list[DataDependent] = dataclasses.field(default_factory=list)
  branches: list[DataDependent] = dataclasses.field(default_factory=list)

  @property
  def collective_seconds(self) -> float:
    return sum(traffic.seconds for traffic in self.collectives.values())

  @property
  def now(self) -> float:  # seconds since the start, as scheduled
    return self.roofline_seconds + self.stalled_seconds

  @property
  def scheduled(self) -> float:
    return max(self.now, self.collective_seconds, self.hbm_seconds)

  def add(self, other: "HloCost", times: float = 1) -> None:
    if not times:
      return
    add(self, other, times)
    add(self.reading, other.reading, times)
    for kind, traffic in other.collectives.items():
      add(self.collectives[kind], traffic, times)
    for source, cost in other.by_source.items():
      add(self.by_source[source], cost, times)
    for kernel, count in other.unknown_kernels.items():
      self.unknown_kernels[kernel] += times * count
    repeat = lambda d: dataclasses.replace(d, times=d.times * times)
    self.loops += map(repeat, other.loops)
    self.branches += map(repeat, other.branches)

  def longest_loop(self) -> tuple[DataDependent, DataDependent] | None:
    """The data-dependent loop with the largest state: a sampler's decode loop.

    Also returns the entry that lists it: the loop itself if this cost counts
    one trip, else the branch around it, which is not counted.
    """
    candidates = [(loop, loop) for loop in self.loops]
    for branch in self.branches:
      if inner := branch.cost.longest_loop():
        candidates.append((inner[0], branch))
    return max(candidates, key=lambda c: c[0].state_bytes, default=None)
