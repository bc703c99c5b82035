"""Batches of prompts: a dict of arrays, and the rows in it."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.runtime.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class PromptConfig:
  """How a question becomes a row of tokens.

  Attributes:
    tokenizer: of the policy.
    width: tokens a row has; the template's count.
    system: the system prompt, "" for none.
    instruction: what the policy reads, `{problem}` in it.
    too_long: what happens to a question, or to a demonstration, that does not
      fit: "error", or "drop".
  """

  tokenizer: Tokenizer
  width: int
  system: str = ""
  instruction: str = "{problem}"
  too_long: str = "error"

  def __post_init__(self):
    choices = ("error", "drop")
    if self.too_long not in choices:
      hint = nearest(self.too_long, choices)
      raise UserError(f"data.too_long={self.too_long!r}: {hint}")
    if "{problem}" not in self.instruction:
      raise UserError(
        f"data.instruction={self.instruction!r}: expected {{problem}} in it"
      )

  def fits(self, ids: Sequence[int], width: int, what: str, key: str) -> bool:
    """Whether ids fit; UserError for a misfit that is not to be dropped."""
    if len(ids) > width and self.too_long == "error":
      raise UserError(f"{what} has {len(ids)} tokens, more than {key}={width}")
    return len(ids) <= width


def join(batches: Sequence[dict]) -> dict:
  """Batches of the same keys, end to end."""
  whole = lambda key: [batch[key] for batch in batches]
  flat = lambda key: list(itertools.chain(*whole(key)))
  return {
    k: flat(k) if k == "problems" else np.concatenate(whole(k))
    for k in batches[0]
  }


def pick(batch: dict, index: np.ndarray) -> dict:
  """The rows of these numbers, in their order."""
  return {
    k: [x[i] for i in index] if k == "problems" else x[index]
    for k, x in batch.items()
  }


def stack(rows: Sequence[dict]) -> dict:
  arrays = {
    k: np.stack([r[k] for r in rows]) for k in rows[0] if k != "problem"
  }
  return arrays | {"problems": [r["problem"] for r in rows]}
