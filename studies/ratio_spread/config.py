"""One run of the ratio spread study: chains of 2 to 12 steps, 10 iterations.

  python -m gspo_jax.main --workdir=runs/spread \
    --config=studies/ratio_spread/config.py:seed=1

The embedded default but for the chains: responses of 17, 31, 59 and 87
tokens, all of them demonstrated in the cold start.
"""

from ml_collections import ConfigDict

from studies import arguments, base


def get_config(argument: str = "") -> ConfigDict:
  """argument: keys of `arguments.read` below, `seed=1`."""
  asked = arguments.read(argument, seed=0, quick=0)
  c = base.config(asked)
  base.long_chains(c)
  c.num_steps = 10
  c.data.source = "chain:steps=2|4|8|12,demonstrated=2|4|8|12,noise=0.08"
  c.eval.every = 10
  c.eval.prompts = 128
  if asked.quick:
    base.shrink(c)
    c.objective.entropy_coef = 0.01  # it moves, even if no response is right
  c.checkpoint.every = 1  # each is looked at
  c.checkpoint.keep = 10
  return c
