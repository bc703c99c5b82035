"""The sizes of refill: what is refused, and the prefills that are compiled."""

import dataclasses

import pytest

from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.paging import ContinuousBatchingConfig
from gspo_jax.sampler.samples import SamplerConfig

DRAW = SamplerConfig(3, 24, stop_ids=(3, 5))
SMALL = ContinuousBatchingConfig(
  slots=4, page_size=4, segment_steps=6, prefill_chunk=8
)


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"slots": 0}, "continuous_batching.slots=0: expected at least 1"),
    ({"page": 0}, "continuous_batching.page_size=0: expected at least 1"),
    (
      {"chunk": 6},
      "continuous_batching.prefill_chunk=6: expected a multiple of continuous_batching.page_size=4",
    ),
    (
      {"pages": 3},
      "continuous_batching.num_pages=3 a shard: expected at least",
    ),
  ],
)
def test_bad_sizes_are_named(change, words):
  with pytest.raises(UserError, match=words):
    dataclasses.replace(SMALL, **change).sizes(DRAW, 14, 1)


@pytest.mark.parametrize("name", ["slots", "pages"])
def test_what_cannot_be_split_over_the_shards(name):
  """Each shard has slots and pages of its own, alike."""
  odd = dataclasses.replace(SMALL, **{"slots": 8, "num_pages": 400, name: 404})
  with pytest.raises(UserError, match=rf"{name}=404: .* multiple of the 8"):
    odd.sizes(DRAW, 14, 8)


def test_the_default_pool_holds_the_longest_answers_in_all_slots():
  """14 + 24 tokens lie in 10 pages; one more for a prompt's partial page."""
  sizes = dataclasses.replace(SMALL, slots=8).sizes(DRAW, 14, 4)
  assert (sizes.slots, sizes.pages) == (2, 2 * 11)


def test_buckets_double_up_to_what_is_there():
  """The last token of a text is fed by the first step of decoding."""
  assert SMALL.buckets(3) == (8,)
  assert SMALL.buckets(9) == (8,)
  assert SMALL.buckets(10) == (8, 16)
  assert SMALL.buckets(41) == (8, 16, 32, 40)
