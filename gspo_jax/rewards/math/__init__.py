r"""Equivalence of mathematical results, MATH style, in bounded time.

`answers` compares two results as tokens of `text`. Each is read as one kind
after the other: words and dates (`kinds`), intervals (`regions`), lists,
equations and matrices, numbers with `units`, and expressions (`expression`),
which are equal if their `values` are. A result that still has to be worked out,
such as 17+1, is wrong (`quantities`).
"""

from gspo_jax.rewards import numbers
from gspo_jax.rewards.math import answers, text
from gspo_jax.rewards.math.text import normalised

__all__ = ("equivalent", "normalised")


def equivalent(prompt: str, response: str, reference: str) -> float:
  r"""1.0 iff the last result of the response means the same as the reference.

  The result is the content of the last `\boxed{}` or the rest of the line after
  the last `####`, whichever comes later. A heading of Markdown is no `####`.

  Lists and sets have no order, tuples do. An equation is equal to its
  multiples. A name may stand before its value, as in `x = 3`. A unit may be
  missing on one side: `10\text{ cm}` is 10. Given on both it is converted, or
  makes the result wrong. A percent sign is a unit: `50\%` is 50, not 0.5.
  Decimals are equal if they agree in six digits and in the decimals that both
  have, whole numbers in all.

  The response must do the work itself. Sums, integrals and other operators are
  wrong unless the reference has them too. Where the reference is a number, all
  arithmetic is wrong but a quotient, a root, a function and a power of ten.
  Other forms of the same expression are correct, such as `x^2-1` for
  `(x-1)(x+1)` and the reverse.

  What cannot be read, such as an integral, is compared as text only, and so is
  a result of over 500 characters, or with powers too large to write out.

  Args:
    prompt: not used.
    response: what the policy wrote.
    reference: a result, or a solution with a result in the same places.
  """
  result = numbers.result(response)
  expected = (numbers.result(reference) or reference).strip()
  if not result or not expected:
    return 0.0
  if result == expected:
    return 1.0
  if max(len(result), len(expected)) > text.MAX_LENGTH:
    return 0.0
  return float(answers.same(text.tokens(expected), text.tokens(result)))
