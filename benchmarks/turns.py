"""Iterations in turns with those of other processes: a line in, a line out."""

import json
import time
from collections.abc import Callable, Iterable, Iterator

_ANSWER = "turn "  # what trainers print themselves begins otherwise


def turns(lines: Iterable[str], lengths: Callable[[], list]) -> Iterator[None]:
  """Yields at each line; when it goes on, it prints what that turn was.

  Its seconds are CPU time of this process, of all its threads, which other
  processes change little.

  Args:
    lines: from the other process.
    lengths: returns those of the turn's responses, in tokens.
  """
  for _ in lines:
    start = time.process_time()
    yield
    turn = {"seconds": time.process_time() - start}
    turn["lengths"] = sorted(lengths())
    print(f"{_ANSWER}{json.dumps(turn)}", flush=True)


def answer(lines: Iterable[str]) -> dict:
  """The first turn in what a process printed.

  Raises:
    EOFError: the process ended; what else it printed says why.
  """
  for line in lines:
    if line.startswith(_ANSWER):
      return json.loads(line.removeprefix(_ANSWER))
  raise EOFError("the process ended, expected seconds")
