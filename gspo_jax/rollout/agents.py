"""Agents: episodes in worker processes, which call the policy over HTTP."""

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

from gspo_jax.data.problem import Problem
from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.endpoint.app import MODEL, Endpoint
from gspo_jax.endpoint.server import Server
from gspo_jax.rollout import agent
from gspo_jax.rollout.environment import Question
from gspo_jax.rollout.episode import Episode
from gspo_jax.rollout.player import Conversation, EpisodeBatch, Player
from gspo_jax.sampler.continuous.engine import Engine
from gspo_jax.sampler.samples import SamplerConfig
from gspo_jax.workers.pool import Call, Pool, Started


class AgentPool(Pool):
  """Workers that play episodes, and the endpoint that they call."""

  def __init__(
    self,
    spec: str,
    tokenizer: Tokenizer,
    config: SamplerConfig,
    *,
    workdir: str = "",
    **limits: Any,
  ):
    self.name = f"agent {spec.removeprefix(agent.PREFIX)!r}"
    self._workdir = workdir  # of the run, for agents
    self.warm: set[tuple] = set()  # samplers and their rows
    self.endpoint = Endpoint(tokenizer, config)
    self._server = Server(self.endpoint.app)
    load = functools.partial(agent.load, spec)
    # An episode that is played again would have calls of the first time.
    super().__init__(self.name, load, repeats=False, **limits)

  def play(
    self,
    episodes: Sequence[tuple[Problem, int, str]],
    notify: Callable[[], None],
  ) -> Started:
    """Plays an episode about each (problem, step, key)."""
    url = self._server.url
    calls = []
    for p, step, key in episodes:
      question = Question.of(p, step, self._workdir)
      keywords = {"base_url": url, "api_key": key, "model": MODEL}
      calls.append(Call(0, (tuple(question), keywords)))
    return self.start(calls, notify)

  def close(self) -> None:
    super().close()
    self._server.close()


class Agents(Player):
  pool: AgentPool

  def _open(self, generate, params, key, rows: int) -> Engine:
    # The clock of an episode does not run while XLA compiles.
    if (id(generate), rows) not in self.pool.warm:
      with super()._open(generate, params, key, rows) as engine:
        engine.warm_up()
      self.pool.warm.add((id(generate), rows))
    return super()._open(generate, params, key, rows)

  def play(self, batch: EpisodeBatch) -> Generator[None]:
    prompts, episodes = batch.prompts, batch.episodes
    steps, endpoint = prompts.steps.tolist(), self.pool.endpoint
    of = {b: b // batch.group_size for b in episodes}
    keys = {b: endpoint.admit(episode) for b, episode in episodes.items()}
    try:
      started = self.pool.play(
        [(prompts.problems[p], steps[p], keys[b]) for b, p in of.items()],
        batch.engine.wake,
      )
      playing = dict(enumerate(episodes))  # by their place in `started`
      while playing:
        yield
        for i, b in [*playing.items()]:
          if started.has_ended(i):
            endpoint.dismiss(keys[b])
            episodes[b].end()
            del playing[i]
            batch.progress.advance(1)
    finally:
      for each in keys.values():
        endpoint.dismiss(each)
    for b, result in zip(episodes, started.wait(), strict=True):
      batch.chats[b] = self._conversation(episodes[b], result)

  def _conversation(self, episode: Episode, result) -> Conversation:
    """What became of an episode; the reward belongs to its last call."""
    if result.lost:
      episode.lose()
    failure = result.failure or ""
    # Checked again: an agent can write to the pipe of its worker's results.
    if not (failure or agent.is_reward(result.value)):
      failure = "gave no reward"
    reward = 0.0 if failure else float(result.value)
    if not episode.end():
      failure = failure or "made no call with an answer"
    return Conversation(
      rewards=[*[0.0] * (episode.calls - 1), reward][: episode.calls],
      tool_calls=episode.tool_calls,
      failure=failure and f"{self.pool.name}: {failure}",
    )
