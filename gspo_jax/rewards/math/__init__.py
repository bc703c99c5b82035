r"""Equivalence of mathematical results, MATH style, in bounded time.

`answers` compares two results as tokens of `text`, one kind after the other:
words and dates (`kinds`), intervals (`regions`), lists, equations and matrices,
numbers with `units`, and expressions (`expression`), equal if their `values`
are. A result that still has to be worked out, such as 17+1, is wrong
(`quantities`).
"""

from gspo_jax.rewards import numbers
from gspo_jax.rewards.math import answers, text
from gspo_jax.rewards.math.text import normalised

__all__ = ("equivalent", "normalised")


def equivalent(prompt: str, response: str, reference: str) -> float:
  r"""1.0 iff the last result of the response means the same as the reference.

  The result is the content of the last `\boxed{}` or the rest of the line after
  the last `####`, whichever comes later; the reference is a result, or has one
  in the same places. docs/rewards.md has the rules. A result that cannot be
  read, is longer than 500 characters or has powers too large to write out is
  compared as text only.
  """
  result = numbers.result(response, prompt)
  expected = (numbers.result(reference) or reference).strip()
  if not result or not expected:
    return 0.0
  if result == expected:
    return 1.0
  if max(len(result), len(expected)) > text.MAX_LENGTH:
    return 0.0
  return float(answers.same(text.tokens(expected), text.tokens(result)))
