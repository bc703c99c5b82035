"""Peak rates of TPU chips, and of the links between them.

Sources:
  FLOPs and memory bandwidth: docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}
  Links, one way: jax-ml.github.io/scaling-book, chapter 2
  HBM: the out-of-memory message of libtpu 0.0.51
  Latency of a hop: assumed, 1 us
  FLOPs a cycle of v5e and v5p: the pages above, 4 units of 128 x 128 in each
    TensorCore

For v6e and tpu7x, with units of 256 x 256, FLOPs a cycle are inferred. By the
cycles of libtpu 0.0.51, a large bfloat16 product does 480,269 FLOPs a cycle on
v6e and 446,074 on tpu7x. Two units can do only 262,144, so four are assumed.
The clock is the peak divided by FLOPs a cycle.

The two devices of a tpu7x chip are assumed to have six links between them. No
source confirms it. It matters only to groups within one chip.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from gspo_jax.plan import gpus
from gspo_jax.runtime.errors import UserError, nearest

_GIB = 2**30


class Chip(NamedTuple):
  """One JAX device: a chip, or half of a tpu7x chip."""

  flops: float  # FLOPs a second in bfloat16
  hbm: float  # bytes of HBM that a program may use
  hbm_bandwidth: float  # bytes a second
  link: float  # bytes a second, one way over one link to a neighbour
  network: float  # bytes a second between slices, for each device
  axes: int  # of the torus
  # True: slices consist of 4x4x4 cubes, and the axes of whole cubes are rings.
  # False: only an axis of 16 chips is a ring.
  cubes: bool
  flops_a_cycle: int  # FLOPs of all matrix units in a clock cycle
  cores: int = 1  # TensorCores
  on_chip: int = 1  # devices on one chip, which share its links
  hop: float = 1e-6  # seconds of the first byte to a neighbour

  @property
  def clock(self) -> float:  # cycles a second
    return self.flops / self.flops_a_cycle

  @property
  def vector_bandwidth(self) -> float:
    """Bytes a second through the vector registers."""
    # Assumed: in a cycle a TensorCore loads one of 8 x 128 x 4 bytes.
    return 4096 * self.cores * self.clock

  def rings(self, shape: Sequence[int]) -> tuple[bool, ...]:
    """Whether each axis of a slice of this shape is a ring."""
    if self.cubes:
      return (all(n % 4 == 0 for n in shape),) * len(shape)
    return tuple(n == 16 for n in shape)


CHIPS = {
  "v5e": Chip(197e12, 15.75 * _GIB, 819e9, 4.5e10, 3.125e9, 2, False, 2**17),
  "v5p": Chip(
    459e12, 95.73 * _GIB, 2765e9, 9e10, 6.25e9, 3, True, 2**18, cores=2
  ),
  "v6e": Chip(918e12, 31.24 * _GIB, 1638e9, 9e10, 12.5e9, 2, False, 2**19),
  "tpu7x": Chip(
    1153.5e12, 94.74 * _GIB, 3690e9, 9e10, 6.25e9, 3, True, 2**19, on_chip=2
  ),
}

# Chips of the largest slice, from the pages above.
_LARGEST = {"v5e": 256, "v5p": 6144, "v6e": 256, "tpu7x": 9216}

# Accelerator types of launch/ -> the kind of chip, and what one chip adds to
# the number in the type: its two TensorCores, or 1.
_TYPES = {
  "v5e": ("v5e", 1),
  "v5litepod": ("v5e", 1),
  "v5p": ("v5p", 2),
  "v6e": ("v6e", 1),
  "tpu7x": ("tpu7x", 2),
}
# The shapes of slices with two axes, and of slices smaller than a cube.
_FLAT = (
  *((1, 1), (2, 2), (2, 4), (4, 4)),
  *((4, 8), (8, 8), (8, 16), (16, 16)),
)
_UNDER_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))


class DeviceCoordinates(NamedTuple):
  slice: int
  coordinates: tuple[int, ...]  # in the torus of that slice


# The bandwidth between two devices of a chip, in links: assumed.
_NEIGHBOUR = 6


class Slice(NamedTuple):
  """A TPU slice: the kind of chip and the shape of the torus."""

  kind: str
  shape: tuple[int, ...]

  platform = "tpu"
  note = "compiler roofline, nothing ran on a chip"

  def __str__(self) -> str:
    return f"{self.kind}:{'x'.join(map(str, self.shape))}"

  @property
  def chip(self) -> Chip:
    return CHIPS[self.kind]

  def described(self, slices: int) -> dict:
    """Arguments of `topologies.get_topology_desc` for so many slices."""
    return {"num_slices": slices} if slices > 1 else {}

  def bandwidth_between(
    self,
    here: Sequence[DeviceCoordinates],
    there: Sequence[DeviceCoordinates],
  ) -> float:
    """Bytes a second that all devices of `here` together can send to `there`.

    In a slice they use the torus links between their chips, and the links
    inside chips that they share; between slices, the network of the smaller
    group.
    """
    chip = self.chip
    if {d.slice for d in here} != {d.slice for d in there}:
      return min(len(here), len(there)) * chip.network
    rings = chip.rings(self.shape)
    sending, receiving = set(here), set(there)
    links = _NEIGHBOUR * len(sending & receiving)
    for number, place in receiving:
      for axis, size in enumerate(self.shape):
        for step in {1, -1}:
          at = place[axis] + step
          if not (rings[axis] or 0 <= at < size):
            continue
          other = (*place[:axis], at % size, *place[axis + 1 :])
          links += (number, other) in sending
    return links * chip.link

  def latency(self, devices: Sequence[DeviceCoordinates]) -> float:
    """Seconds of a byte between the two farthest devices of a group.

    It passes along each torus axis, of a ring the shorter way. Between slices,
    as assumed for hosts in `gpus.LATENCY`, it takes longer.
    """
    if len({d.slice for d in devices}) > 1:
      return gpus.LATENCY
    hops = 0
    for axis, ring in enumerate(self.chip.rings(self.shape)):
      places, size = {d.coordinates[axis] for d in devices}, self.shape[axis]
      apart = [b - a for a in places for b in places if b >= a]
      hops += max(min(n, size - n) if ring else n for n in apart)
    return self.chip.hop * max(hops, 1)

  def bandwidth(
    self, devices: Sequence[DeviceCoordinates], to_all: bool
  ) -> float:
    """Bytes a second that each device of a group can send to the others.

    A group uses two links of a torus axis that it closes to a ring, and one
    link of any other axis. Between slices, the network is the limit. With
    `to_all`, each device sends different bytes to every other device. These
    pass through the devices in between, so the longest axis is the limit.

    The devices of one chip share its links. Two groups that each have one of
    them get half of the links. If a group has both, a ring passes the links
    once; with `to_all` each device gets half.
    """
    chip = self.chip
    if len({d.slice for d in devices}) > 1:
      return chip.network
    links, longest, links_of_longest = 0, 1, 1
    rings = chip.rings(self.shape)
    chips = {d.coordinates for d in devices}
    if len(chips) == 1 < len(devices):
      return _NEIGHBOUR * chip.link
    together = len(devices) // len(chips)  # devices of a chip in the group
    sending = chip.on_chip if to_all else chip.on_chip // together
    for axis, size in enumerate(self.shape):
      extent = len({d.coordinates[axis] for d in devices})
      if extent == 1:
        continue
      axis_links = 2 if extent == size and rings[axis] else 1
      links += axis_links
      if extent > longest:
        longest, links_of_longest = extent, axis_links
    if to_all:
      return chip.link * links_of_longest / max(longest / 4, 1) / sending
    return chip.link * max(links, 1) / sending


Topology = Slice | gpus.Host


def parse(topology: str) -> Topology:
  """Parses v5p:4x4x4, an accelerator type, v5p-128, or GPUs, h100:8."""
  family, _, count = topology.partition("-")
  if family in _TYPES and count.isdecimal():
    return _of_type(topology, family, int(count))
  kind, _, sizes = topology.partition(":")
  if kind in gpus.GPUS:
    return gpus.parse(topology)
  if kind not in CHIPS:
    known = nearest(kind, [*CHIPS, *gpus.GPUS])
    raise UserError(f"--topology={topology!r}: {known}")
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
  if any(n > 1 and n % 2 for n in shape[:2]):
    even = Slice(kind, (*(max(n - n % 2, 1) for n in shape[:2]), *shape[2:]))
    raise UserError(
      f"--topology={topology!r}: expected 1 or even numbers as the first two "
      f"sizes, for a host has 2x2 chips; the next smaller one is {even}"
    )
  return Slice(kind, shape)


def _of_type(topology: str, family: str, count: int) -> Slice:
  """The slice of an accelerator type; the most compact one of cubes."""
  kind, a_chip = _TYPES[family]
  has_cubes, whole = CHIPS[kind].cubes, 64 * a_chip  # whole: a cube
  shapes = _UNDER_A_CUBE if has_cubes else _FLAT
  sizes = {math.prod(shape) * a_chip: shape for shape in shapes}
  if count in sizes:
    return Slice(kind, sizes[count])
  largest = _LARGEST[kind] * a_chip
  if has_cubes and count % whole == 0 and 0 < count <= largest:
    return Slice(kind, _compact(count // whole))
  more = f", or a multiple of {whole} up to {largest}" if has_cubes else ""
  counted = "TensorCores" if a_chip == 2 else "chips"
  raise UserError(
    f"--topology={topology!r}: expected {family}- and a number of {counted}: "
    f"{', '.join(map(str, sizes))}{more}"
  )


def _compact(cubes: int) -> tuple[int, ...]:
  """The shape of `cubes` 4x4x4 cubes whose longest axis is shortest."""
  shapes = (
    (a, b, cubes // (a * b))
    for a in range(1, cubes + 1)
    for b in range(a, cubes // a + 1)
    if cubes % (a * b) == 0 and cubes // (a * b) >= b
  )
  return tuple(4 * n for n in min(shapes, key=lambda shape: shape[::-1]))
