"""Batches of prompts, and how problems become prompts."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from gspo_jax.data.problem import Problem
from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.runtime.errors import UserError


@dataclasses.dataclass(frozen=True)
class PromptBatch:
  """P prompts of S tokens, on the host, the same in every process.

  Attributes:
    problems: P of them.
    tokens: [P, S] int32, padded on the LEFT.
    lengths: [P] int32, real tokens of each prompt.
    positions: [P, 3] int32, where the problems stand in the data: stage of the
      curriculum, source in the mixture, problem in the source.
  """

  problems: list[Problem]
  tokens: np.ndarray
  lengths: np.ndarray
  positions: np.ndarray

  def __len__(self) -> int:
    """P."""
    return len(self.problems)

  def ids(self, p: int) -> list[int]:
    """The tokens of prompt `p`, without padding."""
    return self.tokens[p, self.tokens.shape[1] - self.lengths[p] :].tolist()

  def pick(self, index: np.ndarray) -> "PromptBatch":
    """The prompts with these indices, in this order."""
    return PromptBatch(
      [self.problems[i] for i in index],
      self.tokens[index],
      self.lengths[index],
      self.positions[index],
    )


@dataclasses.dataclass(frozen=True)
class DemonstrationBatch(PromptBatch):
  """Prompts with demonstrated responses of at most R tokens.

  Attributes:
    responses: [P, R] int32, padded on the right.
    response_lengths: [P] int32, with the stop token.
    turns: [P, R] int16, in a conversation the turn of each token, from 1; 0 at
      tokens that are not imitated. None for single responses.
  """

  responses: np.ndarray
  response_lengths: np.ndarray
  turns: np.ndarray | None


Batch = TypeVar("Batch", bound=PromptBatch)


def join(batches: Sequence[Batch]) -> Batch:
  """Concatenates batches of one type."""

  def concatenate(columns):
    if columns[0] is None:
      return None
    if isinstance(columns[0], list):
      return list(itertools.chain(*columns))
    return np.concatenate(columns)

  names = vars(batches[0])
  return type(batches[0])(
    **{name: concatenate([getattr(b, name) for b in batches]) for name in names}
  )


@dataclasses.dataclass(frozen=True)
class PromptConfig:
  """How the text of a problem becomes the tokens of a prompt.

  Attributes:
    tokenizer: of the policy.
    width: tokens of the longest prompt, those of the chat template included.
    system: the system prompt; "" for none.
    instruction: the text of the prompt; `{problem}` in it is replaced.
    too_long: what to do with a prompt or demonstration that is too long:
      "error" or "drop".
  """

  tokenizer: Tokenizer
  width: int
  system: str = ""
  instruction: str = "{problem}"
  too_long: str = "error"

  def tokens_of(self, problem: Problem) -> list[int]:
    """The ids of the prompt of a problem, of any length."""
    history, system = list(problem.history), self.system
    if history and history[0][0] == "system":
      _, system = history.pop(0)
    # No str.format: problems contain braces.
    message = self.instruction.replace("{problem}", problem.text)
    return self.tokenizer.prompt(message, system, history)

  def fits(self, ids: Sequence[int], width: int, name: str, key: str) -> bool:
    """Whether ids fit; if not and `too_long` is "error", raises UserError.

    Args:
      ids: tokens.
      width: tokens that may be.
      name: of what the ids are, for the error.
      key: of the config that sets the width, for the error.
    """
    if len(ids) > width and self.too_long == "error":
      raise UserError(
        f"{name} has {len(ids)} tokens, more than {key}={width}: raise it, or "
        "leave out what is longer (when training: data.too_long=drop)"
      )
    return len(ids) <= width
