"""Sizes of refill: slots, pages, segments, the lengths of prefills."""

import dataclasses

from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler import SamplerConfig
from gspo_jax.schedule import Sizes, width


@dataclasses.dataclass(frozen=True)
class Paging:
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
        f"paging.chunk={self.chunk}: expected a multiple of "
        f"paging.page={self.page}"
      )

  def sizes(self, draw: SamplerConfig, prompt: int, shards: int) -> Sizes:
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
    return Sizes(own, pages, self.page, self.steps, most, prompt)

  def buckets(self, longest: int) -> tuple[int, ...]:
    """T, what prefills are compiled for: texts of up to `longest` tokens."""
    most = max(-(-(longest - 1) // self.chunk), 1) * self.chunk
    found = [self.chunk]
    while found[-1] < most:
      found.append(min(2 * found[-1], most))
    return tuple(found)
