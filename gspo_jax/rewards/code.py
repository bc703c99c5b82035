"""Programs as responses: correct if every test prints the expected output."""

import functools
import json
import re
import textwrap
import time

from gspo_jax.rewards import thinking
from gspo_jax.rewards.reward import Reward
from gspo_jax.runtime import errors
from gspo_jax.workers import sandbox

# Bytes of output to read in addition to twice the expected output.
SLACK = 1 << 16
# Text, a fence, and what follows it: ```python title="a.py", ~~~ {.python}.
_FENCE = re.compile(r"(.*?)(?<!`)(`{3,}(?=[^`]*$)|~{3,})(.*)")
_ITEM = re.compile(r"(?:(?:[-*+]|\d+[.)])\s+)*")  # of a list
_WORD = re.compile(r"[\w.+#-]+")
_PYTHON = re.compile(r"\.?(?:i?python|py|pypy)(?:3(?:\.\d+)?)?")


def passes(
  prompt: str,
  response: str,
  reference: str,
  *,
  seconds: float = 5.0,
  total: float = 30.0,
  memory: int = 512,
) -> float:
  """1.0 iff the last Python program of the response passes every test.

  The program is a fenced block; see `program`. It passes a test if it ends in
  time with exit code 0 and prints the expected text; white space at the end of
  a line and of the output is ignored. Each test runs in a separate sandbox, in
  order, up to the first failure.

  Args:
    prompt: may open the thinking, where programs do not count.
    response: with the program.
    reference: JSON, `{"inputs": [...], "outputs": [...]}` or a list of
      `{"input": ..., "output": ...}`: text for stdin and of stdout.
    seconds: wall-clock time for one test.
    total: seconds for all tests, below the pool's time for one call.
    memory: address space of the program, MiB.
  """
  tests = _tests(reference)
  source = program(thinking.behind(prompt, response))
  if source is None:
    return 0.0
  end = time.monotonic() + total
  for stdin, expected in tests:
    output = sandbox.run(
      source,
      stdin,
      seconds=min(seconds, max(0.0, end - time.monotonic())),
      memory=memory,
      max_output=2 * len(expected.encode("utf-8", "replace")) + SLACK,
    )
    if output is None or _lines(output) != _lines(expected):
      return 0.0
  return 1.0


def program(response: str) -> str | None:
  """The last closed Python block, else the last that names no language.

  None without such a block. A Python block has python, ipython, py or pypy,
  each perhaps with 3 or 3.x, as the first word after its fence, or as any word
  if a brace follows the fence. A block ends at a line of nothing but backticks
  or tildes, at least as many as it began with.
  """
  programs, lines, opened, language = {}, [], "", ""
  for line in response.split("\n"):
    match = _FENCE.fullmatch(line.strip())
    before, marks, info = match.groups() if match else ("", "", "")
    if opened and marks.startswith(opened) and not before + info:
      programs[language], opened = _dedent(lines), ""
    elif opened:
      lines.append(line)
    elif match and (_ITEM.fullmatch(before) or _language(info) == "python"):
      lines, opened, language = [], marks, _language(info)
      programs[language] = None
  return programs.get("python", programs.get(""))


def _language(info: str) -> str:
  words = _WORD.findall(info.lower())
  names = words if info.lstrip().startswith("{") else words[:1]
  return "python" if any(map(_PYTHON.fullmatch, names)) else "".join(names[:1])


def _dedent(lines: list[str]) -> str:
  """The program; a block in a list is indented like its item."""
  text = "\n".join(lines)
  is_indented = text.lstrip("\n")[:1] in (" ", "\t")
  return textwrap.dedent(text) if is_indented else text


def _tests(reference: str) -> list[tuple[str, str]]:
  """Pairs (stdin, stdout), one or more; at least one stdout has text."""
  try:
    tests = json.loads(reference)
    if isinstance(tests, dict):
      tests = list(zip(tests["inputs"], tests["outputs"], strict=True))
    else:
      tests = [(test["input"], test["output"]) for test in tests]
  except (KeyError, TypeError, ValueError) as e:
    raise ValueError(f"{_EXPECTED}, got {reference[:80]!r}") from e
  if not tests or not all(isinstance(s, str) for test in tests for s in test):
    raise ValueError(f"{_EXPECTED}, got {reference[:80]!r}")
  if not any(stdout.strip() for _, stdout in tests):
    raise ValueError(
      "expected at least one test that prints something: these are passed by "
      f"doing nothing: {reference[:80]!r}"
    )
  return tests


_EXPECTED = (
  'expected tests as JSON, {"inputs": [...], "outputs": [...]} or '
  '[{"input": ..., "output": ...}, ...] of strings, one or more'
)


def _lines(text: str) -> list[str]:
  return [line.rstrip() for line in text.rstrip().split("\n")]


def _fits(within: float, *, total, **_) -> None:
  if total >= within:
    raise errors.UserError(
      f"reward 'code': its {total=} seconds of tests must end before the "
      f"{within:g} seconds of a call (reward.seconds), or correct programs "
      f"fail: set those above {total:g}, or 'code:total={within / 2:g}'"
    )


CODE = Reward(
  passes, prepare=functools.partial(sandbox.check, "reward 'code'"), fits=_fits
)
