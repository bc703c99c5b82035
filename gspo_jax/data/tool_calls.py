"""Tool calls in the text of a response, and their formats by model family.

The formats have the names of vLLM's tool-call parsers
(https://docs.vllm.ai/en/latest/features/tool_calling/); `call` is our own.
`_SHAPES` says how most are written. The others:

  llama3_json  {"name": .., "parameters": {..}}, several with a semicolon
               between them (Llama 3.1 to 3.3)
  openai       to=functions.NAME in a message's header, JSON as its text
               (gpt-oss, https://cookbook.openai.com/articles/openai-harmony)
  call         NAME(VALUE) and nothing else, for tokenizers without a chat
               template: VALUE is the text of the first parameter

Control tokens are visible in the text. A call in thinking is none. A call that
was cut, or cannot be read, is an error, and nothing behind it is read, for
nobody can say where it ends. Worker processes import this module, so it needs
the standard library alone.
"""

import functools
import json
import math
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gspo_jax.data.json_schema import fitted
from gspo_jax.rewards import thinking


class ToolCall(NamedTuple):
  name: str  # of the function; "unknown" if it cannot be read
  arguments: Mapping[str, Any] = {}
  error: str = ""  # what is wrong with the call, for the policy; "" if nothing


class Parsed(NamedTuple):
  content: str  # the text outside the calls and the thinking
  calls: tuple[ToolCall, ...] = ()


# Of each function: the JSON schema of its arguments.
Schemas = Mapping[str, Mapping[str, Any]]
_NONE: Schemas = types.MappingProxyType({})

_UNKNOWN = "unknown"
# What may stand before the calls | what begins a call | its arguments, or one
# of them | what ends it | what may stand behind the calls.
_SHAPES = {
  # Qwen2.5, Qwen3, Hermes: JSON with "name" and "arguments".
  "hermes": " | <tool_call> | JSON | </tool_call> | ",
  "qwen3_coder": (
    "<tool_call> | <function=NAME> | <parameter=KEY>\nVALUE\n</parameter> | "
    "</function> | </tool_call>"
  ),
  "glm45": (  # GLM-4.5 to 4.7
    " | <tool_call>NAME | <arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>"
    " | </tool_call> | "
  ),
  "minimax_m2": (
    '<minimax:tool_call> | <invoke name="NAME"> | <parameter name="KEY">VALUE'
    "</parameter> | </invoke> | </minimax:tool_call>"
  ),
  "deepseek_v32": (  # string="false" around JSON
    '<｜DSML｜function_calls> | <｜DSML｜invoke name="NAME"> | '
    '<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter> | '
    "</｜DSML｜invoke> | </｜DSML｜function_calls>"
  ),
  "deepseek_v31": (
    "<｜tool▁calls▁begin｜> | <｜tool▁call▁begin｜>NAME<｜tool▁sep｜> | JSON | "
    "<｜tool▁call▁end｜> | <｜tool▁calls▁end｜>"
  ),
  "deepseek_v3": (
    "<｜tool▁calls▁begin｜> | <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n"
    "```json\n | JSON | ```<｜tool▁call▁end｜> | <｜tool▁calls▁end｜>"
  ),
  "kimi_k2": (  # the calls of a conversation are numbered
    "<|tool_calls_section_begin|> | <|tool_call_begin|>functions.NAME:0"
    "<|tool_call_argument_begin|> | JSON | <|tool_call_end|> | "
    "<|tool_calls_section_end|>"
  ),
  # Without NAME[ARGS] a list of objects, as in hermes.
  "mistral": " | [TOOL_CALLS]NAME[ARGS] | JSON |  | ",
  # Gemma writes JSON with its own sign around texts and none around keys.
  "gemma4": (
    ' | <|tool_call>call:NAME | {KEY:<|"|>VALUE<|"|>} | <tool_call|> | '
  ),
  "functiongemma": (
    " | <start_function_call>call:NAME | {KEY:<escape>VALUE<escape>} | "
    "<end_function_call> | "
  ),
}
# Strings of the chat template that writes a format; the first one that fits.
_SIGNS = {
  "glm45": ("<arg_key>",),
  "qwen3_coder": ("<function=", "<parameter="),
  "minimax_m2": ("<minimax:tool_call>",),
  "deepseek_v32": ("｜DSML｜",),
  "deepseek_v3": ("<｜tool▁sep｜>", "```json"),
  "deepseek_v31": ("<｜tool▁sep｜>",),
  "kimi_k2": ("<|tool_call_argument_begin|>",),
  "mistral": ("[TOOL_CALLS]",),
  "gemma4": ("<|tool_call>",),
  "functiongemma": ("<start_function_call>",),
  "openai": ("<|channel|>", "functions."),
  "hermes": ("<tool_call>",),
  "llama3_json": ("<|start_header_id|>", '"parameters":'),
}
# Patterns for what stands in a shape. A policy chooses the text: each takes
# time linear in its length.
_HOLES = {
  "NAME": r'((?:[^<>"\n{\[:]|:(?!\d))*)',
  ":0": r"(?::\d+)?",
  "KEY": r'([^<>"]*)',
  "VALUE": r"(.*?)",
  "\\\n": r"\n?",
  r'\ string="true"': r'(?: string="\w+")?',
  r"\[ARGS\]": r"(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?",
}
_TAG = re.compile(r"[<\[][^=\]>]*[=\]>]")
# Or one that was cut before its arguments.
_LLAMA = re.compile(
  r'[;\s]*(?=\{(?=.*?"name")(?=.*?"(?:arguments|parameters)"|[^{}]*\Z))',
  re.DOTALL,
)
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_WRITTEN = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
# Of a key of Gemma, or another word.
_GEMMA = re.compile(r"([^\s{}\[\],:\"]+)(\s*:)?")
_SPACE = re.compile(r"\s*")
# As Jinja writes them without its filter `tojson`.
_OF_PYTHON = {"True": True, "False": False, "None": None}


