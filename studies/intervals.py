"""What a few seeds say: means with intervals, paired tests, many at once."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize, stats


def mean(values: Sequence[float], level: float = 0.95) -> dict[str, float]:
  """The mean with Student's t interval: {"mean", "low", "high", "n"}.

  low and high are NaN for one value, all is for none.
  """
  values = np.asarray(values, float)
  n, center = len(values), float(np.mean(values)) if len(values) else math.nan
  if n < 2:
    return {"mean": center, "low": math.nan, "high": math.nan, "n": n}
  error = float(values.std(ddof=1)) / math.sqrt(n)
  half = float(stats.t.ppf((1 + level) / 2, n - 1)) * error
  return {"mean": center, "low": center - half, "high": center + half, "n": n}


def paired(
  a: Sequence[float], b: Sequence[float], level: float = 0.95
) -> dict[str, float]:
  """`mean` of a - b, seed by seed, their "sd", and "p" of the paired t test.

  p is two-sided, and NaN for one pair; where all differences are one number, 0
  if that is not 0, else 1.
  """
  gaps = np.subtract(a, b, dtype=float)
  found = mean(gaps, level)
  if len(gaps) < 2:
    return found | {"sd": math.nan, "p": math.nan}
  sd = float(gaps.std(ddof=1))
  if sd == 0:
    return found | {"sd": sd, "p": float(found["mean"] == 0)}
  t = abs(found["mean"]) / (sd / math.sqrt(len(gaps)))
  return found | {"sd": sd, "p": float(2 * stats.t.sf(t, len(gaps) - 1))}


def place(found: dict[str, float], low: float, high: float) -> str:
  """Where an interval lies: "below", "within" or "above" a range, as a whole.

  "undecided" where it crosses an end of the range, or is none.
  """
  if found["high"] < low:
    return "below"
  if found["low"] > high:
    return "above"
  inside = low <= found["low"] and found["high"] <= high
  return "within" if inside else "undecided"


def holm(ps: Sequence[float]) -> list[float]:
  """p-values adjusted for being many: Holm 1979, step-down.

  Below .05 with a chance of .05 at most, if there is nothing to be found
  anywhere. NaN stays NaN, and counts as one of the many.
  """
  adjusted, highest = [math.nan] * len(ps), 0.0
  order = sorted(range(len(ps)), key=lambda i: (math.isnan(ps[i]), ps[i]))
  for rank, i in enumerate(order):
    if not math.isnan(ps[i]):
      highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
      adjusted[i] = highest
  return adjusted


def judge(differences: Sequence[dict], level: float = 0.05) -> None:
  """Adds to each of `paired` what the test of all of them says.

  "p of all" is Holm's; "verdict" is "higher" or "lower" where that is under
  `level`, else "not distinguished"; "detectable" is the difference that would
  have been found with a chance of .8, were all others nothing.
  """
  adjusted = holm([found["p"] for found in differences])
  for found, p in zip(differences, adjusted, strict=True):
    found["p of all"], found["verdict"] = p, "not distinguished"
    if p < level:  # NaN is not
      found["verdict"] = "higher" if found["mean"] > 0 else "lower"
    strictest = level / len(differences)
    found["detectable"] = detectable(found["sd"], found["n"], strictest)


def detectable(sd: float, n: int, level: float, power: float = 0.8) -> float:
  """The mean that a two-sided t test of n values finds with that chance.

  NaN for one value.
  """
  if n < 2:
    return math.nan
  t = stats.t.isf(level / 2, n - 1)
  missed = lambda shift: power - stats.nct.sf(t, n - 1, shift)
  return float(optimize.brentq(missed, 0, 10 * t)) * sd / math.sqrt(n)


def bootstrap(
  values: Sequence,
  statistic: Callable[[np.ndarray], float],
  *,
  level: float = 0.95,
  draws: int = 2000,
  seed: int = 0,
) -> tuple[float, float]:
  """Percentile interval of a statistic of `values`, resampled along axis 0."""
  values, rng = np.asarray(values), np.random.default_rng(seed)
  picks = rng.integers(len(values), size=(draws, len(values)))
  found = [statistic(values[pick]) for pick in picks]
  low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
  return float(low), float(high)
