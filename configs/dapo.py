"""DAPO (arXiv 2503.14476) on the embedded task: its four parts together.

  python -m gspo_jax.main --config=configs/dapo.py --workdir=runs/dapo

Clip-higher and the token mean are `objective.name = "dapo"`; dynamic sampling
samples up to three batches until one is full of groups whose rewards differ
(`dynamic_sampling/*` is its cost); overlong shaping takes off up to 1 in the
last fifth of the tokens allowed, as in the paper. For another task set data.*,
reward.* and model.* as configs/hugging_face.py does. `:debug` shrinks all.
"""

from ml_collections import ConfigDict

from gspo_jax.configs import tiny_cpu


def get_config(mode: str = "") -> ConfigDict:
  """mode: "" or "debug"."""
  c = tiny_cpu.get_config(mode)
  c.objective.name = "dapo"
  c.rollout.dynamic_sampling_rounds = 3
  if not mode:
    c.sampler.max_new_tokens = 96  # correct responses have 59 tokens
  buffer = c.sampler.max_new_tokens // 5  # 4,096 of 20,480 in the paper
  c.reward.names = ("final_answer", f"overlong:buffer={buffer}")
  c.reward.weights = (1.0, 1.0)
  return c
