"""Environments of the `verifiers` package from release 0.4 on, as an agent.

https://github.com/PrimeIntellect-ai/verifiers, `verifiers.v1`, release 0.4.0.
A program of the package, a harness, calls the policy over HTTP by way of a
server of the package, which records the calls. For release 0.1 see `verifiers`.
"""

import os
import uuid
from collections.abc import Mapping
from typing import Any

from gspo_jax.rollout.environment import Question
from gspo_jax.runtime.errors import needs_extra

with needs_extra("verifiers-agent", "it"):
  from verifiers import v1
  from verifiers.v1.utils.loaders import resolve_env_config


async def play(
  problem: Question,
  *,
  base_url: str,
  api_key: str,
  model: str,
  name: str,
  harness: str = "null",
  runtime: str = "subprocess",
  max_turns: int | None = None,
) -> float:
  """The reward of an episode of a taskset, which its own functions compute.

  Args:
    problem: its column `row` is the data of a task, as JSON.
    base_url: of the policy; `api_key` and `model` too.
    name: of the taskset.
    harness: the program that calls the policy; `null` is a chat with the tools
      of the task. A taskset's own has the taskset's name.
    runtime: where the harness runs, a type of `verifiers.v1.RuntimeConfig`.
    max_turns: calls after which the package ends an episode, and scores it.
  """
  agent = {
    "harness": {"id": harness},
    "runtime": {"type": runtime},
    "max_turns": max_turns,
  }
  config = resolve_env_config({"taskset": {"id": name}, "agent": agent})
  env = v1.load_environment(config)
  task = _task(env.taskset, problem.columns.get("row"))
  # The package takes a key from the environment alone, and hides variables with
  # API_KEY in their name from harnesses.
  variable = f"GSPO_JAX_API_KEY_{uuid.uuid4().hex}"
  os.environ[variable] = api_key
  try:
    client = v1.EvalClientConfig(base_url=base_url, api_key_var=variable)
    async with env.serving():
      return _reward(
        await env.run_episode(task, v1.ModelContext(model, client))
      )
  finally:
    del os.environ[variable]


def _task(taskset, row: Any):
  if not isinstance(row, Mapping):
    raise ValueError("expected a column `row` with the data of a task")
  made = type(taskset).task_type()
  return made(made.data_type().model_validate(row), taskset.config.task)


def _reward(episode) -> float:
  traces = episode.traces
  errors = [*episode.errors, *(e for trace in traces for e in trace.errors)]
  if errors:
    raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}")
  if len(traces) != 1:
    raise ValueError(f"{len(traces)} agents played, expected 1")
  return traces[0].reward
