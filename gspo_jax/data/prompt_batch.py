"""Batches of prompts: dicts of arrays with a first axis of prompts."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from gspo_jax.data.tasks import Problem
from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.runtime.errors import UserError


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


def join(batches: Sequence[dict]) -> dict:
  """Concatenates batches with the same keys."""
  parts = lambda key: [batch[key] for batch in batches]
  return {
    key: list(itertools.chain(*parts(key)))
    if key == "problems"
    else np.concatenate(parts(key))
    for key in batches[0]
  }


def pick(batch: dict, index: np.ndarray) -> dict:
  """The prompts with these indices, in this order."""
  return {
    key: [column[i] for i in index] if key == "problems" else column[index]
    for key, column in batch.items()
  }


def stack(prompts: Sequence[dict]) -> dict:
  """A batch of single prompts, each a dict with `problem` and arrays."""
  arrays = {
    key: np.stack([prompt[key] for prompt in prompts])
    for key in prompts[0]
    if key != "problem"
  }
  return arrays | {"problems": [prompt["problem"] for prompt in prompts]}
