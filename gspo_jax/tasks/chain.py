"""The default task: labelled chains of arithmetic with an exact reward.

The problem `8a+3b-5c+4?` is (((8 + 3) - 5) + 4) modulo 10, from left to right.
A worked response labels each step: `a8+3=1;b1-5=6;c6+4=0;#0`. A label lets a
model copy the operand behind the same letter of the prompt; two layers can
learn this.
"""

import dataclasses
import operator
import random
import string

from gspo_jax.data.problem import Problem, held_out
from gspo_jax.runtime.errors import UserError

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclasses.dataclass(frozen=True)
class Chain:
  """A random-access source of chains; the same index is the same problem."""

  steps: tuple[int, ...]  # possible lengths, 1 to 26 (a label is a letter)
  # Probability that a demonstrated step has a random result, and the chain
  # continues with it: the cold start learns the method, RL the precision.
  noise: float = 0.0
  evaluation: bool = False  # True for the held-out problems
  size: int = 1_000_000
  seed: int = 0

  def __post_init__(self):
    fits = lambda n: isinstance(n, int) and 1 <= n <= 26
    if not self.steps or not all(map(fits, self.steps)):
      raise UserError(f"chain: steps={self.steps}: expected lengths in 1..26")
    if type(self.noise) not in (int, float) or not 0 <= self.noise <= 1:
      raise UserError(
        f"chain: noise={self.noise}: expected a probability in 0..1"
      )

  def __len__(self) -> int:
    return self.size

  def __getitem__(self, index: int) -> Problem:
    rng = random.Random(f"{self.seed}/{self.evaluation}/{index}")
    while True:
      problem = self._sample(rng)
      if held_out(problem.text) == self.evaluation:
        return problem

  def _sample(self, rng: random.Random) -> Problem:
    # `value` is correct; `shown` has the errors of the demonstration.
    value = shown = rng.randrange(10)
    text, demonstration = str(value), []
    for label in string.ascii_lowercase[: rng.choice(self.steps)]:
      operation, operand = rng.choice("+-*"), rng.randrange(10)
      apply = OPERATIONS[operation]
      text += f"{label}{operation}{operand}"
      value = apply(value, operand) % 10
      before, shown = shown, apply(shown, operand) % 10
      if rng.random() < self.noise:
        shown = rng.randrange(10)
      demonstration.append(f"{label}{before}{operation}{operand}={shown};")
    return Problem(text + "?", str(value), "".join(demonstration) + f"#{shown}")


def sources(
  seed: int, *, steps="8", demonstrated="2|4|6|8", noise=0.12
) -> tuple[Chain, Chain, Chain]:
  """Chains for training, for evaluation, and for the cold start.

  `steps` are the lengths of the first two. `demonstrated` (lengths) and `noise`
  are for the third. A | separates lengths.
  """
  chain = Chain(_lengths("steps", steps), seed=seed)
  return (
    chain,
    dataclasses.replace(chain, evaluation=True),
    dataclasses.replace(
      chain, steps=_lengths("demonstrated", demonstrated), noise=noise
    ),
  )


def _lengths(name: str, text: str | int) -> tuple[int, ...]:
  lengths = str(text).split("|")
  if not all(map(str.isdecimal, lengths)):
    raise UserError(
      f"data.source=chain:{name}={text}: expected lengths, such as 2|4|8"
    )
  return tuple(map(int, lengths))
