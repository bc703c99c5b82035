"""Estimates from n sampled answers a question: avg@n, pass@k, maj@k, Elo.

Averages are over questions, and so are their errors: answers to one question
are alike, and N questions stand for all that might have been asked.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

_NORMAL = 1.96  # standard deviations of a 95 % interval
_DECADE = 400  # rating points at which the odds are 10 to 1


def ladder(n: int) -> list[int]:
  """The k to report of n answers: 1, 2, 4, ... and n."""
  return sorted({2**i for i in range(n.bit_length())} | {n})


def avg(scores: np.ndarray) -> tuple[float, float]:
  """The mean of scores [N, n], and its standard error over the N questions.

  The error is NaN for one question.
  """
  means = scores.mean(1, dtype=np.float64)
  spread = means.std(ddof=1) if len(means) > 1 else math.nan
  return float(means.mean()), float(spread / math.sqrt(len(means)))


def pass_at_k(correct: np.ndarray, k: int) -> float:
  """Chance that one of k answers is right, without bias.

  Mean over problems of `1 - C(n - c, k) / C(n, k)`, with c of n answers right:
  Chen et al. 2021, arXiv 2107.03374, eq. 1.

  Args:
    correct: [N, n] bool, n answers to N problems.
    k: 1 to n.
  """
  n = correct.shape[1]
  _require_answers(k, n)
  wrong = n - correct.sum(1)
  return float(np.mean([1 - math.comb(w, k) / math.comb(n, k) for w in wrong]))


def majority_at_k(
  votes: Sequence[Sequence[Hashable | None]], correct: np.ndarray, k: int
) -> float:
  """Chance that the most frequent of k final answers is right, without bias.

  Exact: the mean over all C(n, k) subsets of a question's answers, of which
  none is drawn. Where several answers tie for the most votes, each wins with
  the same chance. One without a final answer has no vote, and where nobody
  votes, nothing is right.

  Args:
    votes: [N][n] final answers, alike where they are equal; None: there is
      none.
    correct: [N, n] bool. Of answers that vote alike some may be right and
      others not (two rewards may read a text differently): then a vote is worth
      the share that is.
    k: 1 to n.
  """
  n = correct.shape[1]
  _require_answers(k, n)
  rows = zip(votes, correct, strict=True)
  return float(np.mean([_majority(row, right, k) for row, right in rows]))


def _majority(votes, correct, k) -> float:
  right = {}
  for vote, is_right in zip(votes, correct, strict=True):
    right.setdefault(vote, []).append(float(is_right))
  silent = len(right.pop(None, []))
  counts = [len(marks) for marks in right.values()]
  worth = [sum(marks) / len(marks) for marks in right.values()]
  won = sum(
    _won(counts, worth, silent, k, top)
    for top in range(1, min(k, max(counts, default=0)) + 1)
  )
  return won / math.comb(len(votes), k)


def _won(counts, worth, silent, k, top) -> float:
  """Subsets of k whose winner has `top` votes, times what that winner is worth.

  Answer by answer, with ways[i, t]: so many subsets of i with t answers at
  `top` and none above; and worths, the same times the sum of their worth.
  """
  ways = np.zeros((k + 1, k // top + 1))
  ways[: silent + 1, 0] = [
    math.comb(silent, i) for i in range(min(silent, k) + 1)
  ]
  worths = np.zeros_like(ways)
  for count, value in zip(counts, worth, strict=True):
    before, worths_before = ways, worths
    ways, worths = before.copy(), worths_before.copy()
    for taken in range(1, min(count, top - 1) + 1):
      times = math.comb(count, taken)
      ways[taken:] += times * before[:-taken]
      worths[taken:] += times * worths_before[:-taken]
    if count >= top:
      times = math.comb(count, top)
      ways[top:, 1:] += times * before[:-top, :-1]
      worths[top:, 1:] += times * (
        worths_before[:-top, :-1] + value * before[:-top, :-1]
      )
  winners = np.arange(1, ways.shape[1])
  return float((worths[k, 1:] / winners).sum())


def _require_answers(k: int, n: int) -> None:
  if not 1 <= k <= n:
    raise ValueError(f"{k=} must lie in 1..{n}, the answers a problem has")


class Elo(NamedTuple):
  """A rating, from `elo`.

  Attributes:
    rating: the estimate.
    low: of the 95 % interval; -inf where nothing is solved.
    high: of the 95 % interval; inf where all is.
    bounded: the likelihood has no maximum, or one beyond half a problem of
      none or all: `rating` is what half a problem would give.
  """

  rating: float
  low: float
  high: float
  bounded: bool


def elo(solved: np.ndarray, ratings: np.ndarray) -> Elo:
  """The rating R at which the expected number of solved problems is that seen.

  `P(solve) = 1 / (1 + 10^((problem - R) / 400))`, as Codeforces has it of two
  contestants (codeforces.com/blog/entry/20762), and of a problem and the one
  who solves it with even chance. `sum P(R) = sum solved` is where the
  likelihood of R has its maximum. This is no contest: there is no clock, no
  penalty and no other contestant, so it is not what a site would award.

  The interval is made of the R with `|sum P - sum solved| < 1.96 sd`, where
  `sd^2 = sum P (1 - P)`: problems count once, however many answers they got.

  Args:
    solved: [N] shares of the answers to a problem that solve it, 0 to 1.
    ratings: [N] of the problems, finite.
  """
  if not (len(solved) == len(ratings) > 0 and np.isfinite(ratings).all()):
    raise ValueError(
      f"{len(solved)=}, {len(ratings)=}: expected finite ratings"
    )
  total, most = float(np.sum(solved)), len(ratings)
  half = min(max(total, 0.5), most - 0.5)
  rating = _rating_of(ratings, lambda mean, sd: mean > half)
  low, high = -math.inf, math.inf
  if total > 0:
    low = _rating_of(ratings, lambda mean, sd: mean > total - _NORMAL * sd)
  if total < most:
    high = _rating_of(ratings, lambda mean, sd: mean > total + _NORMAL * sd)
  return Elo(rating, low, high, bounded=half != total)


def _rating_of(ratings, above) -> float:
  """By bisection, the R from which on `above(mean, sd)` of solved holds."""
  margin = 20 * _DECADE  # odds of 10^20: past the last digit of a count
  low, high = float(np.min(ratings)) - margin, float(np.max(ratings)) + margin
  while high - low > 1e-6:
    middle = (low + high) / 2
    chance = 1 / (1 + 10 ** ((ratings - middle) / _DECADE))
    sd = math.sqrt(np.sum(chance * (1 - chance)))
    low, high = (low, middle) if above(chance.sum(), sd) else (middle, high)
  return (low + high) / 2


def summarize(sampled: np.ndarray, greedy: np.ndarray) -> dict[str, float]:
  """`eval/*` of rewards [N, n] of sampled and [N, 1] of greedy answers.

  `pass@k` for k = 1, 2, 4, ... and n; with rewards of 0 and 1, `avg@n` is
  `pass@1`.
  """
  n = sampled.shape[1]
  return {
    f"eval/avg@{n}": float(sampled.mean()),
    "eval/greedy": float(greedy.mean()),
    **{f"eval/pass@{k}": pass_at_k(sampled > 0.5, k) for k in ladder(n)},
  }
