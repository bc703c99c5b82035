"""One run of the ratio spread study: chains of 2 to 16 steps, 10 iterations.

  python -m gspo_jax.main --workdir=runs/spread \
    --config=studies/ratio_spread/config.py:seed=1

The embedded default but for the chains: answers of 17, 31, 59, 87 and 115
tokens, all of them demonstrated in the cold start.
"""

from ml_collections import ConfigDict

from configs import tiny_cpu
from studies import arguments, quick


def get_config(argument: str = "") -> ConfigDict:
  """argument: keys of `arguments.read` below, `seed=1`."""
  asked = arguments.read(argument, seed=0, quick=0)
  c = tiny_cpu.get_config()
  c.seed = asked.seed
  c.num_steps = 10
  c.data.chain_steps = c.cold_start.chain_steps = (2, 4, 8, 12, 16)
  c.data.max_prompt_length = 64
  c.sampler.max_new_tokens = 128
  # All the steps, and the accuracy is what it is: what the gate asks for was
  # tried with chains of 8 only.
  c.cold_start.gate = 0.0
  c.eval.every = 10
  c.checkpoint.every = 1  # each is looked at
  c.checkpoint.keep = 10
  if asked.quick:
    quick.shrink(c)
    c.objective.entropy_coef = 0.01  # it moves, even if no answer is right
  return c
