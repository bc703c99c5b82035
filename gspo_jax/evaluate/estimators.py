"""Estimates from n sampled answers a question: avg@n, pass@k, maj@k, Elo.

Averages are over questions, and so are their errors: answers to one question
are alike, and N questions stand for all that might have been asked.
"""

import functools
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

  Exact to 12 digits: the mean over all C(n, k) subsets of a question's answers,
  of which none is drawn. Where several answers tie for the most votes, each
  wins with the same chance. One without a final answer has no vote, and where
  nobody votes, nothing is right.

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
  """Draws each answer alone, with chance k/n, and asks for k in all.

  So the counts of the votes are independent: the chance that one wins with
  `top`, all others having fewer or losing the toss, is a product over votes, as
  a polynomial in the number drawn; of that, term k is wanted. It is read off
  values on the unit circle. Votes of as many answers win alike.
  """
  marks = {}
  for vote, right in zip(votes, correct, strict=True):
    marks.setdefault(vote, []).append(float(right))
  marks.pop(None, None)
  worths = {}  # by the answers a vote has, what each such vote is worth
  for mine in marks.values():
    worths.setdefault(len(mine), []).append(sum(mine) / len(mine))
  n = len(votes)
  z = np.exp(-2j * np.pi * np.arange(n // 2 + 1) / n)
  drawn = {c: _drawn(c, k / n, z) for c in worths}
  rest = 1 - k / n + k / n * z  # of an answer whose vote cannot have `top`
  won = np.zeros_like(z)
  for top in range(1, min(k, max(worths, default=0)) + 1):
    able = [
      (worth, *drawn[c][:, top]) for c, worth in worths.items() if c >= top
    ]
    left = n - sum(c * len(worth) for c, worth in worths.items() if c >= top)
    won += _won(able, rest**left, k // top)
  chance = math.comb(n, k) * (k / n) ** k * (1 - k / n) ** (n - k)
  # Where all are drawn, term n falls on term 0, which is empty.
  share = float(np.fft.irfft(won, n)[k % n] / chance)
  return abs(round(share, 12))  # rounding errors stay below 1e-12


def _won(able, rest, most) -> np.ndarray:
  """Chance that one of those able to wins, times its worth, as values at z.

  Of several with `top` the highest of uniform draws wins: the integral over
  the draw u, by Gauss and Legendre, exact for a polynomial of this degree.

  Args:
    able: by answers a vote has: worths of such votes, and the chances of one to
      have `top` and to have fewer, as values at z.
    rest: the chance of everything else.
    most: votes that can have `top` at once.
  """
  most = min(most, sum(len(worth) for worth, *_ in able))
  u, weights = _nodes((most + 1) // 2)
  chance = np.broadcast_to(rest, (len(u), len(rest)))
  won = np.zeros_like(chance)
  for worth, top, fewer in able:
    loses = fewer + u[:, None] * top
    others = loses ** (len(worth) - 1)
    won = (won * loses + chance * sum(worth) * top) * others
    chance = chance * loses * others
  return weights @ won


def _drawn(count, p, z) -> np.ndarray:
  """[2, count + 1, len(z)]: of `count` answers exactly t, and fewer, are drawn.

  Each with chance p, as values of the polynomial at z.
  """
  t = np.arange(count + 1)
  chance = [math.comb(count, i) * p**i * (1 - p) ** (count - i) for i in t]
  exactly = np.array(chance)[:, None] * z ** t[:, None]
  return np.stack([exactly, np.cumsum(exactly, 0) - exactly])


@functools.cache
def _nodes(count: int) -> tuple[np.ndarray, np.ndarray]:
  x, weights = np.polynomial.legendre.leggauss(count)
  return (x + 1) / 2, weights / 2


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
