"""GSPO of SmolLM2-135M-Instruct on instructions that a program checks.

  python -m gspo_jax.model.hf.prepare_smollm2 --to=models/smollm2
  python -m gspo_jax.main --config=configs/smollm2_cpu.py \\
    --workdir=runs/smollm2

Three seeds went from .19 of the held-out problems to .56, in 38 to 39 minutes
of iterations on two cores with AMX (`python -m benchmarks.smollm2`,
docs/results.md). On two cores without AMX a run takes 57 minutes. A fixed list
of words, the subject and 39 of the words that problems ask for, keeps the rules
of .41 of these problems (tests/tasks/test_instructions.py).

The products are in bfloat16, which is fast on a CPU with AMX; on another one
`--config.model.dtype=float32` may be faster.
`configs/smollm2_cpu.py:debug` shrinks every size and needs no folder.
"""

from ml_collections import ConfigDict

from gspo_jax.configs import common, recipes


def get_config(mode: str = "") -> ConfigDict:
  """mode: "" or "debug"."""
  if mode not in ("", "debug"):
    raise ValueError(
      f"configs/smollm2_cpu.py:{mode}: expected 'debug' or nothing"
    )
  c = common.get_config()
  c.num_steps = 40
  # On a CPU, computing the blocks again takes less time than storing them.
  c.model.remat = "full"

  c.data.source = "gspo_jax.tasks.instructions.training"
  c.data.eval_source = "gspo_jax.tasks.instructions.new_subjects"
  c.data.system_prompt = "Give short answers of at most 40 words."
  c.data.prompts = 16
  c.data.max_prompt_length = 96
  c.rollout.group_size = 8
  c.sampler.max_new_tokens = 80
  # At 1, this model writes nonsense half of the time.
  c.sampler.temperature = 0.6
  c.reward.names = ("instructions",)
  c.learner.minibatches = 2
  c.learner.micro_batch_size = 8

  c.optim.learning_rate = 1e-5
  c.optim.warmup_steps = 4
  c.eval.every = 20
  c.eval.prompts = 64
  c.eval.samples = 4
  if mode == "debug":
    return recipes.shrink(c)
  c.model.checkpoint = "models/smollm2"
  return c
