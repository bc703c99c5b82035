"""An agent: a function that calls the policy over HTTP, and scores itself.

docs/agents.md tells users how to write one. Worker processes import this
module, so it needs the standard library alone.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable

from gspo_jax.rollout.environment import Question
from gspo_jax.runtime import spec as specs
from gspo_jax.runtime.errors import UserError
from gspo_jax.workers.pool import Tasks

PREFIX = "openai:"  # of `rollout.environment`, before the agent's name
BUILT_IN = {
  "verifiers": "gspo_jax.rollout.environments.verifiers_agent.play",
}
_OF_AN_EPISODE = "base_url", "api_key", "model"


def named(spec: str) -> Callable:
  """The function of a config, `openai:name` or `openai:name:key=value,...`.

  `name` is one of `BUILT_IN` or `package.module.function`: a function
  `play(problem, *, base_url, api_key, model)`, plain or `async`, that returns
  the reward of its episode. Its other keyword-only parameters are the keys.
  """
  name, colon, text = spec.removeprefix(PREFIX).partition(":")
  play = specs.imported(name, BUILT_IN, "agent")
  if colon:
    keys = specs.keywords(play).keys() - {*_OF_AN_EPISODE}
    arguments = specs.values(name, sorted(keys), text, "agent")
    play = functools.partial(play, **arguments)
  try:
    episode = dict.fromkeys(_OF_AN_EPISODE, "")
    inspect.signature(play).bind(None, **episode)
  except TypeError as error:
    raise UserError(
      f"agent {name!r}: expected play(problem, *, base_url, api_key, model): "
      f"{error}"
    ) from error
  return play


def is_reward(value: object) -> bool:
  return isinstance(value, bool | int | float) and abs(value) <= 1e9


def load(spec: str, seconds: float) -> Tasks:
  """The one task of `workers.pool`: (question, keywords) -> reward."""
  play = named(spec)

  async def task(request) -> float:
    question, keywords = request
    if inspect.iscoroutinefunction(play):
      reward = await play(Question(*question), **keywords)
    else:  # in a thread, so that many episodes are played at once
      reward = await asyncio.to_thread(play, Question(*question), **keywords)
    if is_reward(reward):
      return float(reward)
    raise ValueError(f"expected a reward up to 1e9, got {reward!r:.40}")

  return [task], None
