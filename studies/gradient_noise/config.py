"""One run of the gradient noise study: the embedded default, for 5 iterations.

  python -m gspo_jax.main --workdir=runs/noise \
    --config=studies/gradient_noise/config.py:seed=1
"""

from ml_collections import ConfigDict

from studies import arguments, base


def get_config(argument: str = "") -> ConfigDict:
  """argument: keys of `arguments.read` below, `seed=1`."""
  asked = arguments.read(argument, seed=0, quick=0)
  c = base.config(asked)
  c.num_steps = 5
  c.eval.every = 5
  if asked.quick:
    base.shrink(c)
    c.objective.entropy_coef = 0.01  # it moves, even if no response is right
  c.checkpoint.every = 1  # some are looked at
  c.checkpoint.keep = 5
  return c
