"""Where the thinking of a response begins and ends."""

import re

OPEN, CLOSE = "<think>", "</think>"
_TAGGED = re.compile(rf"\s*{OPEN}(.*?)(?:{CLOSE}\s*|\Z)", re.DOTALL)
_CHANNEL, _NEXT = "<|channel|>", "<|start|>assistant"  # of gpt-oss (harmony)
_ANALYSIS = re.compile(
  r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>"
  r"(.*?)(?:<\|end\|>|(?=<\|start\|>)|\Z)",
  re.DOTALL,
)


def opening(prompt: str) -> str:
  """The `<think>` that a prompt ends with, and the white space behind it."""
  _, tag, space = prompt.rpartition(OPEN)
  return "" if space.strip() else tag + space


def split(text: str) -> tuple[str, str]:
  """The thinking of a response, and the text behind it.

  Thinking begins with `<think>`, or is in the channel `analysis`. Without an
  end it is the whole response. If a prompt ends with `<think>`, put its
  `opening` before the response.
  """
  if tagged := _TAGGED.match(text):
    return tagged[1].strip(), text[tagged.end() :]
  if not text.startswith(_CHANNEL):
    return "", text
  rest = _ANALYSIS.sub("", text).removeprefix(_NEXT)
  thoughts = "\n".join(_ANALYSIS.findall(text)).strip()
  return thoughts, rest.removeprefix(f"{_CHANNEL}final<|message|>")


def behind(prompt: str, response: str) -> str:
  """The response without its thinking, as most rewards read it."""
  return split(opening(prompt) + response)[1]
