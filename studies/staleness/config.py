"""One run of the staleness study: batches that are sampled iterations ahead.

  python -m gspo_jax.main --workdir=runs/stale \
    --config=studies/staleness/config.py:staleness=4,old=sampler,seed=1

60 iterations of `base.learning`, with the 128 problems of the stability study
and its warm-up of two iterations. `recompute` divides by the policy at the
start of the iteration that learns, `sampler` by the one that sampled; `exact`
by that one, too, with the bits that the trainer would have computed then.
"""

from ml_collections import ConfigDict

from studies import arguments, base


def get_config(argument: str = "") -> ConfigDict:
  """argument: keys of `arguments.read` below, `staleness=2,old=sampler`."""
  asked = arguments.read(
    argument, staleness=0, old="recompute", seed=0, quick=0
  )
  c = base.config(asked)
  base.learning(c)
  c.eval.every = c.num_steps
  c.eval.prompts = 128
  c.optim.warmup_steps = 2 * c.learner.minibatches
  c.rollout.max_staleness = asked.staleness
  exact = asked.old == "exact"
  c.objective.old_logps = "sampler" if exact else asked.old
  if asked.quick:
    base.shrink(c)
  return base.exact(c) if exact else c
