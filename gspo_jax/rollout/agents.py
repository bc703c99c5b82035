"""Agents: episodes in worker processes, which call the policy over HTTP.

A call whose prompt begins with all ids of a sequence of its episode, read and
sampled, goes on with the longest such sequence; another call begins a sequence,
up to K = `rollout.max_sequences`. A sequence that a call is going on with is
not free for another. Prompt ids behind a sequence are read, the answer's are
sampled. All sequences of an episode get its reward.
"""

import dataclasses
import functools
import threading
from collections.abc import Sequence

import jax

from gspo_jax import model
from gspo_jax.data.problem import Problem
from gspo_jax.data.prompt_batch import PromptBatch, PromptConfig
from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.endpoint.answers import Answer
from gspo_jax.endpoint.app import MODEL, Client, Endpoint
from gspo_jax.endpoint.requests import ApiError
from gspo_jax.endpoint.server import Server
from gspo_jax.record.progress import Progress
from gspo_jax.rollout import agent, conversation
from gspo_jax.rollout.batch import ScoredSamples
from gspo_jax.rollout.conversation import Conversation
from gspo_jax.rollout.environment import Question
from gspo_jax.rollout.sequences import (
  EpisodeSequence,
  SequenceLimits,
  local_episodes,
)
from gspo_jax.sampler.engine import LENGTH, Engine, EngineSampler, Generation
from gspo_jax.sampler.samples import STOPPED, TRUNCATED, SamplerConfig
from gspo_jax.workers.pool import Call, Pool, Started


class Episode(Client):
  """One run of an agent: its key, its calls, and what was sampled for them.

  The server's thread calls `room`, `started` and `ended`.
  """

  def __init__(
    self, engine: Engine, tokenizer: Tokenizer, limits: SequenceLimits
  ):
    super().__init__(engine, tokenizer)
    self._limits = limits
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
    with self._lock:
      generation.cancelled = self._over
      self.calls += 1
      sequence = self._sequence_of(generation.prompt)
      if not sequence:
        sequence = EpisodeSequence(generation.prompt)
        self._sequences.append(sequence)
      self._open[generation] = sequence, self.calls

  def ended(self, answer: Answer) -> None:
    made = answer.generation
    with self._lock:
      if self._over:
        return
      sequence, turn = self._open.pop(made)
      sequence.read(made.prompt[len(sequence.ids) :])
      sequence.add(made.tokens, made.logps, turn)
      self.finish = TRUNCATED if made.finish == LENGTH else STOPPED
      if answer.call.messages:
        self.tool_calls += len(answer.message.get("tool_calls", ()))

  def gave_up(self, generation: Generation) -> None:
    with self._lock:
      sequence, _ = self._open.pop(generation)
      if not sequence.tokens:
        self._sequences = [s for s in self._sequences if s is not sequence]

  def end(self) -> list[EpisodeSequence]:
    """Takes no more calls; the sequences with answers."""
    with self._lock:
      self._over = True
      for generation in self._open:
        generation.cancelled = True
      return [s for s in self._sequences if s.tokens]

  def _sequence_of(self, prompt: list[int]) -> EpisodeSequence | None:
    """The longest free sequence that a prompt goes on with."""
    taken = [sequence for sequence, _ in self._open.values()]
    free = [s for s in self._sequences if not any(s is t for t in taken)]
    begins = [s for s in free if prompt[: len(s.ids)] == s.ids]
    return max(begins, key=lambda s: len(s.ids), default=None)


class AgentPool(Pool):
  """Workers that play episodes, and the endpoint that they call."""

  def __init__(
    self,
    spec: str,
    tokenizer: Tokenizer,
    config: SamplerConfig,
    *,
    workdir: str = "",
    **limits,
  ):
    self.name = f"agent {spec.removeprefix(agent.PREFIX)!r}"
    self._workdir = workdir  # of the run, for agents
    self.endpoint = Endpoint(tokenizer, config)
    self._server = Server(self.endpoint.app)
    load = functools.partial(agent.load, spec)
    # An episode that is played again would have calls of the first time.
    super().__init__(self.name, load, repeats=False, **limits)

  def play(self, episodes: Sequence[tuple[Problem, int, str]]) -> Started:
    """Plays an episode about each (problem, step, key)."""
    url = self._server.url
    calls = []
    for p, step, key in episodes:
      question = Question(
        p.text, p.reference, dict(p.columns), step, self._workdir
      )
      keywords = {"base_url": url, "api_key": key, "model": MODEL}
      calls.append(Call(0, (tuple(question), keywords)))
    return self.start(calls)

  def close(self) -> None:
    super().close()
    self._server.close()


@dataclasses.dataclass(frozen=True)
class Agents:
  """Plays episodes; called as `Conversations`."""

  pool: AgentPool
  limits: SequenceLimits
  prompt_config: PromptConfig
  batch_sharding: jax.sharding.Sharding  # of arrays [B, ...]

  def __call__(
    self,
    generate: EngineSampler,
    params: model.Params,
    batch: PromptBatch,
    key: jax.Array,
    *,
    label: str,
  ) -> ScoredSamples:
    """G episodes about each of P problems."""
    G = generate.config.group_size
    B, steps = len(batch) * G, batch.steps.tolist()
    tokenizer, endpoint = self.prompt_config.tokenizer, self.pool.endpoint
    own = local_episodes(B, self.batch_sharding)
    with (
      Engine(generate, params, key) as engine,
      Progress(label, len(own), "episodes") as progress,
    ):
      episodes = {b: Episode(engine, tokenizer, self.limits) for b in own}
      keys = {b: endpoint.admit(episode) for b, episode in episodes.items()}
      started = self.pool.play(
        [(batch.problems[b // G], steps[b // G], keys[b]) for b in own]
      )
      started.done.add_done_callback(lambda _: engine.wake())
      playing = dict(enumerate(own))  # by their place in `started`
      ended: dict[int, list[EpisodeSequence]] = {}

      def all_ended() -> bool:
        for i, b in [*playing.items()]:
          if started.results[i] is not None or started.done.done():
            endpoint.dismiss(keys[b])
            ended[b] = episodes[b].end()
            del playing[i]
            progress.advance(1)
        return not playing

      try:
        engine.run(all_ended)
      finally:
        for each in keys.values():
          endpoint.dismiss(each)
      results = dict(zip(own, started.wait(), strict=True))
    chats = {
      b: self._conversation(episodes[b], ended[b], results[b]) for b in own
    }
    return conversation.scored_sequences(
      batch,
      chats,
      ended,
      {b: episodes[b].finish for b in own},
      self.limits,
      slot_steps=engine.slot_steps,
      pad_id=tokenizer.pad_id,
      batch_sharding=self.batch_sharding,
      group_size=G,
      environment_seconds=engine.idle_seconds,
    )

  def _conversation(self, episode, sequences, result) -> Conversation:
    """An episode for people; the reward belongs to its last call."""
    decode = self.prompt_config.tokenizer.decode
    failure = result.failure or ""
    # Checked again: an agent can write to the pipe of its worker's results.
    if not (failure or agent.is_reward(result.value)):
      failure = "gave no reward"
    reward = 0.0 if failure else float(result.value)
    failure = failure or ("" if sequences else "made no call with an answer")
    return Conversation(
      text="\n\n".join(decode(sequence.tokens) for sequence in sequences),
      rewards=[*[0.0] * (episode.calls - 1), reward][: episode.calls],
      tool_calls=episode.tool_calls,
      failure=failure and f"{self.pool.name}: {failure}",
    )
