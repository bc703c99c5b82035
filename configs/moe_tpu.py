"""MoE models on slices of TPU v5e, v5p, v6e and tpu7x.

  python -m gspo_jax.plan --config=configs/moe_tpu.py --topology=v5p:4x4x4
  python -m gspo_jax.main --config=configs/moe_tpu.py --workdir=gs://...

Arguments follow a colon, with commas between:

  variant=qwen3-235b-a22b        a model of `SLICES`; default qwen3-30b-a3b
  topology=v5p:4x8x8             a slice of it; default its first
  long                           64k tokens and more, on a slice of `LONG`
  checkpoint=DIR,questions=FILE  train a Hugging Face folder on maths questions:
                                 JSON lines, Parquet, or any `data.source`
  eval=FILE                      held-out questions; default an eighth of them
  recipe=NAME                    dapo or srpo, the methods of these configs
  debug                          shrinks every size, to run anywhere

Every host must see folder and files. Without them a run starts from random
weights on the embedded task, to try a pod. docs/scaling.md has a table of the
slices, with bytes by the plan.
"""

import math
from typing import NamedTuple

from ml_collections import ConfigDict

from gspo_jax.configs import common, recipes

_STORE_MOST = "attention,stream,heads,tokens,hidden"
_STORE_LITTLE = "attention,stream"


class _Slice(NamedTuple):
  """How a model lies on a slice, chosen with gspo_jax.plan."""

  fsdp: int  # the devices that are left go to `mesh.data`
  decoding: int  # `sampler_mesh.expert`
  decoding_tensor: int = 1  # `sampler_mesh.tensor`
  prompts: int = 64
  group_size: int = 8
  new_tokens: int = 3072
  pages: int = 0  # `continuous_batching.num_pages`
  rows: int = 1  # packed rows of one pass, on each `context` devices
  remat: str = _STORE_LITTLE
  instruments: bool = True
  lora_rank: int = 0  # 0: all weights are trained
  context: int = 1
  expert: int = 4


_QWEN3_30B = {
  "v5p:4x4x4": _Slice(
    fsdp=16,
    decoding=8,
    prompts=512,
    group_size=16,
    new_tokens=16384,
    pages=384_000,  # of 392,640 that the plan allows
    remat=_STORE_MOST,
    # The experts of every token and their log-probs take 79 GiB more.
    instruments=False,
  ),
  "v5e:8x16": _Slice(
    fsdp=32,
    decoding=16,
    prompts=256,
    pages=50_688,  # of 53,760 that the plan allows
  ),
  "tpu7x:4x4x4": _Slice(
    fsdp=32,
    decoding=8,
    prompts=512,
    group_size=16,
    new_tokens=16384,
    pages=704_512,  # of 726,784 that the plan allows
    remat=_STORE_MOST,
    instruments=False,
  ),
  "v6e:8x8": _Slice(fsdp=16, decoding=16, prompts=256),
  # An update of all weights needs 97 GiB of temporaries alone.
  "v5p:2x2x2": _Slice(fsdp=2, decoding=8, instruments=False, lora_rank=16),
  "v6e:4x4": _Slice(fsdp=4, decoding=16, instruments=False, lora_rank=16),
}
_QWEN3_235B = {
  # 135,168 pages are as many as all slots can need; the plan allows 351,232.
  # With `decoding=16` the weights for decoding do not fit on their way (104
  # GiB). One row a device gathers weights for too few tokens.
  "v5p:4x8x8": _Slice(fsdp=32, decoding=32, prompts=512, rows=2),
  # With a page for all that the slots can need, prefill takes 100 GiB of 95.
  "tpu7x:4x4x4": _Slice(
    fsdp=32,
    decoding=32,
    prompts=512,
    pages=61_440,  # of 64,768 that the plan allows
    rows=2,
  ),
}
_QWEN3_480B = {
  # Its 160 experts can be split over 32 devices at most, where all weights and
  # their moments are 168 GiB a device. With `decoding=32`, and one for
  # `decoding_tensor`, the weights for decoding do not fit on their way.
  "v5p:4x4x4": _Slice(
    fsdp=8, decoding=4, decoding_tensor=8, instruments=False, lora_rank=16
  ),
}
_OLMOE = {
  # Its context is 4,096 tokens, prompt and response.
  "v6e:2x4": _Slice(
    fsdp=2,
    decoding=8,
    pages=7168,  # of 7,352 that the plan allows
    rows=2,
  ),
}
_GPT_OSS = {
  "v5p:2x2x2": _Slice(fsdp=2, decoding=8, instruments=False),
  "v6e:2x4": _Slice(fsdp=2, decoding=8, instruments=False, lora_rank=16),
}
_GLM_AIR = {
  # On v5p:2x4x4 an update needs 97 GiB of temporaries alone.
  "v5p:4x4x4": _Slice(fsdp=16, decoding=16, prompts=256, instruments=False),
}
_MINIMAX = {
  # It always thinks, so that responses are long. 100,352 pages are a third of
  # what all slots could need; the plan allows 185,856.
  "v5p:4x4x8": _Slice(
    fsdp=32,
    decoding=32,
    prompts=256,
    new_tokens=16384,
    pages=100_352,
    instruments=False,
  ),
}
_QWEN3_6 = {
  "v5p:2x2x4": _Slice(fsdp=4, decoding=8, instruments=False),
  "v6e:8x8": _Slice(fsdp=16, decoding=16, prompts=256, instruments=False),
}
# No kernel reads pages of latents: it decodes in blocks.
_MOONLIGHT = {
  "v6e:2x4": _Slice(fsdp=2, decoding=8, instruments=False, lora_rank=16),
}

