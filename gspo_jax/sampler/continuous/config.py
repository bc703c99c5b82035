"""Sizes of continuous batching: slots, pages, segments, prefill lengths."""

import dataclasses

from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.key import AT_LEAST_1, ZERO_OR_MORE, check, key
from gspo_jax.sampler.samples import SamplerConfig

_DRAFTING = 4  # responses draft where at most 1 of 4 slots is in use
PROMPT_ROWS = 2  # states of prefixes that a shard keeps for later slots


@dataclasses.dataclass(frozen=True)
class ShardSizes:
  """Sizes of continuous batching on one shard of the devices."""

  slots: int  # M, responses that decode at the same time
  num_pages: int  # in the pool
  page_size: int  # tokens of a page
  segment_steps: int  # most decode steps of a segment
  max_new_tokens: int  # R, most tokens of a response
  max_prompt_length: int  # S, most tokens of a prompt
  drafts: int = 0  # most of a slot in a step

  @property
  def pages_per_slot(self) -> int:
    """W, pages of the longest prompt and response without its last token."""
    tokens = self.max_prompt_length - 1 + self.max_new_tokens
    return -(-tokens // self.page_size)

  @property
  def holds_all_slots(self) -> bool:
    """Whether the pool has pages for `slots` of the longest responses."""
    return self.num_pages >= self.slots * (self.pages_per_slot + 1)

  def drafts_of(self, active: int) -> int:
    """Drafts of a response in a step where so many are in slots, or fewer."""
    return self.drafts if _DRAFTING * active <= self.slots else 0

  def segment_tokens(self, active: int) -> int:
    """Most tokens that a segment adds to each of so many responses."""
    return self.segment_steps * (1 + self.drafts_of(active))


@dataclasses.dataclass(frozen=True)
class ContinuousBatchingConfig:
  slots: int = key(
    0,
    "responses that decode together; 0: all of a batch, by the static sampler; "
    "evaluations then have as many slots as a batch",
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
  speculation: int = key(
    0,
    "tokens that a step drafts of each response, from the texts of its group, "
    "while at most 1 of 4 slots is in use; 0: none. It changes no response.",
    ZERO_OR_MORE,
  )
  segment_steps: int = 32  # decode steps between host checks

  def __post_init__(self):
    check(self, "continuous_batching")
    if self.segment_steps < 1:
      raise UserError(f"{self.segment_steps=}: expected at least 1")
    if self.prefill_chunk < 1 or self.prefill_chunk % self.page_size:
      raise UserError(
        f"continuous_batching.prefill_chunk={self.prefill_chunk}: expected a "
        f"multiple of continuous_batching.page_size={self.page_size}"
      )

  def shard_sizes(
    self, sampler: SamplerConfig, max_prompt_length: int, shards: int
  ) -> ShardSizes:
    """The sizes of one of `shards` shards; UserError if they do not fit."""
    for name in ("slots", "num_pages"):
      if (value := getattr(self, name)) % shards:
        raise UserError(
          f"continuous_batching.{name}={value}: expected a multiple of the "
          f"{shards} shards of sampler_mesh"
        )
    sizes = ShardSizes(
      slots=self.slots // shards,
      num_pages=self.num_pages // shards,
      page_size=self.page_size,
      segment_steps=self.segment_steps,
      max_new_tokens=sampler.max_new_tokens,
      max_prompt_length=max_prompt_length,
      drafts=sampler.speculation,
    )
    # A slot's pages and a prompt's partial last page: at most one a slot.
    least = sizes.pages_per_slot + 1
    if not self.num_pages:
      return dataclasses.replace(sizes, num_pages=sizes.slots * least)
    if sizes.num_pages < least:
      raise UserError(
        f"continuous_batching.num_pages={sizes.num_pages} a shard: expected at "
        f"least {least}, what the longest prompt and its response can take"
      )
    return sizes

  def buckets(self, longest: int) -> tuple[int, ...]:
    """The padded lengths T of prefills, for prompts of up to `longest` tokens.

    They double from `prefill_chunk` on. The last token of a prompt is not
    prefilled; the first decode step feeds it.
    """
    chunk = self.prefill_chunk
    last = max(-(-(longest - 1) // chunk), 1) * chunk
    lengths = [chunk]
    while lengths[-1] < last:
      lengths.append(min(2 * lengths[-1], last))
    return tuple(lengths)
