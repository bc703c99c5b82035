"""A Python tool: programs of the policy run in `workers.sandbox`.

If the last fenced code block of a response, behind its thinking, is a program,
the tool replies with its output. A response without a program is the answer.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from gspo_jax.rewards import code, gsm8k, thinking
from gspo_jax.rollout.environment import Message, Question, Step
from gspo_jax.runtime.errors import UserError
from gspo_jax.workers import sandbox

_FAILED = "error: the program failed, or it took too long or printed too much"


@dataclasses.dataclass(kw_only=True)
class Python:
  """Runs programs; `gsm8k` rewards the answer.

  Each program starts anew, without files, network or earlier state. It has
  `seconds` of wall-clock time, fewer than `reward.seconds`, and `memory` MiB of
  address space; the policy reads `characters` of its output.
  """

  roles = ("tool",)
  seconds: float = 4.0
  memory: int = 512
  characters: int = 1000

  @classmethod
  def prepare(cls, **arguments: Any) -> None:
    """UserError without a sandbox."""
    sandbox.check("environment 'python'", **vars(cls(**arguments)))

  @classmethod
  def fits(cls, within: float, **arguments: Any) -> None:
    seconds = cls(**arguments).seconds
    if seconds >= within:
      raise UserError(
        f"environment 'python': its {seconds=} of a program must end before "
        f"the {within:g} seconds of a call (reward.seconds): set those above "
        f"{seconds:g}, or 'python:seconds={within / 2:g}'"
      )

  def reset(self, problem: Question, seed: int) -> Sequence[Message]:
    self._reference = problem.reference
    return ()

  def step(self, response: str) -> Step:
    program = code.program(thinking.behind("", response))
    if program is None:
      return Step(done=True, reward=gsm8k("", response, self._reference))
    output = sandbox.run(
      program,
      "",
      seconds=self.seconds,
      memory=self.memory,
      max_output=4 * self.characters + code.SLACK,
    )
    if output is None:
      return Step([("tool", _FAILED)], tool_calls=1, tool_errors=1)
    text = output.strip()[: self.characters] or "(it printed nothing)"
    return Step([("tool", text)], tool_calls=1)
