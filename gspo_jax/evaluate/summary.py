"""The numbers of a benchmark, and a table of several benchmarks."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from gspo_jax.evaluate import estimators
from gspo_jax.evaluate.benchmarks import Benchmark
from gspo_jax.rewards import math as latex
from gspo_jax.rewards import numbers, thinking

# Longer results are compared as text: the time to normalise a result grows with
# the square of its length, and real results are short.
_LONGEST = 500


def summarize(
  benchmark: Benchmark, records: Sequence[Mapping], threshold: float
) -> dict:
  """The numbers of a benchmark, for JSON; infinite numbers are None.

  Args:
    benchmark: N problems.
    records: N * n responses from `shorten`, grouped by problem.
    threshold: `reward.pass_threshold`, the least score of a correct response.

  Returns:
    `avg`, the mean score, and its standard error; `pass` and `majority` by k
      (None for programs, which have no vote); `elo` over the `rated` problems;
      the shares of responses that were `truncated`, and that `failed`: their
      reward could not be computed, and they score 0.
  """
  count = len(benchmark.problems)
  table = lambda key: np.array([r[key] for r in records]).reshape(count, -1)
  scores = table("score").astype(np.float64)
  correct, n = estimators.correct(scores, threshold), scores.shape[1]
  ks = estimators.ladder(n)
  avg, error = estimators.avg(scores)
  rated = [i for i, r in enumerate(benchmark.ratings) if r is not None]
  return {
    "set": benchmark.name,
    "reward": benchmark.reward,
    "problems": count,
    "skipped": benchmark.skipped,
    "samples": n,
    "avg": avg,
    "avg_error": _finite(error),
    "pass_threshold": threshold,
    "pass": {str(k): estimators.pass_at_k(correct, k) for k in ks},
    "majority": _majority(benchmark.reward, records, correct, ks),
    "elo": _elo(correct[rated], [benchmark.ratings[i] for i in rated]),
    "rated": len(rated),
    "truncated": float((table("finish") == "truncated").mean()),
    "failed": float(table("failed").mean()),
    "tokens": float(table("tokens").mean()),
  }


def shorten(reward: str, record: Mapping) -> dict:
  """What `summarize` reads of a record; its vote replaces the text."""
  kept = {k: record[k] for k in ("score", "failed", "tokens", "finish")}
  return kept | {"vote": vote(reward, record["response"])}


def _majority(reward, records, correct, ks):
  if _name(reward) not in _READERS:
    return None
  n, votes, one = correct.shape[1], [], object()
  for i, is_right in enumerate(correct):
    of_problem = [r["vote"] for r in records[i * n : (i + 1) * n]]
    # All correct results of a problem are one vote.
    right = {v for v, r in zip(of_problem, is_right, strict=True) if r} - {None}
    votes.append([one if v in right else v for v in of_problem])
  return {str(k): estimators.majority_at_k(votes, correct, k) for k in ks}


def vote(reward: str, text: str) -> Hashable | None:
  r"""The result of a response, for a majority vote; None without a result.

  Two votes are equal if the results are the same text or the same number. The
  reward `math` accepts more results as equal (`\frac{1}{2}` and 0.5), so
  `summarize` counts all correct votes as one. Wrong results that are equal but
  written differently are separate votes. `reward`, math, gsm8k or final_answer,
  perhaps with arguments, says how to find the result.
  """
  if _name(reward) not in _READERS:
    return None
  find, normalise = _READERS[_name(reward)]
  result = find(text)
  if not result:
    return None
  return normalise(result) if len(result) <= _LONGEST else hash(result)


def _name(reward: str) -> str:
  return reward.partition(":")[0]


def _behind_mark(text: str) -> str:
  _, mark, last = thinking.behind("", text).rpartition("#")
  return last.strip() if mark else ""


_READERS = {
  "final_answer": (_behind_mark, numbers.without_separators),
  "gsm8k": (numbers.result, numbers.number),
  "math": (numbers.result, latex.normalised),
}


def _elo(correct, ratings):
  if not ratings:
    return None
  elo = estimators.elo(correct.mean(1), np.array(ratings, float))
  return {k: _finite(v) for k, v in elo._asdict().items()}


def _finite(value):
  return value if math.isfinite(value) else None


def render(summaries: Sequence[Mapping]) -> str:
  head = ("set", "problems", "samples", "avg@n", "pass@n", "maj@n",
          "Elo (95 %)", "truncated", "failed")  # fmt: skip
  rows = [head, *map(_cells, summaries)]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for first, *rest in rows:
    cells = [c.rjust(w) for c, w in zip(rest, widths[1:], strict=True)]
    lines.append("  ".join([first.ljust(widths[0]), *cells]))
  return "\n".join(lines + [note for s in summaries for note in _notes(s)])


def _cells(s):
  n, share = str(s["samples"]), lambda x: f"{x:.3f}"
  error = s["avg_error"]
  return (
    s["set"],
    str(s["problems"]),
    n,
    share(s["avg"]) + (f" ± {error:.3f}" if error is not None else ""),
    share(s["pass"][n]),
    share(s["majority"][n]) if s["majority"] else "-",
    _elo_cell(s["elo"]) if s["elo"] else "-",
    f"{s['truncated']:.1%}",
    f"{s['failed']:.1%}",
  )


def _elo_cell(elo):
  end = lambda x, none: none if x is None else f"{x:.0f}"
  star = "*" if elo["bounded"] else ""
  interval = f"{end(elo['low'], '-inf')} to {end(elo['high'], 'inf')}"
  return f"{elo['rating']:.0f}{star} ({interval})"


def _notes(s) -> Iterator[str]:
  for reason, count in s["skipped"].items():
    yield f"{s['set']}: {count} rows left out: {reason}"
  if s["elo"] and s["rated"] < s["problems"]:
    yield f"{s['set']}: Elo over the {s['rated']} problems that have a rating"
  if s["elo"] and s["elo"]["bounded"]:
    yield f"{s['set']}: * nearly all or none solved: rated at half a problem"
