"""Long series, drawn with few points that hide no spike."""

from typing import NamedTuple

import numpy as np

from gspo_jax.report.workdir import Series


class Curve(NamedTuple):
  """Points [N] of a line, and of the band of all that it stands for."""

  steps: np.ndarray
  middle: np.ndarray  # a bucket's mean; NaN where it has no finite number
  low: np.ndarray  # its minimum
  high: np.ndarray  # its maximum
  last: float  # the newest finite number; NaN without one
  thinned: bool  # whether a point stands for several steps


def thin(series: Series, points: int) -> Curve:
  """At most `points` of them, each for as many steps as the next."""
  steps, values = series
  finite = values[~np.isnan(values)]
  last = float(finite[-1]) if len(finite) else np.nan
  if len(steps) <= points:
    return Curve(steps, values, values, values, last, False)
  edges = np.linspace(steps[0], steps[-1] + 1, points + 1)
  buckets = np.split(np.arange(len(steps)), np.searchsorted(steps, edges[1:-1]))
  buckets = [bucket for bucket in buckets if len(bucket)]
  columns = [_bucket(steps[b], values[b]) for b in buckets]
  return Curve(*map(np.array, zip(*columns, strict=True)), last, True)


def _bucket(steps, values):
  finite = values[~np.isnan(values)]
  if not len(finite):
    return steps[-1], np.nan, np.nan, np.nan
  return steps[-1], finite.mean(), finite.min(), finite.max()


def columns(steps: np.ndarray, values: np.ndarray, most: int):
  """Rows [N, bins] summed into at most `most` columns: edges, sums, counts.

  Returns:
    The steps at which columns begin, and the end [C + 1]; sums [C, bins], NaN
    left out; how many finite numbers each is of [C, bins].
  """
  first, last = steps[0], steps[-1] + 1
  edges = np.linspace(first, last, min(most, last - first) + 1)
  where = np.searchsorted(edges, steps, side="right") - 1
  sums, counts = (np.zeros((len(edges) - 1, values.shape[1])) for _ in "12")
  np.add.at(sums, where, np.nan_to_num(values))
  np.add.at(counts, where, ~np.isnan(values))
  return edges, sums, counts
