"""A Python tool: programs of the policy run in the sandbox of `rewards`.

A response whose last fenced code block is a program is a call: the tool replies
with what the program prints. A response without one is the answer.
"""

from collections.abc import Sequence

from gspo_jax.rewards import code, gsm8k, sandbox
from gspo_jax.rollout.environment import Message, Question, Step
from gspo_jax.runtime.errors import UserError

_FAILED = "error: the program failed, or it took too long or printed too much"


class Python:
  """Runs programs; the reward is that of `gsm8k` for the answer.

  Each program starts anew, without files, network or the state of an earlier
  one; see `rewards.sandbox`.

  Args:
    seconds: wall-clock time of a program; less than `reward.seconds`.
    memory: address space of a program, MiB.
    characters: of the output that the policy reads; the rest is cut.
  """

  roles = ("tool",)

  def __init__(
    self, *, seconds: float = 4.0, memory: int = 512, characters: int = 1000
  ):
    self._seconds, self._memory = seconds, memory
    self._characters = characters

  @staticmethod
  def prepare(seconds: float = 4.0, **_) -> None:
    """UserError without a sandbox; called once in each worker."""
    if not isinstance(seconds, int | float) or not seconds > 0:
      raise UserError(
        f"environment 'python': expected seconds above 0, got {seconds!r}"
      )
    sandbox.bwrap_path()

  def reset(self, problem: Question, seed: int) -> Sequence[Message]:
    """The prompt is that of the data."""
    self._reference = problem.reference
    return ()

  def step(self, response: str) -> Step:
    """The output of the program, or the end with the reward."""
    program = code.program(response)
    if program is None:
      reward = gsm8k("", response, self._reference)
      return Step(done=True, reward=reward)
    output = sandbox.run(
      program,
      "",
      seconds=self._seconds,
      memory=self._memory,
      max_output=4 * self._characters + code.SLACK,
    )
    if output is None:
      return Step([("tool", _FAILED)], tool_calls=1, tool_errors=1)
    text = output.strip()[: self._characters] or "(it printed nothing)"
    return Step([("tool", text)], tool_calls=1)
