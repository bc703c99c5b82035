"""Sizes of continuous batching: slots, pages, segments, prefill lengths."""

import dataclasses

from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.key import AT_LEAST_1, ZERO_OR_MORE, check, key
from gspo_jax.sampler.samples import SamplerConfig


def pages_per_slot(
  max_prompt_length: int, max_new_tokens: int, page_size: int
) -> int:
  """W, pages of the longest prompt and response; the last token is not fed."""
  return -(-(max_prompt_length - 1 + max_new_tokens) // page_size)


@dataclasses.dataclass(frozen=True)
class ShardSizes:
  """Sizes of continuous batching on one shard of the devices.

  Attributes:
    slots: B, responses that decode at the same time.
    num_pages: n, pages in the pool.
    page_size: tokens a page.
    segment_steps: most decode steps of a segment.
    max_new_tokens: R, most tokens of a response.
    max_prompt_length: most tokens of a prompt.
  """

  slots: int
  num_pages: int
  page_size: int
  segment_steps: int
  max_new_tokens: int
  max_prompt_length: int

  def __post_init__(self):
    for name, value in dataclasses.asdict(self).items():
      if value < 1:
        raise UserError(f"{name}={value}: expected at least 1")
    # One page more than a slot can use, for a prompt's own partial page.
    least = self.pages_per_slot + 1
    if self.num_pages < least:
      raise UserError(
        f"continuous_batching.num_pages={self.num_pages} a shard: expected at "
        f"least {least}, what the longest prompt and its response can take"
      )

  @property
  def pages_per_slot(self) -> int:
    """W, most pages of one slot; a prompt may hold one more, a partial one."""
    return pages_per_slot(
      self.max_prompt_length, self.max_new_tokens, self.page_size
    )


@dataclasses.dataclass(frozen=True)
class ContinuousBatchingConfig:
  """Sizes of continuous batching on all devices together."""

  slots: int = key(
    0,
    "responses that decode together; 0: the static sampler, all of a batch",
    ZERO_OR_MORE,
  )
  page_size: int = key(16, "tokens of a page", AT_LEAST_1)
  num_pages: int = key(
    0,
    "pages of the pool; 0: as many as `slots` of the longest responses take. "
    "`gspo_jax.plan` prints the most that the HBM holds.",
    ZERO_OR_MORE,
  )
  prefill_chunk: int = key(
    128, "prompt tokens of a forward pass; a multiple of `page_size`"
  )
  segment_steps: int = 32  # decode steps between host checks

  def __post_init__(self):
    check(self, "continuous_batching")
    if self.prefill_chunk < 1 or self.prefill_chunk % self.page_size:
      raise UserError(
        f"continuous_batching.prefill_chunk={self.prefill_chunk}: expected a "
        f"multiple of continuous_batching.page_size={self.page_size}"
      )

  def with_slots_for(self, responses: int) -> "ContinuousBatchingConfig":
    """No more slots than responses: an idle slot costs as much as another."""
    return dataclasses.replace(self, slots=min(self.slots, responses))

  def shard_sizes(
    self, sampler: SamplerConfig, max_prompt_length: int, shards: int
  ) -> ShardSizes:
    """The sizes of each of `shards` equal shards.

    Raises:
      UserError: slots or pages do not divide by the shards, or are too few.
    """
    for name in ("slots", "num_pages"):
      if (value := getattr(self, name)) % shards:
        raise UserError(
          f"continuous_batching.{name}={value}: expected a multiple of the "
          f"{shards} shards of sampler_mesh"
        )
    slots, max_new_tokens = self.slots // shards, sampler.max_new_tokens
    # Also the partial last page of each prompt: at most one a slot.
    longest = (
      pages_per_slot(max_prompt_length, max_new_tokens, self.page_size) + 1
    )
    return ShardSizes(
      slots=slots,
      num_pages=self.num_pages // shards or slots * longest,
      page_size=self.page_size,
      segment_steps=self.segment_steps,
      max_new_tokens=max_new_tokens,
      max_prompt_length=max_prompt_length,
    )

  def buckets(self, longest: int) -> tuple[int, ...]:
    """The padded lengths T that prefills are compiled for.

    They double from `prefill_chunk` on. A prefill leaves out the last token of
    a prompt, which the first decode step feeds.

    Args:
      longest: tokens of the longest prompt.
    """
    chunk = self.prefill_chunk
    last = max(-(-(longest - 1) // chunk), 1) * chunk
    lengths = [chunk]
    while lengths[-1] < last:
      lengths.append(min(2 * lengths[-1], last))
    return tuple(lengths)
