"""Formats of tool calls: what a model of each family writes is read."""

import json
import random
import re
import time

import pytest

from gspo_jax.data.tool_calls import FORMATS, ToolCall, format_of, parse

ROME = ToolCall("get_weather", {"city": "Roma – 罗马", "days": 2})
OSLO = ToolCall("get_weather", {"city": "Oslo", "days": 1})
SCHEMA = {"city": {"type": "string"}, "days": {"type": "integer"}}
PARAMETERS = {"get_weather": {"properties": SCHEMA}}


def _texts(pair, call, sections=("", "")):
  """A writer of calls in a format of texts."""
  write = lambda x: x if isinstance(x, str) else json.dumps(x)
  one = lambda c: call.format(
    c.name, "".join(pair.format(k, write(v)) for k, v in c.arguments.items())
  )
  return lambda calls: "".join(map(one, calls)).join(sections)


def _jsons(call, sections=("", ""), between=""):
  dumps = lambda c: json.dumps(c.arguments, ensure_ascii=False)
  one = lambda i, c: call % {"name": c.name, "json": dumps(c), "i": i}
  return lambda calls: between.join(
    one(i, c) for i, c in enumerate(calls)
  ).join(sections)


def _gemma(sign, call):
  def write(x):
    if isinstance(x, str):
      return sign + x + sign
    if isinstance(x, list):
      return f"[{','.join(map(write, x))}]"
    if isinstance(x, dict):
      return "{" + ",".join(f"{k}:{write(v)}" for k, v in x.items()) + "}"
    return json.dumps(x)

  return lambda calls: "".join(
    call % (c.name, write(c.arguments)) for c in calls
  )


