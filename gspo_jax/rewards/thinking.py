"""Where the thinking of a response begins and ends."""

import re

OPEN, CLOSE = "<think>", "</think>"
# The end of thinking that does not begin anew.
_CLOSED = re.compile(rf"{CLOSE}(?!\s*{OPEN})")
# Of gpt-oss (harmony): the header of a message, which may be cut, and its end.
HEADER = re.compile(
  r"(?:\s*<\|start\|>)?([^<]*+(?:<\|(?:channel|constrain)\|>[^<]*+)*+)"
  r"(?:<\|message\|>|\Z)"
)
END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z")
_FIRST = re.compile(
  r"\s*(?:<\|start\|>assistant)?(?: ?to=[^\s<]+)? ?<\|channel\|>"
)
_CHANNEL = re.compile(r"<\|channel\|>(\w*)")


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
    end = _CLOSED.search(begin)
    rest = begin[end.end() :].lstrip() if end else ""
    return begin[len(OPEN) : end.start() if end else None].strip(), rest
  if not _FIRST.match(text):
    return "", text
  thoughts, rest, place = [], "", 0
  while place < len(text) and (header := HEADER.match(text, place)):
    end = END.search(text, header.end())
    said, place = text[header.end() : end.start()], end.end()
    channel = _CHANNEL.search(header[1])
    if not channel or "to=" in header[1]:  # a call
      continue
    if channel[1] == "analysis":
      thoughts.append(said)
    elif channel[1] == "final" and header[0].endswith("<|message|>"):
      rest = said
  return "\n".join(thoughts).strip(), rest


def behind(prompt: str, response: str) -> str:
  """The response without its thinking, as most rewards read it."""
  return split(opening(prompt) + response)[1]