def format_of(template: str) -> str:
  """The format that a chat template writes; "" if it is unknown."""
  for name, signs in _SIGNS.items():
    if all(sign in template for sign in signs):
      return name
  return ""


def parse(text: str, format: str, schemas: Schemas = _NONE) -> Parsed:
  """The calls of a response, in their order.

  Args:
    text: the response, without its stop token; behind `thinking.opening` of its
      prompt.
    format: one of `FORMATS`.
    schemas: of the functions that may be called. A VALUE is the JSON that it
      is, if its schema allows that, else a text. Arguments that do not fit are
      no error here.
  """
  if format != "openai" or text.lstrip().startswith(thinking.OPEN):
    text = thinking.split(text)[1]  # the channels of gpt-oss are read below
  return FORMATS[format](text, schemas)


class _Shape(NamedTuple):
  text: str
  before: re.Pattern  # before the tag
  begin: re.Pattern  # with the name
  argument: re.Pattern
  end: re.Pattern


@functools.cache
def _shape(format: str) -> _Shape:
  parts = _SHAPES[format].split(" | ")
  before, begin, argument, end, behind = map(re.escape, parts)
  tag = _TAG.match(parts[1])[0]
  is_next = f"(?={re.escape(tag)})"
  if "KEY:" in argument:
    sign = argument[len(r"\{KEY:") :].partition("VALUE")[0]
    quoted = rf"{sign}(?:(?!{sign}).)*{sign}"
    argument = rf"((?:{quoted}|(?!{end}|{sign}).)*)(?={end})"
  else:
    argument += rf"\s*(?={argument.partition('KEY')[0]}|{end})"
  sources = (
    rf"{before}(?:\s*{is_next})?|{is_next}" if before else is_next,
    rf"{begin}\s*",
    argument,
    rf"\s*{end}(?:\s*{behind})?",
  )
  patterns = []
  for source in sources:
    for hole, pattern in _HOLES.items():
      source = source.replace(hole, pattern)
    patterns.append(re.compile(source, re.DOTALL))
  text = _SHAPES[format].replace(" | ", "")
  return _Shape(text, *patterns)


def _shaped(format: str, text: str, schemas: Schemas) -> Parsed:
  shape = _shape(format)
  read = _read_json
  if shape.argument.groups:
    read = _read_texts if shape.argument.groups > 1 else _read_gemma
  content, calls, place = [], [], 0
  while found := shape.before.search(text, place):
    content.append(text[place : found.start()])
    begin = shape.begin.match(text, found.end())
    name = begin[1].strip() if begin and shape.begin.groups else ""
    try:
      if not begin:
        raise ValueError("a call has another beginning")
      schema = schemas.get(name) or {}
      made, place = read(text, begin.end(), shape, name, schema)
      if not (end := shape.end.match(text, place)):
        raise ValueError("a call has no end")
      place = end.end()
    except (ValueError, RecursionError) as error:
      why = f"{error}: expected {shape.text}"
      made, text, place = [ToolCall(name or _UNKNOWN, error=why)], "", 0
    calls += made
  content.append(text[place:])
  return Parsed("".join(content).strip(), tuple(calls))


def _read_json(text, place, shape, name, schema):
  value, place = _decoded(text, place)
  if name:
    return [_checked(name, value)], place
  several = value if isinstance(value, list) and value else [value]
  return [*map(_of_object, several)], place


