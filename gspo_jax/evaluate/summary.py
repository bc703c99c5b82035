"""What the answers to a set come to, and the table of all sets."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from gspo_jax.evaluate import estimators
from gspo_jax.evaluate.benchmarks import Benchmark
from gspo_jax.rewards import math as latex
from gspo_jax.rewards import numbers

# What is said with more characters is compared as it stands: results are short,
# and what reads them takes time that grows with the square.
_LONGEST = 500


def summarize(questions: Benchmark, rows: Sequence[Mapping]) -> dict:
  """The numbers of a set, as JSON; infinite ones are None.

  Args:
    questions: N of them.
    rows: N * n answers in `brief`, those to a question side by side.

  Returns:
    `avg` of n scores and its standard error; `pass` and `majority` by k, where
    an answer is right if its score is over 0.5 (no majority where a vote makes
    no sense, as among programs); `elo` over the `rated` questions; shares of
    answers `truncated` and `failed` (they score 0: a reward could not be
    computed).
  """
  count = len(questions.problems)
  table = lambda key: np.array([r[key] for r in rows]).reshape(count, -1)
  scores = table("score").astype(np.float64)
  correct, n = scores > 0.5, scores.shape[1]
  ks = estimators.ladder(n)
  avg, error = estimators.avg(scores)
  rated = [i for i, r in enumerate(questions.ratings) if r is not None]
  return {
    "set": questions.name,
    "reward": questions.reward,
    "questions": count,
    "skipped": questions.skipped,
    "samples": n,
    "avg": avg,
    "avg_error": _finite(error),
    "pass": {str(k): estimators.pass_at_k(correct, k) for k in ks},
    "majority": _majority(questions.reward, rows, correct, ks),
    "elo": _elo(correct[rated], [questions.ratings[i] for i in rated]),
    "rated": len(rated),
    "truncated": float((table("finish") == "truncated").mean()),
    "failed": float(table("failed").mean()),
    "tokens": float(table("tokens").mean()),
  }


def brief(reward: str, row: Mapping) -> dict:
  """What `summarize` needs of an answer: its `vote`, but not its text.

  Args:
    reward: that judged it.
    row: of answers.jsonl.
  """
  kept = {k: row[k] for k in ("score", "failed", "tokens", "finish")}
  return kept | {"vote": vote(reward, row["text"])}


def _majority(reward, rows, correct, ks):
  if _name(reward) not in _READERS:
    return None
  n = correct.shape[1]
  votes = [
    _merged([row["vote"] for row in rows[i * n : (i + 1) * n]], right)
    for i, right in enumerate(correct)
  ]
  return {str(k): estimators.majority_at_k(votes, correct, k) for k in ks}


def _merged(votes, correct):
  """Votes to a question, those that were judged correct made one."""
  good = {v for v, right in zip(votes, correct, strict=True) if right} - {None}
  one = object()
  return [one if v in good else v for v in votes]


def vote(reward: str, text: str) -> Hashable | None:
  r"""What an answer says in the end; None: nothing that can be compared.

  Alike for results that are written alike, and for equal numbers. `math` knows
  more results as equal (`\frac{1}{2}` and 0.5). So `summarize` takes all votes
  that were judged correct for one; wrong ones are not compared with each other,
  and those written in several ways are divided.

  Args:
    reward: whose reading of results it is: math, gsm8k or final_answer, with
      its arguments or without.
    text: of the answer.
  """
  if _name(reward) not in _READERS:
    return None
  find, read = _READERS[_name(reward)]
  found = find(text)
  if not found:
    return None
  return read(found) if len(found) <= _LONGEST else hash(found)


def _name(reward: str) -> str:
  return reward.partition(":")[0]


def _behind_mark(text: str) -> str:
  _, mark, last = text.rpartition("#")
  return last.strip() if mark else ""


_READERS = {
  "final_answer": (_behind_mark, lambda found: found.replace(",", "")),
  "gsm8k": (numbers.result, numbers.number),
  "math": (numbers.result, latex.normalised),
}


def _elo(correct, ratings):
  if not ratings:
    return None
  found = estimators.elo(correct.mean(1), np.array(ratings, float))
  return {k: _finite(v) for k, v in found._asdict().items()}


def _finite(value):
  return value if math.isfinite(value) else None


def render(summaries: Sequence[Mapping]) -> str:
  """A table, a line a set, and what has to be said beside it."""
  head = ("set", "questions", "samples", "avg@n", "pass@n", "maj@n",
          "Elo (95 %)", "truncated", "failed")  # fmt: skip
  cells = [head, *map(_cells, summaries)]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  lines = [_line(row, widths) for row in cells]
  return "\n".join(lines + [note for s in summaries for note in _notes(s)])


def _line(row, widths):
  first, *rest = (c.rjust(w) for c, w in zip(row, widths, strict=True))
  return "  ".join([first.strip().ljust(widths[0]), *rest])


def _cells(s):
  n, share = str(s["samples"]), lambda x: f"{x:.3f}"
  error = s["avg_error"]
  return (
    s["set"],
    str(s["questions"]),
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
  if s["elo"] and s["rated"] < s["questions"]:
    yield f"{s['set']}: Elo over the {s['rated']} questions that have a rating"
  if s["elo"] and s["elo"]["bounded"]:
    yield f"{s['set']}: * nearly all or none solved: at half a problem from it"
