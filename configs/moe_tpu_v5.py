"""Qwen3 MoE policies on TPU v5: 30B-A3B by default, 235B-A22B on request.

  python -m gspo_jax.plan --config=configs/moe_tpu_v5.py --topology=v5p:4x4x4
  python -m gspo_jax.main --config=configs/moe_tpu_v5.py --workdir=gs://...

`configs/moe_tpu_v5.py:variant=qwen3-235b-a22b,topology=v5p:4x8x8` takes another
size or slice; `:debug` shrinks every size, to run anywhere.
"""

from ml_collections import ConfigDict

from configs import common

_KEEP_MOST = ("attention", "stream", "heads", "tokens", "hidden")
_KEEP_LITTLE = ("attention", "stream")

# (variant, topology) -> mesh.fsdp, mesh.expert, devices that share experts when
# decoding, answers a chip in one pass, chips, what the blocks keep.
_SLICES = {
  ("qwen3-30b-a3b", "v5p:4x4x4"): (16, 4, 8, 4, 64, _KEEP_MOST),
  ("qwen3-30b-a3b", "v5e:8x16"): (32, 4, 16, 1, 128, _KEEP_LITTLE),
  ("qwen3-235b-a22b", "v5p:4x8x8"): (32, 4, 16, 2, 256, _KEEP_LITTLE),
}


def get_config(arg: str = "") -> ConfigDict:
  """arg: comma-separated `variant=...`, `topology=...` and `debug`."""
  words = [word for word in arg.split(",") if word]
  chosen = dict(word.split("=", 1) for word in words if "=" in word)
  rest = {word for word in words if "=" not in word}
  variant = chosen.pop("variant", "qwen3-30b-a3b")
  topology = chosen.pop("topology", "v5p:4x4x4")
  if chosen or rest - {"debug"} or (variant, topology) not in _SLICES:
    raise ValueError(
      f"configs/moe_tpu_v5.py:{arg}: expected debug, or one of "
      + "; ".join(f"variant={v},topology={t}" for v, t in _SLICES)
    )
  c = common.get_config()
  _size(c, variant, *_SLICES[variant, topology])
  if rest:
    _shrink(c)
  return c


def _size(c, variant, fsdp, expert, decoding, rows, chips, keep) -> None:
  c.num_steps = 500
  c.model.variant = variant
  c.model.keep = keep
  c.mesh.data = -1
  c.mesh.fsdp = fsdp
  c.mesh.expert = expert
  c.sampler_mesh.expert = decoding
  c.sampler_mesh.tensor = 1

  # 16 answers of 4,096 tokens a chip, in four minibatches (GSPO, sec. 5.1).
  c.data.prompts = 2 * chips
  c.data.max_prompt_length = 1024
  c.sampler.group_size = 8
  c.sampler.max_new_tokens = 3072
  c.learner.minibatches = 4
  c.learner.micro_rows = rows * chips

  c.optim.learning_rate = 1e-6
  c.optim.warmup_steps = 20
  c.eval.prompts = 512
  c.eval.samples = 8


def _shrink(c) -> None:
  c.num_steps = 2
  c.model.variant = "tiny"
  c.model.dtype = "float32"
  c.mesh = ConfigDict({"data": -1, "fsdp": 1, "expert": 1, "tensor": 1})
  c.sampler_mesh = ConfigDict({"expert": 0, "tensor": 0})
  c.data.chain_steps = (1,)
  c.data.prompts = 8
  c.data.max_prompt_length = 8
  c.sampler.group_size = 4
  c.sampler.max_new_tokens = 12
  c.learner.micro_rows = 8
  c.eval.prompts = 8
  c.eval.samples = 4
