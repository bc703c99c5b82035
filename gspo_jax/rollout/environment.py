"""Environments answer the policy between its responses.

docs/environments.md tells users how to write one. Worker processes import this
module, so it needs the standard library alone.
"""

import base64
import functools
import inspect
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from gspo_jax.data import tool_calls
from gspo_jax.data.problem import Problem
from gspo_jax.runtime import errors
from gspo_jax.runtime import spec as specs
from gspo_jax.workers.pool import Tasks

# Role and content; behind them, for the result of a tool call, the name of the
# function.
Message = tuple[str, ...]

# Classes, or specs with arguments.
BUILT_IN = {
  "calculator": (
    "tools:functions=gspo_jax.tasks.games.calc,"
    "reward=gspo_jax.tasks.games.is_result,format=call"
  ),
  "guessing": "gspo_jax.tasks.games.Guessing",
  "python": "gspo_jax.rollout.environments.python_tool.Python",
  "tools": "gspo_jax.rollout.environments.tools.Tools",
  "verifiers": "gspo_jax.rollout.environments.verifiers.Verifiers",
}
_MAX_STATE = 16 << 20  # bytes of a pickled environment
_MAX_TEXT = 1 << 20  # characters of the messages of a step


class Question(NamedTuple):
  text: str  # before the instruction and the chat template
  reference: str
  columns: Mapping[str, Any] = {}  # other columns of the problem's record
  step: int = 0  # the iteration that took the problem; 0 in an evaluation
  workdir: str = ""  # the run's folder

  @classmethod
  def of(cls, problem: Problem, step: int, workdir: str) -> "Question":
    text, reference, columns = problem.text, problem.reference, problem.columns
    return cls(text, reference, dict(columns), step, workdir)


class Step(NamedTuple):
  # The policy reads them before its next response, unless `done`. Their roles
  # are among the environment's `roles`.
  messages: Sequence[Message] = ()
  done: bool = False
  reward: float = 0.0  # a conversation gets the sum over its steps
  tool_calls: int = 0
  tool_errors: int = 0  # tool calls that failed


class Environment(Protocol):
  """One conversation, of messages (role, content); pickled between calls.

  A class may have `prepare(**arguments)`, called once in each worker: UserError
  if the environment cannot run; and `fits(seconds, **arguments)`: UserError if
  a call cannot end in time.

  A class may have `tools(**arguments)`: the JSON schemas of the functions that
  the policy may call, of which the chat template is told. Its `__init__` may
  take `format`, one of `data.tool_calls.FORMATS`: that of the chat template, if
  the spec does not set it; and `schemas`, what `tools` returned.
  """

  roles: tuple[str, ...]

  def reset(self, problem: Question, seed: int) -> Sequence[Message]:
    """Begins the conversation; returns the messages of its prompt.

    The last message is the user's. Without messages the data makes the prompt.
    The seed is the same for all responses to a prompt.
    """

  def step(self, response: str) -> Step:
    """Answers a response, text without its stop token; may be `async`.

    Returns a `Step`, or a tuple of its fields. Without messages the
    conversation ends.
    """


def named(
  spec: str, tool_format: str = "", schemas: Sequence[Mapping] = ()
) -> functools.partial:
  """A function without arguments that makes the environment of a config.

  `spec` is `name` or `name:key=value,key=value`: one of `BUILT_IN` or
  `package.module.Class`, and keyword-only arguments of its `__init__`. See
  `Environment` for `tool_format` and `schemas`.
  """
  name, colon, text = spec.partition(":")
  if ":" in (preset := BUILT_IN.get(name, "")):
    name, colon, given = preset.partition(":")
    text = f"{given},{text}" if text else given
  cls = specs.imported(name, BUILT_IN, "environment")
  arguments = specs.arguments(name, cls, text, "environment") if colon else {}
  takes = specs.keywords(cls) if hasattr(cls, "tools") else {}
  if "format" in takes:
    arguments = {"format": tool_format} | arguments
  if "schemas" in takes:
    arguments["schemas"] = schemas
  if inspect.iscoroutinefunction(getattr(cls, "reset", None)):
    raise errors.UserError(
      f"environment {name!r}: its reset is `async`, expected a plain function; "
      "only step may be `async`"
    )
  for method, parameters in (("reset", 3), ("step", 2)):
    function: Any = getattr(cls, method, None)
    try:
      inspect.signature(function).bind(*range(parameters))
    except TypeError as e:
      raise errors.UserError(
        f"environment {name!r}: expected a class with reset(problem, seed) and "
        f"step(response), its {method} does not fit: {e}"
      ) from e
  try:
    inspect.signature(cls).bind(**arguments)
  except TypeError as e:
    raise errors.UserError(
      f"environment {name!r}: {e}; set it, '{name}:key=value'"
    ) from e
  return functools.partial(cls, **arguments)


