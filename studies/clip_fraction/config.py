"""One run of the clip fraction study: the embedded default, for 10 iterations.

  python -m gspo_jax.main --workdir=runs/clip \
    --config=studies/clip_fraction/config.py:method=grpo,rate=1e-3,seed=1

No warm-up: the learning rate is what is studied, and all of the iterations have
it.
"""

from ml_collections import ConfigDict

from studies import arguments, base


def get_config(argument: str = "") -> ConfigDict:
  """argument: keys of `arguments.read` below, `method=grpo,rate=1e-3`."""
  asked = arguments.read(argument, method="gspo", rate=3e-4, seed=0, quick=0)
  c = base.config(asked)
  c.num_steps = 10
  c.objective.name = asked.method
  c.optim.learning_rate = asked.rate
  c.optim.warmup_steps = 0
  c.eval.every = 10
  return base.shrink(c) if asked.quick else c
