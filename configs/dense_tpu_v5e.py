"""Qwen3-8B on 64 chips of TPU v5e.

  python -m gspo_jax.plan --config=configs/dense_tpu_v5e.py --topology=v5e:8x8
  python -m gspo_jax.main --config=configs/dense_tpu_v5e.py --workdir=gs://...

A dense model has no experts to split, but `expert` shares out the vocabulary,
whose logits would otherwise be the largest array of a 16 GB chip. Responses
are sampled with the heads over 8 chips, since the weights fill one.

`configs/dense_tpu_v5e.py:debug` shrinks every size, to run anywhere. As it
stands a run starts from random weights on the embedded task, to try a pod; add
`--config.model.checkpoint=DIR` (a folder that every host sees) and the keys
`data` and `reward` of configs/hugging_face.py for a real one.

What the plan printed (compiled by libtpu 0.0.51: nothing ran on a chip), of
15.75 GiB: update and old log-probs 12.3, weights for decoding 7.4, prefill 9.6,
generate 9.4. An update with its rows full takes 13.9 s at best (MFU 58 %) and
18.6 s by libtpu's cycles (43 %), a decode step with all pages full 9.8 and 11.8
ms. 34,872 pages are the most that leave 8 % of the HBM free, and 16,896 are as
many as all slots can need.
"""

from ml_collections import ConfigDict

from gspo_jax.configs import common, recipes


def get_config(mode: str = "") -> ConfigDict:
  """mode: "" or "debug"."""
  if mode not in ("", "debug"):
    raise ValueError(f"configs/dense_tpu_v5e.py:{mode}: expected 'debug'")
  c = common.get_config()
  c.num_steps = 500
  c.model.variant = "qwen3-8b"
  c.mesh.data = -1
  c.mesh.fsdp = 32
  c.mesh.expert = 2
  c.sampler_mesh.expert = 1
  c.sampler_mesh.tensor = 8

  # 512 responses, in four minibatches (GSPO, sec. 5.1).
  c.data.prompts = 64
  c.data.max_prompt_length = 1024
  c.rollout.group_size = 8
  c.sampler.max_new_tokens = 3072
  c.learner.minibatches = 4
  c.learner.micro_batch_size = 64

  # All responses decode at once, with the pages that all of them can need.
  c.continuous_batching.slots = 512
  c.continuous_batching.page_size = 128  # a TPU's lanes
  c.continuous_batching.num_pages = 0

  c.optim.learning_rate = 1e-6
  c.optim.warmup_steps = 20
  c.eval.prompts = 512
  c.eval.samples = 8
  return recipes.shrink(c) if mode else c
