"""Programs as answers: right if they print what each test expects."""

import json
import re
import time

from gspo_jax.rewards import sandbox
from gspo_jax.runtime import errors

# Bytes of output read beyond twice what a test expects.
SLACK = 1 << 16
PYTHON = ("python", "py", "python3")
_FENCE = re.compile("```([^`]*)")


def passes(
  prompt: str,
  answer: str,
  reference: str,
  *,
  seconds: float = 5.0,
  total: float = 30.0,
  memory: int = 512,
) -> float:
  """1.0 iff the answer's last fenced block passes every test.

  Its fence says python, py or python3; where none does, the last that says
  nothing counts.
  A test is passed by ending in time, with exit code 0, having printed the
  expected text; white space at the end of a line and of the whole is ignored.
  Each runs in a sandbox of its own, and the first that fails is the last.

  Args:
    prompt: not used.
    answer: what the policy wrote.
    reference: JSON, `{"inputs": [...], "outputs": [...]}` or a list of
      `{"input": ..., "output": ...}`: texts for stdin and of stdout.
    seconds: time for one test, by the clock.
    total: time for all tests, below the pool's time for an answer.
    memory: address space of the program, MiB.

  Raises:
    ValueError: the reference is not as above.
  """
  tests = _tests(reference)
  program = _block(answer)
  if program is None:
    return 0.0
  end = time.monotonic() + total
  for given, expected in tests:
    output = sandbox.run(
      program,
      given,
      seconds=min(seconds, max(0.0, end - time.monotonic())),
      memory=memory,
      most=2 * len(expected.encode("utf-8", "replace")) + SLACK,
    )
    if output is None or _lines(output) != _lines(expected):
      return 0.0
  return 1.0


def _block(answer: str) -> str | None:
  """The last closed block of Python; with none, the last of no language."""
  found, lines, language = {}, None, ""
  for line in answer.split("\n"):
    fence = _FENCE.fullmatch(line.strip())
    if fence and (fence[1].strip() or lines is None):
      lines, language = [], fence[1].strip().lower()
      language = "python" if language in PYTHON else language
      found[language] = None
    elif fence:
      found[language], lines = "\n".join(lines), None
    elif lines is not None:
      lines.append(line)
  return found.get("python", found.get(""))


def _tests(reference: str) -> list[tuple[str, str]]:
  """(stdin, expected stdout), one or more, not all without output."""
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
  if not any(output.strip() for _, output in tests):
    raise ValueError(
      "expected tests of which one or more print something: these are passed "
      f"by doing nothing: {reference[:80]!r}"
    )
  return tests


_EXPECTED = (
  'expected tests as JSON, {"inputs": [...], "outputs": [...]} or '
  '[{"input": ..., "output": ...}, ...] of texts, one or more'
)


def _lines(text: str) -> list[str]:
  return [line.rstrip() for line in text.rstrip().split("\n")]


def _prepare(*, seconds=5.0, total=30.0, memory=512) -> None:
  for name, value in (("seconds", seconds), ("total", total)):
    if not isinstance(value, int | float) or not value > 0:
      raise errors.UserError(
        f"reward 'code': expected {name} above 0, got {value!r}"
      )
  if not isinstance(memory, int) or memory < 32:
    raise errors.UserError(
      f"reward 'code': expected memory of 32 MiB or more, got {memory!r}"
    )
  sandbox.found()


def _fits(within: float, *, total=30.0, **_) -> None:
  if total >= within:
    raise errors.UserError(
      f"reward 'code': its {total=} seconds of tests must end before the "
      f"{within:g} seconds of an answer (reward.seconds), or right programs "
      f"fail: set those above {total:g}, or 'code:total={within / 2:g}'"
    )


passes.prepare, passes.fits = _prepare, _fits
