"""Where the thinking of a response begins and ends."""

import re

OPEN, CLOSE = "<think>", "</think>"
# Of gpt-oss (harmony).
_ANALYSIS = re.compile(
  r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>"
  r"(.*?)(?:<\|end\|>|(?=<\|start\|>)|\Z)",
  re.DOTALL,
)


def opening(prompt: str) -> str:
  """The `<think>` that a prompt ends with, and the white space behind it."""
  _, tag, space = prompt.rpartition(OPEN)
  return "" if not tag or space.strip() else tag + space


def split(text: str) -> tuple[str, str]:
  """The thinking of a response, and the text behind it.

  Thinking begins with `<think>`, or is in the channel `analysis`. Without an
  end it is the whole response. If a prompt ends with `<think>`, put its
  `opening` before the response.
  """
  begin = text.lstrip()
  if begin.startswith(OPEN):
    thoughts, _, rest = begin.removeprefix(OPEN).partition(CLOSE)
    return thoughts.strip(), rest.lstrip()
  if not text.startswith("<|channel|>"):
    return "", text
  thoughts, rest = "\n".join(_ANALYSIS.findall(text)), _ANALYSIS.sub("", text)
  for header in ("<|start|>assistant", "<|channel|>final<|message|>"):
    rest = rest.removeprefix(header)
  return thoughts.strip(), rest


def behind(prompt: str, response: str) -> str:
  """The response without its thinking, as most rewards read it."""
  return split(opening(prompt) + response)[1]
