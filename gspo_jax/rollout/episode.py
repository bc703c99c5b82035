"""An episode: what was sampled and read in one run of an environment or agent.

A call whose prompt begins with all ids of a sequence of its episode, read and
sampled, goes on with the longest such sequence; another call begins a sequence,
up to K = `rollout.max_sequences`. A sequence that a call is going on with is
not free for another. Prompt ids behind a sequence are read, the answer's are
sampled. All sequences of an episode get its advantage.
"""

import threading

from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.endpoint.client import Client
from gspo_jax.endpoint.requests import ApiError
from gspo_jax.rollout.sequences import EpisodeSequence, SequenceLimits
from gspo_jax.sampler.continuous.engine import LENGTH, Engine, Generation
from gspo_jax.sampler.samples import STOPPED, TRUNCATED, SamplingParams


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
    self.calls = 0
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
