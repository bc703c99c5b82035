"""Tool calls in the text of a response, and their formats by model family.

The formats have the names of vLLM's tool-call parsers
(https://docs.vllm.ai/en/latest/features/tool_calling/); `call` is our own:

  hermes        <tool_call>{"name": .., "arguments": {..}}</tool_call>
                (Qwen2.5, Qwen3, Hermes)
  qwen3_coder   <tool_call><function=NAME><parameter=KEY>VALUE</parameter>
                </function></tool_call>
  glm45         <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE
                </arg_value></tool_call> (GLM-4.5 to 4.7)
  llama3_json   {"name": .., "parameters": {..}}, several with a semicolon
                between them (Llama 3.1 to 3.3)
  openai        to=functions.NAME in a message's header, JSON as its text
                (gpt-oss, https://cookbook.openai.com/articles/openai-harmony)
  deepseek_v3   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, a line with
                ```json, the JSON, ``` and <｜tool▁call▁end｜>
  deepseek_v31  <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>
  call          NAME(VALUE) and nothing else, for tokenizers without a chat
                template: VALUE is the text of the first parameter

Control tokens are visible in the text. A call in thinking is none: thinking
ends with `</think>`, and begins with `<think>` or in the prompt. Worker
processes import this module, so it needs the standard library alone.
"""

import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class ToolCall(NamedTuple):
  name: str  # of the function; "unknown" if it cannot be read
  arguments: Mapping[str, Any] = {}
  error: str = ""  # what is wrong with the call, for the policy; "" if nothing


class Parsed(NamedTuple):
  content: str  # the text outside the calls and the thinking
  calls: tuple[ToolCall, ...] = ()


# The parameters of each function, with their types.
Parameters = Mapping[str, Mapping[str, Any]]
_NONE: Parameters = types.MappingProxyType({})

