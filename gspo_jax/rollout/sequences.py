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

import jax
import numpy as np

from gspo_jax.runtime import multihost, sharding
from gspo_jax.sampler.samples import Prompts, Samples


@dataclasses.dataclass
class EpisodeSequence:
  """A prompt, and what was sampled and read behind it.

  A prompt longer than `width` fills it, and the rest of it is read behind it.
  """

  prompt: Sequence[int]  # ids before the first sampled one
  tokens: list[int] = dataclasses.field(default_factory=list)
  logps: list[float] = dataclasses.field(default_factory=list)  # 0: was read
  # The call, from 1, that sampled a token; 0: it was read.
  turns: list[int] = dataclasses.field(default_factory=list)

  @property
  def ids(self) -> list[int]:
    return [*self.prompt, *self.tokens]

  def read(self, ids: Sequence[int]) -> None:
    self._extend(ids, [0.0] * len(ids), 0)

  def add(self, ids: Sequence[int], logps: Sequence[float], turn: int) -> None:
    self._extend(ids, logps, turn)

  def _extend(self, ids, logps, turn):
    self.tokens += ids
    self.logps += logps
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


def local_episodes(
  size: int, batch_sharding: jax.sharding.Sharding
) -> list[int]:
  """The episodes, of so many, that this process plays."""
  like = multihost.to_global(np.zeros(size, np.int8), batch_sharding)
  return [*multihost.local_rows(like)]


def arrange(
  episodes: Mapping[int, Sequence[EpisodeSequence]],
  finish: Mapping[int, int],
  size: int,
  limits: SequenceLimits,
  *,
  slot_steps: int,
  pad_id: int,
  batch_sharding: jax.sharding.Sharding,
) -> tuple[Prompts, Samples]:
  """The prompts [B * K] on the host, and the samples; call it on every process.

  `episodes` and their `finish` are this process's, by number from 0 to B - 1;
  B = `size`. Others are rows without tokens.
  """
  B, (_, K, S, R) = size, limits
  rows = {
    b * K + k: sequence
    for b, own in episodes.items()
    for k, sequence in enumerate(own)
  }
  prompts = np.zeros((B * K, S), np.int32)
  tokens, turns = np.zeros((2, B * K, R), np.int32)
  logps = np.zeros((B * K, R), np.float32)
  prompt_lengths, lengths = np.zeros((2, B * K), np.int32)
  finish_B = np.zeros(B, np.int8)
  finish_B[[*finish]] = [*finish.values()]
  for row, sequence in rows.items():
    kept = sequence.prompt[:S]
    more = len(sequence.prompt) - len(kept)
    end = more + len(sequence.tokens)
    prompts[row, S - len(kept) :] = kept
    prompt_lengths[row], lengths[row] = len(kept), end
    tokens[row, :end] = [*sequence.prompt[S:], *sequence.tokens]
    turns[row, more:end] = sequence.turns
    logps[row, more:end] = sequence.logps
  whole = multihost.sum_of_all
  prompts, prompt_lengths, lengths = map(
    whole, (prompts, prompt_lengths, lengths)
  )
  # An empty row has a prompt of one token, which no update reads.
  prompt_lengths = np.maximum(prompt_lengths, 1)
  is_prompt = np.arange(S) >= S - prompt_lengths[:, None]
  prompts = np.where(is_prompt, prompts, pad_id)
  tokens = np.where(np.arange(R) < lengths[:, None], whole(tokens), pad_id)
  arrays = (
    tokens,
    whole(logps),
    lengths,
    np.repeat(whole(finish_B), K),
    whole(turns).astype(np.int16),
  )
  *arrays, turns = multihost.to_global(arrays, batch_sharding)
  replicated = sharding.replicated(batch_sharding.mesh)
  steps = multihost.to_global(np.int32(slot_steps), replicated)
  samples = Samples(*arrays, slot_steps=steps, turns=turns)
  return Prompts(prompts, prompt_lengths), samples
