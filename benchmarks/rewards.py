"""Responses per second of the reward pool, and what a small batch costs.

  python -m benchmarks.rewards [--quick]

GSM8K and MATH responses of about 100 tokens, and programs with two tests each,
by 1 and 2 workers, the responses given at once; the time of 256 responses of
the embedded task, which every iteration of the default config waits for; and
that of one response, as a step of an environment or the end of a response in
continuous batching gives it. A reward that this machine cannot run is left out.
"""

import argparse
import json
import statistics
import time

from gspo_jax.rewards.pool import RewardPool
from gspo_jax.rewards.reward import Response
from gspo_jax.runtime import errors

THOUGHT = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs a day. " * 8


def responses(name: str, count: int) -> list[Response]:
  """`count` responses, half of them right, no two alike."""
  if name == "code":
    tests = {"inputs": ["1 2", "5 6"], "outputs": ["3", "11"]}
    programs = [
      f"# {i}\na, b = map(int, input().split())\nprint(a + b + {i % 2})"
      for i in range(count)
    ]
    return [
      Response("", f"{THOUGHT}\n```python\n{p}\n```", json.dumps(tests))
      for p in programs
    ]
  form = {
    "final_answer": ("a8+3=1;b1-5=6;#{}", "{}"),
    "gsm8k": (THOUGHT + "\n#### {}.00", "{}"),
    # Equal by algebra only.
    "math": (THOUGHT + "$\\boxed{{\\frac{{{}}}{{2}}+x}}$", "x+{}/2"),
  }
  text, reference = form[name]
  return [
    Response("", text.format(i), reference.format(i + i % 2))
    for i in range(count)
  ]


def rate(name: str, workers: int, count: int) -> float:
  """Responses per second, all of them submitted together."""
  given = responses(name, count)
  with RewardPool([name], [1.0], workers=workers, seconds=60) as scorer:
    scorer.submit(given[:2]).result()
    began = time.monotonic()
    scores = scorer.submit(given).result()
    seconds = time.monotonic() - began
  if scores.failed.any() or abs(scores.total.mean() - 0.5) > 0.01:
    raise RuntimeError(f"{name}: unexpected scores: {scores}")
  return count / seconds


def batch(size: int, workers: int, repeats: int) -> float:
  """Median seconds of responses of the embedded task."""
  given, seconds = responses("final_answer", size), []
  with RewardPool(["final_answer"], [1.0], workers=workers) as scorer:
    for _ in range(repeats + 1):
      began = time.monotonic()
      scorer.submit(given).result()
      seconds.append(time.monotonic() - began)
  return statistics.median(seconds[1:])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="a few responses")
  quick = parser.parse_args().quick
  counts = {"final_answer": 8192, "gsm8k": 8192, "math": 1024, "code": 128}
  record = {}
  print("reward | workers | responses per second")
  for name, count in counts.items():
    for workers in (1, 2):
      try:
        speed = rate(name, workers, 16 if quick else count)
      except errors.UserError as e:
        print(f"{name} | {workers} | none: {e}")
      else:
        record[f"{name} {workers}"] = round(speed, 1)
        print(f"{name} | {workers} | {speed:,.0f}", flush=True)
  for size, workers in ((256, 1), (256, 2), (1, 1)):
    seconds = batch(size, workers, 3 if quick else 50 if size > 1 else 1000)
    record[f"seconds of {size} by {workers}"] = round(seconds, 5)
    print(f"{size} responses by {workers} | {1e3 * seconds:.2f} ms")
  print(json.dumps(record))


if __name__ == "__main__":
  main()