# The first slice of a variant is its default.
SLICES = {
  "qwen3-30b-a3b": _QWEN3_30B,
  "qwen3-30b-a3b-2507": _QWEN3_30B,
  "qwen3-coder-30b-a3b": _QWEN3_30B,
  "qwen3-235b-a22b": _QWEN3_235B,
  "qwen3-235b-a22b-2507": _QWEN3_235B,
  "qwen3-coder-480b-a35b": _QWEN3_480B,
  "olmoe-1b-7b": _OLMOE,
  "gpt-oss-20b": _GPT_OSS,
  "glm-4.5-air": _GLM_AIR,
  "minimax-m2": _MINIMAX,
  "qwen3.6-35b-a3b": _QWEN3_6,
  "moonlight-16b-a3b": _MOONLIGHT,
}

# Long rows, split over `context`: of 65,536 tokens, prompt and response, and of
# 131,072. Their lengths divide into the longest blocks of attention.
_QWEN3_30B_LONG = {
  "v5p:4x4x4": _Slice(
    fsdp=4,
    context=4,
    decoding=8,
    prompts=256,
    new_tokens=65536 - 1024,
    pages=262_144,  # of 400,896 that the plan allows
    remat=_STORE_MOST,
    instruments=False,
  ),
  "tpu7x:4x4x4": _Slice(
    fsdp=4,
    context=8,
    decoding=8,
    prompts=256,
    new_tokens=131_072 - 1024,
    pages=524_288,  # of 742,528 that the plan allows
    remat=_STORE_MOST,
    instruments=False,
  ),
}

# Releases for 262,144 tokens; the first one is the default of `long`.
LONG = {
  "qwen3-30b-a3b-2507": _QWEN3_30B_LONG,
  "qwen3-coder-30b-a3b": _QWEN3_30B_LONG,
}

_ARGUMENTS = "checkpoint", "questions", "eval", "variant", "topology", "recipe"
_FLAGS = ("debug", "long")

# Releases that think before they answer, unless the template is told otherwise,
# and what it is told. The others either never do, or always.
_NO_THINKING = {
  "qwen3-30b-a3b": "enable_thinking=False",
  "qwen3-235b-a22b": "enable_thinking=False",
  "glm-4.5-air": "enable_thinking=False",
  "qwen3.6-35b-a3b": "enable_thinking=False",
  "gpt-oss-20b": "reasoning_effort=low",  # it always thinks, but then little
}
_THINKING_TOKENS = 8192  # a response with fewer has no room for it


def get_config(arg: str = "") -> ConfigDict:
  """arg: words with commas between: any of `_FLAGS`, and of `_ARGUMENTS` with
  `=` and a value."""
  try:
    return _config(arg)
  except ValueError as error:
    raise ValueError(f"configs/moe_tpu.py:{arg}: {error}") from error


def _config(arg: str) -> ConfigDict:
  given, flags = recipes.arguments(arg, _ARGUMENTS, _FLAGS)
  variants = LONG if "long" in flags else SLICES
  where = " with long" * ("long" in flags)
  variant = recipes.chosen(given, "variant", variants, where)
  slices, where = variants[variant], f" with variant={variant}"
  topology = recipes.chosen(given, "topology", slices, where)
  c = _sized(variant, slices[topology], num_devices(topology))
  if "debug" in flags:
    recipes.shrink(c)
  short = slices[topology].new_tokens < _THINKING_TOKENS
  if recipes.train_on_questions(c, given) and short:
    c.data.template_args = _NO_THINKING.get(variant, "")
  return recipes.with_recipe(c, given.get("recipe", ""))


def num_devices(topology: str) -> int:
  """The devices of a slice; a chip of tpu7x is two."""
  kind, _, sides = topology.partition(":")
  chips = math.prod(map(int, sides.split("x")))
  return 2 * chips if kind == "tpu7x" else chips


def _sized(variant: str, where: _Slice, devices: int) -> ConfigDict:
  c = common.get_config()
  c.num_steps = 500
  c.model.variant = variant
  c.model.remat = where.remat
  c.model.lora.rank = where.lora_rank
  c.mesh.data = -1
  c.mesh.fsdp = where.fsdp
  c.mesh.context = where.context
  c.mesh.expert = where.expert
  c.sampler_mesh.expert = where.decoding
  c.sampler_mesh.tensor = where.decoding_tensor

  c.data.prompts = where.prompts
  c.data.max_prompt_length = 1024
  c.rollout.group_size = where.group_size
  c.sampler.max_new_tokens = where.new_tokens
  c.learner.minibatches = 4  # GSPO, sec. 5.1
  # objective.replay stays "none", as in the GSPO paper: the plans' bytes and
  # seconds are without replay. docs/objectives.md says why to try "r3".
  c.learner.micro_batch_size = where.rows * devices // where.context
  c.log.instruments = where.instruments

  # All responses decode at once: most end soon, and make room in the pool.
  c.continuous_batching.slots = where.prompts * where.group_size
  c.continuous_batching.page_size = 128  # a TPU's lanes
  c.continuous_batching.num_pages = where.pages

  # Adapters take about ten times the learning rate of all weights.
  c.optim.learning_rate = 1e-5 if where.lora_rank else 1e-6
  c.optim.warmup_steps = 20
  c.eval.prompts = 512
  c.eval.samples = 8
  if where.prompts * where.group_size < 1024:
    # Each evaluation would be as many responses as eight iterations.
    c.eval.every = 20
    c.eval.samples = 4
  return c
