"""The embedded task: labelled chains of arithmetic, with a perfect verifier.

`8a+3b-5c+4?` asks for (((8 + 3) - 5) + 4) modulo 10, left to right. A worked
answer names each step by its label: `a8+3=1;b1-5=6;c6+4=0;#0`. The labels turn
the look-up of an operand into copying what followed the same letter before,
which a model of two layers learns.
"""

import dataclasses
import hashlib
import random
import string
from typing import NamedTuple

from gspo_jax.runtime.errors import UserError

_OPERATIONS = {
  "+": lambda a, b: a + b,
  "-": lambda a, b: a - b,
  "*": lambda a, b: a * b,
}


class Problem(NamedTuple):
  """One problem of any source.

  Attributes:
    text: what the policy is asked, before a template.
    reference: the answer that the reward compares with.
    demonstration: a worked response to imitate in the cold start.
  """

  text: str
  reference: str
  demonstration: str


def held_out(question: str) -> bool:
  """Whether a question is for evaluation only: one in eight, by its hash."""
  return hashlib.sha256(question.encode()).digest()[0] < 32


@dataclasses.dataclass(frozen=True)
class Chain:
  """A random-access source of chains; the same index is the same problem.

  Attributes:
    steps: the lengths to draw from, each 1 to 26 (a label is a letter).
    noise: chance that a demonstrated step has a random result, which the rest
      of the chain then carries on. The cold start learns the method from it
      and leaves the precision to RL.
    evaluation: give the held-out questions instead of the others.
    size: how many problems there are.
    seed: of the whole source.
  """

  steps: tuple[int, ...]
  noise: float = 0.0
  evaluation: bool = False
  size: int = 1_000_000
  seed: int = 0

  def __post_init__(self):
    fits = lambda n: isinstance(n, int) and 1 <= n <= 26
    if not self.steps or not all(map(fits, self.steps)):
      raise UserError(f"chain_steps={self.steps}: expected lengths in 1..26")
    if not 0 <= self.noise <= 1:
      raise UserError(f"chain_noise={self.noise}: expected a chance in 0..1")

  def __len__(self) -> int:
    return self.size

  def __getitem__(self, index: int) -> Problem:
    rng = random.Random(f"{self.seed}/{self.evaluation}/{index}")
    while True:
      problem = self._draw(rng)
      if held_out(problem.text) == self.evaluation:
        return problem

  def _draw(self, rng: random.Random) -> Problem:
    start = value = shown = rng.randrange(10)
    question, demonstration = str(start), []
    for label in string.ascii_lowercase[: rng.choice(self.steps)]:
      operation, operand = rng.choice("+-*"), rng.randrange(10)
      apply = _OPERATIONS[operation]
      question += f"{label}{operation}{operand}"
      value = apply(value, operand) % 10
      before, shown = shown, apply(shown, operand) % 10
      if rng.random() < self.noise:
        shown = rng.randrange(10)
      demonstration.append(f"{label}{before}{operation}{operand}={shown};")
    return Problem(
      question + "?", str(value), "".join(demonstration) + f"#{shown}"
    )
