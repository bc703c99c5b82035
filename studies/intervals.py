"""What a few seeds say: means with intervals, paired tests, many at once."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats


def mean(values: Sequence[float], level: float = 0.95) -> dict[str, float]:
  """The mean with Student's t interval: {"mean", "low", "high", "n"}.

  low and high are NaN for one value.
  """
  values = np.asarray(values, float)
  n, center = len(values), float(np.mean(values))
  if n < 2:
    return {"mean": center, "low": math.nan, "high": math.nan, "n": n}
  error = float(values.std(ddof=1)) / math.sqrt(n)
  half = float(stats.t.ppf((1 + level) / 2, n - 1)) * error
  return {"mean": center, "low": center - half, "high": center + half, "n": n}


def paired(
  a: Sequence[float], b: Sequence[float], level: float = 0.95
) -> dict[str, float]:
  """`mean` of a - b, seed by seed, and "p" of the two-sided paired t test.

  p is NaN for one pair; where all differences are one number, 0 if that is not
  0, else 1.
  """
  gaps = np.subtract(a, b, dtype=float)
  found = mean(gaps, level)
  if len(gaps) < 2:
    return found | {"p": math.nan}
  spread = float(gaps.std(ddof=1))
  if spread == 0:
    return found | {"p": float(found["mean"] == 0)}
  t = abs(found["mean"]) / (spread / math.sqrt(len(gaps)))
  return found | {"p": float(2 * stats.t.sf(t, len(gaps) - 1))}


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
  """Adds to each of `paired`, of values to be high: "p of all", "verdict".

  p of all is Holm's; the verdict is "better" or "worse" where it is under
  `level`, else "not distinguished".
  """
  adjusted = holm([found["p"] for found in differences])
  for found, p in zip(differences, adjusted, strict=True):
    found["p of all"], found["verdict"] = p, "not distinguished"
    if p < level:  # NaN is not
      found["verdict"] = "better" if found["mean"] > 0 else "worse"


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
