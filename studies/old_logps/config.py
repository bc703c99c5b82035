"""One run of the old log-prob study: activations in bfloat16.

  python -m gspo_jax.main --workdir=runs/old \
    --config=studies/old_logps/config.py:method=gspo,old=sampler,seed=1

The embedded default but for its dtype, that of a run on an accelerator. The
sampler decodes token by token against a cache, the trainer scores whole rows:
the two round differently. Parameters, vocabulary logits and log-softmax are
float32 in both.
"""

from ml_collections import ConfigDict

from configs import tiny_cpu
from studies import arguments, quick


def get_config(argument: str = "") -> ConfigDict:
  """argument: keys of `arguments.read` below, `method=grpo,old=recompute`."""
  asked = arguments.read(
    argument, method="gspo", old="sampler", seed=0, quick=0
  )
  c = tiny_cpu.get_config()
  c.seed = asked.seed
  c.num_steps = 20
  c.model.dtype = "bfloat16"
  c.objective.name = asked.method
  c.objective.old_logps = asked.old
  c.eval.every = 5
  c.checkpoint.keep = 1
  return quick.shrink(c) if asked.quick else c
