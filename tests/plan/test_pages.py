"""The largest pool of pages: what HBM is left over, less a margin."""

import jax
import pytest

from gspo_jax.configs import tiny_cpu
from gspo_jax.plan import pages
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding

MIB = 2**20


@pytest.fixture(scope="module")
def made():
  """A config with 4 slots and 96 pages of 4 tokens, and its program."""
  keys = tiny_cpu.get_config("debug")
  keys.continuous_batching.update(
    {"slots": 4, "page_size": 4, "prefill_chunk": 8, "num_pages": 96}
  )
  config = parse(keys)
  mesh = sharding.make_mesh(jax.devices()[:2], data=2)
  return config, build_program(config, mesh)


def test_a_page_is_padded_to_the_lanes_of_a_tpu(made):
  """Keys and values, 2 layers, 2 heads of 16, 4 tokens of 128 x 4 bytes."""
  _, program = made
  size = pages.page_bytes(program.cfg, program.sampler.generate)
  assert size == 2 * 2 * program.cfg.num_kv_heads * 4 * 128 * 4


def test_the_largest_pool_leaves_the_margin_and_not_a_page_more(made):
  _, program = made
  generate, cfg = program.sampler.generate, program.cfg
  hbm, needed = 64 * MIB, 5 * MIB
  room = pages.room(needed, hbm, cfg, generate)
  assert (room["num_pages"], generate.shards) == (96, 2)
  more = room["largest"] // 2 - 48
  size = room["page_bytes"]
  assert needed + more * size <= (1 - pages.MARGIN) * hbm
  assert needed + (more + 1) * size > (1 - pages.MARGIN) * hbm
  # The longest is 8 prompt tokens and 12: 5 pages, and a partial one.
  assert room["slots_of_longest"] == room["largest"] // 2 // 6 * 2
  assert room["tokens_a_slot"] == room["largest"] // 2 * 4 // 2


def test_what_is_more_than_fits_is_named_with_the_largest(made):
  _, program = made
  generate, cfg = program.sampler.generate, program.cfg
  size = pages.page_bytes(cfg, generate)
  hbm = 48 * size
  room = pages.room(48 * size, hbm, cfg, generate)
  assert room["largest"] == 2 * 44  # 8 % of 48 pages are 3.84
  assert pages.advice(room) == (
    "continuous_batching.num_pages=96: expected at most 88, which leave 8% of "
    "the HBM free"
  )
  none = pages.room(99 * size, hbm, cfg, generate)
  assert none["largest"] == 0


def test_smaller_pools_are_tried_as_long_as_they_hold_a_response(made):
  config, program = made
  generate, cfg = program.sampler.generate, program.cfg
  size = pages.page_bytes(cfg, generate)
  tried = lambda hbm: [
    less.continuous_batching.num_pages
    for less in pages.smaller(config, cfg, generate, hbm)
  ]
  assert tried(64 * size) == [64, 32, 16]
  assert tried(24 * size) == [24, 12]  # 3 pages hold no longest response
  assert tried(128 * size) == [64, 32]  # 64 a shard are not fewer than 48
