"""Sizes of refill: slots, pages, segments, the lengths of prefills."""

import dataclasses

from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.samples import SamplerConfig


def width(prompt: int, most: int, page: int) -> int:
  """Pages of a row whose prompt and answer have so many tokens at most."""
  return -(-(prompt - 1 + most) // page)


@dataclasses.dataclass(frozen=True)
class ShardSizes:
  """What a shard of the devices has room for.

  Attributes:
    slots: B, answers that decode together.
    pages: n, of the pool.
    page: S, tokens of a page.
    steps: most decode steps of a segment.
    most: R, most new tokens of an answer.
    prompt: tokens of the longest prompt.
  """

  slots: int
  pages: int
  page: int
  steps: int
  most: int
  prompt: int

  def __post_init__(self):
    for name, value in dataclasses.asdict(self).items():
      if value < 1:
        raise UserError(f"{name}={value}: expected at least 1")
    if self.pages <= self.width:
      raise UserError(
        f"continuous_batching.num_pages={self.pages} a shard: expected at "
        f"least {self.width + 1}, what one response and its prompt can take"
      )

  @property
  def width(self) -> int:
    """W, pages of the longest row; its text may hold one more, partial."""
    return width(self.prompt, self.most, self.page)


@dataclasses.dataclass(frozen=True)
class ContinuousBatchingConfig:
  """Sizes of continuous batching, of all devices together.

  Attributes:
    slots: B, responses that decode together.
    page_size: S, tokens of a page.
    segment_steps: decode steps of a segment at most.
    prefill_chunk: tokens of one forward pass of a prefill; a multiple of
      `page_size`.
    num_pages: in all; 0 for as many as B of the longest responses take.
  """

  slots: int
  page_size: int
  segment_steps: int
  prefill_chunk: int
  num_pages: int = 0

  def __post_init__(self):
    for name, least in (
      ("slots", 1),
      ("page_size", 1),
      ("segment_steps", 1),
      ("num_pages", 0),
    ):
      if getattr(self, name) < least:
        raise UserError(
          f"continuous_batching.{name}={getattr(self, name)}: expected at "
          f"least {least}"
        )
    if self.prefill_chunk < 1 or self.prefill_chunk % self.page_size:
      raise UserError(
        f"continuous_batching.prefill_chunk={self.prefill_chunk}: expected a "
        f"multiple of continuous_batching.page_size={self.page_size}"
      )

  def sizes(self, draw: SamplerConfig, prompt: int, shards: int) -> ShardSizes:
    """What each of `shards` has, for prompts of at most `prompt` tokens.

    Raises:
      UserError: slots or pages cannot be split, or are too few.
    """
    for name in ("slots", "num_pages"):
      if (value := getattr(self, name)) % shards:
        raise UserError(
          f"continuous_batching.{name}={value}: expected a multiple of the "
          f"{shards} shards of sampler_mesh"
        )
    slots = self.slots // shards
    most = draw.max_new_tokens
    # Besides, the partial last page of each prompt: at most one a slot.
    longest = width(prompt, most, self.page_size) + 1
    pages = self.num_pages // shards or slots * longest
    return ShardSizes(
      slots, pages, self.page_size, self.segment_steps, most, prompt
    )

  def buckets(self, longest: int) -> tuple[int, ...]:
    """T, the lengths that prefills are compiled for.

    Args:
      longest: tokens of the longest prompt.
    """
    chunk = self.prefill_chunk
    most = max(-(-(longest - 1) // chunk), 1) * chunk
    found = [chunk]
    while found[-1] < most:
      found.append(min(2 * found[-1], most))
    return tuple(found)
