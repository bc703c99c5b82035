"""Topologies that are accepted, and the bandwidth of groups of devices."""

import itertools

import pytest

from gspo_jax.plan import chips
from gspo_jax.plan.chips import DeviceCoordinates, parse
from gspo_jax.runtime.errors import UserError


def box(*ranges, of_slice=0):
  """The devices at all combinations of coordinates."""
  return [
    DeviceCoordinates(of_slice, place) for place in itertools.product(*ranges)
  ]


@pytest.mark.parametrize(
  ("topology", "kind", "shape"),
  [("v5p:4x4x4", "v5p", (4, 4, 4)), ("tpu7x:2x2x1", "tpu7x", (2, 2, 1)),
   ("v5e:1x4", "v5e", (1, 4)), ("v6e-1", "v6e", (1, 1)),
   ("v5p-1536", "v5p", (8, 8, 12)), ("v5p-12288", "v5p", (16, 16, 24))],
)  # fmt: skip
def test_parse(topology, kind, shape):
  assert parse(topology) == chips.Slice(kind, shape)


@pytest.mark.parametrize(
  ("topology", "words"),
  [
    ("v5x:4x4", "'v5x:4x4': did you mean 'v5"),
    ("v4:2x2x1", "choose one of a100, a100-40gb, h100, h200, l4, t4, tpu7x"),
    ("h100", "'h100': expected h100:1 to h100:8, the GPUs of one host"),
    ("a100-40gb:16", "expected a100-40gb:1 to a100-40gb:8"),
    ("l4:0", "expected l4:1 to l4:8"),
    ("v5p:4x4", "expected 3 sizes, as in v5p:4x4x4"),
    ("v5e:0x2", "expected 2 sizes"),  # libtpu crashes on it
    ("v5p:3x4x4", "first two sizes, for .* smaller one is v5p:2x4x4"),
    ("v5p-128000", "8, 16, 32, 64, or a multiple of 128 up to 12288"),
    ("v6e-12", "a number of chips: 1, 4, 8, 16, 32, 64, 128, 256$"),
    ("v5e:32x16", "512 chips, but a slice of v5e has at most 256"),
  ],
)
def test_an_invalid_topology_is_an_error(topology, words):
  with pytest.raises(UserError, match=words):
    parse(topology)


def test_a_ring_is_twice_as_fast_as_a_line():
  tpu_slice, link = parse("v5e:8x16"), chips.CHIPS["v5e"].link
  line = box(range(8), [0])
  ring = box([0], range(16))
  part = box([0], range(8))
  assert tpu_slice.bandwidth(line, to_all=False) == link
  assert tpu_slice.bandwidth(ring, to_all=False) == 2 * link
  assert tpu_slice.bandwidth(part, to_all=False) == link
  assert tpu_slice.bandwidth(box(range(8), range(16)), False) == 3 * link
  # Between slices, the network is the limit.
  both = [*box([0], [0]), *box([0], [0], of_slice=1)]
  assert tpu_slice.bandwidth(both, to_all=False) == tpu_slice.chip.network


@pytest.mark.parametrize(
  ("topology", "cut_links"), [("v5p:8x8x8", 2), ("v5e:8x8", 1)]
)
def test_all_to_all_is_limited_by_the_smallest_cut(topology, cut_links):
  tpu_slice = parse(topology)
  n = tpu_slice.shape[0]
  everyone = box(*(range(n) for n in tpu_slice.shape))
  # Half the devices send half their bytes over the cut, `cut_links`
  # links in each line of n devices.
  seconds_a_byte = n / 2 / 2 / (cut_links * tpu_slice.chip.link)
  assert tpu_slice.bandwidth(everyone, to_all=True) == pytest.approx(
    1 / seconds_a_byte
  )


@pytest.mark.parametrize(
  ("topology", "links"),
  [
    ("v5p:2x2x2", 4),  # four lines of two chips
    ("v5p:4x4x4", 2 * 16),  # rings are cut twice
    ("v5e:4x4", 4),
    ("v6e:8x16", 2 * 8),
  ],
)
def test_between_two_halves_are_the_links_of_the_cut(topology, links):
  tpu_slice = parse(topology)
  *whole, last = map(range, tpu_slice.shape)
  half = len(last) // 2
  here, there = box(*whole, last[:half]), box(*whole, last[half:])
  found = tpu_slice.bandwidth_between(here, there)
  assert found == links * tpu_slice.chip.link
  other = [DeviceCoordinates(1, d.coordinates) for d in here]
  network = len(here) * tpu_slice.chip.network
  assert tpu_slice.bandwidth_between(here, other) == network


def test_between_the_devices_of_a_chip_are_links_too():
  tpu_slice = parse("tpu7x:2x1x1")
  here, there = box([0], [0], [0]), box(range(2), [0], [0])
  found = tpu_slice.bandwidth_between(here, here)
  assert found == 6 * tpu_slice.chip.link
  # The chip of both, and the link to its neighbour.
  found = tpu_slice.bandwidth_between(here, there)
  assert found == (6 + 1) * tpu_slice.chip.link


@pytest.mark.parametrize("to_all", [False, True])
def test_two_devices_of_one_chip_share_its_links(to_all):
  tpu_slice = parse("tpu7x:2x2x1")
  link = tpu_slice.chip.link
  one_each = box(range(2), [0], [0])
  both = [*one_each, *one_each]
  # The other devices of these chips are a group of their own.
  assert 2 * tpu_slice.bandwidth(one_each, to_all) == link
  # In a ring, one of two devices sends to the other on its chip.
  assert tpu_slice.bandwidth(both, to_all) == (link / 2 if to_all else link)
  alone = [one_each[0], one_each[0]]
  assert tpu_slice.bandwidth(alone, to_all) == 6 * link


@pytest.mark.parametrize("topology", ["v5p:4x4x8", "v5p:2x2x4", "v5e:4x16"])
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), (0, 1, -1)])
def test_a_byte_to_the_farthest_device_takes_the_shorter_way(topology, axes):
  tpu_slice = parse(topology)
  axes = {axis % len(tpu_slice.shape) for axis in axes}
  group = box(
    *(range(n if axis in axes else 1) for axis, n in enumerate(tpu_slice.shape))
  )
  rings = tpu_slice.chip.rings(tpu_slice.shape)

  def hops(a, b):
    total = 0
    for x, y, n, ring in zip(
      a.coordinates, b.coordinates, tpu_slice.shape, rings, strict=True
    ):
      total += min(abs(x - y), n - abs(x - y)) if ring else abs(x - y)
    return total

  farthest = max(hops(a, b) for a in group for b in group)
  assert tpu_slice.latency(group) == farthest * tpu_slice.chip.hop
