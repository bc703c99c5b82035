"""What each key of a config means, from the comments of configs/common.py."""

import ast
import dataclasses
import inspect
import io
import tokenize
from typing import NamedTuple

from gspo_jax.configs import common
from gspo_jax.program.config import Config, ConfigDict
from gspo_jax.record.identity import flatten
from gspo_jax.runtime.key import Choice, Range

_SIZE = "Sets a field of gspo_jax.model.ModelConfig."


class Description(NamedTuple):
  """A key or a section of a config.

  Attributes:
    key: as it is typed, with dots between its parts.
    default: its value; None for a section.
    comment: what it means, with its unit, and the values it may have in
      brackets; "" for a section that common.py says nothing about.
  """

  key: str
  default: object
  comment: str


def describe(config: ConfigDict | None = None) -> list[Description]:
  """All keys, in the order of configs/common.py, each section before its keys.

  Args:
    config: gives the defaults; None: those of configs/common.py.
  """
  config = common.get_config() if config is None else config
  comments, rules = _comments(inspect.getsource(common)), _rules(Config)
  place = {key: i for i, key in enumerate(comments)}
  values = {key: None for key in config if isinstance(config[key], ConfigDict)}
  values |= flatten(config)
  # A key that common.py does not have comes last in its section.
  order = lambda key: (
    place.get(key.partition(".")[0], len(place)),
    place.get(key, len(place)),
  )
  return [
    Description(
      key, values[key], _with_range(comments.get(key, _SIZE), rules.get(key))
    )
    for key in sorted(values, key=order)
  ]


def _comments(source: str) -> dict[str, str]:
  """The comment of each `c.key = value`, first those above, then those beside.

  A key that is set again keeps its first comment.
  """
  above, beside = {}, {}
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type == tokenize.COMMENT:
      alone = not token.line[: token.start[1]].strip()
      (above if alone else beside)[token.start[0]] = token.string[1:].strip()
  found = {}
  for node in ast.walk(ast.parse(source)):
    if not isinstance(node, ast.Assign):
      continue
    key = ast.unparse(node.targets[0])
    if not key.startswith("c."):
      continue
    lines = []
    line = node.lineno - 1
    while line in above:
      lines.insert(0, above[line])
      line -= 1
    inside = range(node.lineno, node.end_lineno + 1)
    lines += [beside[line] for line in inside if line in beside]
    found.setdefault(key.removeprefix("c."), " ".join(lines))
  return found


def _rules(kind, prefix: str = "") -> dict[str, Range | Choice]:
  """What the dataclasses of program/config.py check, by key."""
  rules = {}
  for field in dataclasses.fields(kind):
    key = f"{prefix}{field.name}"
    if dataclasses.is_dataclass(field.type):
      rules |= _rules(field.type, f"{key}.")
    elif rule := field.metadata.get("rule"):
      rules[key] = rule
  return rules


def _with_range(comment: str, rule: Range | Choice | None) -> str:
  if rule is None:
    return comment
  if isinstance(rule, Range):
    return f"{comment} [{rule.expected}]"
  if all(name in comment for name in rule.names):
    return comment  # which says more about each
  return f"{comment} [{' | '.join(rule.names)}]"
