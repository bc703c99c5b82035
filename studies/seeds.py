"""The runs of a setting, seed by seed."""

import math
from collections.abc import Iterable, Mapping, Sequence

from studies import intervals


def of(results: Sequence[dict], **setting) -> dict[int, dict]:
  """By seed, the results that have these values."""
  found = [r for r in results if all(r[k] == v for k, v in setting.items())]
  return {r["seed"]: r for r in found}


def values(own: Mapping[int, dict], key: str) -> list[float]:
  """Of each seed, but those that have no such number."""
  return [r[key] for r in own.values() if _is_number(r[key])]


def curve(results: Iterable[dict], key: str) -> list[list]:
  """[step, `intervals.mean` over seeds] of a curve that each result has."""
  by_step = {}
  for step, value in (point for r in results for point in r[key]):
    by_step.setdefault(step, []).append(value)
  return [[s, intervals.mean(v)] for s, v in sorted(by_step.items())]


def pairs(
  own: Mapping[int, dict], base: Mapping[int, dict], key: str
) -> tuple[list[float], list[float]]:
  """`values` of the seeds that both have."""
  both = sorted(own.keys() & base.keys())
  every = [(own[seed][key], base[seed][key]) for seed in both]
  found = [pair for pair in every if all(map(_is_number, pair))]
  return [a for a, _ in found], [b for _, b in found]


def _is_number(value) -> bool:
  return value is not None and math.isfinite(value)
