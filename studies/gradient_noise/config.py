"""One run of the gradient noise study: the embedded default, for 8 iterations.

  python -m gspo_jax.main --workdir=runs/noise \
    --config=studies/gradient_noise/config.py:seed=1

With `length=512` every answer has that many tokens: how the study draws those
that it takes gradients of, not a way to train.
"""

from ml_collections import ConfigDict

from configs import tiny_cpu
from studies import arguments, quick


def get_config(argument: str = "") -> ConfigDict:
  """argument: keys of `arguments.read` below, `seed=1,length=512`."""
  asked = arguments.read(argument, seed=0, length=0, quick=0)
  c = tiny_cpu.get_config()
  c.seed = asked.seed
  c.num_steps = 8
  c.eval.every = 8
  c.checkpoint.every = 1  # some are looked at
  c.checkpoint.keep = 8
  if asked.quick:
    quick.shrink(c)
    c.objective.entropy_coef = 0.01  # it moves, even if no answer is right
  if asked.length:
    c.sampler.min_new_tokens = c.sampler.max_new_tokens = asked.length
  return c
