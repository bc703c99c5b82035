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
        f"continuous_batching.num_pages={self.pages} a shard: expected at least "
        f"{self.width + 1}, what one answer and its prompt can take"
      )

  @property
  def width(self) -> int:
    """W, pages of the longest row; its text may hold one more, partial."""
    return width(self.prompt, self.most, self.page)


@dataclasses.dataclass(frozen=True)
class ContinuousBatchingConfig:
  """Sizes of decoding, of all devices together.

  Attributes:
    slots: B, answers that decode together.
    page: S, tokens of a page.
    steps: most decode steps of a segment.
    chunk: tokens of one forward pass of a prefill; a multiple of `page`.
    pages: in all; 0 for as many as B of the longest answers take.
  """

  slots: int
  page: int
  steps: int
  chunk: int
  pages: int = 0

  def __post_init__(self):
    for name, least in (("slots", 1), ("page", 1), ("steps", 1), ("pages", 0)):
      if getattr(self, name) < least:
        raise UserError(
          f"paging.{name}={getattr(self, name)}: expected at least {least}"
        )
    if self.chunk < 1 or self.chunk % self.page:
      raise UserError(
        f"continuous_batching.prefill_chunk={self.chunk}: expected a multiple of "
        f"continuous_batching.page_size={self.page}"
      )

  def sizes(self, draw: SamplerConfig, prompt: int, shards: int) -> ShardSizes:
    """What each of `shards` has, for prompts of at most `prompt` tokens.

    Raises:
      UserError: slots or pages cannot be split, or are too few.
    """
    for name in ("slots", "pages"):
      if (value := getattr(self, name)) % shards:
        raise UserError(
          f"paging.{name}={value}: expected a multiple of the {shards} shards "
          "of sampler_mesh"
        )
    own = self.slots // shards
    most = draw.max_new_tokens
    # The prompts' own partial pages, besides: those of a slot's at most.
    longest = width(prompt, most, self.page) + 1
    pages = self.pages // shards or own * longest
    return ShardSizes(own, pages, self.page, self.steps, most, prompt)

  def buckets(self, longest: int) -> tuple[int, ...]:
    """T, what prefills are compiled for: texts of up to `longest` tokens."""
    most = max(-(-(longest - 1) // self.chunk), 1) * self.chunk
    found = [self.chunk]
    while found[-1] < most:
      found.append(min(2 * found[-1], most))
    return tuple(found)
