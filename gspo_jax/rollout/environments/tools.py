"""Tools as plain Python functions, which run in the worker process.

A response that calls functions gets a result for each call, in a message of
role "tool". What goes wrong in a call is a result, too, for the policy reads
it. A response without a call is the answer: a reward scores it without its
thinking.
"""

import functools
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gspo_jax.data import json_schema, tool_calls
from gspo_jax.rewards.reward import Response, Reward
from gspo_jax.rewards.reward import named as named_reward
from gspo_jax.rollout.environment import Message, Question, Step
from gspo_jax.runtime.errors import UserError, content_of, nearest

_NAME = "environment 'tools'"


class Tools:
  """Calls functions with types and docstrings; `reward` scores the answer.

  `functions` is `package.module.name` of a function, of a list of functions, or
  of a class: its public methods are the tools, one object lives as long as a
  conversation, and its method `reset(problem)`, if it has one, is called first.
  The policy reads `characters` of each result.
  """

  roles = ("tool",)

  def __init__(
    self,
    *,
    functions: str,
    reward: str,
    format: str = "",
    characters: int = 4000,
    schemas: Sequence[Mapping] = (),
  ):
    self._path, self._reward = functions, reward
    self._format, self._characters = format, characters
    of = [schema["function"] for schema in schemas]
    self._schemas = {f["name"]: f["parameters"] for f in of}

  @staticmethod
  def tools(*, functions: str, format: str = "", **_: Any) -> list[Mapping]:
    """The JSON schemas; [] for the format `call`, which no prompt tells of."""
    if format == "call":
      return []
    from gspo_jax.data.tokenizers.base import import_transformers

    schema, schemas = import_transformers().utils.get_json_schema, []
    for name, function in _functions(functions, _new(functions)).items():
      try:
        schemas.append(schema(function))
      except Exception as error:  # the docstring and the types are the user's
        raise UserError(
          f"{_NAME}: {functions}: function {name!r}: {error}; expected a type "
          "for each parameter, and a docstring that has them below 'Args:'"
        ) from error
    return schemas

  @staticmethod
  def prepare(
    *, functions: str, reward: str, characters: int = 4000, **_: Any
  ) -> None:
    """UserError if the functions or the reward cannot be used."""
    if type(characters) is not int or characters < 1:
      raise UserError(
        f"{_NAME}: expected characters of 1 or more, got {characters!r}"
      )
    for name, function in _functions(functions, _new(functions)).items():
      if fault := _fault(function):
        raise UserError(f"{_NAME}: {functions}: function {name!r}: {fault}")
    _scores(reward)

  @staticmethod
  def fits(within: float, *, reward: str, **_: Any) -> None:
    named_reward(reward, within)

  def reset(self, problem: Question, seed: int) -> Sequence[Message]:
    self._problem, self._object = problem, _new(self._path)
    if reset := getattr(self._object, "reset", None):
      reset(problem)
    self._score_keywords("")  # an error now if the problem lacks a column
    return ()

  def step(self, response: str) -> Step:
    functions = _functions(self._path, self._object)
    schemas = self._schemas or {  # the format `call` asks for names alone
      name: {"properties": dict.fromkeys(inspect.signature(f).parameters)}
      for name, f in functions.items()
    }
    answer, calls = tool_calls.parse(response, self._format, schemas)
    if not calls:
      return Step(done=True, reward=self._score(answer))
    results = [_result(call, functions, schemas) for call in calls]
    # A name that the policy made up may be of any length.
    names = [c.name if c.name in functions else "unknown" for c in calls]
    # JSON may have halves of surrogate pairs, which UTF-8 cannot encode.
    clean = lambda text: text.encode(errors="replace").decode()
    messages = [
      ("tool", clean(text[: self._characters]), name)
      for name, (text, _) in zip(names, results, strict=True)
    ]
    failed = sum(failed for _, failed in results)
    return Step(messages, tool_calls=len(calls), tool_errors=failed)

  def _score(self, response: str) -> float:
    problem, keywords = self._problem, self._score_keywords(response)
    reward = _scores(self._reward, problem.workdir)
    return reward(problem.text, response, problem.reference, **keywords)

  def _score_keywords(self, response: str) -> dict[str, Any]:
    text, reference, columns, step, workdir = self._problem
    answer = Response(text, response, reference, columns=columns, step=step)
    return _scores(self._reward, workdir).keywords([answer])


