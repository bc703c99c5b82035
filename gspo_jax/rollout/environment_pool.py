"""Worker processes that run environments."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gspo_jax.data.problem import Problem
from gspo_jax.rollout import environment
from gspo_jax.rollout.environment import BEGIN, STEP, Question, Step
from gspo_jax.runtime.errors import UserError
from gspo_jax.workers.pool import Call, Pool, Started


class Reply(NamedTuple):
  step: Step = Step(done=True)
  state: str = ""  # the environment after the call, for the next one
  failure: str = ""  # why the call failed; "" if it did not


class EnvironmentPool(Pool):
  """Worker processes that run environments; a context manager.

  `environment.named` reads `spec`, `tool_format` and `schemas`. At the start a
  conversation about each of the `examples` is begun, to try the environment.
  `workdir` is the run's folder, for environments; `limits` are a `Pool`'s.
  """

  def __init__(
    self,
    spec: str,
    *,
    tool_format: str = "",
    schemas: Sequence[Mapping] = (),
    examples: Sequence[Problem] = (),
    workdir: str = "",
    **limits: Any,
  ):
    self._name, self._workdir = f"environment {spec!r}", workdir
    told: dict = {"tool_format": tool_format, "schemas": schemas}
    load = functools.partial(environment.load, spec, **told)
    super().__init__(self._name, load, **limits)
    # Calls of an `async` step run at once only if they are started together.
    self.is_async: bool = self.facts
    try:
      replies = self.begin([(problem, 0, 0) for problem in examples])
      for problem, reply in zip(examples, replies, strict=True):
        if reply.failure:
          raise UserError(
            f"{reply.failure}, in reset of the problem {problem.text[:40]!r}"
          )
    except BaseException:
      self.close()
      raise

  def begin(
    self, conversations: Sequence[tuple[Problem, int, int]]
  ) -> list[Reply]:
    """Begins conversations about (problem, step, seed); waits."""
    calls = [
      Call(BEGIN, (Question.of(problem, step, self._workdir), seed))
      for problem, step, seed in conversations
    ]
    return self.replies(self.start(calls))

  def step(
    self,
    responses: Sequence[tuple[str, str]],
    notify: Callable[[], None] = lambda: None,
  ) -> Started:
    return self.start([Call(STEP, response) for response in responses], notify)

  def replies(self, started: Started) -> list[Reply]:
    return [self.reply(started, i) for i in range(len(started.calls))]

  def reply(self, started: Started, place: int) -> Reply:
    """The answer to one call; waits for all unless it has ended."""
    result = started.results[place] or started.wait()[place]
    if result.failure:
      return Reply(failure=f"{self._name}: {result.failure}")
    state, messages, *rest = result.value
    return Reply(Step(tuple(map(tuple, messages)), *rest), state)
