"""Two embedded environments, and their problems with demonstrations.

Calculator: `37*48?` is answered with `calc(37*48)`, the tool replies `1776`,
and the answer is `#1776`. A model of two layers cannot multiply in its head, so
it is right only where it calls the tool.

Guessing: a letter between two others, such as `c-n?`, is to be found. A guess
names the letters that are left and one of them, `cn:h`. The reply is `>` if the
letter comes later, `<` if earlier; a right guess ends the game. Halving finds
one of 15 letters with four guesses.

The demonstrations have mistakes on purpose: some do not call the calculator, or
call it with other numbers, and half of the guesses are random. The cold start
so learns the form, and leaves the use of the tool and the halving to RL.
"""

import random
import re
import string
from collections.abc import Sequence

from gspo_jax.data.tasks import Problem
from gspo_jax.rollout.environment import Message, Question, Step

_OPERATIONS = {
  "+": lambda a, b: a + b,
  "-": lambda a, b: a - b,
  "*": lambda a, b: a * b,
}
_EXPRESSION = re.compile(r"(\d{1,4})([-+*])(\d{1,4})")
_CALL = re.compile(r"calc\((.*)\)", re.DOTALL)
_SIZE = 6000  # problems of each source
_GUESS = re.compile(r"[a-z]{2}:[a-z]")


class Calculator:
  """A tool for one operation on two numbers.

  The reward is 1 for the right number behind the last `#`.
  """

  roles = ("tool",)

  def reset(self, problem: Question, seed: int) -> Sequence[Message]:
    self._reference = problem.reference
    return ()

  def step(self, response: str) -> Step:
    call = _CALL.fullmatch(response)
    if not call:
      answer = response.rpartition("#")[2]
      return Step(done=True, reward=float(answer == self._reference))
    parts = _EXPRESSION.fullmatch(call[1])
    if not parts:
      return Step([("tool", "error")], tool_calls=1, tool_errors=1)
    a, operation, b = parts.groups()
    result = _OPERATIONS[operation](int(a), int(b))
    return Step([("tool", str(result))], tool_calls=1)


def calculator_problems() -> list[Problem]:
  """Two numbers of two digits; a source for `data.source`."""
  rng, problems = random.Random("calculator"), {}
  while len(problems) < _SIZE:
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)
    operation = rng.choice("+-*")
    text = f"{a}{operation}{b}"
    result = str(_OPERATIONS[operation](a, b))
    demonstration, turns = _calculated(text, result, rng)
    problems[text] = Problem(f"{text}?", result, demonstration, turns=turns)
  return list(problems.values())


def _calculated(text: str, result: str, rng: random.Random):
  """A demonstration: its first response, and the turns behind it."""
  kind = rng.random()
  if kind < 0.4:  # does not call the tool
    return f"#{rng.randrange(10, 1000)}", ()
  if kind < 0.5:  # calls it with another number
    a, operation, b = _EXPRESSION.fullmatch(text).groups()
    a = str(rng.randrange(10, 100))
    text = f"{a}{operation}{b}"
    result = str(_OPERATIONS[operation](int(a), int(b)))
  return f"calc({text})", (("tool", result), ("assistant", f"#{result}"))


class Guessing:
  """A letter is to be found; the reward of the right guess is 1."""

  roles = ("user",)

  def reset(self, problem: Question, seed: int) -> Sequence[Message]:
    self._letter = problem.reference
    return ()

  def step(self, response: str) -> Step:
    if not _GUESS.fullmatch(response):
      return Step(done=True)
    guess = response[-1]
    if guess == self._letter:
      return Step(done=True, reward=1.0)
    return Step([("user", ">" if self._letter > guess else "<")])


def guessing_problems() -> list[Problem]:
  """Ranges of 8 to 15 letters, each letter five times; for `data.source`."""
  rng, letters = random.Random("guessing"), string.ascii_lowercase
  problems = []
  for size in range(8, 16):
    for first in range(27 - size):
      whole = letters[first : first + size]
      for letter in whole * 5:  # with other demonstrations
        demonstration, turns = _guessed(rng, first, size, letter)
        text = f"{whole[0]}-{whole[-1]}?"
        problems.append(Problem(text, letter, demonstration, turns=turns))
  return problems


def _guessed(rng: random.Random, first: int, size: int, letter: str):
  """A demonstration of up to four guesses, half of them random."""
  letters, low, high = string.ascii_lowercase, first, first + size - 1
  turns = []
  while True:
    guess = (low + high) // 2
    if rng.random() < 0.5:
      guess = rng.randrange(low, high + 1)
    turns.append(
      ("assistant", f"{letters[low]}{letters[high]}:{letters[guess]}")
    )
    if letters[guess] == letter or len(turns) == 7:
      return turns[0][1], tuple(turns[1:])
    if letters[guess] < letter:
      turns.append(("user", ">"))
      low = guess + 1
    else:
      turns.append(("user", "<"))
      high = guess - 1
