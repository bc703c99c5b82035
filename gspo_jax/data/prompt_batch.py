"""Batches of prompts, and how problems become prompts."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Self, TypeVar

import numpy as np

from gspo_jax.data.problem import Problem
from gspo_jax.data.tokenizers.base import Message, Tokenizer, as_messages
from gspo_jax.runtime.errors import UserError, prefixed


@dataclasses.dataclass(frozen=True)
class PromptBatch:
  """P prompts of S tokens, on the host, the same in every process."""

  problems: list[Problem]  # [P]
  tokens: np.ndarray  # [P, S] int32, padded on the LEFT
  lengths: np.ndarray  # [P] int32, without padding
  # [P, 3] int32, where the problems stand in the data: stage of the curriculum,
  # source in the mixture, problem in the source.
  positions: np.ndarray
  steps: np.ndarray  # [P] int32, the iteration that took each; 0: held out

  def __len__(self) -> int:
    return len(self.problems)

  def ids(self, p: int) -> list[int]:
    """The tokens of prompt `p`, without padding."""
    return self.tokens[p, self.tokens.shape[1] - self.lengths[p] :].tolist()

  def pick(self, index: np.ndarray) -> Self:
    arrays = {k: x for k, x in vars(self).items() if isinstance(x, np.ndarray)}
    return dataclasses.replace(
      self,
      problems=[self.problems[i] for i in index],
      **{name: x[index] for name, x in arrays.items()},
    )


@dataclasses.dataclass(frozen=True)
class DemonstrationBatch(PromptBatch):
  """Prompts with demonstrated responses of at most R tokens."""

  responses: np.ndarray  # [P, R] int32, padded on the right
  response_lengths: np.ndarray  # [P] int32, with the stop token
  # [P, R] int16, in a conversation the turn of each token, from 1; 0 at tokens
  # that are not imitated. None for single responses.
  turns: np.ndarray | None


Batch = TypeVar("Batch", bound=PromptBatch)


def join(batches: Sequence[Batch]) -> Batch:
  def concatenate(columns):
    if columns[0] is None:
      return None
    if isinstance(columns[0], list):
      return list(itertools.chain(*columns))
    return np.concatenate(columns)

  columns = zip(*(vars(batch).values() for batch in batches), strict=True)
  return type(batches[0])(*map(concatenate, columns))


@dataclasses.dataclass(frozen=True)
class PromptConfig:
  """How the text of a problem becomes tokens; see the keys of `DataConfig`."""

  tokenizer: Tokenizer
  width: int  # tokens of the longest prompt, with the chat template
  system: str = ""
  instruction: str = "{problem}"
  too_long: str = "error"
  tools: Sequence[Mapping] = ()  # JSON schemas, for the chat template

  def messages_of(self, problem: Problem) -> list[Message]:
    """The messages of a prompt; the last one is of the user."""
    history = as_messages(problem.history)
    if self.system and not (history and history[0]["role"] == "system"):
      history = [*as_messages([("system", self.system)]), *history]
    # No str.format: problems contain braces.
    message = self.instruction.replace("{problem}", problem.text)
    return [*history, *as_messages([("user", message)])]

  def tokens_of(self, problem: Problem) -> list[int]:
    return self.tokenizer.chat(self.messages_of(problem), self.tools)

  def check(self, problems: Sequence[Problem]) -> None:
    """UserError if the chat template leaves out a part of a prompt."""
    for problem in problems:
      with prefixed(f"problem {problem.text[:40]!r}"):
        self.tokenizer.check_prompt(self.messages_of(problem), self.tools)

  def fits(self, ids: Sequence[int], width: int, name: str, key: str) -> bool:
    """Whether ids fit; if not and `too_long` is "error", raises UserError.

    `name` says what the ids are; `key` is the config key of `width`.
    """
    if len(ids) > width and self.too_long == "error":
      raise UserError(
        f"{name} has {len(ids)} tokens, more than {key}={width}: raise it, or "
        "leave out what is longer (when training: data.too_long=drop)"
      )
    return len(ids) <= width
