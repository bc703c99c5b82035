"""Rewards: a prompt, an answer's text and its reference in, a float out.

A reward is any `f(prompt, answer, reference) -> float`, an `async def` too,
which is run to its end, one answer at a time. One that declares the
keyword-only arguments `tokens` or `limit` is also given the answer's length in
tokens, stop token included, and the most that were allowed. A reward that has
an attribute `prepare` has it called once, at the start, with the arguments of
its name: the place to find out what is missing, as a `UserError`. An attribute
`fits` is called in the same way, with the seconds for one call as its first.
`rewards.pool` runs them, where they can break nothing.
"""

import ast
import functools
import importlib
import inspect
from collections.abc import Callable

from gspo_jax.rewards.numbers import final_answer, gsm8k
from gspo_jax.runtime import errors

__all__ = ["BUILT_IN", "final_answer", "given", "gsm8k", "named"]

BUILT_IN = {
  "code": "gspo_jax.rewards.code.passes",
  "final_answer": "gspo_jax.rewards.numbers.final_answer",
  "format": "gspo_jax.rewards.format.thinks",
  "gsm8k": "gspo_jax.rewards.numbers.gsm8k",
  "length": "gspo_jax.rewards.length.short",
  "math": "gspo_jax.rewards.math.equivalent",
  "number": "gspo_jax.rewards.numbers.numbered",
  "overlong": "gspo_jax.rewards.length.overlong",
}
MEASURES = ("tokens", "limit")


def named(spec: str, within: float | None = None) -> Callable[..., float]:
  """The reward that a config names, ready to be called.

  Args:
    spec: `name` or `name:key=value,key=value`; the name is one of `BUILT_IN` or
      `package.module.function`, the keys are its keyword-only arguments.
    within: seconds for one call, if they are bounded.

  Raises:
    UserError: there is none of that name, its module does not import, the
      arguments are not its own, its `prepare` found something missing, it does
      not fit into its seconds, or it cannot be called as a reward.
  """
  name, colon, text = spec.partition(":")
  function = _found(name)
  arguments = _arguments(name, function, text) if colon else {}
  prepare = getattr(function, "prepare", None)
  if prepare:
    prepare(**arguments)
  fits = getattr(function, "fits", None)
  if fits and within is not None:
    fits(within, **arguments)
  reward = functools.partial(function, **arguments)
  _require_call(name, reward)
  return reward


def given(function: functools.partial) -> frozenset[str]:
  """Which of `MEASURES` a reward of `named` is to be called with."""
  return (_keywords(function.func) & set(MEASURES)) - function.keywords.keys()


def _found(name: str) -> Callable[..., float]:
  path, _, attribute = BUILT_IN.get(name, name).rpartition(".")
  if not path:
    hint = errors.nearest(name, BUILT_IN)
    raise errors.UserError(f"unknown reward {name!r}: {hint}")
  try:
    module = importlib.import_module(path)
  # Whatever it raises, SystemExit too: it is the user's own code.
  except BaseException as e:
    if isinstance(e, KeyboardInterrupt):
      raise
    raise errors.UserError(
      f"reward {name!r}: importing {path!r} failed: {type(e).__name__}: {e}"
    ) from e
  function = getattr(module, attribute, None)
  if not callable(function):
    functions = [n for n, v in vars(module).items() if inspect.isfunction(v)]
    public = [n for n in functions if not n.startswith("_")]
    hint = errors.nearest(attribute, public) if public else "it has none"
    raise errors.UserError(
      f"reward {name!r}: {path!r} has no function {attribute!r}: {hint}"
    )
  try:
    inspect.signature(function)
  except ValueError as e:
    raise errors.UserError(
      f"reward {name!r}: {e}: expected a Python function (prompt, answer, "
      "reference) around it"
    ) from e
  return function


def _require_call(name: str, reward: functools.partial) -> None:
  """UserError unless a reward takes the arguments that it is given."""
  signature, measures = inspect.signature(reward), given(reward)
  try:
    signature.bind("", "", "", **dict.fromkeys(measures, 0))
  except TypeError as e:
    raise errors.UserError(
      f"reward {name!r} takes {inspect.signature(reward.func)}: expected "
      "(prompt, answer, reference) and, by keyword only, tokens, limit or what "
      f"'{name}:key=value' sets: {e}"
    ) from e


def _keywords(function: Callable[..., float]) -> frozenset[str]:
  kinds = inspect.signature(function).parameters.items()
  return frozenset(n for n, p in kinds if p.kind is p.KEYWORD_ONLY)


def _arguments(name: str, function, text: str) -> dict[str, float | str]:
  """`key=value,key=value` as keyword arguments; a value is a number or text."""
  known = _keywords(function)
  arguments = {}
  for part in text.split(","):
    key, equals, value = (s.strip() for s in part.partition("="))
    if not equals or key in arguments:
      raise errors.UserError(
        f"reward {name!r}: expected key=value once each, got {part!r}"
      )
    if key not in known:
      hint = errors.nearest(key, known) if known else "it takes none"
      raise errors.UserError(f"reward {name!r} has no argument {key!r}: {hint}")
    try:
      arguments[key] = ast.literal_eval(value)
    except (ValueError, SyntaxError):
      arguments[key] = value
  return arguments
