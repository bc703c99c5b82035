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
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.data.problem import Problem
from gspo_jax.data.prompt_batch import PromptBatch, PromptConfig
from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.endpoint.answers import Answer
from gspo_jax.endpoint.app import MODEL, Client, Endpoint
from gspo_jax.endpoint.requests import ApiError
from gspo_jax.endpoint.server import Server
from gspo_jax.record.progress import Progress
from gspo_jax.rewards.pool import PendingRewards, Rewards
from gspo_jax.rewards.reward import Response
from gspo_jax.rollout import agent, scoring
from gspo_jax.rollout.batch import ScoredSamples
from gspo_jax.rollout.conversations import REWARD
from gspo_jax.rollout.environment import Question
from gspo_jax.rollout.sequences import EpisodeSequence, arrange, room
from gspo_jax.runtime import multihost
from gspo_jax.sampler.engine import LENGTH, Engine, EngineSampler, Generation
from gspo_jax.sampler.samples import STOPPED, TRUNCATED, SamplerConfig
from gspo_jax.workers.pool import Call, Pool, Result, Started


@dataclasses.dataclass(frozen=True)
class Limits:
  """Of an episode; what goes beyond is refused."""

  turns: int  # calls
  sequences: int  # K
  width: int  # S, `data.max_prompt_length`
  longest: int  # R, `sampler.max_new_tokens`


class Episode(Client):
  """One run of an agent: its key, its calls, and what was sampled for them.

  The server's thread calls `room`, `started` and `ended`.
  """

  def __init__(self, engine: Engine, tokenizer: Tokenizer, limits: Limits):
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
    first = len(sequence.prompt if sequence else prompt)
    most = first + room(first, limits.width, limits.longest)
    return min(super().room(prompt), most - len(prompt))

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
    self, spec: str, tokenizer: Tokenizer, config: SamplerConfig, **limits
  ):
    self.name = f"agent {spec.removeprefix(agent.PREFIX)!r}"
    self.endpoint = Endpoint(tokenizer, config)
    self._server = Server(self.endpoint.app)
    load = functools.partial(agent.load, spec)
    super().__init__(self.name, load, **limits)

  def play(self, episodes: Sequence[tuple[Problem, str]]) -> Started:
    """Plays an episode about each (problem, key)."""
    url = self._server.url
    calls = []
    for p, key in episodes:
      question = Question(p.text, p.reference, dict(p.columns))
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
  limits: Limits
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
    B, problems = len(batch) * G, batch.problems
    tokenizer, endpoint = self.prompt_config.tokenizer, self.pool.endpoint
    own = [*multihost.local_rows(self._like(B))]  # of this process
    with (
      Engine(generate, params, key) as engine,
      Progress(label, len(own), "episodes") as progress,
    ):
      episodes = {b: Episode(engine, tokenizer, self.limits) for b in own}
      keys = {b: endpoint.admit(episode) for b, episode in episodes.items()}
      started = self.pool.play([(problems[b // G], keys[b]) for b in own])
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
    return self._scored(batch, episodes, ended, results, engine, G)

  def _like(self, B: int) -> jax.Array:
    """An array [B], whose rows show which process has which episodes."""
    return multihost.to_global(np.zeros(B, np.int8), self.batch_sharding)

  def _scored(
    self,
    batch: PromptBatch,
    episodes: Mapping[int, Episode],
    ended: Mapping[int, list[EpisodeSequence]],
    results: Mapping[int, Result],
    engine: Engine,
    G: int,
  ) -> ScoredSamples:
    limits, P = self.limits, len(batch)
    failures = {
      b: result.failure or ("" if ended[b] else "made no call with an answer")
      for b, result in results.items()
    }
    like = self._like(P * G)
    gather = lambda values: multihost.allgather_rows(values, like)
    failed = gather({b: bool(f) for b, f in failures.items()}) > 0
    total = gather({b: r.value or 0.0 for b, r in results.items()})
    total = scoring.pay_failures_least(total[:, None], failed, G)
    reasons = dict.fromkeys(
      f"{self.pool.name}: {f}" for f in failures.values() if f
    )
    rewards = Rewards(
      total.reshape(P, G),
      {REWARD: total.reshape(P, G)},
      failed.reshape(P, G),
      tuple(reasons)[: scoring.MAX_REASONS],
    )
    finish = gather({b: e.finish for b, e in episodes.items()})
    prompts, samples = arrange(
      ended,
      finish.astype(np.int8),
      sequences=limits.sequences,
      width=limits.width,
      longest=limits.longest,
      pad_id=self.prompt_config.tokenizer.pad_id,
      batch_sharding=self.batch_sharding,
    )
    steps = np.int32(engine.slot_steps)
    steps = multihost.to_global(steps, samples.slot_steps.sharding)
    calls = gather({b: e.calls for b, e in episodes.items()})
    return ScoredSamples(
      prompts=batch,
      samples=dataclasses.replace(samples, slot_steps=steps),
      responses=self._responses(batch, ended, G),
      rewards=PendingRewards.computed(rewards),
      conversation={
        "turns": calls,
        "tool_calls": gather({b: e.tool_calls for b, e in episodes.items()}),
        "tool_errors": np.zeros(P * G, np.float32),
        "rewards": self._of_calls(calls, total[:, 0]),
      },
      environment_seconds=engine.idle_seconds,
      sequence_prompts=prompts,
    )

  def _responses(self, batch, ended, G: int) -> dict[int, Response]:
    """What people read of an episode: its sequences behind their prompts."""
    decode = self.prompt_config.tokenizer.decode
    text = lambda sequences: "\n\n".join(decode(s.tokens) for s in sequences)
    size = lambda sequences: sum(len(s.tokens) for s in sequences)
    most = self.limits.longest
    return {
      b: Response("", text(s), "", size(s), most).to(batch.problems[b // G])
      for b, s in ended.items()
    }

  def _of_calls(self, calls: np.ndarray, total: np.ndarray) -> np.ndarray:
    """[B, turns] float32: an episode's reward is that of its last call."""
    column, calls = np.arange(self.limits.turns), calls[:, None]
    rewards = np.where(column == calls - 1, total[:, None], 0)
    return np.where(column < calls, rewards, np.nan).astype(np.float32)
