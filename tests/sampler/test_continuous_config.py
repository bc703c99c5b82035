"""The sizes of continuous batching: errors, and the prefills to compile."""

import dataclasses

import pytest

from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import SamplerConfig

SAMPLER = SamplerConfig(3, 24, stop_ids=(3, 5))
SMALL = ContinuousBatchingConfig(
  slots=4, page_size=4, segment_steps=6, prefill_chunk=8
)


@pytest.mark.parametrize(
  ("change", "words"),
  [({"page_size": 0}, "page_size=0: expected at least 1"),
   ({"num_pages": -1}, "num_pages=-1: expected 0 or more"),
   ({"prefill_chunk": 6},
    "prefill_chunk=6: expected a multiple of continuous_batching.page_size=4"),
   ({"num_pages": 10}, "num_pages=10 a shard: expected at least 11")],
)  # fmt: skip
def test_an_error_names_the_key_and_the_value(change, words):
  with pytest.raises(UserError, match=f"^continuous_batching.{words}"):
    dataclasses.replace(SMALL, **change).shard_sizes(SAMPLER, 14, 1)


@pytest.mark.parametrize("name", ["slots", "num_pages"])
def test_slots_and_pages_divide_by_the_shards(name):
  odd = dataclasses.replace(SMALL, **{"slots": 8, "num_pages": 400, name: 404})
  with pytest.raises(UserError, match=rf"{name}=404: .* multiple of the 8"):
    odd.shard_sizes(SAMPLER, 14, 8)


def test_the_default_pool_holds_the_longest_responses_in_all_slots():
  """14 + 24 tokens fill 10 pages; one more for a prompt's partial page."""
  sizes = dataclasses.replace(SMALL, slots=8).shard_sizes(SAMPLER, 14, 4)
  assert (sizes.slots, sizes.num_pages) == (2, 2 * 11)
  least = dataclasses.replace(SMALL, num_pages=11).shard_sizes(SAMPLER, 14, 1)
  assert (least.num_pages, least.pages_per_slot) == (11, 10)


def test_buckets_double_up_to_the_longest_prefix():
  """The first decode step feeds the last token of a prefix."""
  assert SMALL.buckets(3) == (8,)
  assert SMALL.buckets(9) == (8,)
  assert SMALL.buckets(10) == (8, 16)
  assert SMALL.buckets(41) == (8, 16, 32, 40)
