"""Sequences of episodes: rows that an update learns from.

An episode of an agent is several calls of the policy. A call whose context
begins with a whole sequence of the episode goes on with it; another call begins
a new sequence. Each sequence has one importance ratio, over the tokens that
were sampled in it, and the advantage of its episode.

Dimension key: B episodes, K sequences of an episode at most, S prompt columns,
R response columns.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gspo_jax.sampler.continuous.engine import Engine
from gspo_jax.sampler.samples import Prompts, Samples


@dataclasses.dataclass(eq=False)
class EpisodeSequence:
  """A prompt, and what was sampled and read behind it.

  A prompt longer than `width` fills it, and the rest of it is read behind it.
  """

  prompt: Sequence[int]  # ids before the first sampled one
  number: int = 0  # from 0 to K - 1, of its episode
  tokens: list[int] = dataclasses.field(default_factory=list)
  # The call, from 1, that sampled a token; 0: it was read.
  turns: list[int] = dataclasses.field(default_factory=list)

  @property
  def ids(self) -> list[int]:
    return [*self.prompt, *self.tokens]

  def add(self, ids: Sequence[int], turn: int = 0) -> None:
    """Appends ids that were read, or those that a call sampled."""
    self.tokens += ids
    self.turns += [turn] * len(ids)


class SequenceLimits(NamedTuple):
  turns: int  # calls of an episode
  sequences: int  # K
  width: int  # S
  longest: int  # R

  def room(
    self, prompt: Sequence[int], sequence: EpisodeSequence | None = None
  ) -> int:
    """Tokens that fit behind `prompt`, which goes on with the sequence."""
    first = len(sequence.prompt if sequence else prompt)
    read = len(prompt) - first
    return self.longest - max(first - self.width, 0) - read


def episode_samples(
  engine: Engine,
  episodes: Mapping[int, Sequence[EpisodeSequence]],
  finish: Mapping[int, int],
  limits: SequenceLimits,
) -> Samples:
  """The samples of all hosts; call it on every process.

  `episodes` and their `finish` are this process's, by number from 0 to B - 1.
  Rows without a sequence have no tokens.
  """
  _, K, S, R = limits
  n = len(episodes) * K
  prompts, tokens = (np.zeros((n, x), np.int32) for x in (S, R))
  turns = np.zeros((n, R), np.int16)
  prompt_lengths, lengths = np.zeros((2, n), np.int32)
  for i, (_, own) in enumerate(sorted(episodes.items())):
    for sequence in own:
      row, kept = i * K + sequence.number, sequence.prompt[:S]
      more = sequence.prompt[S:]
      end = len(more) + len(sequence.tokens)
      prompts[row, S - len(kept) :] = kept
      prompt_lengths[row], lengths[row] = len(kept), end
      tokens[row, :end] = [*more, *sequence.tokens]
      turns[row, len(more) : end] = sequence.turns
  of_episodes = np.array([finish[b] for b in sorted(episodes)], np.int8)
  return engine.finish_episodes(
    [b * K + k for b in sorted(episodes) for k in range(K)],
    tokens=tokens,
    lengths=lengths,
    finish=np.repeat(of_episodes, K),
    turns=turns,
    prompts=Prompts(prompts, prompt_lengths),
  )
