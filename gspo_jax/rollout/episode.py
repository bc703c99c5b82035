"""An episode: what was sampled and read in one run of an environment or agent.

A call whose prompt begins with all ids of a sequence of its episode, read and
sampled, goes on with the longest such sequence; another call begins a sequence,
up to K = `rollout.max_sequences`. A sequence that a call is going on with is
not free for another. Prompt ids behind a sequence are read, the answer's are
sampled. A sequence is a row that an update learns from: it has one importance
ratio, over the tokens that were sampled in it, and the episode's advantage.

Dimension key: B episodes, K sequences of an episode at most, S prompt columns,
R response columns.
"""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.endpoint.answers import Choice
from gspo_jax.endpoint.client import Client
from gspo_jax.endpoint.requests import ApiError
from gspo_jax.sampler.continuous.engine import LENGTH, Engine, Generation
from gspo_jax.sampler.samples import (
  STOPPED,
  TRUNCATED,
  Prompts,
  Samples,
  SamplingParams,
)


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


class Episode(Client):
  """The calls of episode `number`, from 0 to `size` - 1.

  Sequence k of it has the row number * K + k of the samples. The random keys of
  its tokens are made of number + k * size: so those of the first sequence are
  the keys of a response of one turn. One thread makes calls and ends them;
  another one may `end` the episode.
  """

  honours = ()  # the run says how episodes are sampled

  def __init__(
    self,
    engine: Engine,
    tokenizer: Tokenizer,
    limits: SequenceLimits,
    number: int,
    size: int,
    sampling: SamplingParams | None = None,
  ):
    super().__init__(engine, tokenizer)
    self._sampling = sampling
    self._limits, self._number, self._size = limits, number, size
    self._lock = threading.Lock()  # guards what follows
    self._over = False
    self._sequences: list[EpisodeSequence] = []
    # The sequence and the number of each call without an answer so far.
    self._open: dict[Generation, tuple[EpisodeSequence, int]] = {}
    self.calls = self.tool_calls = 0
    self.finish = STOPPED

  def room(self, prompt: list[int]) -> int:
    limits = self._limits
    with self._lock:
      if self._over:
        raise ApiError("the episode has ended", status=403)
      if self.calls >= limits.turns:
        raise ApiError(
          f"{self.calls} calls: an episode has at most {limits.turns} "
          "(rollout.max_turns)",
          code="max_turns",
          status=403,
        )
      sequence = self._sequence_of(prompt)
      if not sequence and len(self._sequences) >= limits.sequences:
        raise ApiError(
          f"the prompt goes on with none of the {len(self._sequences)} "
          f"sequences: an episode has at most {limits.sequences} "
          "(rollout.max_sequences)",
          code="max_sequences",
          status=403,
        )
    return min(super().room(prompt), limits.room(prompt, sequence))

  def started(self, generation: Generation) -> None:
    prompt, K = generation.prompt, self._limits.sequences
    with self._lock:
      generation.cancelled = self._over
      self.calls += 1
      sequence = self._sequence_of(prompt)
      if not sequence:
        taken = {s.number for s in self._sequences}
        free = (k for k in range(K) if k not in taken)
        sequence = EpisodeSequence(prompt, next(free))
        self._sequences.append(sequence)
      self._open[generation] = sequence, self.calls
      k, width = sequence.number, self._limits.width
      columns = min(len(sequence.prompt), width)  # before those of the response
      generation.params = self._sampling
      generation.row = self._number * K + k
      generation.response = self._number + k * self._size
      generation.num_tokens = len(prompt) - columns
      generation.goes_on = bool(sequence.tokens)
      if sequence.tokens:  # its last token was not fed to the policy
        generation.num_recorded = len(sequence.ids) - 1

  def ended(self, choice: Choice) -> None:
    self.record(choice.generation)
    if choice.call.messages:
      self.tool_calls += len(choice.message.get("tool_calls", ()))

  def record(self, generation: Generation) -> None:
    """Appends an answer to its sequence."""
    with self._lock:
      if self._over:
        return
      sequence, turn = self._open.pop(generation)
      sequence.add(generation.prompt[len(sequence.ids) :])
      sequence.add(generation.tokens, turn)
      self.finish = TRUNCATED if generation.finish == LENGTH else STOPPED

  def gave_up(self, generation: Generation) -> None:
    with self._lock:
      sequence, _ = self._open.pop(generation)
      if not sequence.tokens and sequence in self._sequences:
        self._sequences.remove(sequence)

  def lose(self) -> None:
    """Drops what was sampled: nobody knows what came of it."""
    with self._lock:
      self._sequences = []

  def end(self) -> list[EpisodeSequence]:
    """Takes no more calls; the sequences with answers."""
    with self._lock:
      self._over = True
      for generation in self._open:
        generation.cancelled = True
      return [s for s in self._sequences if s.tokens]

  def _sequence_of(self, prompt: list[int]) -> EpisodeSequence | None:
    """The longest free sequence that a prompt goes on with."""
    taken = {sequence for sequence, _ in self._open.values()}
    free = [s for s in self._sequences if s not in taken]
    begins = [s for s in free if prompt[: len(s.ids)] == s.ids]
    return max(begins, key=lambda s: len(s.ids), default=None)


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
