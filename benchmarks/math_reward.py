"""Verdicts of the reward `math` and of math-verify on pairs of answers.

  python -m benchmarks.math_reward [--quick] [--out FILE]

The pairs are those of tests/rewards/math_pairs.tsv: a response, a reference,
and whether they mean the same, by kind. A verdict that takes over 5 seconds
counts as "wrong", and its process is ended.
"""

import argparse
import collections
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import record
from gspo_jax import rewards

PATH = Path(__file__).parents[1] / "tests" / "rewards" / "math_pairs.tsv"
LIMIT = 5.0  # seconds


class Pair(NamedTuple):
  """A line of the file.

  Attributes:
    kind: of the results.
    right: whether they mean the same.
    result: as in the file.
    response: the result, in a sentence and a box.
    reference: the other result.
  """

  kind: str
  right: bool
  result: str
  response: str
  reference: str


def pairs() -> Iterator[Pair]:
  """The pairs of the file, in which ⏎ is a new line of a response.

  A result alone is put into a box.
  """
  for line in PATH.read_text().splitlines():
    if line.startswith("# "):
      kind = line[2:]
      continue
    right, *sides = line.split("\t")
    result, reference = (side.replace("⏎", "\n") for side in sides)
    response = f"So the answer is $\\boxed{{{result}}}$."
    if kind == "response":  # a whole one
      response = result
    yield Pair(kind, right == "1", result, response, reference)


def ours(response: str, reference: str) -> bool:
  return rewards.named("math")("", response, reference) > 0.5


def math_verify_alone(response: str, reference: str) -> bool:
  import math_verify

  gold = math_verify.parse(f"${reference}$", parsing_timeout=None)
  answer = math_verify.parse(response, parsing_timeout=None)
  return math_verify.verify(gold, answer, timeout_seconds=None)


def _answer(verifier: Callable[[str, str], bool], connection) -> None:
  """Verdicts on what comes through a connection, one after the other."""
  verifier("\\boxed{\\frac{1}{2}+x}", "x+0.5")  # imports
  connection.send(None)
  while True:
    connection.send(bool(verifier(*connection.recv())))


def _started(verifier):
  here, there = multiprocessing.Pipe()
  process = multiprocessing.Process(
    target=_answer, args=(verifier, there), daemon=True
  )
  process.start()
  here.recv()
  return process, here


def judged(verifier, given: list[Pair]) -> list[tuple[bool, float]]:
  """The verdict on each pair, and its seconds."""
  process, connection = _started(verifier)
  found = []
  for pair in given:
    began = time.perf_counter()
    connection.send((pair.response, pair.reference))
    in_time = connection.poll(LIMIT)
    verdict = connection.recv() if in_time else False
    found.append((verdict, time.perf_counter() - began))
    if not in_time:
      process.kill()
      process, connection = _started(verifier)
  process.kill()
  return found


def table(given: list[Pair], found: list[tuple[bool, float]]) -> dict:
  """Counts of verdicts, and seconds, by kind and for all kinds together."""
  rows = collections.defaultdict(collections.Counter)
  for pair, (verdict, seconds) in zip(given, found, strict=True):
    for row in (rows[pair.kind], rows["all"]):
      row["pairs"] += 1
      row["wrong, rewarded"] += verdict and not pair.right
      row["right, refused"] += pair.right and not verdict
      row["slowest"] = max(row["slowest"], round(seconds, 3))
  rows["all"]["median"] = round(statistics.median(s for _, s in found), 5)
  rows["all"] = rows.pop("all")  # last
  return {kind: dict(row) for kind, row in rows.items()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="40 of the pairs")
  parser.add_argument("--out", type=Path, help="write the record there")
  args = parser.parse_args()
  given = list(pairs())
  if args.quick:
    given = given[:: len(given) // 40]
  verifiers = {"math": ours, "math-verify": math_verify_alone}
  found = {
    name: table(given, judged(verifier, given))
    for name, verifier in verifiers.items()
  }
  columns = ("wrong, rewarded", "right, refused", "slowest")
  print(
    "| kind | pairs |",
    " | ".join(f"{name}: {column}" for name in found for column in columns),
    "|",
  )
  for kind in found["math"]:
    cells = [found[name][kind][column] for name in found for column in columns]
    print(
      "|",
      kind,
      "|",
      found["math"][kind]["pairs"],
      "|",
      " | ".join(map(str, cells)),
      "|",
    )
  record.finish("math_reward", found, args.out)


if __name__ == "__main__":
  main()
