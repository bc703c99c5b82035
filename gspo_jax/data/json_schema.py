"""Which values fit a JSON schema.

Worker processes import this module, so it needs the standard library alone.
"""

import json
from collections.abc import Mapping
from typing import Any

_TYPES: Mapping[str, Any] = {
  "array": list,
  "boolean": bool,
  "integer": int,
  "null": type(None),
  "number": (int, float),
  "object": dict,
  "string": str,
}


def an_object(**properties: Any) -> dict[str, Any]:
  """The schema of an object that has the properties."""
  required = [*properties]
  return {"type": "object", "required": required, "properties": properties}


def fitted(value: Any, schema: Any, root: Any = None) -> Any:
  """A JSON value as the schema has it: 2.0 becomes 2 where it has integers.

  A schema that is its own part has no value but those of its other options.
  Read are `type`, `nullable`, `enum`, `const`, `allOf`, `anyOf`, `oneOf` (as
  `anyOf`: the first that fits), `$ref` within `root` (`schema`, if not given),
  `properties`, `required`, `additionalProperties` and `items`.

  Raises:
    ValueError: it does not fit: the place, what was expected, and the value.
  """
  root = schema if root is None else root
  # A schema may refer to itself: what was found makes the time linear.
  found: dict[tuple[int, int], tuple[Any, tuple[Any, str]]] = {}

  def fit(value, part) -> tuple[Any, str]:
    """The value, and an error; "" if it fits."""
    key = id(value), id(part)
    if key not in found:
      # With the value, so that no other one gets its id.
      found[key] = value, (value, ": expected no schema that is its own part")
      found[key] = value, look(value, part)
    return found[key][1]

  def look(value, part):
    if not isinstance(part, Mapping):
      return value, _wrong("nothing", value) if part is False else ""
    if value is None and part.get("nullable"):
      return value, ""
    whole = [_referred(root, part["$ref"])] if "$ref" in part else []
    for each in (*whole, *(part.get("allOf") or ())):
      value, error = fit(value, each)
      if error:
        return value, error
    for options in filter(None, (part.get("anyOf"), part.get("oneOf"))):
      made = [fit(value, option) for option in options]
      errors = "; ".join(dict.fromkeys(error[2:] for _, error in made))
      value, error = next((x for x in made if not x[1]), (value, errors))
      if error:
        return value, f": {error[:300]}"
    types = part.get("type") or []
    types = [types] if isinstance(types, str) else types
    allowed = part.get("enum") or [part.get("const", value)]
    is_bool = type(value) is bool
    same = [x for x in allowed if x == value and (type(x) is bool) == is_bool]
    if not same:
      return value, _wrong(f"one of {json.dumps(allowed)[:200]}", value)
    value = same[0]
    if isinstance(value, float) and "integer" in types and value.is_integer():
      value = int(value)
    if types and not any(_is_of(value, name) for name in types):
      return value, _wrong(" or ".join(map(str, types)), value)
    if not isinstance(value, dict | list):
      return value, ""
    is_object = isinstance(value, dict)
    of = (part.get("properties") if is_object else None) or {}
    others = part.get("additionalProperties" if is_object else "items")
    for key in (part.get("required") or ()) if is_object else ():
      if key not in value:
        return value, _wrong(repr(key), value)
    items = dict(value.items() if is_object else enumerate(value))
    for key, x in items.items():
      items[key], error = fit(x, of.get(key, others))
      if error:
        return value, f".{key}{error}"
    if all(items[key] is value[key] for key in items):
      return value, ""  # itself, for what was found of it
    return items if is_object else [*items.values()], ""

  try:
    value, error = fit(value, schema)
  except RecursionError:
    error = ": expected values that are not as deep"
  if error:
    raise ValueError(error.lstrip(".: "))
  return value


def _referred(root: Any, reference: str) -> Any:
  """The part of `root` that a `$ref` names; anything fits what is not there."""
  for key in str(reference).split("/")[1:]:
    key = key.replace("~1", "/").replace("~0", "~")
    root = root.get(key, True) if isinstance(root, Mapping) else True
  return root


def _is_of(value: Any, name: str) -> bool:
  if isinstance(value, bool) and name != "boolean":
    return False
  return isinstance(value, _TYPES.get(name, object))


def _wrong(expected: str, value: Any) -> str:
  got = {dict: "an object", list: "an array"}.get(type(value))
  return f": expected {expected}, got {got or json.dumps(value)[:80]}"
