"""Environments: what answers the policy between its responses.

An environment is a class. One object holds one conversation:

  class Game:
    roles = ("user",)                     of the messages that it writes
    def reset(self, problem, seed): ...   -> messages, or () for the prompt
    def step(self, response): ...         -> Step

  reset     gets the problem, a `Question`, and an integer that is the same for
            all responses to a prompt. What it returns is the prompt, messages
            of (role, content) that end with one of the user; (): the prompt
            that the data makes of the problem, which is usual.
  step      gets the text of a response, without its stop token, and returns a
            `Step`, or a tuple of its fields. Without messages it ends the
            conversation.

Name it in `rollout.environment` as `package.module.Class`, or
`package.module.Class:key=value,key=value` to set keyword-only arguments of its
`__init__`. `BUILT_IN` has short names.

A class may have `prepare(**arguments)`, which is called once in each worker at
the start and raises UserError if the environment cannot run, and
`fits(seconds, **arguments)`, which raises UserError if a call cannot end in so
many seconds.

Environments run in the worker processes of `rewards.pool`, with the limits of
rewards: `reward.seconds` for one call, memory, and a process forked for each
batch of calls. Between two calls the object is pickled, so it holds plain
values, not connections; it may keep the address of a server that holds more.
If `step` is an `async def`, `reward.concurrency` of them run at once. A call
that raises, takes too long or ends its process costs its conversation: it ends
there, with a reward of at most 0 and of no more than others of its group get,
and `reward/failed` counts it.

This module needs the standard library alone: worker processes import it.
"""

import base64
import functools
import inspect
import pickle
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from gspo_jax.runtime import errors
from gspo_jax.runtime import spec as specs

Message = tuple[str, str]  # role and content

BUILT_IN = {
  "calculator": "gspo_jax.tasks.games.Calculator",
  "guessing": "gspo_jax.tasks.games.Guessing",
  "python": "gspo_jax.rollout.environments.python_tool.Python",
  "verifiers": "gspo_jax.rollout.environments.verifiers.Verifiers",
}
_MAX_STATE = 16 << 20  # bytes of a pickled environment
_MAX_TEXT = 1 << 20  # characters of the messages of a step


class Question(NamedTuple):
  """The problem of a conversation.

  Attributes:
    text: of the problem, before the instruction and the chat template.
    reference: the target.
    columns: the other columns of the problem's record.
  """

  text: str
  reference: str
  columns: Mapping[str, Any] = {}


class Step(NamedTuple):
  """What an environment does with a response.

  Attributes:
    messages: what the policy reads before its next response: (role, content)
      each, with roles of the environment's `roles`. Not read where `done`.
    done: whether the conversation has ended.
    reward: of this response. The reward of a conversation is their sum.
    tool_calls: tools that the response called.
    tool_errors: of them, those that failed.
  """

  messages: Sequence[Message] = ()
  done: bool = False
  reward: float = 0.0
  tool_calls: int = 0
  tool_errors: int = 0


class Environment(Protocol):
  """One conversation; see the head of this file."""

  roles: tuple[str, ...]

  def reset(self, problem: Question, seed: int) -> Sequence[Message]:
    """Begins the conversation: its prompt, or () for that of the data."""

  def step(self, response: str) -> Step:
    """Answers a response."""


def named(spec: str) -> functools.partial:
  """The environment that a config names, a function without arguments.

  Args:
    spec: `name` or `name:key=value,key=value`; see the head of this file.

  Raises:
    UserError: there is none, its module does not import, it does not take those
      arguments, or it is no environment.
  """
  name, colon, text = spec.partition(":")
  cls = specs.imported(name, BUILT_IN, "environment")
  given = {}
  if colon:
    given = specs.arguments(name, cls, text, "environment")
  if inspect.iscoroutinefunction(getattr(cls, "reset", None)):
    raise errors.UserError(
      f"environment {name!r}: its reset is `async`, expected a plain function; "
      "only step may be `async`"
    )
  for method, parameters in (("reset", 3), ("step", 2)):
    function = getattr(cls, method, None)
    try:
      inspect.signature(function).bind(*range(parameters))
    except TypeError as e:
      raise errors.UserError(
        f"environment {name!r}: expected a class with reset(problem, seed) and "
        f"step(response), its {method} does not fit: {e}"
      ) from e
  try:
    inspect.signature(cls).bind(**given)
  except TypeError as e:
    raise errors.UserError(
      f"environment {name!r}: {e}; set it, '{name}:key=value'"
    ) from e
  return functools.partial(cls, **given)