def _read_texts(text, place, shape, name, schema):
  arguments, error = {}, ""
  of, others = schema.get("properties") or {}, "additionalProperties"
  while pair := shape.argument.match(text, place):
    key, value = pair[1].strip(), pair[2]
    if key in arguments:
      error = "expected each argument once"
    if ' string="true"' not in text[pair.end(1) : pair.start(2)]:
      value = _value(value, of.get(key, schema.get(others, True)), schema)
    arguments[key], place = value, pair.end()
  return [ToolCall(name, {} if error else arguments, error)], place


def _read_gemma(text, place, shape, name, schema):
  if not (found := shape.argument.match(text, place)):
    raise ValueError("a call has no end")
  parts = found[1].split(shape.text.partition("KEY:")[2].partition("VALUE")[0])
  quoted = lambda word: f'"{word[1]}":' if word[2] else word[0]
  for i, part in enumerate(parts):
    parts[i] = json.dumps(part) if i % 2 else _GEMMA.sub(quoted, part)
  return [_checked(name, _JSON.decode("".join(parts)))], found.end()


def _llama3_json(text: str, schemas: Schemas) -> Parsed:
  rest, calls = text.strip().removeprefix("<|python_tag|>"), []
  place = 0
  while begin := _LLAMA.match(rest, place):
    try:
      value, end = _decoded(rest, begin.end())
    except ValueError as error:
      return Parsed("", (*calls, ToolCall(_UNKNOWN, error=str(error))))
    if "name" not in value or not {"arguments", "parameters"} & value.keys():
      break
    calls.append(_of_object(value))
    place = end
  rest = rest[place:].lstrip("; \n")
  return Parsed(rest if calls else text, tuple(calls))


def _openai(text: str, schemas: Schemas) -> Parsed:
  content, calls, place = thinking.split(text)[1], [], 0
  while place < len(text):
    header = thinking.HEADER.match(text, place)
    name = header and _RECIPIENT.search(header[1])
    place = header.end() if header else place + 1
    if name and "<|channel|>" in header[1]:
      try:
        value, place = _decoded(text, place)
      except ValueError as error:
        calls.append(ToolCall(name[1], error=str(error)))
        break
      calls.append(_checked(name[1], value))
    place = thinking.END.search(text, place).end()
  return Parsed(content, tuple(calls))


def _call(text: str, schemas: Schemas) -> Parsed:
  call = _WRITTEN.fullmatch(text)
  if not call or call[1] not in schemas:
    return Parsed(text)
  first = list(schemas[call[1]].get("properties") or {})[:1]
  return Parsed("", (ToolCall(call[1], dict.fromkeys(first, call[2])),))


FORMATS: Mapping[str, Callable[[str, Schemas], Parsed]] = {
  **{name: functools.partial(_shaped, name) for name in _SHAPES},
  "call": _call,
  "llama3_json": _llama3_json,
  "openai": _openai,
}


def _of_object(value: Any) -> ToolCall:
  name = value.get("name") if isinstance(value, dict) else None
  if not isinstance(name, str):
    return ToolCall(
      _UNKNOWN, error='a call lacks "name": expected an object with it'
    )
  for key in ("arguments", "parameters"):
    if key in value:
      return _checked(name, value[key])
  return ToolCall(name)


def _checked(name: str, arguments: Any) -> ToolCall:
  try:
    return ToolCall(name, fitted(arguments, {"type": "object"}))
  except ValueError as error:
    return ToolCall(name, error=f"arguments: {error}")


def _number(text: str) -> float:
  if text in ("NaN", "Infinity", "-Infinity") or abs(float(text)) == math.inf:
    raise ValueError(f"no number of JSON: {text}")
  return float(text)


_JSON = json.JSONDecoder(parse_constant=_number, parse_float=_number)


def _decoded(text: str, place: int = 0) -> tuple[Any, int]:
  """The JSON value at a place, and the place behind it."""
  try:
    return _JSON.raw_decode(text, _SPACE.match(text, place).end())
  except (ValueError, RecursionError) as error:
    raise ValueError(f"a call is not valid JSON: {error}") from error


def _value(text: str, schema: Any, root: Any) -> Any:
  """JSON if its schema allows it, else a text."""
  try:
    value = _OF_PYTHON[text] if text in _OF_PYTHON else _JSON.decode(text)
  except (ValueError, RecursionError):
    return text
  choices = (text, value) if isinstance(value, str) else (value, text)
  for choice in choices:
    try:
      return fitted(choice, schema, root)
    except Exception:  # it does not fit, or the client's schema is none
      continue
  return choices[0]
