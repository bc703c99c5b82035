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


def describe(grams: np.ndarray, facts: dict) -> dict:
  """One length: each method's quantities, with intervals.

  facts["clipped tokens"] has each method's share; the noise is over what is
  left, which dropping as many at random would leave of that at ratio 1.
  """
  clipped = facts["clipped tokens"]
  return facts | {
    "noise at ratio 1": float(measures.noise(grams, _AT_ONE).mean()),
    "added": {m: _with_interval(added(grams, m), rms) for m in clipped},
    "noise": {
      m: _with_interval(
        noise(grams, m), lambda pairs, m=m: share(pairs) / (1 - clipped[m])
      )
      for m in clipped
      if clipped[m] < 1
    },
  }


def _with_interval(pairs, statistic) -> dict[str, float]:
  low, high = intervals.bootstrap(pairs, statistic)
  return {
    "mean": statistic(pairs),
    "low": low,
    "high": high,
    "n": len(pairs),
  }


def exponents(by_length: dict[int, np.ndarray]) -> dict[str, float]:
  """By which what each method's ratios add goes with length."""
  return {
    m: measures.power(
      list(by_length), [rms(added(grams, m)) for grams in by_length.values()]
    )
    for m in gradients.METHODS
  }
