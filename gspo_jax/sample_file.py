"""The files of sample answers: text to read, and to take apart again.

  ---- 1 of 4, step 12, reward 0.5
  question:
  2+2?
  answer:
  2+2=4
  reference: 4

A policy could write such lines itself, and forge answers with rewards. So what
looks like one inside a question or an answer is indented by a space.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

_MARK = "(?=---- |question:|answer:|reference:)"
_LIKE_A_MARK = re.compile(f"^(?= *{_MARK})", re.M)
_INDENTED = re.compile(f"^ (?= *{_MARK})", re.M)
_HEAD = re.compile(r"^---- \d+ of \d+, step \d+, reward (\S+)\n", re.M)
_BODY = re.compile(r"question:\n(.*?)\nanswer:\n(.*)\nreference: (.*)", re.S)


class Sample(NamedTuple):
  """An answer as a file shows it: control characters are escaped."""

  question: str
  answer: str
  reference: str
  reward: str


def write(step: int, rows: Sequence[tuple[str, str, str, float]]) -> str:
  """A file's text, of rows of question, answer, reference, reward."""
  text = ""
  for i, (question, answer, reference, reward) in enumerate(rows, 1):
    text += f"---- {i} of {len(rows)}, step {step}, reward {reward:g}\n"
    for label, part in (("question", question), ("answer", answer)):
      part = _LIKE_A_MARK.sub(" ", printable(part, keep="\n\t"))
      text += f"{label}:\n{part}\n"
    text += f"reference: {printable(reference)}\n\n"
  return text


def read(text: str) -> list[Sample]:
  """What `write` wrote; [] of other text. What is cut short is an answer."""
  pieces, found = _HEAD.split(text)[1:], []
  for reward, body in zip(pieces[::2], pieces[1::2], strict=True):
    whole = _BODY.match(body)
    *parts, reference = whole.groups() if whole else ("", body, "")
    parts = (_INDENTED.sub("", part).strip("\n") for part in parts)
    found.append(Sample(*parts, reference.strip("\n"), reward))
  return found


def printable(text: str, keep: str = "") -> str:
  """The text with escapes for what a terminal would act upon."""
  return "".join(
    c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text
  )
