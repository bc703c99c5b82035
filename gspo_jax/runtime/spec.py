"""Specs: a name with arguments, as `overlong:buffer=8` is in a config."""

import ast
import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from gspo_jax.runtime import errors


def imported(
  name: str, built_in: Mapping[str, str], kind: str = "reward"
) -> Callable[..., Any]:
  """The function or class that a config names, a `kind` in errors.

  `name` is `package.module.attribute`, or a short name of `built_in`.
  """
  path, _, attribute = built_in.get(name, name).rpartition(".")
  if not path:
    hint = errors.nearest(name, built_in)
    raise errors.UserError(f"unknown {kind} {name!r}: {hint}")
  try:
    module = importlib.import_module(path)
  # The module is the user's code: it may raise anything, SystemExit too.
  except BaseException as e:
    if isinstance(e, KeyboardInterrupt):
      raise
    raise errors.UserError(
      f"{kind} {name!r}: importing {path!r} failed: {type(e).__name__}: {e}"
    ) from e
  function = getattr(module, attribute, None)
  if not callable(function):
    # A `Reward` or a `Method` is an object that can be called.
    is_kind = lambda x: callable(x) and not inspect.isclass(x)
    noun = "function"
    if kind == "environment":
      is_kind, noun = inspect.isclass, "class"
    public = [
      n for n, v in vars(module).items() if is_kind(v) and not n.startswith("_")
    ]
    hint = errors.nearest(attribute, public) if public else "it has none"
    raise errors.UserError(
      f"{kind} {name!r}: {path!r} has no {noun} {attribute!r}: {hint}"
    )
  try:
    inspect.signature(function)
  except ValueError as e:
    raise errors.UserError(
      f"{kind} {name!r}: {e}: expected a Python function around it"
    ) from e
  return function


def arguments(
  name: str, function: Callable[..., Any], text: str, kind: str = "reward"
) -> dict[str, Any]:
  """A spec's arguments, for a function or class; see `values`."""
  return values(name, keywords(function), text, kind)


def values(
  name: str, known: Collection[str], text: str, kind: str = "reward"
) -> dict[str, Any]:
  """`key=value,key=value` as a dict; each value is a Python literal or text.

  `name` is the part of a spec before the colon, `text` the part after it.
  """
  found = {}
  for part in text.split(","):
    key, equals, value = (s.strip() for s in part.partition("="))
    if not equals or key in found:
      raise errors.UserError(
        f"{kind} {name!r}: expected key=value once each, got {part!r}"
      )
    if key not in known:
      hint = errors.nearest(key, known) if known else "it takes none"
      raise errors.UserError(f"{kind} {name!r} has no argument {key!r}: {hint}")
    try:
      found[key] = ast.literal_eval(value)
    except (ValueError, SyntaxError):
      found[key] = value
  return found


def keywords(function: Callable[..., float]) -> dict[str, inspect.Parameter]:
  parameters = inspect.signature(function).parameters.items()
  return {n: p for n, p in parameters if p.kind is p.KEYWORD_ONLY}


def chosen(
  key: str, spec: str, table: Mapping[str, Callable[..., Any]]
) -> functools.partial:
  """The function of `table` that `spec` names, with the spec's numbers bound.

  `spec` is `name` or `name:argument=number,...`, for keyword-only arguments;
  errors name the config `key`.
  """
  name, colon, text = spec.partition(":")
  if name not in table:
    raise errors.UserError(f"{key}={name!r}: {errors.nearest(name, table)}")
  numbers = arguments(name, table[name], text, kind=key) if colon else {}
  for argument, value in numbers.items():
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise errors.UserError(f"{key}={spec}: {argument}: expected a number")
  return functools.partial(table[name], **numbers)