def roles(spec: str) -> tuple[str, ...]:
  """The roles of the messages that an environment writes; UserError as above.

  A role "assistant" is an error: the policy alone writes those.
  """
  found = _roles(named(spec).func)
  if not (isinstance(found, tuple) and found and {"user", "tool"} >= {*found}):
    raise errors.UserError(
      f"environment {spec!r} has roles={found!r}: expected ('user',), "
      "('tool',) or ('user', 'tool'), those of the messages that it writes"
    )
  return found


def _roles(cls) -> tuple[str, ...]:
  return getattr(cls, "roles", ("user",))


def reward_spec(spec: str) -> str:
  """The spec with which a reward pool calls an environment."""
  is_async = inspect.iscoroutinefunction(named(spec).func.step)
  function = call_async if is_async else call
  # No comma, colon or equals sign, which separate arguments.
  text = urllib.parse.quote(spec, safe="")
  return f"{__name__}.{function.__name__}:environment={text}"


def call(
  prompt,
  response,
  reference,
  *,
  environment: str,
  columns: Mapping[str, Any] = {},
  seed: int = 0,
):
  """One call of an environment in a worker process, with a reward's signature.

  Args:
    prompt: the pickled environment in base64; "" to begin the conversation.
    response: of the policy; to begin, the text of the problem.
    reference: of the problem.
    environment: its spec, quoted.
    columns: of the problem; read to begin.
    seed: of the conversation.
  """
  if not prompt:
    return _begin(response, reference, environment, seed, columns)
  game = pickle.loads(base64.b64decode(prompt))
  return game, game.step(response), _roles(type(game))


async def call_async(
  prompt,
  response,
  reference,
  *,
  environment: str,
  columns: Mapping[str, Any] = {},
  seed: int = 0,
):
  """As `call`, for an environment whose `step` is `async`."""
  if not prompt:
    return _begin(response, reference, environment, seed, columns)
  game = pickle.loads(base64.b64decode(prompt))
  return game, await game.step(response), _roles(type(game))


def _begin(text, reference, environment, seed, columns):
  game = _named(environment)()
  question = Question(text, reference, columns)
  messages = game.reset(question, seed) or ()
  return game, Step(messages), ("system", "user", "assistant")


@functools.cache
def _named(quoted: str) -> functools.partial:
  return named(urllib.parse.unquote(quoted))


def _prepare(*, environment: str) -> None:
  """Imports the environment once, in the worker."""
  made = _named(environment)
  if prepare := getattr(made.func, "prepare", None):
    prepare(**made.keywords)


def _fits(within: float, *, environment: str) -> None:
  """Checks the time limit of one call, if the environment knows its own."""
  made = _named(environment)
  if fits := getattr(made.func, "fits", None):
    fits(within, **made.keywords)


def _convert(value) -> dict:
  """A game and its step as JSON.

  Raises:
    ValueError, TypeError: the step has another form.
  """
  game, step, allowed = value
  if not isinstance(step, tuple):
    raise TypeError(f"expected a Step, got {type(step).__name__}")
  step = Step(*step)
  messages = [[role, content] for role, content in step.messages]
  for role, content in messages:
    if not isinstance(content, str) or role not in allowed:
      raise ValueError(
        f"expected messages of (role, text) with roles {allowed}, got "
        f"{str((role, content))[:80]}"
      )
    try:
      content.encode()
    except UnicodeEncodeError as e:
      raise ValueError(
        f"expected text that UTF-8 can encode, got {content[:80]!r}: {e.reason}"
      ) from e
  if sum(len(content) for _, content in messages) > _MAX_TEXT:
    raise ValueError(f"messages of more than {_MAX_TEXT} characters")
  reward = float(step.reward)
  if not abs(reward) <= 1e9:  # NaN, too
    raise ValueError(f"expected a reward up to 1e9, got {reward}")
  state = pickle.dumps(game)
  if len(state) > _MAX_STATE:
    raise ValueError(f"its pickle has more than {_MAX_STATE} bytes")
  return {
    "state": base64.b64encode(state).decode(),
    "messages": messages,
    "done": bool(step.done) or not messages,
    "reward": reward,
    "tool_calls": int(step.tool_calls),
    "tool_errors": int(step.tool_errors),
  }


for _function in (call, call_async):
  _function.prepare, _function.fits = _prepare, _fits
  _function.convert = _convert
