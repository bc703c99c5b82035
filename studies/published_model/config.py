"""One run of the published model study, of SmolLM2-135M-Instruct.

  python -m gspo_jax.model.hf.prepare_smollm2 --to=models/smollm2
  python -m gspo_jax.main --workdir=runs/published --config.eval.every=10 \
    --config=studies/published_model/config.py:method=dr_grpo,rate=3e-5,seed=1

configs/smollm2_cpu.py with half of its prompts, 10 iterations in place of 40,
four minibatches, as in GSPO, sec. 5.1, and a warm-up of two optimizer steps. A
minibatch is packed into about 9 rows. Micro-batches of two rows pad them to 10,
those of eight rows to 16. The study evaluates for itself, in larger batches and
without greedy responses; hence `eval.every=0`.
"""

from ml_collections import ConfigDict

from gspo_jax.configs import smollm2_cpu
from studies import arguments


def get_config(argument: str = "") -> ConfigDict:
  """argument: keys of `arguments.read` below, `method=gmpo,rate=1e-5`."""
  asked = arguments.read(
    argument, method="gspo", rate=1e-5, seed=0, iterations=10, quick=0
  )
  c = smollm2_cpu.get_config("debug" if asked.quick else "")
  c.seed = asked.seed
  c.objective.name = asked.method
  c.optim.learning_rate = asked.rate
  c.optim.warmup_steps = 2
  c.learner.minibatches = 4
  c.eval.every = 0
  c.checkpoint.keep = 1
  c.cold_start.gate = 0.0  # there is no cold start
  if not asked.quick:
    c.num_steps = asked.iterations
    c.data.prompts = 8
    c.learner.micro_batch_size = 2
  return c
