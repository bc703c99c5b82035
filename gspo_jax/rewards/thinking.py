"""Where the thinking of a response begins and ends."""

import re

OPEN, CLOSE = "<think>", "</think>"
# The end of thinking that does not begin anew.
_END = re.compile(rf"{CLOSE}(?!\s*{OPEN})")
# Of gpt-oss (harmony): the first header, and the messages of two channels.
_HEADER = re.compile(
  r"\s*(?:<\|start\|>assistant)?(?: ?to=[^\s<]+)? ?<\|channel\|>"
)
_ANALYSIS, _FINAL = (
  re.compile(
    rf"<\|channel\|>{name}<\|message\|>"
    r"([^<]*(?:<(?!\|(?:end|return|start)\|>)[^<]*)*)"
  )
  for name in ("analysis", r"final(?: ?<\|constrain\|>\w*)?")
)


def opening(prompt: str) -> str:
  """The `<think>` that a prompt ends with, and the white space behind it."""
  _, tag, space = prompt.rpartition(OPEN)
  return "" if not tag or space.strip() else tag + space


def split(text: str) -> tuple[str, str]:
  """The thinking of a response, and the text behind it.

  Thinking begins with `<think>`, or is in the channel `analysis`; then the last
  channel `final` is behind it. Without an end it is the whole response. If a
  prompt ends with `<think>`, put its `opening` before the response.
  """
  begin = text.lstrip()
  if begin.startswith(OPEN):
    end = _END.search(begin)
    rest = begin[end.end() :].lstrip() if end else ""
    return begin[len(OPEN) : end.start() if end else None].strip(), rest
  if not _HEADER.match(text):
    return "", text
  thoughts = "\n".join(_ANALYSIS.findall(text)).strip()
  *_, rest = ["", *_FINAL.findall(text)]
  return thoughts, rest


def behind(prompt: str, response: str) -> str:
  """The response without its thinking, as most rewards read it."""
  return split(opening(prompt) + response)[1]
