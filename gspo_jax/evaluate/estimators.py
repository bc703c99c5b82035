"""Estimates from n responses to each of N problems: avg@n, pass@k, maj@k, Elo.

Standard errors are over problems: responses to one problem are correlated, and
the N problems are a sample of all possible ones.
"""

import functools
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

_NORMAL = 1.96  # standard deviations of a 95 % interval
_DECADE = 400  # rating points at which the odds are 10 to 1


def ladder(n: int) -> list[int]:
  """The values of k to report for n responses: 1, 2, 4, ... and n."""
  return sorted({2**i for i in range(n.bit_length())} | {n})


def correct(scores: np.ndarray, threshold: float) -> np.ndarray:
  """Whether rewards reach `reward.pass_threshold`, compared as float32."""
  return np.asarray(scores, np.float32) >= np.float32(threshold)


def avg(scores: np.ndarray) -> tuple[float, float]:
  """Mean of scores [N, n], and its standard error over N (NaN for N = 1)."""
  means = scores.mean(1, dtype=np.float64)
  spread = means.std(ddof=1) if len(means) > 1 else math.nan
  return float(means.mean()), float(spread / math.sqrt(len(means)))


def pass_at_k(correct: np.ndarray, k: int) -> float:
  """Unbiased estimate of the probability that one of k responses is correct.

  Mean over problems of `1 - C(n - c, k) / C(n, k)`, with c of n responses
  correct: Chen et al. 2021, arXiv 2107.03374, eq. 1. `correct` is [N, n] bool.
  """
  n = correct.shape[1]
  _require_responses(k, n)
  wrong = n - correct.sum(1)
  return float(np.mean([1 - math.comb(w, k) / math.comb(n, k) for w in wrong]))


def majority_at_k(
  votes: Sequence[Sequence[Hashable | None]], correct: np.ndarray, k: int
) -> float:
  """Unbiased estimate of the accuracy of a majority vote among k responses.

  The mean over all C(n, k) subsets of a problem's responses, exact to 12
  digits, without enumeration. If several results have the most votes, each wins
  with equal probability. A response without a result has no vote; a subset
  without votes is wrong.

  Args:
    votes: [N][n], the result of each response; equal results are one vote.
      None: no result.
    correct: [N, n] bool. A vote and a reward may read a text differently: a
      vote is worth the share of its responses that are correct.
    k: size of the vote, 1 to n.
  """
  n = correct.shape[1]
  _require_responses(k, n)
  each = [_majority(*row, k) for row in zip(votes, correct, strict=True)]
  return float(np.mean(each))


