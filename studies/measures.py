"""What the studies of ratios and gradients compute: arrays in, numbers out.

Dimension key: B responses, T tokens, N pairs of groups, K parts of a gradient.
"""

from collections.abc import Iterable, Sequence

import numpy as np


def power(sizes: Sequence[float], values: Sequence[float]) -> float:
  """The exponent b of values ~ sizes ** b: least squares of their logs.

  NaN for fewer than two sizes, or where a value is not above 0.
  """
  sizes, values = np.asarray(sizes, float), np.asarray(values, float)
  if len(sizes) < 2 or not np.all(values > 0):
    return float("nan")
  x = np.log(sizes) - np.log(sizes).mean()
  return float(x @ np.log(values) / (x @ x))


def spread(
  gaps_BT: np.ndarray,
  mask_BT: np.ndarray,
  lengths: tuple[int, int],
  token_clip: tuple[float, float],
  sequence_clip: tuple[float, float],
) -> dict[str, float] | None:
  """How far ratios lie from each other, and from 1, at some response lengths.

  Args:
    gaps_BT: x - o, new less old log-probs; not read under the mask.
    mask_BT: bool, the tokens of the responses.
    lengths: the shortest and the longest response to look at, in tokens.
    token_clip: l and h: a ratio in 1 - l..1 + h is inside.
    sequence_clip: the same for exp(mean_t(x - o)) of a response.

  Returns:
    None for fewer than two such responses, else {"answers", "tokens": how many,
    "length": their mean, "token_variance", "sequence_variance": of x - o and of
    its mean over a response, unbiased, "token_outside", "sequence_outside":
    shares of ratios outside, whatever the sign of an advantage}.
  """
  lengths_B = mask_BT.sum(1)
  inside_B = (lengths_B >= lengths[0]) & (lengths_B <= lengths[1])
  if inside_B.sum() < 2:
    return None
  gaps_BT = np.where(mask_BT, gaps_BT, 0.0).astype(float)[inside_B]
  tokens = gaps_BT[mask_BT[inside_B]]
  means = gaps_BT.sum(1) / lengths_B[inside_B]
  return {
    "answers": len(means),
    "tokens": len(tokens),
    "length": float(lengths_B[inside_B].mean()),
    "token_variance": float(tokens.var(ddof=1)),
    "sequence_variance": float(means.var(ddof=1)),
    "token_outside": _outside(tokens, *token_clip),
    "sequence_outside": _outside(means, *sequence_clip),
  }


def _outside(log_ratios, low, high) -> float:
  ratios = np.exp(log_ratios)
  return float(((ratios < 1 - low) | (ratios > 1 + high)).mean())


def pooled(spreads: Iterable[dict | None]) -> dict[str, float] | None:
  """One `spread` of several rollouts, each about its own mean; None for none.

  "token_std" and "sequence_std" stand in place of the variances. What is of
  tokens is weighed by the tokens, the rest by the responses.
  """
  found = [s for s in spreads if s]
  if not found:
    return None

  def mean(key):
    count = "tokens" if key.startswith("token_") else "answers"
    return float(
      np.average([s[key] for s in found], weights=[s[count] for s in found])
    )

  return {
    "answers": sum(s["answers"] for s in found),
    "tokens": sum(s["tokens"] for s in found),
    "length": mean("length"),
    "token_std": mean("token_variance") ** 0.5,
    "sequence_std": mean("sequence_variance") ** 0.5,
    "token_outside": mean("token_outside"),
    "sequence_outside": mean("sequence_outside"),
  }


def noise(grams: np.ndarray, parts: Sequence[float]) -> np.ndarray:
  """|g_a - g_b|^2 / 2 of each pair of groups, [N].

  Its mean is the trace of the covariance of a group's gradient g, unbiased.

  Args:
    grams: [N, 2, K, 2, K], the inner products of the parts of both gradients.
    parts: [K], g is the sum of the parts times these.
  """
  return energy(grams, parts) - dot(grams, parts)


def energy(grams: np.ndarray, parts: Sequence[float]) -> np.ndarray:
  """(|g_a|^2 + |g_b|^2) / 2 of each pair, [N]; arguments as in `noise`."""
  inner = _inner(grams, parts)
  return (inner[:, 0, 0] + inner[:, 1, 1]) / 2


def dot(grams: np.ndarray, parts: Sequence[float]) -> np.ndarray:
  """g_a g_b of each pair, [N], an unbiased |E g|^2; arguments as in `noise`."""
  inner = _inner(grams, parts)
  return (inner[:, 0, 1] + inner[:, 1, 0]) / 2


def _inner(grams, parts):
  parts = np.asarray(parts, float)
  return np.einsum("nakbl,k,l->nab", np.asarray(grams, float), parts, parts)
