r"""Equivalence of mathematical results, MATH style: kind by kind, then by value.

`answers` compares two results as tokens of `text`: words, choices, lists,
intervals (`regions`), equations, matrices, numbers with `units`, and
expressions (`expression`, `values`, `work`).
"""

from gspo_jax.rewards import numbers
from gspo_jax.rewards.math import answers, text
from gspo_jax.rewards.math.text import normalised

__all__ = ("equivalent", "normalised")


def equivalent(prompt: str, response: str, reference: str) -> float:
  """docs"""
  result = numbers.result(response)
  expected = (numbers.result(reference) or reference).strip()
  if not result or not expected:
    return 0.0
  if result == expected:
    return 1.0
  if max(len(result), len(expected)) > text.MAX_LENGTH:
    return 0.0
  return float(answers.same(text.tokens(expected), text.tokens(result)))
