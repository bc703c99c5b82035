"""One run of the old log-prob study: activations in bfloat16.

  python -m gspo_jax.main --workdir=runs/old \
    --config=studies/old_logps/config.py:method=gspo,old=sampler,seed=1

The embedded default but for its dtype, that of a run on an accelerator. The
sampler decodes token by token against a cache, the trainer scores whole rows:
the two round differently. Parameters, vocabulary logits and log-softmax are
float32 in both.
"""

from ml_collections import ConfigDict

from studies import arguments, base


def get_config(argument: str = "") -> ConfigDict:
  """argument: keys of `arguments.read` below, `method=grpo,old=recompute`."""
  asked = arguments.read(
    argument, method="gspo", old="sampler", seed=0, quick=0
  )
  c = base.config(asked)
  c.num_steps = 12
  c.model.dtype = "bfloat16"
  c.objective.name = asked.method
  c.objective.old_logps = asked.old
  c.eval.every = 12
  return base.shrink(c) if asked.quick else c
