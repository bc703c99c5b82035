"""The embedded default: a 0.26M-parameter MoE learns chains of arithmetic.

  python -m gspo_jax.main --config=configs/tiny_cpu.py --workdir=runs/tiny

A cold start, then 40 iterations: 112 to 149 s on two x86-64 cores beside other
jobs, 83 to 89 s alone by an earlier commit. Held-out pass@1, seeds 0, 1, 2:
.407, .431, .396 before RL and .846, .784, .828 after, benchmarks/tiny_cpu.json.
By an earlier commit GSPO clips 20 to 46 % of the tokens in the first six
iterations and 6 to 25 % in the last six, and .2 to .6 % of the experts of seed
0 flip in an iteration.

`configs/tiny_cpu.py:debug` shrinks every size: seconds, and little is learnt.
"""

from ml_collections import ConfigDict

from gspo_jax.configs import common


def get_config(mode: str = "") -> ConfigDict:
  """mode: "" or "debug"."""
  if mode not in ("", "debug"):
    raise ValueError(f"configs/tiny_cpu.py:{mode}: expected 'debug' or nothing")
  c = common.get_config()
  c.num_steps = 40
  c.model.variant = "tiny"
  c.model.dtype = "float32"  # a CPU has no fast bfloat16
  c.model.remat = "none"  # it all fits

  # 2e-4 and 3e-4 took seed 1 from .44 to .79 in 40 iterations; 4e-4 wobbled to
  # .71 in 30, with 20 to 40 % of the tokens clipped.
  c.optim.learning_rate = 3e-4
  # The first Adam steps flip most experts.
  c.optim.warmup_steps = 8
  # Packed rows: a cold start computes 3 of 4 micro-batches of 16.
  c.learner.micro_batch_size = 16
  c.cold_start.steps = 800
  if mode == "debug":
    shrink(c)
  return c


def shrink(c: ConfigDict) -> None:
  """Sizes of a run of seconds; the model stays as it is."""
  c.num_steps = 4
  c.data.source = "chain:steps=1,demonstrated=1"
  c.data.prompts = 4
  c.data.max_prompt_length = 8
  c.rollout.group_size = 4
  c.sampler.max_new_tokens = 12
  c.learner.micro_batch_size = 4
  c.cold_start.steps = 100  # just enough for a right answer now and then
  c.cold_start.learning_rate = 4e-3
  c.cold_start.gate = 0.0
  c.cold_start.batch = 16
  c.eval.every = 2
  c.eval.prompts = 8
  c.eval.samples = 4
  c.checkpoint.every = 2
  c.log.samples = 2