_UNKNOWN = "unknown"
# Strings of the chat template that writes a format; the first one that fits.
_SIGNS = {
  "glm45": ("<arg_key>",),
  "qwen3_coder": ("<function=", "<parameter="),
  "deepseek_v3": ("<｜tool▁sep｜>", "```json"),
  "deepseek_v31": ("<｜tool▁sep｜>",),
  "openai": ("<|channel|>", "functions."),
  "hermes": ("<tool_call>",),
  "llama3_json": ("<|start_header_id|>", '"parameters":'),
}
# How a call begins and ends, in the formats of models that think in the text.
_TAGS = "<tool_call>", "</tool_call>"
_TOKENS = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_ENDS = {
  "deepseek_v3": _TOKENS,
  "deepseek_v31": _TOKENS,
  "glm45": _TAGS,
  "hermes": _TAGS,
  "qwen3_coder": ("<function=", "</function>"),
}
# A policy chooses the text: each pattern takes time linear in its length.
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_CODED = re.compile(  # Qwen3-Coder may leave the first tag out
  _TAGGED.pattern + r"|(<function=.*?(?:</function>|\Z))(?:\s*</tool_call>)?",
  re.DOTALL,
)
_FUNCTION = re.compile(r"<function=([^<>]*)>\s*(?:</function>)?")
_PARAMETER = re.compile(  # behind "<parameter="
  r"([^<>]*)>\n?(.*?)\n?</parameter>\s*(?:</function>)?", re.DOTALL
)
_ARGUMENT = re.compile(  # behind "<arg_key>"
  r"([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL
)
_LLAMA = re.compile(
  r'\{(?=.*?"name")(?=.*?"(?:arguments|parameters)")', re.DOTALL
)
_DEEPSEEK = re.compile(
  r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL
)
_FENCED = re.compile(r"([^\n]*)\n```json\n(.*?)\n?```\s*", re.DOTALL)
_HARMONY_ENDS = re.compile(r"<\|(?:start\|>assistant|end\|>|call\|>|return\|>)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_WRITTEN = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
# As Jinja writes them without its filter `tojson`.
_OF_PYTHON = {"True": True, "False": False, "None": None}


def format_of(template: str) -> str:
  """The format that a chat template writes; "" if it is unknown."""
  for name, signs in _SIGNS.items():
    if all(sign in template for sign in signs):
      return name
  return ""


def parse(text: str, format: str, parameters: Parameters = _NONE) -> Parsed:
  """The calls of a response, in their order.

  Args:
    text: the response, without its stop token.
    format: one of `FORMATS`.
    parameters: of the functions that may be called. In `qwen3_coder` and
      `glm45`, which write a text without quotes, a value is JSON if it can be,
      unless its parameter is a `str`, a union with it, or a `Literal` of texts.
  """
  return FORMATS[format](_behind_thinking(text, format), parameters)


def _behind_thinking(text: str, format: str) -> str:
  thinking, end, answer = text.partition("</think>")
  if thinking.lstrip().startswith("<think>"):
    return answer
  if not end or format not in _ENDS:
    return text
  # A `</think>` in an argument ends no thinking.
  begins, ends = _ENDS[format]
  is_open = thinking.rfind(begins) > thinking.rfind(ends)
  is_in_call = is_open and ends in answer.partition(begins)[0]
  return text if is_in_call else answer


def _hermes(text: str, parameters: Parameters) -> Parsed:
  return _tagged(text, _of_json)


def _qwen3_coder(text: str, parameters: Parameters) -> Parsed:
  def call_of(body):
    head, *parts = body.split("<parameter=")
    name = _FUNCTION.fullmatch(head.strip())
    if not name:
      return ToolCall(
        _UNKNOWN, error="expected one <function=NAME> in <tool_call>"
      )
    expected = "<parameter=KEY>VALUE</parameter>"
    return _of_texts(name[1].strip(), parts, _PARAMETER, expected, parameters)

  return _tagged(text, call_of, _CODED)


def _glm45(text: str, parameters: Parameters) -> Parsed:
  def call_of(body):
    name, *parts = body.split("<arg_key>")
    expected = "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"
    return _of_texts(name.strip(), parts, _ARGUMENT, expected, parameters)

  return _tagged(text, call_of)


def _llama3_json(text: str, parameters: Parameters) -> Parsed:
  rest = text.strip().removeprefix("<|python_tag|>").lstrip()
  calls, decoder = [], json.JSONDecoder()
  while _LLAMA.match(rest):
    try:
      value, end = decoder.raw_decode(rest)
    except (ValueError, RecursionError) as error:
      calls.append(
        ToolCall(_UNKNOWN, error=f"a call is not valid JSON: {error}")
      )
      return Parsed("", tuple(calls))
    if "name" not in value or not {"arguments", "parameters"} & value.keys():
      break
    calls.append(_of_object(value))
    rest = rest[end:].lstrip("; \n")
  return Parsed(rest if calls else text, tuple(calls))


def _openai(text: str, parameters: Parameters) -> Parsed:
  # Without channels a text is the answer; with them the last final one is.
  calls, content = [], "" if "<|channel|>" in text else text
  for message in _HARMONY_ENDS.split(text):
    header, _, body = message.partition("<|message|>")
    if name := _RECIPIENT.search(header):
      calls.append(_of_arguments(name[1], body))
    elif "<|channel|>final" in header:
      content = body
  return Parsed(content, tuple(calls))


def _deepseek_v3(text: str, parameters: Parameters) -> Parsed:
  def call_of(body):
    fenced = _FENCED.fullmatch(body.partition("<｜tool▁sep｜>")[2])
    if not fenced:
      error = (
        "expected function<｜tool▁sep｜>NAME and JSON between ```json and ```"
      )
      return ToolCall(_UNKNOWN, error=error)
    return _of_arguments(fenced[1].strip(), fenced[2])

  return _deepseek(text, call_of)


def _deepseek_v31(text: str, parameters: Parameters) -> Parsed:
  def call_of(body):
    name, _, arguments = body.partition("<｜tool▁sep｜>")
    return _of_arguments(name.strip(), arguments)

  return _deepseek(text, call_of)


def _call(text: str, parameters: Parameters) -> Parsed:
  call = _WRITTEN.fullmatch(text)
  if not call or call[1] not in parameters:
    return Parsed(text)
  first = [*parameters[call[1]]][:1]
  return Parsed("", (ToolCall(call[1], dict.fromkeys(first, call[2])),))


FORMATS: Mapping[str, Callable[[str, Parameters], Parsed]] = {
  "call": _call,
  "deepseek_v3": _deepseek_v3,
  "deepseek_v31": _deepseek_v31,
  "glm45": _glm45,
  "hermes": _hermes,
  "llama3_json": _llama3_json,
  "openai": _openai,
  "qwen3_coder": _qwen3_coder,
}


def _tagged(
  text: str, read: Callable[[str], ToolCall], pattern: re.Pattern = _TAGGED
) -> Parsed:
  found = pattern.finditer(text)
  calls = (read(call[call.lastindex].strip()) for call in found)
  return Parsed(pattern.sub("", text).strip(), tuple(calls))


def _deepseek(text: str, read: Callable[[str], ToolCall]) -> Parsed:
  content = text.partition("<｜tool▁calls▁begin｜>")[0].strip()
  return Parsed(content, tuple(map(read, _DEEPSEEK.findall(text))))


def _of_json(text: str) -> ToolCall:
  try:
    return _of_object(json.loads(text))
  except (ValueError, RecursionError) as error:
    return ToolCall(_UNKNOWN, error=f"a call is not valid JSON: {error}")


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


def _of_arguments(name: str, text: str) -> ToolCall:
  try:
    return _checked(name, json.loads(text))
  except (ValueError, RecursionError) as error:
    return ToolCall(name, error=f"its arguments are not valid JSON: {error}")


def _checked(name: str, arguments: Any) -> ToolCall:
  if isinstance(arguments, dict):
    return ToolCall(name, arguments)
  got = type(arguments).__name__
  return ToolCall(name, error=f"expected an object as arguments, got {got}")


def _of_texts(name, parts, pattern, expected: str, parameters) -> ToolCall:
  """The call whose arguments are these parts, each of which fits `pattern`."""
  found = [pattern.fullmatch(part) for part in parts]
  if not all(found):
    return ToolCall(name, error=f"expected {expected} for each argument")
  kinds = parameters.get(name, {})
  pairs = [(pair[1].strip(), pair[2]) for pair in found]
  arguments = {key: _value(text, kinds.get(key)) for key, text in pairs}
  if len(arguments) < len(pairs):
    return ToolCall(name, error="expected each argument once")
  return ToolCall(name, arguments)


def _value(text: str, kind: Any) -> Any:
  if _is_text(kind):
    return text
  if text in _OF_PYTHON:
    return _OF_PYTHON[text]
  try:
    return json.loads(text)
  except (ValueError, RecursionError):
    return text


def _is_text(kind: Any) -> bool:
  """Whether a value of the type may be a text."""
  among = typing.get_args(kind)
  match typing.get_origin(kind):
    case typing.Literal:
      return all(isinstance(value, str) for value in among)
    case typing.Union | types.UnionType | typing.Annotated:
      return any(map(_is_text, among))
  return kind is str