def _result(
  call: tool_calls.ToolCall,
  functions: Mapping[str, Callable],
  schemas: tool_calls.Schemas,
) -> tuple[str, bool]:
  """The text that the policy reads, and whether the call failed."""
  if call.error:
    return f"error: {call.error}", True
  if call.name not in functions:
    name = call.name[:100]  # the nearest of 10^5 characters takes seconds
    return f"error: no function {name!r}: {nearest(name, functions)}", True
  function = functions[call.name]
  signature = inspect.signature(function)
  try:
    signature.bind(**call.arguments)
    arguments = json_schema.fitted(call.arguments, schemas[call.name])
  except (TypeError, ValueError) as error:
    return f"error: {call.name}{signature}: {error}", True
  try:
    value = function(**arguments)
    if not isinstance(value, str):
      value = json.dumps(
        value, ensure_ascii=False, allow_nan=False, default=_as_text
      )
  except Exception as error:
    return _reason(error), True
  return value, False


def _reason(error: Exception) -> str:
  """A ValueError of a tool is meant for the policy, and needs no type."""
  text = str(error)
  if not isinstance(error, ValueError):
    text = f"{type(error).__name__}: {text}"
  return f"error: {text}" if text else "error"


def _as_text(value: Any) -> str:
  """Of dates and the like; TypeError if the text has an address in memory."""
  text = str(value)
  if " at 0x" in text:
    raise TypeError(f"Object of type {type(value).__name__} is not JSON")
  return text


def _fault(function: Callable) -> str:
  """Why it can be no tool; "" if it can."""
  if inspect.iscoroutinefunction(function):
    return "expected a plain function, it is `async`"
  signature = inspect.signature(function)
  without = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL
  if any(p.kind in without for p in signature.parameters.values()):
    return f"expected parameters that a call can name, got {signature}"
  return ""


@functools.cache
def _named(path: str) -> Any:
  """The function, class or list that a config names."""
  module, _, attribute = path.rpartition(".")
  try:
    return getattr(importlib.import_module(module), attribute)
  # The module is the user's code: it may raise anything, SystemExit too.
  except BaseException as error:
    if isinstance(error, KeyboardInterrupt):
      raise
    raise UserError(
      f"{_NAME}: functions={path!r}: expected package.module.name of functions "
      f"or of a class: {type(error).__name__}: {error}"
    ) from error


def _new(path: str) -> Any:
  """A new object of the class that a config names; None for functions."""
  found = _named(path)
  with content_of(f"{_NAME}: functions={path!r}: its __init__"):
    return found() if inspect.isclass(found) else None


def _functions(path: str, instance: Any) -> dict[str, Callable]:
  found = _named(path)
  if inspect.isclass(found):
    public = [n for n in dir(found) if not n.startswith("_") and n != "reset"]
    # Of the class, for a property of the object may raise.
    methods = [n for n in public if _is_function(getattr(found, n))]
    functions = {name: getattr(instance, name) for name in methods}
  else:
    several = [found] if callable(found) else found
    if not (
      isinstance(several, list | tuple) and all(map(_is_function, several))
    ):
      several = ()
    functions = {f.__name__: f for f in several}
    if len(functions) < len(several):
      functions = {}
  if not functions:
    raise UserError(
      f"{_NAME}: functions={path!r}: expected a function, a list of functions "
      "with different names, or a class with public methods, got "
      f"{str(found)[:60]}"
    )
  return functions


def _is_function(value: Any) -> bool:
  """Not a property, nor a `functools.partial`, which has no name."""
  is_named = callable(value) and hasattr(value, "__name__")
  return is_named and not inspect.isclass(value)


@functools.cache
def _scores(spec: str, workdir: str = "") -> Reward:
  """A reward that scores one response, of unknown length, in a plain call."""
  reward = named_reward(spec, workdir=workdir)
  names = inspect.signature(reward.function).parameters
  for is_so, what in (
    (reward.takes_group, "takes a group of responses"),
    (reward.is_async, "is `async`"),
    ("tokens" in names or "limit" in names, "reads the length of a response"),
  ):
    if is_so:
      raise UserError(
        f"{_NAME}: reward={spec!r} {what}: expected a plain function of a "
        "prompt, a response and a reference"
      )
  return reward
