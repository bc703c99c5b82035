"""One run of the stability study: a method in one of three hard regimes.

  python -m gspo_jax.main --workdir=runs/stability \
    --config=studies/stability/config.py:regime=routing,method=grpo+r2,seed=1

`routing`: one expert of 32 a token, in four layers; the experts have a quarter
of the embedded default's width, so that a layer has as many weights. `long`:
chains of 16 steps, 115 tokens. `off_policy`: 16 updates an iteration instead of
4, at the same learning rate, hence four times as far from the rollout's policy.
The methods keep the clip ranges of their papers, and all else is alike.
"""

from ml_collections import ConfigDict

from configs import tiny_cpu
from studies import arguments, quick

# name of a method: objective.name and objective.replay
METHODS = {
  "grpo": ("grpo", "none"),
  "grpo+r2": ("grpo", "r2"),
  "gspo": ("gspo", "none"),
  "gmpo": ("gmpo", "none"),
  "rspo": ("rspo", "none"),
}


def get_config(argument: str = "") -> ConfigDict:
  """argument: keys of `arguments.read` below, `regime=long,method=gmpo`."""
  asked = arguments.read(
    argument, regime="routing", method="gspo", seed=0, quick=0
  )
  for name, known in (("regime", REGIMES), ("method", METHODS)):
    if getattr(asked, name) not in known:
      raise ValueError(f"{name}={getattr(asked, name)}: expected {list(known)}")
  c = tiny_cpu.get_config()
  c.seed = asked.seed
  c.num_steps = 30
  c.objective.name, c.objective.replay = METHODS[asked.method]
  c.eval.every = 5
  c.checkpoint.keep = 1
  REGIMES[asked.regime](c)
  return _shrink(c) if asked.quick else c


def _routing(c):
  c.data.prompts = 16  # four layers take twice the time of two
  c.learner.micro_rows = 32
  c.model.num_layers = c.model.unroll = 4
  c.model.num_experts = 32
  c.model.experts_per_token = 1
  c.model.mlp_dim = 16
  c.cold_start.steps = 1200


def _long(c):
  c.data.prompts = 16  # answers of twice the length
  c.learner.micro_rows = 32
  c.data.chain_steps = (16,)
  c.data.max_prompt_length = 56
  c.sampler.max_new_tokens = 120
  c.cold_start.chain_steps = (4, 8, 12, 16)
  # 16 steps with half the noise go wrong as often as 8 do with all of it.
  c.cold_start.chain_noise = 0.06
  c.cold_start.steps = 1200
  c.cold_start.gate = 0.8


def _off_policy(c):
  c.learner.minibatches = 16
  c.learner.micro_rows = 16


REGIMES = {"routing": _routing, "off_policy": _off_policy, "long": _long}


def _shrink(c):
  quick.shrink(c)
  c.num_steps = 2
  c.learner.minibatches = 4
  return c
