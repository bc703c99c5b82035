"""What is said of gradients, from their parts' inner products, with intervals.

Dimension key: N pairs of groups, K parts; grams are [N, 2, K, 2, K].
"""

import numpy as np

from studies import intervals, measures
from studies.gradient_noise import gradients

_AT_ONE = [1.0] + [0.0] * len(gradients.METHODS)


def added(grams: np.ndarray, name: str) -> np.ndarray:
  """[N, 2]: of each pair what a method's ratios add, and the gradient at 1."""
  _, own = gradients.parts(name)
  return np.stack([measures.energy(grams, p) for p in (own, _AT_ONE)], 1)


def noise(grams: np.ndarray, name: str) -> np.ndarray:
  """[N, 2]: of each pair a method's noise, and that at ratio 1."""
  whole, _ = gradients.parts(name)
  return np.stack([measures.noise(grams, p) for p in (whole, _AT_ONE)], 1)


def share(pairs: np.ndarray) -> float:
  """[N, 2] -> the quotient of the means."""
  top, bottom = pairs.mean(0)
  return float(top / bottom)


def rms(pairs: np.ndarray) -> float:
  return share(pairs) ** 0.5


ALL = {"added": (added, rms), "noise": (noise, share)}


def describe(grams: np.ndarray, facts: dict) -> dict:
  """One length and new policy: each method's quantities, with intervals."""
  found = dict(facts)
  found["noise at ratio 1"] = float(measures.noise(grams, _AT_ONE).mean())
  for quantity, (pairs, statistic) in ALL.items():
    found[quantity] = {}
    for name in gradients.METHODS:
      values = pairs(grams, name)
      low, high = intervals.bootstrap(values, statistic)
      found[quantity][name] = {
        "mean": statistic(values),
        "low": low,
        "high": high,
        "n": len(values),
      }
  return found


def exponents(by_length: dict[int, np.ndarray]) -> dict:
  """By which each quantity goes with length, resampling pairs of groups."""
  lengths, found = list(by_length), {}
  for quantity, (pairs, statistic) in ALL.items():
    found[quantity] = {}
    for name in gradients.METHODS:
      values = np.stack([pairs(g, name) for g in by_length.values()], 1)

      def slope(values, statistic=statistic):
        each = [statistic(v) for v in values.swapaxes(0, 1)]
        return measures.power(lengths, each)

      low, high = intervals.bootstrap(values, slope)
      found[quantity][name] = {"mean": slope(values), "low": low, "high": high}
  return found
