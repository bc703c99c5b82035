"""Programs as answers: right if they print what each test expects."""

import json
import time

from gspo_jax import errors
from gspo_jax.rewards import sandbox

# Bytes of output read beyond twice what a test expects.
SLACK = 1 << 16


def passes(
  prompt: str,
  answer: str,
  reference: str,
  *,
  seconds: float = 5.0,
  total: float = 30.0,
  memory: int = 512,
) -> float:
  """1.0 iff the answer's last ```python block passes every test.

  A test is passed by ending in time, with exit code 0, having printed the
  expected text; white space at the end of a line and of the whole is ignored.
  Each runs in a sandbox of its own, and the first that fails is the last.

  Args:
    prompt: not used.
    answer: what the policy wrote.
    reference: JSON, `{"inputs": [...], "outputs": [...]}` or a list of
      `{"input": ..., "output": ...}`: texts for stdin and of stdout.
    seconds: time for one test, by the clock.
    total: time for all tests; keep it below the pool's time for an answer.
    memory: address space of each process, MiB.

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
  """The last block between a line ```python and a line ```, if it is closed."""
  block, lines = None, None
  for line in answer.split("\n"):
    if line.strip() == "```python":
      block, lines = None, []
    elif line.strip() == "```" and lines is not None:
      block, lines = "\n".join(lines), None
    elif lines is not None:
      lines.append(line)
  return block


def _tests(reference: str) -> list[tuple[str, str]]:
  """(stdin, expected stdout), at least one."""
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


passes.prepare = _prepare
