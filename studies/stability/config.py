"""One run of the stability study: a method in one of four regimes.

  python -m gspo_jax.main --workdir=runs/stability \
    --config=studies/stability/config.py:regime=routing,method=grpo+r2,seed=1

`routing`: one expert of 32 a token, in four layers; the experts have a quarter
of the embedded default's width, so that a layer has as many weights. `long`:
chains of 12 steps, 87 tokens. `off_policy`: 16 updates an iteration instead of
4, of a quarter of the responses each, at the same learning rate; how far that
is from the rollout's policy is measured. `learning`: that of `base.learning`,
which was looked for after the other three, of which two learn nothing.
Everywhere the first two iterations are warm-up. The methods keep the clip
ranges of their papers, all else is alike.
"""

from ml_collections import ConfigDict

from studies import arguments, base

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
  c = base.config(asked)
  c.num_steps = 20
  c.objective.name, c.objective.replay = METHODS[asked.method]
  c.eval.prompts = 128
  REGIMES[asked.regime](c)
  c.eval.every = c.num_steps
  c.optim.warmup_steps = 2 * c.learner.minibatches
  return base.shrink(c) if asked.quick else c


def _routing(c):
  c.data.prompts = 16  # four layers take twice the time of two
  c.learner.micro_batch_size = 32
  c.model.num_layers = c.model.unroll = 4
  c.model.num_experts = 32
  c.model.experts_per_token = 1
  c.model.mlp_dim = 16
  c.cold_start.steps = 800  # slower: at 200 the loss is .55, the default's .33


def _long(c):
  base.long_chains(c)
  c.data.prompts = 16  # for longer responses
  c.data.source += ",steps=12"


def _off_policy(c):
  c.learner.minibatches = 16
  c.learner.micro_batch_size = 16
  c.num_steps = 12  # that is 192 updates, and 80 in the others


REGIMES = {
  "routing": _routing,
  "off_policy": _off_policy,
  "long": _long,
  "learning": base.learning,
}
