"""Long series reduced to fewer points, without hiding a spike."""

from typing import NamedTuple

import numpy as np

from gspo_jax.report.workdir import Series


class Curve(NamedTuple):
  """Points [N] of a line, and of the band around it."""

  steps: np.ndarray
  middle: np.ndarray  # mean of the steps of a point; NaN if none is finite
  low: np.ndarray  # their minimum
  high: np.ndarray  # their maximum
  last: float  # the last finite value; NaN if there is none
  thinned: bool  # whether a point covers several steps


def thin(series: Series, points: int) -> Curve:
  """At most `points` points, each of which covers equally many steps."""
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


class Columns(NamedTuple):
  """Distributions of neighbouring steps, added up into C columns.

  Attributes:
    edges: [C + 1] the steps at which columns begin, and the end.
    sums: [C, bins] without NaN.
    counts: [C, bins] how many finite numbers each sum has.
  """

  edges: np.ndarray
  sums: np.ndarray
  counts: np.ndarray


def columns(steps: np.ndarray, values: np.ndarray, limit: int) -> Columns:
  """Adds values [N, bins] of N steps up into at most `limit` columns."""
  first, last = steps[0], steps[-1] + 1
  edges = np.linspace(first, last, min(limit, last - first) + 1)
  where = np.searchsorted(edges, steps, side="right") - 1
  sums, counts = (np.zeros((len(edges) - 1, values.shape[1])) for _ in "12")
  np.add.at(sums, where, np.nan_to_num(values))
  np.add.at(counts, where, ~np.isnan(values))
  return Columns(edges, sums, counts)