def tools(spec: str, tool_format: str) -> tuple[list[Mapping], str]:
  """The JSON schemas of an environment's tools, and the format of its calls."""
  make = named(spec, tool_format)
  if not hasattr(make.func, "tools"):
    return [], ""
  tool_format = make.keywords.get("format", tool_format)
  if tool_format not in tool_calls.FORMATS:
    told = "the chat template shows none that is known"
    raise errors.UserError(
      f"environment {spec!r}: expected a format of tool calls, "
      f"{f'got {tool_format!r}' if tool_format else told}: set format=NAME, "
      f"one of {', '.join(tool_calls.FORMATS)}"
    )
  return make.func.tools(**make.keywords), tool_format


def roles(spec: str) -> tuple[str, ...]:
  """The roles of the environment's messages, never "assistant"."""
  names = _roles(named(spec).func)
  if not (isinstance(names, tuple) and names and {"user", "tool"} >= {*names}):
    raise errors.UserError(
      f"environment {spec!r} has roles={names!r}: expected ('user',), "
      "('tool',) or ('user', 'tool'), those of the messages that it writes"
    )
  return names


def _roles(cls) -> tuple[str, ...]:
  return getattr(cls, "roles", ("user",))


def load(spec: str, seconds: float, **told: Any) -> Tasks:
  """Tasks of `workers.pool`: `BEGIN` and `STEP`; `told` is as of `named`.

  BEGIN takes (question, seed), STEP takes (state, response).
  """
  make = named(spec, **told)
  if prepare := getattr(make.func, "prepare", None):
    prepare(**make.keywords)
  if fits := getattr(make.func, "fits", None):
    fits(seconds, **make.keywords)

  def begin(request):
    game = make()
    messages = game.reset(*request) or ()
    return _answer(game, Step(messages), ("system", "user", "assistant"))

  def step(request):
    state, response = request
    game = pickle.loads(base64.b64decode(state))
    return _answer(game, game.step(response), _roles(make.func))

  async def step_async(request):
    state, response = request
    game = pickle.loads(base64.b64decode(state))
    return _answer(game, await game.step(response), _roles(make.func))

  is_async = inspect.iscoroutinefunction(make.func.step)  # type: ignore[attr-defined]  # `named` saw it
  return [begin, step_async if is_async else step], is_async


BEGIN, STEP = 0, 1


def _answer(game, step, allowed: tuple[str, ...]) -> list:
  """JSON: the environment's state, and the fields of its `Step`."""
  if not isinstance(step, tuple):
    raise TypeError(f"expected a Step, got {type(step).__name__}")
  step = Step(*step)
  messages = [[*message] for message in step.messages]
  for role, content, *name in messages:
    is_text = all(isinstance(text, str) for text in (content, *name))
    if not is_text or role not in allowed or len(name) > (role == "tool"):
      raise ValueError(
        f"expected messages of (role, text) with roles {allowed}, got "
        f"{str((role, content, *name))[:80]}"
      )
    try:
      "".join((content, *name)).encode()
    except UnicodeEncodeError as e:
      raise ValueError(
        f"expected text that UTF-8 can encode, got {content[:80]!r}: {e.reason}"
      ) from e
  if sum(len(text) for message in messages for text in message) > _MAX_TEXT:
    raise ValueError(f"messages of more than {_MAX_TEXT} characters")
  reward = float(step.reward)
  if not abs(reward) <= 1e9:  # NaN, too
    raise ValueError(f"expected a reward up to 1e9, got {reward}")
  state = pickle.dumps(game)
  if len(state) > _MAX_STATE:
    raise ValueError(f"its pickle has more than {_MAX_STATE} bytes")
  return [
    base64.b64encode(state).decode(),
    messages,
    bool(step.done) or not messages,
    reward,
    int(step.tool_calls),
    int(step.tool_errors),
  ]
