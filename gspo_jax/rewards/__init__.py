"""Rewards: a prompt, a response and its reference in, a float out.

A reward is any `f(prompt, response, reference) -> float`. It may be an `async
def`: each call is then awaited before the next one starts. A reward with the
keyword-only arguments `tokens` or `limit` also receives the length of the
response in tokens, stop token included, and the largest length allowed.

A reward may carry two functions as attributes:

  prepare(**arguments)        called once at the start with the arguments of the
                              reward's spec; raises UserError if the reward
                              cannot run (a missing package, a bad argument)
  fits(seconds, **arguments)  as `prepare`, with the time limit of one call

Other wings take `named`, `length_arguments`, `final_answer`, `gsm8k` and
`BUILT_IN` from here, `pool` (runs rewards in worker processes), `math` and
`numbers` (results in a normal form).
"""

import ast
import functools
import importlib
import inspect
from collections.abc import Callable

from gspo_jax.rewards.numbers import final_answer, gsm8k
from gspo_jax.runtime import errors

__all__ = (
  "BUILT_IN",
  "final_answer",
  "gsm8k",
  "length_arguments",
  "math",
  "named",
  "numbers",
  "pool",
)

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
_LENGTH_ARGUMENTS = ("tokens", "limit")


def named(spec: str, within: float | None = None) -> Callable[..., float]:
  """The reward that a config names, ready to be called.

  Args:
    spec: `name` or `name:key=value,key=value`. The name is one of `BUILT_IN` or
      `package.module.function`; the keys are its keyword-only arguments.
    within: seconds that one call may take; None for no limit.

  Raises:
    UserError: no reward has that name, its module does not import, it does not
      take those arguments, its `prepare` or `fits` failed, or it cannot be
      called as a reward.
  """
  name, colon, text = spec.partition(":")
  function = _import(name)
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


def length_arguments(reward: functools.partial) -> frozenset[str]:
  """Those of `tokens` and `limit` that a reward of `named` must be given."""
  takes = _keywords(reward.func) & set(_LENGTH_ARGUMENTS)
  return takes - reward.keywords.keys()


def _import(name: str) -> Callable[..., float]:
  path, _, attribute = BUILT_IN.get(name, name).rpartition(".")
  if not path:
    hint = errors.nearest(name, BUILT_IN)
    raise errors.UserError(f"unknown reward {name!r}: {hint}")
  try:
    module = importlib.import_module(path)
  # The module is the user's code: it may raise anything, SystemExit too.
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
      f"reward {name!r}: {e}: expected a Python function (prompt, response, "
      "reference) around it"
    ) from e
  return function


def _require_call(name: str, reward: functools.partial) -> None:
  """UserError unless the pool's call fits the signature of the reward."""
  keywords = dict.fromkeys(length_arguments(reward), 0)
  try:
    inspect.signature(reward).bind("", "", "", **keywords)
  except TypeError as e:
    raise errors.UserError(
      f"reward {name!r} takes {inspect.signature(reward.func)}: expected "
      "(prompt, response, reference) and, by keyword only, tokens, limit or "
      f"what '{name}:key=value' sets: {e}"
    ) from e


def _keywords(function: Callable[..., float]) -> frozenset[str]:
  kinds = inspect.signature(function).parameters.items()
  return frozenset(n for n, p in kinds if p.kind is p.KEYWORD_ONLY)


def _arguments(name: str, function, text: str) -> dict[str, float | str]:
  """`key=value,key=value` as a dict; each value is a Python literal or text."""
  keywords = _keywords(function)
  arguments = {}
  for part in text.split(","):
    key, equals, value = (s.strip() for s in part.partition("="))
    if not equals or key in arguments:
      raise errors.UserError(
        f"reward {name!r}: expected key=value once each, got {part!r}"
      )
    if key not in keywords:
      hint = errors.nearest(key, keywords) if keywords else "it takes none"
      raise errors.UserError(f"reward {name!r} has no argument {key!r}: {hint}")
    try:
      arguments[key] = ast.literal_eval(value)
    except (ValueError, SyntaxError):
      arguments[key] = value
  return arguments
