"""The calculator of calculator_cpu.py, played by an agent over HTTP.

  python -m gspo_jax.main --config=configs/calculator_endpoint_cpu.py \
    --workdir=runs/calculator_endpoint

The agent (gspo_jax/tasks/calculator_agent.py) calls the policy as it would call
any server of OpenAI's API; docs/agents.md shows how to write one. It needs
`pip install -e '.[serve]'`.

`configs/calculator_endpoint_cpu.py:debug` shrinks every size: nothing is
learnt.
"""

from ml_collections import ConfigDict

from gspo_jax.configs import calculator_cpu


def get_config(mode: str = "") -> ConfigDict:
  """mode: "" or "debug"."""
  if mode not in ("", "debug"):
    raise ValueError(
      f"configs/calculator_endpoint_cpu.py:{mode}: expected 'debug' or nothing"
    )
  c = calculator_cpu.get_config(mode)
  c.rollout.environment = "openai:gspo_jax.tasks.calculator_agent.play"
  c.reward.seconds = 120.0  # of an episode
  return c
