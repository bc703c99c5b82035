"""Chips and slices: what is accepted, and how fast groups can talk."""

import itertools

import pytest

from gspo_jax.plan import chips
from gspo_jax.plan.chips import DeviceCoordinates, bandwidth, parse
from gspo_jax.runtime.errors import UserError


def box(*ranges, of_slice=0):
  """The devices at all combinations of coordinates."""
  return [
    DeviceCoordinates(of_slice, place) for place in itertools.product(*ranges)
  ]


@pytest.mark.parametrize(
  ("topology", "kind", "shape"),
  [
    ("v5e:4x4", "v5e", (4, 4)),
    ("v5p:4x4x4", "v5p", (4, 4, 4)),
    ("v6e:16x16", "v6e", (16, 16)),
    ("tpu7x:2x2x1", "tpu7x", (2, 2, 1)),
  ],
)
def test_a_slice_is_read(topology, kind, shape):
  assert parse(topology) == chips.Slice(kind, shape)


@pytest.mark.parametrize(
  ("topology", "words"),
  [
    ("v5x:4x4", "'v5x:4x4': did you mean 'v5"),
    ("h200:1x1", "choose one of tpu7x, v5e, v5p, v6e"),
    ("v5p:4x4", "expected 3 sizes, as in v5p:4x4x4"),
    ("v5e:4x4x4", "expected 2 sizes, as in v5e:4x4"),
    ("v5e", "expected 2 sizes"),
    ("v5e:4x", "expected 2 sizes"),
    ("v5e:0x2", "expected 2 sizes"),  # libtpu dies of this one
    ("v5e:-2x2", "expected 2 sizes"),
    ("v5e:32x16", "512 chips, but a slice of v5e has at most 256"),
  ],
)
def test_a_wrong_slice_is_named(topology, words):
  with pytest.raises(UserError, match=words):
    parse(topology)


def test_rings_are_where_a_slice_closes():
  assert chips.CHIPS["v5p"].rings((4, 4, 8)) == (True, True, True)
  assert chips.CHIPS["v5p"].rings((2, 4, 4)) == (False, False, False)
  assert chips.CHIPS["v5e"].rings((8, 16)) == (False, True)


def test_a_ring_is_twice_as_fast_as_a_line():
  where, link = parse("v5e:8x16"), chips.CHIPS["v5e"].link
  line = box(range(8), [0])
  ring = box([0], range(16))
  part = box([0], range(8))
  assert bandwidth(where, line, to_all=False) == link
  assert bandwidth(where, ring, to_all=False) == 2 * link
  assert bandwidth(where, part, to_all=False) == link
  assert bandwidth(where, box(range(8), range(16)), False) == 3 * link


@pytest.mark.parametrize(
  ("topology", "links_in_each_cut"), [("v5p:8x8x8", 2), ("v5e:8x8", 1)]
)
def test_to_all_is_bound_by_the_narrowest_cut(topology, links_in_each_cut):
  where = parse(topology)
  n = where.shape[0]
  everyone = box(*(range(n) for n in where.shape))
  # Half the devices send half their bytes over the cut, `links_in_each_cut`
  # links in each line of n devices.
  seconds_a_byte = n / 2 / 2 / (links_in_each_cut * where.chip.link)
  assert bandwidth(where, everyone, to_all=True) == pytest.approx(
    1 / seconds_a_byte
  )


def test_between_slices_the_network_is_the_bound():
  where = parse("v5e:2x2")
  both = [DeviceCoordinates(0, (0, 0)), DeviceCoordinates(1, (0, 0))]
  assert bandwidth(where, both, to_all=False) == where.chip.network


def test_devices_of_one_chip_still_have_a_link():
  where = parse("tpu7x:2x2x1")
  same = [DeviceCoordinates(0, (0, 0, 0)), DeviceCoordinates(0, (0, 0, 0))]
  assert bandwidth(where, same, to_all=False) == where.chip.link
