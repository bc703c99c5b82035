"""Costs of compiled computations: what they add up, and how they add up.

Of one device, in FLOPs, bytes and seconds at best; `walk` finds them.
"""

import collections
import dataclasses


@dataclasses.dataclass
class Traffic:
  """Collectives of one kind and group size, added up.

  Attributes:
    count: how many.
    wire: bytes that each device sends.
    seconds: that takes.
  """

  count: float = 0
  wire: float = 0.0
  seconds: float = 0.0


@dataclasses.dataclass
class Open:
  """A loop or a branch that data decides; `cost` is of one trip, or of it.

  Attributes:
    source: the JAX operation.
    state: bytes of what it carries.
    times: how often the program comes to it.
    cost: of one iteration, or of the heaviest branch.
  """

  source: str
  state: float
  times: float
  cost: "HloCost"


@dataclasses.dataclass
class HloCost:
  """Of a computation, per device.

  Attributes:
    flops: of matrix products.
    attention: the part of it that was added by hand, for splash.
    hbm: bytes.
    seconds: the roofline of its operations, collectives apart.
    stalled: seconds that it waits for collectives, as the compiler ordered it.
    collectives: (kind, group size, whether asynchronous) -> Traffic.
    by_source: JAX operation -> (seconds, flops, hbm).
    unknown: kernels of unknown FLOPs and how many.
    loops: those that data decides.
    branches: likewise.
  """

  flops: float = 0.0
  attention: float = 0.0
  hbm: float = 0.0
  seconds: float = 0.0
  stalled: float = 0.0
  collectives: dict = dataclasses.field(
    default_factory=lambda: collections.defaultdict(Traffic)
  )
  by_source: dict = dataclasses.field(default_factory=dict)
  unknown: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  loops: list[Open] = dataclasses.field(default_factory=list)
  branches: list[Open] = dataclasses.field(default_factory=list)

  @property
  def wire_seconds(self) -> float:
    """Of all collectives, one after the other."""
    return sum(traffic.seconds for traffic in self.collectives.values())

  @property
  def perfect(self) -> float:
    """Seconds if all communication hides behind computation, or the reverse."""
    return max(self.seconds, self.wire_seconds)

  @property
  def scheduled(self) -> float:
    """Seconds as the compiler ordered it."""
    return max(self.seconds + self.stalled, self.perfect)

  @property
  def serial(self) -> float:
    """Seconds if nothing overlaps."""
    return self.seconds + self.wire_seconds

  def add(self, other: "HloCost", times: float = 1) -> None:
    """What `times` runs of another computation cost."""
    for name in ("flops", "attention", "hbm", "seconds", "stalled"):
      value = getattr(self, name) + times * getattr(other, name)
      setattr(self, name, value)
    for key, traffic in other.collectives.items():
      mine = self.collectives[key]
      mine.count += times * traffic.count
      mine.wire += times * traffic.wire
      mine.seconds += times * traffic.seconds
    for source, values in other.by_source.items():
      self.credit(source, *(times * v for v in values))
    for kernel, count in other.unknown.items():
      self.unknown[kernel] += times * count
    again = lambda o: dataclasses.replace(o, times=o.times * times)
    self.loops += map(again, other.loops)
    self.branches += map(again, other.branches)

  def credit(
    self, source: str, seconds: float, flops: float, hbm: float
  ) -> None:
    old = self.by_source.get(source, (0.0, 0.0, 0.0))
    self.by_source[source] = (old[0] + seconds, old[1] + flops, old[2] + hbm)


def longest_loop(cost: HloCost) -> tuple[Open, Open] | tuple[None, None]:
  """(loop, listed): of the loops that data decides, the one that carries most.

  In a sampler that is decoding with the longest cache, in a branch of a branch.
  `listed` is where `cost` lists it: the loop itself, of which one trip is in
  the sum, or else the branch that holds it, of which nothing is.
  """
  found = [(loop, loop) for loop in cost.loops]
  for branch in cost.branches:
    inner, _ = longest_loop(branch.cost)
    found += [(inner, branch)] if inner else []
  return max(found, key=lambda pair: pair[0].state, default=(None, None))
