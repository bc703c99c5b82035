"""What a TPU chip can do at most, and how its slices are wired.

Peaks of compute and memory: docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}.
Links: one way, jax-ml.github.io/scaling-book, chapter 2.
HBM: what libtpu 0.0.51 lets a program use, from its out-of-memory message.
"""

import dataclasses
import math
from collections.abc import Sequence

from gspo_jax.runtime.errors import UserError, nearest

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """One device as JAX sees it: a chip, or half of a tpu7x.

  Attributes:
    flops: a second, bfloat16.
    hbm: bytes that a program may use.
    hbm_bandwidth: bytes a second.
    link: bytes a second, one way over one link to a neighbour.
    network: bytes a second between slices, a device's share.
    axes: of the torus.
    cubes: whether slices are made of 4x4x4 cubes, whose axes close to rings;
      else only an axis of 16 closes.
  """

  flops: float
  hbm: float
  hbm_bandwidth: float
  link: float
  network: float
  axes: int
  cubes: bool

  def rings(self, shape: Sequence[int]) -> tuple[bool, ...]:
    """Which axes of a slice close to a ring."""
    if self.cubes:
      return (all(n % 4 == 0 for n in shape),) * len(shape)
    return tuple(n == 16 for n in shape)


CHIPS = {
  "v5e": Chip(197e12, 15.75 * _GIB, 819e9, 4.5e10, 3.125e9, 2, False),
  "v5p": Chip(459e12, 95.73 * _GIB, 2765e9, 9e10, 6.25e9, 3, True),
  "v6e": Chip(918e12, 31.24 * _GIB, 1638e9, 9e10, 12.5e9, 2, False),
  # Two devices a chip, which share its links.
  "tpu7x": Chip(1153.5e12, 94.74 * _GIB, 3690e9, 9e10, 6.25e9, 3, True),
}

# The largest slices there are, by the pages above.
_LARGEST = {"v5e": 256, "v5p": 6144, "v6e": 256, "tpu7x": 9216}


@dataclasses.dataclass(frozen=True)
class Slice:
  """A kind of chip and the shape of its torus."""

  kind: str
  shape: tuple[int, ...]

  def __str__(self) -> str:
    return f"{self.kind}:{'x'.join(map(str, self.shape))}"

  @property
  def chip(self) -> Chip:
    return CHIPS[self.kind]


def parse(topology: str) -> Slice:
  """Reads `v5p:4x4x4`.

  Raises:
    UserError: an unknown chip, or a shape that its slices cannot have.
  """
  kind, _, sizes = topology.partition(":")
  if kind not in CHIPS:
    raise UserError(f"--topology={topology!r}: {nearest(kind, CHIPS)}")
  chip = CHIPS[kind]
  example = {2: "4x4", 3: "4x4x4"}[chip.axes]
  shape = tuple(int(n) if n.isdigit() else 0 for n in sizes.split("x"))
  if len(shape) != chip.axes or min(shape) < 1:
    raise UserError(
      f"--topology={topology!r}: expected {chip.axes} sizes, as in "
      f"{kind}:{example}"
    )
  if math.prod(shape) > _LARGEST[kind]:
    raise UserError(
      f"--topology={topology!r}: {math.prod(shape)} chips, but a slice of "
      f"{kind} has at most {_LARGEST[kind]}; use --slices for more"
    )
  return Slice(kind, shape)


@dataclasses.dataclass(frozen=True)
class DeviceCoordinates:
  """Where a device is: its slice, and its coordinates in that torus."""

  slice: int
  coordinates: tuple[int, ...]


def bandwidth(
  where: Slice, places: Sequence[DeviceCoordinates], to_all: bool
) -> float:
  """Bytes a second at which each device of a group can send to the others.

  A ring uses both links of each axis that the group extends over, a line one.
  To send to all (`to_all`), bytes also pass through the devices between.
  Between slices the network is the bound.
  """
  chip = where.chip
  if len({p.slice for p in places}) > 1:
    return chip.network
  links, longest, widest = 0, 1, 1
  rings = chip.rings(where.shape)
  for axis, whole in enumerate(where.shape):
    extent = len({p.coordinates[axis] for p in places})
    if extent == 1:
      continue
    ways = 2 if extent == whole and rings[axis] else 1
    links += ways
    if extent > longest:
      longest, widest = extent, ways
  if to_all:
    return chip.link * widest / max(longest / 4, 1)
  return chip.link * max(links, 1)
