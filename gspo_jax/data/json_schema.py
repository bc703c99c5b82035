"""JSON schemas of the arguments of calls: what fits, and what was expected.

Worker processes import this module, so it needs the standard library alone.
"""

import json
from collections.abc import Mapping
from typing import Any

_TYPES = {
  "array": list,
  "boolean": bool,
  "integer": int,
  "null": type(None),
  "number": (int, float),
  "object": dict,
  "string": str,
}


def fitted(value: Any, schema: Any, root: Any = None) -> Any:
  """A JSON value as the schema has it: 2.0 becomes 2 where it has integers.

  Read are `type`, `nullable`, `enum`, `const`, `allOf`, `anyOf`, `oneOf` (as
  `anyOf`, the first that fits), `$ref` within `root` (`schema`, if not given),
  `properties`, `required`, `additionalProperties`, `items` and `prefixItems`.

  Raises:
    ValueError: it does not fit: the place, what was expected, and the value.
  """
  root = schema if root is None else root
  # What was found, so that schemas that refer to themselves take linear time.
  found: dict[tuple[int, int], tuple[Any, tuple[Any, str]]] = {}

  def fit(value, part) -> tuple[Any, str]:
    """The value and an error, which is "" if it fits."""
    key = id(value), id(part)
    if key not in found:
      found[key] = value, look(value, part)  # kept, so that no other has its id
    return found[key][1]

  def look(value, part):
    if not isinstance(part, Mapping):
      return value, _expected("nothing", value) if part is False else ""
    parts = [_referred(root, part["$ref"])] if "$ref" in part else []
    for each in (*parts, *part.get("allOf", ())):
      value, error = fit(value, each)
      if error:
        return value, error
    for options in (part.get("anyOf"), part.get("oneOf")):
      fits = (fit(value, option) for option in options or [True])
      value, error = next((x for x in fits if not x[1]), (value, "none"))
      if error:
        return value, _expected(" or ".join(map(_said, options)), value)
    if value is None and part.get("nullable"):
      return value, ""
    types = _types(part)
    if isinstance(value, float) and value.is_integer() and "integer" in types:
      value = value if "number" in types else int(value)
    allowed = part.get("enum", [part["const"]] if "const" in part else [value])
    if not (
      any(_is_of(value, name) for name in types or [""])
      and any(_is_same(value, each) for each in allowed)
    ):
      return value, _expected(_said(part), value)
    return inside(value, part)

  def inside(value, part):
    if isinstance(value, dict):
      for key in part.get("required", ()):
        if key not in value:
          return value, _expected(f"{key!r} in it", value)
      of, others = part.get("properties") or {}, "additionalProperties"
    elif isinstance(value, list):
      of, others = dict(enumerate(part.get("prefixItems", ()))), "items"
    else:
      return value, ""
    made, others = {}, part.get(others, True)
    for key, x in (
      value.items() if isinstance(value, dict) else enumerate(value)
    ):
      made[key], error = fit(x, of.get(key, others))
      if error:
        return value, f".{key}{error}"
    return made if isinstance(value, dict) else [*made.values()], ""

  try:
    value, error = fit(value, schema)
  except RecursionError:
    error = ": expected values that are not as deep"
  if error:
    raise ValueError(error.removeprefix("."))
  return value


def _referred(root: Any, reference: str) -> Any:
  """The part of `root` that a `$ref` names; anything fits what is not there."""
  for key in str(reference).split("/")[1:]:
    key = key.replace("~1", "/").replace("~0", "~")
    root = root.get(key, True) if isinstance(root, Mapping) else True
  return root


def _types(part: Mapping) -> list[str]:
  names = part.get("type", [])
  return [names] if isinstance(names, str) else names


def _is_of(value: Any, name: str) -> bool:
  if isinstance(value, bool) and name in ("integer", "number"):
    return False
  return isinstance(value, _TYPES.get(name, object))


def _is_same(value: Any, other: Any) -> bool:
  return value == other and isinstance(value, bool) == isinstance(other, bool)


def _said(part: Any) -> str:
  """What a schema expects, in short."""
  if isinstance(part, Mapping) and "enum" not in part and "const" not in part:
    return " or ".join(_types(part)) or "what its schema says"
  return json.dumps(part, ensure_ascii=False, default=str)[:200]


def _expected(expected: str, value: Any) -> str:
  got = {dict: "an object", list: "an array"}.get(type(value))
  return f": expected {expected}, got {got or json.dumps(value)[:80]}"