_OBJECT = '{"name": "%(name)s", "arguments": %(json)s}'
_DEEP = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
# How a model writes calls, and what no text may have there.
WRITERS = {
  "hermes": (_jsons(f"<tool_call>\n{_OBJECT}\n</tool_call>"), ()),
  "qwen3_coder": (_texts(
    "<parameter={}>\n{}\n</parameter>\n",
    "<tool_call>\n<function={}>\n{}</function>\n</tool_call>",
  ), ("</parameter>",)),
  "glm45": (_texts(
    "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
    "<tool_call>{}\n{}</tool_call>",
  ), ("</arg_value>",)),
  "minimax_m2": (_texts(
    '<parameter name="{}">{}</parameter>\n',
    '<invoke name="{}">\n{}</invoke>\n',
    ("<minimax:tool_call>\n", "</minimax:tool_call>"),
  ), ("</parameter>",)),
  "deepseek_v32": (_texts(
    '<｜DSML｜parameter name="{}" string="false">{}</｜DSML｜parameter>\n',
    '<｜DSML｜invoke name="{}">\n{}</｜DSML｜invoke>\n',
    ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
  ), ("</｜DSML｜parameter>",)),
  "deepseek_v31": (_jsons(
    "<｜tool▁call▁begin｜>%(name)s<｜tool▁sep｜>%(json)s<｜tool▁call▁end｜>",
    _DEEP,
  ), ()),
  "deepseek_v3": (_jsons(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%(name)s\n```json\n%(json)s\n"
    "```<｜tool▁call▁end｜>", _DEEP, "\n",
  ), ()),
  "kimi_k2": (_jsons(
    "<|tool_call_begin|>functions.%(name)s:%(i)s<|tool_call_argument_begin|>"
    "%(json)s<|tool_call_end|>",
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
  ), ()),
  "mistral": (_jsons("[TOOL_CALLS]%(name)s[ARGS]%(json)s"), ()),
  "mistral, before 11": (_jsons(_OBJECT, ("[TOOL_CALLS] [", "]"), ", "), ()),
  "gemma4": (_gemma('<|"|>', "<|tool_call>call:%s%s<tool_call|>"), ('<|"|>',)),
  "functiongemma": (_gemma(
    "<escape>", "<start_function_call>call:%s%s<end_function_call>",
  ), ("<escape>",)),
  "llama3_json": (_jsons(
    '{"name": "%(name)s", "parameters": %(json)s}', between="; ",
  ), ()),
  "openai": (_jsons(
    "<|channel|>commentary to=functions.%(name)s <|constrain|>json"
    "<|message|>%(json)s<|call|>", between="<|start|>assistant",
  ), ()),
}  # fmt: skip
# Thinking and text of a response, before two calls in it.
BEFORE = {
  "hermes": "<think>\nTwo cities.\n</think>\n\nI look.\n",
  "glm45": "\n<think>Two cities.</think>\nI look.\n",
  "openai": "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant",
  "llama3_json": "",
}
EXAMPLES = {
  name: BEFORE.get(name, "I look.") + write((ROME, OSLO))
  for name, (write, _) in WRITERS.items()
  if "," not in name
}
# How some models write the second one.
OTHERS = [
  ("hermes", '<tool_call>{"name": "get_weather", "arguments": '
   '{"city": "Oslo", "days": 1}}</tool_call>\n'),
  ("glm45", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo"
   "</arg_value><arg_key>days</arg_key><arg_value>1</arg_value></tool_call>"),
  ("llama3_json", '<|python_tag|>{"type": "function", "name": "get_weather", '
   '"parameters": {"city": "Oslo", "days": 1}}'),
  ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
   '```json\n{"city": "Oslo",\n "days": 1}\n```<｜tool▁call▁end｜>'),
  ("deepseek_v32", '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter '
   'name="city" string="true">Oslo</｜DSML｜parameter>\n<｜DSML｜parameter '
   'name="days" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>'),
  ("mistral", "[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]"
   '{"city": "Oslo", "days": 1}'),
]  # fmt: skip
BROKEN = {
  "hermes": ['<tool_call>\n{"name": "f", "arguments": {"x": }}\n</tool_call>'],
  "llama3_json": ['{"name": "f", "parameters": {"x": 1}', '{"name": "f", "pa'],
  "openai": ["<|channel|>commentary to=functions.f<|message|>{'x': 1}",
             "<|channel|>commentary to=functions.f"],
  "deepseek_v3": [
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{x}\n```",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"],
  "deepseek_v31": [
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{x}<｜tool▁call▁end｜>"],
  "qwen3_coder": [
    '<tool_call>{"name": "f"}</tool_call>',
    "<tool_call><function=f><parameter=x>1</tool_call>",
    "<function=f><parameter=x>1",
    "<tool_call><function=f><parameter=x>1</parameter><parameter=x>2"
    "</parameter></function></tool_call>",
    "<tool_call><tool_call><function=f></function></tool_call>"],
  "glm45": [
    "<tool_call>f<arg_key>x</arg_key>1</tool_call>",
    "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value>"
    "<arg_key>x</arg_key><arg_value>2</arg_value></tool_call>"],
  "minimax_m2": ["<minimax:tool_call></minimax:tool_call>",
                 '<invoke name="f"><parameter name="x">1</invoke>'],
  "deepseek_v32": ['<｜DSML｜invoke name="f"></｜DSML｜function_calls>'],
  "kimi_k2": [
    "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{x}"],
  "mistral": ["[TOOL_CALLS]f[ARGS]{x}", "[TOOL_CALLS] [1]", "[TOOL_CALLS]f"],
  "gemma4": ["<|tool_call>f{}<tool_call|>",
             '<|tool_call>call:f{x:<|"|>1}<tool_call|>',
             "<|tool_call>call:f{x:1}{}<tool_call|>"],
  "functiongemma": ["<start_function_call>call:f{x:}<end_function_call>"],
}  # fmt: skip
OBJECTS = [
  ("[1]", 'lacks "name"'), ('{"arguments": {}}', 'lacks "name"'),
  ('{"name": "f", "arguments": "x"}', 'arguments: expected object, got "x"'),
  ('{"name": "f", "arguments": ' + "[" * 10**5, "not valid JSON"),
]  # fmt: skip


def test_a_header_of_gpt_oss_may_have_its_parts_in_any_order():
  call = ToolCall("f", {"x": 1})
  for header in (
    "<|channel|>commentary to=functions.f <|constrain|>json",
    "<|channel|>commentary<|constrain|>json to=functions.f",
    " to=functions.f<|channel|>commentary json",
  ):
    text = f'{header}<|message|>{{"x": 1}}<|call|>'
    assert parse(text, "openai").calls == (call,)
    assert parse(f"5<|start|>assistant{text}", "openai").calls == (call,)
    thought = f"<|channel|>analysis<|message|>I write {text}"
    assert parse(thought, "openai").calls == ()


def test_every_format_has_an_example():
  assert {*EXAMPLES, "call"} == {*FORMATS}
  assert BROKEN.keys() == EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_parallel_calls_are_read_in_their_order(name):
  found = parse(EXAMPLES[name], name, PARAMETERS)
  assert found.calls == (ROME, OSLO)
  said = "I look." in BEFORE.get(name, "I look.")
  assert found.content == "I look." * said


@pytest.mark.parametrize(("name", "text"), OTHERS)
def test_a_call_may_be_written_otherwise(name, text):
  assert parse(text, name, PARAMETERS) == ("", (OSLO,))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_template_that_writes_a_format_has_its_signs(name):
  template = "<|start_header_id|>" if name == "llama3_json" else ""
  assert format_of(template + EXAMPLES[name]) == name


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_call_in_thinking_is_none(name):
  """Whether the thinking is closed or not; behind it, calls count."""
  text = EXAMPLES[name].rpartition("</think>")[2]
  assert parse(f"<think>{text}</think>\n5", name, PARAMETERS).calls == ()
  assert parse(f"<think>{text}", name, PARAMETERS).calls == ()
  for thought in ("a", "with <tool_call> or <function= I", text):
    found = parse(f"<think>{thought}</think>{text}", name, PARAMETERS)
    assert found.calls == (ROME, OSLO)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("city", ["a</think>b", "a<think>b"])
def test_a_sign_of_thinking_in_an_argument_is_text(name, city):
  text = EXAMPLES[name].replace("Oslo", city)
  _, call = parse(text, name, PARAMETERS).calls
  assert call.arguments == {"city": city, "days": 1}
  # In the first call, without thinking before it.
  text = EXAMPLES[name].rpartition("</think>")[2]
  text = text.replace("Roma – 罗马", city)
  first, _ = parse(text, name, PARAMETERS).calls
  assert first.arguments == {"city": city, "days": 2}


# Parts of calls, and what stands before them.
PARTS = {
  "<tool_call>f": (
    "<arg_key>",
    "<arg_key>a</arg_key><arg_value>",
    "</arg_key>",
  ),
  "<tool_call><function=f>": ("<parameter=", "<parameter=a>", "</function>"),
  "": ("<tool_call>", "<function=", '{"name":"f","parameters":{}}', "<think>"),
  "<|channel|>": ("to=functions.", "<|message|>", "<|call|>", "a", "a("),
  "<｜tool▁call▁begin｜>f<｜tool▁sep｜>": ("\n```json\n", "```", "```\n"),
  "<|tool_call_begin|>": (" ", ":1", "functions.", "<|tool_call_begin|>"),
  "[TOOL_CALLS]": ('"[TOOL_CALLS]"', "[CALL_ID]", '[{"name":"f"}][TOOL_CALLS]'),
  "<|tool_call>call:f{": ('<|"|>', "a", "a:", '<|"|>a', "{"),
  '<invoke name="f">': ('<parameter name="a">', "</parameter> ", "</invoke>"),
  '{"name": "parameters": ': ("{", "[", '"name"', '{"name":'),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_time_is_linear_in_the_length(name):
  """Quadratic, a text would take from 1 to 100 s."""
  for start, parts in PARTS.items():
    for part in parts:
      text = start + part * (10**5 // len(part))
      begun = time.process_time()
      parse(text, name)
      assert time.process_time() - begun < 0.5, (start, part)


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_has_no_call(name):
  for text in ("It is 5.", "", '{"answer": 5}', "f(5)"):
    assert parse(text, name, PARAMETERS) == (text, ())


@pytest.mark.parametrize(
  ("name", "text"), [(n, text) for n, texts in BROKEN.items() for text in texts]
)
def test_a_broken_call_is_an_error_for_the_policy(name, text):
  (call,) = parse(text, name).calls
  assert call.error
  assert not call.arguments
  assert call.name in ("unknown", "f")


@pytest.mark.parametrize(("text", "error"), OBJECTS)
def test_json_that_is_a_wrong_call(text, error):
  (call,) = parse(f"<tool_call>{text}</tool_call>", "hermes").calls
  assert error in call.error


# A schema of an argument, what the policy wrote, and what that is.
TEXT, NULL, INT = {"type": "string"}, {"type": "null"}, {"type": "integer"}
VALUES = [
  (TEXT, "7", "7"), (TEXT, '"7"', '"7"'),
  ({"anyOf": [TEXT, NULL]}, "12345", "12345"),
  ({"anyOf": [TEXT, NULL]}, "1.10", "1.10"),
  ({"anyOf": [TEXT, NULL]}, "true", "true"),
  ({"anyOf": [TEXT, NULL]}, "null", None),
  ({"type": ["string", "null"]}, "7", "7"),
  ({"type": "string", "nullable": True}, "None", None),
  ({"oneOf": [INT, TEXT]}, "7", 7), ({"enum": ["7", "8"]}, "7", "7"),
  ({"enum": ["a", 7]}, "7", 7), ({"const": "1"}, "1", "1"),
  ({"$ref": "#/$defs/name"}, "7", "7"),
  ({"allOf": [{"$ref": "#/$defs/name"}]}, "7", "7"), (INT, "2.0", 2),
  ({"type": "number"}, "1e999", "1e999"),
  ({"type": "array", "items": TEXT}, '["a"]', ["a"]),
  ({"type": "object", "additionalProperties": INT}, '{"a": 1}', {"a": 1}),
  ({"type": "array", "items": TEXT}, "", ""),  # the policy's text, as it is
  ({"type": "boolean"}, "True", True), ({}, "True", True), ({}, "NaN", "NaN"),
  ({"type": 3, "properties": [], "anyOf": 1}, "7", 7),
]  # fmt: skip
PAIRS = {
  "qwen3_coder": "<function=f><parameter=x>\n{}\n</parameter></function>",
  "glm45": (
    "<tool_call>f<arg_key>x</arg_key><arg_value>{}</arg_value></tool_call>"
  ),
  "minimax_m2": '<invoke name="f"><parameter name="x">{}</parameter></invoke>',
  "deepseek_v32": (
    '<｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="false">{}'
    "</｜DSML｜parameter></｜DSML｜invoke>"
  ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_a_text_without_quotes_is_what_its_schema_allows(
  name, schema, text, value
):
  schemas = {"f": {"properties": {"x": schema}, "$defs": {"name": TEXT}}}
  (call,) = parse(PAIRS[name].format(text), name, schemas).calls
  assert call == ToolCall("f", {"x": value})
  assert type(call.arguments["x"]) is type(value)


def test_without_a_template_a_call_is_the_whole_response():
  schemas = {"calc": {"properties": {"expression": {}}}, "now": {}}
  read = lambda text: parse(text, "call", schemas).calls
  assert read("calc(3*(4+5))") == (ToolCall("calc", {"expression": "3*(4+5)"}),)
  assert read("now()") == (ToolCall("now"),)
  assert read("calc(1)\n") == read("clac(1)") == read("a calc(1)") == ()


def test_qwen3_coder_may_leave_the_first_tag_out():
  call = "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>"
  f = ToolCall("f", {"x": 1})
  for text in (f"I look.\n{call}\n</tool_call>", f"I look.\n{call}"):
    assert parse(text, "qwen3_coder") == ("I look.", (f,))
  two = f"{call}\n{call}\n<tool_call>{call}</tool_call>"
  assert parse(two, "qwen3_coder") == ("", (f, f, f))


def test_json_that_answers_is_no_call_of_llama():
  read = lambda text: parse(text, "llama3_json")
  for text in ('{"name": "Bob", "age": 3}', '{"a": "name"} has no parameters'):
    assert read(text) == (text, ())
  f = ToolCall("f", {"x": 1})
  call = '{"name": "f", "parameters": {"x": 1}}'
  assert read(f"{call}; {call}\n") == ("", (f, f))
  assert read(f"{call} is it.") == ("is it.", (f,))
  assert read(f'{call}, {{"a": 1}}') == (', {"a": 1}', (f,))
  assert read(f'{call}; {{"name": "f", "parameters": ').calls[1].error


def test_the_answer_of_gpt_oss_is_its_final_channel():
  thought = "<|channel|>analysis<|message|>4?"
  assert parse(thought, "openai") == ("", ())
  final = "<|end|><|start|>assistant<|channel|>final<|message|>5"
  assert parse(thought + final, "openai") == ("5", ())


PIECES = [
  *('"', "\\", "\n", " ", "{", "}", "[", "]", ",", ":", "'", "<", ">", "```"),
  *("Köln", "罗马", "\u2028", "😀", "</", "a", "7", "null", "True", "x" * 40),
]
KINDS = {
  "text": TEXT, "perhaps": {"anyOf": [TEXT, NULL]}, "count": INT,
  "share": {"type": "number"}, "is_on": {"type": "boolean"},
  "words": {"type": "array", "items": TEXT},
  "sums": {"type": "object", "additionalProperties": INT},
  "any": {"$ref": "#/$defs/any"},
}  # fmt: skip
ANY = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/any"}}, INT]}


def _drawn(draw, name):
  """Calls of random arguments, and their schemas."""
  form = name.partition(",")[0]
  tags = re.findall(r"<[^<>]*>|\[\w+\]", EXAMPLES[form])
  tags = [tag for tag in tags if "think>" not in tag]
  without = WRITERS[name][1]

  def text():
    pieces = draw.choices(PIECES + tags, k=draw.randrange(6))
    made = "".join(pieces)
    return (
      "a"
      if made in ("null", "None") or any(sign in made for sign in without)
      else made
    )

  make = {
    "text": text,
    "perhaps": lambda: draw.choice([None, text()]),
    "count": lambda: draw.randrange(-(10**20), 10**20),
    "share": lambda: draw.choice([draw.uniform(-1e9, 1e9), 1e-300, 0]),
    "is_on": lambda: draw.choice([True, False]),
    "words": lambda: [text() for _ in range(draw.randrange(3))],
    "sums": lambda: {k: draw.randrange(9) for k in "ab"[: draw.randrange(3)]},
    "any": lambda: [[draw.randrange(9)], []],
  }
  calls = tuple(
    ToolCall(
      draw.choice(["f", "get_weather", "a.b-c"]),
      {k: make[k]() for k in draw.sample([*KINDS], draw.randrange(5))},
    )
    for _ in range(draw.randrange(1, 4))
  )
  schema = {"properties": KINDS, "$defs": {"any": ANY}}
  return calls, dict.fromkeys(("f", "get_weather", "a.b-c"), schema)


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_is_read_and_what_was_cut_is_no_call(name):
  draw, form = random.Random(name), name.partition(",")[0]
  for _ in range(150):
    calls, schemas = _drawn(draw, name)
    text = WRITERS[name][0](calls)
    assert parse(text, form, schemas).calls == calls, text
    for _ in range(8):
      cut = text[: draw.randrange(len(text))]
      found = parse(cut, form, schemas).calls
      whole = tuple(call for call in found if not call.error)
      assert whole == calls[: len(whole)], cut
      assert found[len(whole) :] == found[-1:] * (len(found) - len(whole))
