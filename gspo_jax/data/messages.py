"""A message as data sets and the endpoint's clients write it, checked."""

import json
from collections.abc import Mapping
from typing import Any

from gspo_jax.runtime.errors import UserError

# vLLM calls `reasoning` what Qwen, DeepSeek and SGLang call otherwise.
_TEXTS = "reasoning", "reasoning_content", "name", "tool_call_id"


class WrongField(UserError):
  name = ""  # of the field


def _wrong(name: str, value: Any, expected: str) -> WrongField:
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
    raise _wrong(name, message, "an object with role and content")
  role = message.get("role")
  if not isinstance(role, str):
    raise _wrong(f"{name}.role", role, "a text")
  calls = message.get("tool_calls") or []
  if not isinstance(calls, list) or (calls and role != "assistant"):
    raise _wrong(f"{name}.tool_calls", calls, "a list, of the assistant alone")
  made = {"role": "system" if role == "developer" else role}
  for key in _TEXTS:
    if (value := message.get(key)) not in (None, ""):
      if not isinstance(value, str):
        raise _wrong(f"{name}.{key}", value, "a text")
      made["reasoning_content" if key == "reasoning" else key] = value
  may_lack = bool(calls) or "reasoning_content" in made
  made["content"] = _text(message, name, may_lack)
  if calls:
    made["tool_calls"] = [
      _tool_call(call, f"{name}.tool_calls[{i}]")
      for i, call in enumerate(calls)
    ]
  return made


def is_text(value: Any) -> bool:
  """Whether UTF-8 can encode all texts of a JSON value: no lone surrogates."""
  try:
    json.dumps(value, ensure_ascii=False).encode()
  except (UnicodeEncodeError, RecursionError):
    return False
  return True


def _text(message: Mapping, name: str, may_lack: bool) -> str:
  content = message.get("content")
  if isinstance(content, list):
    texts = [
      part.get("text") if isinstance(part, dict) else None for part in content
    ]
    content = "".join(texts) if all(isinstance(t, str) for t in texts) else 0
  if content is None and may_lack:
    return ""
  if not isinstance(content, str):
    raise _wrong(
      f"{name}.content", message.get("content"), "text, or parts of text"
    )
  return content


def _tool_call(call: Any, name: str) -> dict[str, Any]:
  function = call.get("function") if isinstance(call, dict) else None
  if not isinstance(function, dict) or not isinstance(
    function.get("name"), str
  ):
    raise _wrong(name, call, 'an object {"id", "type", "function": {"name"}}')
  given = arguments = function.get("arguments") or "{}"
  try:
    if isinstance(given, str):
      arguments = json.loads(given)
  except (ValueError, RecursionError):
    arguments = None
  if not (isinstance(arguments, dict) and is_text(arguments)):
    raise _wrong(
      f"{name}.function.arguments", given, "an object, or one as a JSON text"
    )
  return {
    "id": str(call.get("id") or ""),
    "type": "function",
    "function": {"name": function["name"], "arguments": arguments},
  }
