"""One run of the mismatch study: a sampler whose weights have an error.

  python -m gspo_jax.main --workdir=runs/mismatch \
    --config=studies/mismatch/config.py:method=grpo+tis,seed=1

That is a run without an error; `error=int:3` and `error=router:0.3` are keys of
`studies.weight_errors`, which `python -m studies.mismatch.run` alone knows.
`error=exact` has no error to the last bit: `model.exact`, whose old log-probs
are the sampler's. `error=old:N` learns from batches that were sampled N
iterations before. 40 iterations of `base.learning`, with the problems and the
warm-up of stability.
"""

from ml_collections import ConfigDict

from studies import arguments, base

# method: objective.name, objective.replay, objective.mismatch
METHODS = {
  "gspo": ("gspo", "none", "none"),
  "gspo+r3": ("gspo", "r3", "none"),
  "grpo": ("grpo", "none", "none"),
  "grpo+r2": ("grpo", "r2", "none"),
  "grpo+r3": ("grpo", "r3", "none"),
  "grpo+tis": ("grpo", "none", "tis_token:cap=2"),
  "grpo+mis": ("grpo", "none", "mis_token:cap=2,floor=0.5"),
  "cispo": ("cispo", "none", "none"),
  "dppo_tv": ("dppo_tv", "none", "none"),
  "gspo+wide": ("gspo:clip_low=0.05,clip_high=0.05", "none", "none"),
  "grpo+dual": ("grpo:dual_clip=3", "none", "none"),
}


def get_config(argument: str = "") -> ConfigDict:
  """argument: keys of `arguments.read` below, `method=gspo,error=int:4`."""
  asked = arguments.read(
    argument, method="gspo", old="recompute", error="none", seed=0, quick=0
  )
  c = base.config(asked)
  base.learning(c)
  c.num_steps = 40
  c.eval.every = c.num_steps
  c.eval.prompts = 128
  c.optim.warmup_steps = 2 * c.learner.minibatches
  objective = c.objective
  objective.name, objective.replay, objective.mismatch = METHODS[asked.method]
  objective.old_logps = asked.old
  kind, _, level = asked.error.partition(":")
  if kind == "old":
    c.rollout.max_staleness = int(level)
  elif kind not in ("none", "exact"):
    c.sampled_with = asked.error
  if asked.quick:
    base.shrink(c)
  return base.exact(c) if kind == "exact" else c
