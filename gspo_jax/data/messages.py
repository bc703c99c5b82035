"""A message as data sets and the endpoint's clients write it, checked."""

import json
from collections.abc import Mapping
from typing import Any

from gspo_jax.data.json_schema import an_object, fitted
from gspo_jax.runtime.errors import UserError

# vLLM calls `reasoning` what Qwen, DeepSeek and SGLang call otherwise.
_TEXTS = "reasoning", "reasoning_content", "name", "tool_call_id"
_TEXT = {"type": "string"}
_PART = {
  "properties": {"type": {"enum": ["text", None]}},
  "allOf": [an_object(text=_TEXT)],
}
_CALL = an_object(function=an_object(name=_TEXT))


class WrongField(UserError):
  name = ""  # of the field


def wrong(name: str, value: Any, expected: str) -> WrongField:
  shown = json.dumps(value, default=str)[:80]
  error = WrongField(f"{name}={shown}: expected {expected}")
  error.name = name
  return error


def read(message: Any, name: str) -> dict[str, Any]:
  """A message for `Tokenizer.chat`; WrongField, of the fields of `name`.

  A developer is the system. Arguments of calls become mappings. Fields that
  are null or unknown are left out.
  """
  if not isinstance(message, dict):
    raise wrong(name, message, "an object with role and content")
  role = message.get("role")
  if not isinstance(role, str):
    raise wrong(f"{name}.role", role, "a text")
  calls = message.get("tool_calls") or []
  if not isinstance(calls, list) or (calls and role != "assistant"):
    raise wrong(f"{name}.tool_calls", calls, "a list, of the assistant alone")
  made = {"role": "system" if role == "developer" else role}
  for key in _TEXTS:
    if (value := message.get(key)) not in (None, ""):
      if not isinstance(value, str):
        raise wrong(f"{name}.{key}", value, "a text")
      made["reasoning_content" if key == "reasoning" else key] = value
  may_lack = bool(calls) or "reasoning_content" in made
  made["content"] = _text(message, name, may_lack and role == "assistant")
  if calls:
    made["tool_calls"] = [
      _tool_call(call, f"{name}.tool_calls[{i}]")
      for i, call in enumerate(calls)
    ]
  return made


def is_json(value: Any) -> bool:
  """Whether JSON in UTF-8 has it: no NaN, no half of a surrogate pair."""
  try:
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
  except (ValueError, RecursionError):
    return False
  return True


def _text(message: Mapping, name: str, may_lack: bool) -> str:
  content = message.get("content")
  if content is None and may_lack:
    return ""
  parts = [{"text": content}] if isinstance(content, str) else content
  try:
    return "".join(
      part["text"] for part in fitted(parts, {"type": "array", "items": _PART})
    )
  except ValueError as error:
    expected = "text, or parts of text"
    raise wrong(f"{name}.content", content, expected) from error


def _tool_call(call: Any, name: str) -> dict[str, Any]:
  try:
    function = fitted(call, _CALL)["function"]
  except ValueError as error:
    expected = 'an object {"id", "type", "function": {"name"}}'
    raise wrong(name, call, expected) from error
  given = arguments = function.get("arguments") or "{}"
  try:
    if isinstance(given, str):
      arguments = json.loads(given)
  except (ValueError, RecursionError):
    arguments = None
  if not (isinstance(arguments, dict) and is_json(arguments)):
    raise wrong(
      f"{name}.function.arguments", given, "an object, or one as a JSON text"
    )
  return {
    "id": str(call.get("id") or ""),
    "type": "function",
    "function": {"name": function["name"], "arguments": arguments},
  }
