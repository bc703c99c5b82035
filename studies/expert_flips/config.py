"""One run of the expert flip study: GRPO on some number of experts and layers.

  python -m gspo_jax.main --workdir=runs/flips \
    --config=studies/expert_flips/config.py:experts=32,top=1,rate=1e-3,seed=1

The cold start is short: routers have to be trained, responses need not be good.
The experts of a layer have 512 hidden columns together, however many there are.

Two updates an iteration. In the first nothing has flipped, in the second one
update has been made: twice the logged rate is that of one update.
"""

from ml_collections import ConfigDict

from studies import arguments, base


def get_config(argument: str = "") -> ConfigDict:
  """argument: keys of `arguments.read` below, `experts=32,top=4,rate=1e-3`."""
  asked = arguments.read(
    argument, experts=8, top=2, layers=2, rate=3e-4, seed=0, quick=0
  )
  c = base.config(asked)
  c.num_steps = 10
  c.model.num_experts = asked.experts
  c.model.experts_per_token = asked.top
  c.model.mlp_dim = 512 // asked.experts
  c.model.num_layers = c.model.unroll = asked.layers
  c.data.prompts = 16
  c.data.source = "chain:steps=4,demonstrated=2|4"
  c.data.max_prompt_length = 16
  c.sampler.max_new_tokens = 40
  c.objective.name = "grpo"
  c.learner.minibatches = 2
  c.optim.learning_rate = asked.rate
  c.optim.warmup_steps = 0
  c.cold_start.steps = 200
  c.eval.every = 10
  c.eval.prompts = 64
  return base.shrink(c) if asked.quick else c
