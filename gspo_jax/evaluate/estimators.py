"""Estimates from n responses to each of N problems: avg@n, pass@k, maj@k, Elo.

Standard errors are over problems: the responses to one problem are correlated,
and the N problems are a sample of all that the benchmark could have.
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
  """Whether each of these rewards is at least `reward.pass_threshold`.

  Compared in float32, in which rewards are kept: 0.7 is not under 0.7.
  """
  return np.asarray(scores, np.float32) >= np.float32(threshold)


def avg(scores: np.ndarray) -> tuple[float, float]:
  """The mean of scores [N, n], and its standard error over the N problems.

  The error is NaN for one problem.
  """
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

  The mean over all C(n, k) subsets of a problem's responses, computed exactly
  (to 12 digits) without enumerating them. If several results have the most
  votes, each wins with equal probability. A response without a result has no
  vote; a subset without votes counts as wrong.

  Args:
    votes: [N][n] results of the responses, equal where they vote for the same;
      None: no result.
    correct: [N, n] bool. If only some responses with one vote are correct (a
      vote and a reward may read a text differently), that vote is worth their
      share.
    k: size of the vote, 1 to n.
  """
  n = correct.shape[1]
  _require_responses(k, n)
  each = [_majority(*row, k) for row in zip(votes, correct, strict=True)]
  return float(np.mean(each))


def _majority(votes, correct, k) -> float:
  """The expected worth of the winner of a vote among k of n responses.

  The subset is sampled by including each response independently with
  probability k/n, given that k are included. The counts of the results are then
  independent. The probability that one result wins with `top` votes is a
  product over results, as a polynomial in z whose term t belongs to subsets of
  t responses. The product is evaluated on the unit circle, and term k is read
  with an inverse FFT. Results with equally many responses share their factors.
  """
  by_result = {}
  for vote, right in zip(votes, correct, strict=True):
    by_result.setdefault(vote, []).append(float(right))
  by_result.pop(None, None)
  worths = {}  # by the number of responses: the worths of such results
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
  # For k = n the FFT puts term n in the place of term 0, which is empty.
  share = float(np.fft.irfft(won, n)[k % n] / chance)
  return abs(round(share, 12))  # rounding errors stay below 1e-12


def _won(able, rest, winners) -> np.ndarray:
  """Probability that a result with `top` votes wins, times its worth, at z.

  A tie goes to the highest of uniform random numbers u: the integral over u,
  with Gauss-Legendre nodes that are exact for a polynomial of this degree.

  Args:
    able: for each number of responses that a result can have: the worths of
      such results, and the probabilities that one has `top` votes and that it
      has fewer, as values at z.
    rest: the probability of everything else.
    winners: the number of results that can have `top` votes at once.
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
  """[2, count + 1, len(z)]: exactly t of `count` responses are included; fewer.

  Each is included with probability p; the values of the polynomials at z.
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
  # Less than half a problem is solved, or all but less than half of one:
  # `rating` is computed as if it were half a problem.
  bounded: bool


def elo(solved: np.ndarray, ratings: np.ndarray) -> Elo:
  """The rating R at which the expected number of solved problems is that seen.

  `P(solve) = 1 / (1 + 10^((rating of the problem - R) / 400))`, the formula of
  Codeforces for two contestants (codeforces.com/blog/entry/20762); a problem's
  rating is that of a contestant who solves it with probability 1/2. The
  likelihood of R has its maximum where `sum P(R) = sum solved`. There is no
  clock, no penalty and no other contestant, so this is not the rating that a
  site would award.

  The interval contains every R with `|sum P - sum solved| < 1.96 sd`, where
  `sd^2 = sum P (1 - P)`: a problem counts once, however many responses it has.

  `solved` [N] has the share of the responses to each problem that solve it,
  `ratings` [N] the problems' ratings, finite.
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
  """The smallest R where `above(mean, sd)` of solved holds, by bisection."""
  margin = 20 * _DECADE  # odds of 10^20: past the last digit of a count
  low, high = float(np.min(ratings)) - margin, float(np.max(ratings)) + margin
  while high - low > 1e-6:
    middle = (low + high) / 2
    chance = 1 / (1 + 10 ** ((ratings - middle) / _DECADE))
    sd = math.sqrt(np.sum(chance * (1 - chance)))
    low, high = (low, middle) if above(chance.sum(), sd) else (middle, high)
  return (low + high) / 2
