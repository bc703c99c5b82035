"""Environments of the `verifiers` package: subclasses of its `MultiTurnEnv`.

https://github.com/PrimeIntellect-ai/verifiers, release 0.1.14. From 0.4 on the
package has others, which call the policy over HTTP: see `verifiers_agent`.
"""

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_jax.rollout.environment import Message, Question, Step
from gspo_jax.runtime.errors import UserError, needs_extra

# Fields of a state that are not pickled: a model's connection and its bill.
_OF_A_CLIENT = ("client", "usage", "usage_tracker")


class Verifiers:
  """A conversation of an environment from `verifiers.load_environment`.

  Uses the environment's prompt, `env_response`, stop conditions and rubric; the
  rubric rewards the last response. The state must be picklable. A problem has a
  column `row`, a row of the environment's dataset.
  """

  roles = ("user",)

  def __init__(self, *, name: str):
    self._name = name
    self._state: Any = None
    self._context: list = []  # messages of the package: the prompt, all turns

  @staticmethod
  def prepare(*, name: str) -> None:
    """UserError if the environment does not load, or has tools."""
    if tools := getattr(_load(name), "tool_defs", None):
      raise UserError(
        f"verifiers:name={name}: it has {len(tools)} tools, expected none; "
        "give their functions to the environment 'tools'"
      )

  def reset(self, problem: Question, seed: int) -> Sequence[Message]:
    """Makes the state; the environment ignores the seed."""
    row = problem.columns.get("row")
    if not isinstance(row, Mapping) or not isinstance(row.get("prompt"), list):
      raise ValueError("expected a column `row` with a list `prompt`")
    self._state = asyncio.run(_begin(_load(self._name), row))
    self._context = [*self._state["prompt"]]
    return [_text(message) for message in self._context]

  async def step(self, response: str) -> Step:
    env, state, context = _load(self._name), self._state, self._context
    said = _messages([{"role": "assistant", "content": response}])
    await env.add_trajectory_step(state, _turn(context, said, state))
    if not await env.is_completed(state):
      self._context = _messages(await env.get_prompt_messages(state))
      if state.get("final_env_response") is None:
        return Step([_text(m) for m in self._context[len(context) + 1 :]])
      await env.is_completed(state)  # notes why it stopped
    await env.cleanup(state)
    await env.rubric.score_rollout(state)
    await env.rubric.cleanup(state)
    return Step(done=True, reward=state["reward"])


@functools.cache
def _load(name: str):
  with needs_extra("verifiers", f"environment 'verifiers:name={name}'"):
    import verifiers
    import verifiers.envs  # not in 0.4
  try:
    return verifiers.load_environment(name)
  except (AttributeError, ImportError, RuntimeError, ValueError) as error:
    raise UserError(f"verifiers:name={name}: {error}") from error


async def _begin(env, row):
  from verifiers.types import ClientConfig

  state = await env.init_state(row, ClientConfig(), "policy", {})
  for key in _OF_A_CLIENT:
    state.pop(key, None)
  return await env.setup_state(state) or state


def _turn(prompt, response, state) -> dict[str, Any]:
  """A `TrajectoryStep` without the fields that a model's server adds."""
  absent = dict.fromkeys(("response", "tokens", "reward", "advantage"))
  return absent | {
    "prompt": prompt,
    "completion": response,
    "is_truncated": False,
    "trajectory_id": state["trajectory_id"],
    "extras": {},
  }


def _messages(messages) -> list:
  """Messages as objects of the package, which environments expect."""
  from verifiers.utils.message_utils import maybe_normalize_messages

  return maybe_normalize_messages(messages)


def _text(message) -> Message:
  if not isinstance(message.content, str):
    raise ValueError(f"expected a message of text, got {str(message)[:80]}")
  return message.role, message.content
