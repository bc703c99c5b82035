"""Two embedded environments: problems and demonstrations.

Calculator: `37*48?` is answered with `calc(37*48)`, the tool replies `1776`,
and the answer is `#1776`. The environment is `tools` with the function `calc`.

Guessing: the policy must find a letter in a range such as `c-n?`. The reply to
a guess is `>` if the letter is later or `<` if it is earlier, and the range
that is left: `>i-n?`. The environment always keeps the larger part, so luck
does not help. Halving finds one of 15 letters with four guesses.

The demonstrations have mistakes on purpose. Most do not call the calculator, or
call it with another number, and all guesses are random. So the cold start
learns the form, and RL must learn to use the tool and to halve the range.
"""

import random
import re
import string
from collections.abc import Sequence

from gspo_jax.data.problem import Problem
from gspo_jax.rollout.environment import Message, Question, Step
from gspo_jax.tasks.chain import OPERATIONS

_EXPRESSION = re.compile(r"(\d{1,4})([-+*])(\d{1,4})")
_SIZE = 6000  # problems of each source
_RANGE = re.compile(r"([a-z])-([a-z])[?]")
_LETTERS = string.ascii_lowercase


def calc(expression: str) -> int:
  """Computes one operation on two numbers.

  Args:
    expression: the numbers and `+`, `-` or `*` between them, such as 37*48.
  """
  parts = _EXPRESSION.fullmatch(expression)
  if not parts:
    raise ValueError  # the policy reads "error"
  a, operation, b = parts.groups()
  return OPERATIONS[operation](int(a), int(b))


def is_result(prompt: str, response: str, reference: str) -> float:
  """1.0 iff the response is `#` and the reference."""
  return float(response == f"#{reference}")


def calculator_problems() -> list[Problem]:
  """Two numbers of two digits; for `data.source`."""
  rng, problems = random.Random("calculator"), {}
  while len(problems) < _SIZE:
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)
    operation = rng.choice("+-*")
    text = f"{a}{operation}{b}"
    result = str(OPERATIONS[operation](a, b))
    demonstration, turns = _calculated(a, operation, b, rng)
    problems[text] = Problem(f"{text}?", result, demonstration, turns=turns)
  return list(problems.values())


def _calculated(a: int, operation: str, b: int, rng: random.Random):
  kind = rng.random()
  if kind < 0.7:  # does not call the tool
    return f"#{rng.randrange(10, 1000)}", ()
  if kind < 0.8:  # calls it with a wrong number
    a = rng.randrange(10, 100)
  result = str(OPERATIONS[operation](a, b))
  turns = ("tool", result), ("assistant", f"#{result}")
  return f"calc({a}{operation}{b})", turns


class Guessing:
  """The environment of the guessing game; the right letter has reward 1."""

  roles = ("user",)

  def reset(self, problem: Question, seed: int) -> Sequence[Message]:
    ends = _RANGE.fullmatch(problem.text)
    if not ends:
      raise ValueError(f"{problem.text!r}: expected a range as 'a-f?'")
    first, last = ends.groups()
    self._low, self._high = _LETTERS.index(first), _LETTERS.index(last)
    return ()

  def step(self, response: str) -> Step:
    """Replies with the larger part; ends at the last letter, or without one."""
    guess = _LETTERS.find(response) if len(response) == 1 else -1
    if not self._low <= guess <= self._high:
      return Step(done=True)
    if self._low == self._high:
      return Step(done=True, reward=1.0)
    sign, self._low, self._high = _left(guess, self._low, self._high)
    return Step([("user", sign + _asked(self._low, self._high))])


def guessing_problems() -> list[Problem]:
  """Ranges of 6 to 12 letters with demonstrations; for `data.source`."""
  rng, problems = random.Random("guessing"), []
  for size in range(6, 13):
    for low in range(27 - size):
      high = low + size - 1
      for _ in range(40):
        first, turns = _guessed(rng, low, high)
        problems.append(Problem(_asked(low, high), "found", first, turns=turns))
  # Shuffled, because the first ones are held out and should be diverse.
  rng.shuffle(problems)
  return problems


def _asked(low: int, high: int) -> str:
  return f"{_LETTERS[low]}-{_LETTERS[high]}?"


def _left(guess: int, low: int, high: int) -> tuple[str, int, int]:
  """The sign, and the larger part as a range; of equal parts the later one."""
  if high - guess >= guess - low:
    return ">", guess + 1, high
  return "<", low, guess - 1


def _guessed(rng: random.Random, low: int, high: int):
  turns = []
  for _ in range(4):
    guess = rng.randrange(low, high + 1)
    turns.append(("assistant", _LETTERS[guess]))
    if low == high:
      break
    sign, low, high = _left(guess, low, high)
    turns.append(("user", sign + _asked(low, high)))
  if turns[-1][0] == "user":
    turns.pop()
  return turns[0][1], tuple(turns[1:])
