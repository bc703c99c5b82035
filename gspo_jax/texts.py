"""What a sampler has still to draw: texts, and the answers that continue them.

Dimension key: P prompts, G answers a prompt, A = P * G answers, S prompt slots,
R most new tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gspo_jax.sampler import UNFINISHED, Samples


class Texts(NamedTuple):
  """Of N texts, each the start of one answer's row or of several.

  Attributes:
    tokens: N arrays of int32, no padding.
    owner: [A] int, the text that each answer continues; never falling.
    drawn: [A] int32, tokens of the answer that its text holds.
    until: [A] int32, those that it is to have in the end; of an answer that is
      not to be drawn, `drawn`.
  """

  tokens: Sequence[np.ndarray]
  owner: np.ndarray
  drawn: np.ndarray
  until: np.ndarray


def unfinished(
  prompts: np.ndarray, lengths: np.ndarray, begun: Samples, until: np.ndarray
) -> Texts:
  """The answers that have not ended, and where each goes on.

  Neighbours to a prompt that have no token yet share one text, the prompt. The
  others have one each, prompt and all, for what they drew differs: their prompt
  is prefilled and stored for each.

  Args:
    prompts: [P, S] int32, padded on the left.
    lengths: [P] int, their tokens.
    begun: numpy arrays of A answers.
    until: [A] int, tokens at which an answer is to pause.
  """
  group = len(begun.lengths) // max(len(prompts), 1)
  waits = (begun.finish == UNFINISHED) & (begun.lengths < until)
  tokens, owner, shared = [], [], None
  for answer, drawn in enumerate(begun.lengths.tolist()):
    p = answer // group
    if waits[answer] and (drawn or shared != p):
      prompt = prompts[p, prompts.shape[1] - lengths[p] :]
      tokens.append(np.concatenate([prompt, begun.tokens[answer, :drawn]]))
      shared = None if drawn else p
    owner.append(max(len(tokens) - 1, 0))
  until = np.where(waits, until, begun.lengths)
  return Texts(
    tokens, np.array(owner, int), begun.lengths, until.astype(np.int32)
  )