def _majority(votes, correct, k) -> float:
  """The expected worth of the winner of a vote among k of n responses.

  Take each response with probability k/n, given that k are taken: this draws a
  random subset. Without the condition, the counts of different results are
  independent. The probability that a result wins with `top` votes is then a
  product over results, written as a polynomial in z: term t belongs to subsets
  of t responses. An inverse FFT of its values on the unit circle gives term k.
  Results with equally many responses have equal factors, computed once.
  """
  by_result = {}
  for vote, right in zip(votes, correct, strict=True):
    by_result.setdefault(vote, []).append(float(right))
  by_result.pop(None, None)
  worths = {}  # number of responses -> worths of the results that have it
  for rights in by_result.values():
    worths.setdefault(len(rights), []).append(sum(rights) / len(rights))
  n = len(votes)
  z = np.exp(-2j * np.pi * np.arange(n // 2 + 1) / n)
  included = {c: _included(c, k / n, z) for c in worths}
  rest = 1 - k / n + k / n * z  # of a response whose result cannot have `top`
  won = np.zeros_like(z)
  for top in range(1, min(k, max(worths, default=0)) + 1):
    able = [
      (worth, *included[c][:, top]) for c, worth in worths.items() if c >= top
    ]
    left = n - sum(c * len(worth) for c, worth in worths.items() if c >= top)
    won += _won(able, rest**left, k // top)
  chance = math.comb(n, k) * (k / n) ** k * (1 - k / n) ** (n - k)
  # For k = n the FFT adds term n to term 0, which is empty.
  share = float(np.fft.irfft(won, n)[k % n] / chance)
  return abs(round(share, 12))  # rounding errors stay below 1e-12


def _won(able, rest, winners) -> np.ndarray:
  """Probability that a result with `top` votes wins, times its worth, at z.

  Each result draws a uniform number u, and the highest u wins a tie. The
  integral over u uses Gauss-Legendre nodes that are exact for this degree.

  `able` has, for each number of responses that allows `top` votes, the worths
  of its results and the probabilities, at z, of `top` and of fewer votes.
  `rest` is the probability of all else; `winners` can have `top` votes at once.
  """
  winners = min(winners, sum(len(worth) for worth, *_ in able))
  u, weights = _nodes((winners + 1) // 2)
  chance = np.broadcast_to(rest, (len(u), len(rest)))
  won = np.zeros_like(chance)
  for worth, top, fewer in able:
    loses = fewer + u[:, None] * top
    others = loses ** (len(worth) - 1)
    won = (won * loses + chance * sum(worth) * top) * others
    chance = chance * loses * others
  return weights @ won


def _included(count, p, z) -> np.ndarray:
  """[2, count + 1, len(z)]: t of `count` responses are taken; fewer than t are.

  Each is taken with probability p; the values are polynomials at z.
  """
  t = np.arange(count + 1)
  chance = [math.comb(count, i) * p**i * (1 - p) ** (count - i) for i in t]
  exactly = np.array(chance)[:, None] * z ** t[:, None]
  return np.stack([exactly, np.cumsum(exactly, 0) - exactly])


@functools.cache
def _nodes(count: int) -> tuple[np.ndarray, np.ndarray]:
  x, weights = np.polynomial.legendre.leggauss(count)
  return (x + 1) / 2, weights / 2


def _require_responses(k: int, n: int) -> None:
  if not 1 <= k <= n:
    raise ValueError(f"{k=}: expected 1..{n}, the responses to a problem")


class Elo(NamedTuple):
  """A rating and its 95 % interval."""

  rating: float
  low: float  # -inf if nothing is solved
  high: float  # inf if all is solved
  # Less than half a problem is solved or unsolved; `rating` is computed as if
  # it were half a problem.
  bounded: bool


def elo(solved: np.ndarray, ratings: np.ndarray) -> Elo:
  """The rating R that predicts the number of problems that were solved.

  `P(solve) = 1 / (1 + 10^((rating of the problem - R) / 400))` is the formula
  of Codeforces for two contestants (codeforces.com/blog/entry/20762): a
  contestant with a problem's rating solves it with probability 1/2. The
  likelihood of R has its maximum where `sum P(R) = sum solved`. There are no
  clock, penalties or other contestants, so a site would award another rating.

  The interval has every R with `|sum P - sum solved| < 1.96 sd`. Since `sd^2 =
  sum P (1 - P)`, a problem counts once, with any number of responses.

  `solved` [N] is the share of each problem's responses that solve it; `ratings`
  [N] are finite.
  """
  if not (len(solved) == len(ratings) > 0 and np.isfinite(ratings).all()):
    raise ValueError(
      f"{len(solved)=}, {len(ratings)=}: expected finite ratings"
    )
  total, count = float(np.sum(solved)), len(ratings)
  half = min(max(total, 0.5), count - 0.5)
  rating = _rating_of(ratings, lambda mean, sd: mean > half)
  low, high = -math.inf, math.inf
  if total > 0:
    low = _rating_of(ratings, lambda mean, sd: mean > total - _NORMAL * sd)
  if total < count:
    high = _rating_of(ratings, lambda mean, sd: mean > total + _NORMAL * sd)
  return Elo(rating, low, high, bounded=half != total)


def _rating_of(ratings, above) -> float:
  """The smallest R where `above(mean, sd)` of solved holds; bisection."""
  margin = 20 * _DECADE  # odds of 10^20: past the last digit of a count
  low, high = float(np.min(ratings)) - margin, float(np.max(ratings)) + margin
  while high - low > 1e-6:
    middle = (low + high) / 2
    chance = 1 / (1 + 10 ** ((ratings - middle) / _DECADE))
    sd = math.sqrt(np.sum(chance * (1 - chance)))
    low, high = (low, middle) if above(chance.sum(), sd) else (middle, high)
  return (low + high) / 2
