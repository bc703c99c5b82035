"""Chat templates of TRL's wheel: ids are those of the whole template."""

import contextlib
import importlib.util
import re
from pathlib import Path

import hf_tokenizers
import jinja2
import pytest
from hf_tokenizers import whole

from gspo_jax.data import tool_calls
from gspo_jax.runtime.errors import UserError

SPEC = importlib.util.find_spec("trl")
FOLDER = Path(*SPEC.submodule_search_locations if SPEC else ["."])
TEMPLATES = {
  path.stem: path.read_text()
  for path in sorted((FOLDER / "chat_templates").glob("*.jinja"))
}
pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(not TEMPLATES, reason="needs the templates of TRL"),
]
CONTROL = re.compile(r"<\|\w+\|>|<｜[^｜]+｜>|\[gMASK\]|<sop>")
# The stop tokens of the families that are loaded.
STOPS = {
  "deepseek": ["<｜end▁of▁sentence｜>"],
  "glm4": ["<|observation|>", "<|user|>", "<|endoftext|>"],
  "gptoss": ["<|return|>", "<|call|>"],
  "llama3": ["<|eot_id|>"],
  "qwen": ["<|im_end|>"],
}
FAMILY = {
  name: stops
  for name in TEMPLATES
  for start, stops in STOPS.items()
  if name.startswith(start)
}
TOOLS = [
  {
    "type": "function",
    "function": {
      "name": name,
      "description": f"The {name} of a city.",
      "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Which."}},
        "required": ["city"],
      },
    },
  }
  for name in ("weather", "clock")
]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "How is it in Köln?"}


def said(content, *names, **fields):
  message = {"role": "assistant", "content": content, **fields}
  calls = [
    {
      "id": f"call{i:05}",
      "type": "function",
      "function": {"name": name, "arguments": {"city": "Köln"}},
    }
    for i, name in enumerate(names)
  ]
  return message | ({"tool_calls": calls} if calls else {})


def result(i, text):
  return {"role": "tool", "content": text, "tool_call_id": f"call{i:05}"}


THOUGHT = {"reasoning_content": "A thought."}
AND_NOW = {"role": "user", "content": "And now?"}
CHATS = {
  "single": ([SYSTEM, USER], []),
  "two turns": ([USER, said("Rain."), AND_NOW], []),
  "thinking": ([USER, said("Rain.", **THOUGHT), AND_NOW], []),
  "tools": ([SYSTEM, USER], TOOLS),
  "call": ([USER, said("", "weather"), result(0, "rain")], TOOLS),
  "thinking and call": (
    [USER, said("", "weather", **THOUGHT), result(0, "rain")], TOOLS),
  "parallel calls": (
    [USER, said("", "weather", "clock"), result(0, "rain"), result(1, "noon"),
     said("Rain at noon."), AND_NOW], TOOLS),
}  # fmt: skip


def load(name, folder):
  template, stops = TEMPLATES[name], FAMILY[name]
  control = sorted({*CONTROL.findall(template), *stops, "<s>"})
  fast = hf_tokenizers.of_bytes(control)
  names = {"eos_token": stops[0], "bos_token": "<s>"}
  return hf_tokenizers.save(folder / name, fast, template, stops, **names)


def tagged(message):
  """A message for a template that does not know the field of thinking."""
  thoughts = message.get("reasoning_content")
  tags = f"<think>\n{thoughts}\n</think>\n\n" if thoughts else ""
  plain = {k: v for k, v in message.items() if k != "reasoning_content"}
  return plain | {"content": tags + message["content"]}


def require_chat(tokenizer, messages, tools):
  """The ids of the whole template, or its own error; no tool left out."""
  form = dict if tokenizer._writes_thinking else tagged
  try:
    theirs = whole(tokenizer, [*map(form, messages)], tools)
  except jinja2.TemplateError as error:
    with pytest.raises(UserError, match=re.escape(str(error))):
      tokenizer.chat(messages, tools)
    return
  text = tokenizer._library.decode(theirs)
  if all(f"The {tool['function']['name']} of" in text for tool in tools):
    assert tokenizer.chat(messages, tools) == theirs
    # gpt-oss writes the first of several calls alone.
    drops = tokenizer.tool_format == "openai" and "noon" in text
    refused = pytest.raises(UserError, match=r"leaves out .*call of 'clock':")
    with refused if drops else contextlib.nullcontext():
      tokenizer.check_prompt(messages, tools)
  else:
    with pytest.raises(UserError, match="leaves out the tool 'weather'"):
      tokenizer.chat(messages, tools)


def require_turns(tokenizer, response, answer, tools=()):
  """Turn by turn the ids are those of the whole template, thinking included."""
  messages = [USER]
  ids = tokenizer.chat(messages, tools)
  prompt = tokenizer.decode(ids).rstrip()
  if prompt.endswith("<think>"):
    response = response | THOUGHT
    response = response if tokenizer._writes_thinking else tagged(response)
  elif prompt.endswith("</think>"):
    response = response | {"reasoning_content": ""}
  for _ in range(2):
    messages += [response, answer]
    theirs = whole(tokenizer, messages, tools)
    assert theirs[: len(ids)] == ids
    new = theirs[len(ids) :]
    end = 1 + next(i for i, x in enumerate(new) if x in tokenizer.stop_ids)
    turn = answer["role"], answer["content"]
    if tools:
      turn = *turn, "weather"
      said = tokenizer.decode(new[: end - 1])
      (call,) = tool_calls.parse(said, tokenizer.tool_format).calls
      assert call == ("weather", {"city": "Köln"}, "")
    ids += new[:end] + tokenizer.turn([turn], stopped=True)
    assert ids == theirs


CALLED = said("", "weather", **THOUGHT), result(0, "rain")
TURNS = {
  "user": (said("Rain."), AND_NOW, ()),
  "tool": (said("Rain."), result(0, "rain"), ()),
  "calls": (*CALLED, TOOLS),
}


ALL = {*TURNS}
# What is accepted; of a template for training, at least what is accepted of the
# template for inference.
ACCEPTED = {
  "glm4moe": {"calls"}, "gptoss": {"calls"}, "llama3": {"user", "tool"},
  "llama3_1": ALL, "llama3_2": ALL, "qwen2_5": ALL,
  "qwen2_5_vl": {"user", "tool"}, "qwen3": {"tool", "calls"},
  "qwen3_5_think": {"calls"}, "qwen3_6": {"calls"}, "qwen3_8": {"calls"},
  "qwen3_instruct_2507": ALL, "qwen3_training": {"calls"}, "qwen3_vl": ALL,
}  # fmt: skip


@pytest.mark.parametrize("family", STOPS)
def test_ids_are_those_of_the_whole_template(tmp_path, family):
  """Whatever `check_turns` accepts goes on turn by turn."""
  names = [name for name in FAMILY if name.startswith(family)]
  assert names
  for name in names:
    tokenizer, refused = load(name, tmp_path), {}
    for messages, tools in CHATS.values():
      require_chat(tokenizer, messages, tools)
    for kind, turns in TURNS.items():
      role = turns[1]["role"]
      try:
        tokenizer.check_turns([role], turns[2], tokenizer.tool_format)
      except UserError as error:
        refused[kind] = str(error)
        continue
      require_turns(tokenizer, *turns)
    inference = ACCEPTED.get(name.removesuffix("_training"), set())
    assert ACCEPTED.get(name, inference).isdisjoint(refused), refused
