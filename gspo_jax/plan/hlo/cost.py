"""The cost of a compiled computation on one device, and how costs add up.

FLOPs, bytes and the seconds they take at best; `walk` computes them.
"""

import collections
import dataclasses
from typing import NamedTuple


class CollectiveKind(NamedTuple):
  """Collectives that are added up together.

  Attributes:
    kind: the HLO opcode, or "network" between slices.
    group_size: how many devices take part.
    asynchronous: whether other operations can run at the same time.
  """

  kind: str
  group_size: int
  asynchronous: bool


@dataclasses.dataclass
class Traffic:
  """The sum over collectives of one `CollectiveKind`.

  Attributes:
    count: how many there are.
    wire: bytes that each device sends.
    seconds: the longer of the times to send them, and to read and write HBM.
    hbm_bytes: bytes of HBM that each device reads and writes.
  """

  count: float = 0
  wire: float = 0.0
  seconds: float = 0.0
  hbm_bytes: float = 0.0


class OperationCost(NamedTuple):
  """The sum over the instructions of one JAX operation.

  Attributes:
    seconds: at best.
    flops: of matrix products.
    hbm_bytes: bytes read from and written to HBM.
    compiler_seconds: by the compiler's estimate.
  """

  seconds: float
  flops: float
  hbm_bytes: float
  compiler_seconds: float = 0.0


@dataclasses.dataclass
class DataDependent:
  """A loop whose trip count, or a branch that, depends on the data.

  Attributes:
    source: the JAX operation.
    state_bytes: bytes of its loop state or result.
    times: how often the program executes it.
    cost: of one iteration of the loop, or of the most expensive branch.
  """

  source: str
  state_bytes: float
  times: float
  cost: "HloCost"


@dataclasses.dataclass
class HloCost:
  """The cost of a computation on one device.

  Attributes:
    flops: of matrix products.
    attention_flops: the part of `flops` in attention kernels, which report no
      FLOPs themselves.
    padding_flops: FLOPs that grouped products do besides, in blocks that are
      not full.
    hbm_bytes: bytes read from and written to HBM, also by collectives.
    hbm_seconds: the time for `hbm_bytes` alone.
    roofline_seconds: the time of all operations except collectives.
    estimated_seconds: the part of it that the compiler estimated.
    stalled_seconds: the time spent waiting for collectives, in the order of
      the compiler's schedule.
    collectives: the sum for each kind of collective.
    by_source: the name of a JAX operation -> its cost.
    unknown_kernels: kernels of unknown FLOPs -> how often they run.
    loops: those with a trip count that depends on the data.
    branches: those that the data selects.
  """

  flops: float = 0.0
  attention_flops: float = 0.0
  padding_flops: float = 0.0
  hbm_bytes: float = 0.0
  hbm_seconds: float = 0.0
  roofline_seconds: float = 0.0
  estimated_seconds: float = 0.0
  stalled_seconds: float = 0.0
  collectives: dict[CollectiveKind, Traffic] = dataclasses.field(
    default_factory=lambda: collections.defaultdict(Traffic)
  )
  by_source: dict[str, OperationCost] = dataclasses.field(default_factory=dict)
  unknown_kernels: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  loops: list[DataDependent] = dataclasses.field(default_factory=list)
  branches: list[DataDependent] = dataclasses.field(default_factory=list)

  @property
  def collective_seconds(self) -> float:
    """The time of all collectives, one after the other."""
    return sum(traffic.seconds for traffic in self.collectives.values())

  @property
  def perfect_overlap(self) -> float:
    """Seconds if collectives and computation overlap completely."""
    return max(self.roofline_seconds, self.collective_seconds, self.hbm_seconds)

  @property
  def scheduled(self) -> float:
    """Seconds in the order of the compiler's schedule."""
    return max(
      self.roofline_seconds + self.stalled_seconds, self.perfect_overlap
    )

  @property
  def no_overlap(self) -> float:
    """Seconds if collectives and computation do not overlap."""
    return max(
      self.roofline_seconds + self.collective_seconds, self.hbm_seconds
    )

  def add(self, other: "HloCost", times: float = 1) -> None:
    """Adds the cost of `times` runs of another computation."""
    if not times:
      return
    for name in (
      "flops",
      "attention_flops",
      "padding_flops",
      "hbm_bytes",
      "hbm_seconds",
      "roofline_seconds",
      "estimated_seconds",
      "stalled_seconds",
    ):
      value = getattr(self, name) + times * getattr(other, name)
      setattr(self, name, value)
    for kind, traffic in other.collectives.items():
      total = self.collectives[kind]
      total.count += times * traffic.count
      total.wire += times * traffic.wire
      total.hbm_bytes += times * traffic.hbm_bytes
      total.seconds += times * traffic.seconds
    for source, cost in other.by_source.items():
      self.add_operation(source, OperationCost(*(times * x for x in cost)))
    for kernel, count in other.unknown_kernels.items():
      self.unknown_kernels[kernel] += times * count
    repeat = lambda d: dataclasses.replace(d, times=d.times * times)
    self.loops += map(repeat, other.loops)
    self.branches += map(repeat, other.branches)

  def add_operation(self, source: str, cost: OperationCost) -> None:
    """Adds a cost to that of the JAX operation `source` in `by_source`."""
    old = self.by_source.get(source, OperationCost(0.0, 0.0, 0.0))
    self.by_source[source] = OperationCost(
      *(a + b for a, b in zip(old, cost, strict=True))
    )


class LongestLoop(NamedTuple):
  """A data-dependent loop, and the entry of the cost that lists it.

  Attributes:
    loop: the loop.
    listed: the loop itself if one trip of it is in the cost; else the branch
      that contains it, of which nothing is in the cost.
  """

  loop: DataDependent | None
  listed: DataDependent | None


def longest_loop(cost: HloCost) -> LongestLoop:
  """The data-dependent loop with the largest state, also within branches.

  In a sampler this is the loop that decodes with the longest cache, in a branch
  of a branch. Both fields are None if there is no loop.
  """
  candidates = [LongestLoop(loop, loop) for loop in cost.loops]
  for branch in cost.branches:
    inner = longest_loop(branch.cost).loop
    candidates += [LongestLoop(inner, branch)] if inner else []
  return max(
    candidates,
    key=lambda c: c.loop.state_bytes,
    default=LongestLoop(None, None),
  )
