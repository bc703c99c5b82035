"""Models on GPUs with 24 or 80 GB: one card, or eight of a host.

  python -m gspo_jax.plan --config=configs/gpu.py --topology=l4:1
  python -m gspo_jax.main --config=configs/gpu.py --workdir=runs/gpu

Arguments follow a colon, with commas between:

  variant=qwen3-4b               a model of `CARDS`; default qwen3-0.6b
  memory=80                      GB of a card, 24 or 80; default its first
  checkpoint=DIR,questions=FILE  train a Hugging Face folder on maths questions:
                                 JSON lines, Parquet, or any `data.source`
  eval=FILE                      held-out questions; default an eighth of them
  recipe=NAME                    dapo or srpo, the methods of these configs
  debug                          shrinks every size, to run anywhere

What the plan said of the largest function, in GiB, with jax 0.10.2 for CUDA
12.9; nothing ran on a GPU. JAX takes 75 % of a card:

  qwen3-0.6b     24  all weights  14.7 of the 16.5 of an L4
  qwen3-1.7b     24  adapters     14.1
  qwen3-0.6b     80  all weights  49.5 of the 59.3 of an H100
  qwen3-1.7b     80  all weights  52.2
  qwen3-4b       80  adapters     50.6
  olmoe-1b-7b    80  adapters     51.4
  qwen3-30b-a3b  80  adapters     42.8 of each of eight cards

docs/gpu.md has all of it, with the times at best.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from gspo_jax.configs import common, recipes


class _Card(NamedTuple):
  """How a model lies on GPUs of one memory, chosen with gspo_jax.plan."""

  pages: int  # `continuous_batching.num_pages`
  rows: int = 2  # packed rows of one pass, on each card
  prompts: int = 16
  new_tokens: int = 1024
  lora_rank: int = 0  # 0: all weights are trained
  cards: int = 1
  fsdp: int = 1
  expert: int = 1


# The first memory of a variant is its default.
CARDS = {
  "qwen3-0.6b": {
    24: _Card(pages=832),
    80: _Card(pages=5632, rows=8, prompts=64, new_tokens=3072),
  },
  "qwen3-1.7b": {
    24: _Card(pages=896, lora_rank=16),
    80: _Card(pages=3840, rows=4, prompts=64, new_tokens=3072),
  },
  "qwen3-4b": {
    80: _Card(pages=3584, rows=4, prompts=64, new_tokens=3072, lora_rank=16),
  },
  "olmoe-1b-7b": {
    80: _Card(pages=2560, prompts=64, new_tokens=3072, lora_rank=16),
  },
  "qwen3-30b-a3b": {
    80: _Card(
      pages=8 * 4160,  # as many as all slots can need
      rows=1,
      prompts=64,
      new_tokens=3072,
      lora_rank=16,
      cards=8,
      fsdp=2,
      expert=4,
    ),
  },
}

_ARGUMENTS = ("variant", "memory", "checkpoint", "questions", "eval", "recipe")
_FLAGS = ("debug",)


def get_config(arg: str = "") -> ConfigDict:
  """arg: words with commas between: any of `_FLAGS`, and of `_ARGUMENTS` with
  `=` and a value."""
  try:
    return _config(arg)
  except ValueError as error:
    raise ValueError(f"configs/gpu.py:{arg}: {error}") from error


def _config(arg: str) -> ConfigDict:
  given, flags = recipes.arguments(arg, _ARGUMENTS, _FLAGS)
  variant = recipes.chosen(given, "variant", CARDS)
  cards = {str(memory): card for memory, card in CARDS[variant].items()}
  memory = given.get("memory", next(iter(cards)))
  if memory not in cards:
    raise ValueError(
      f"memory={memory}: expected {' or '.join(cards)} with variant={variant}"
    )
  c = _sized(variant, cards[memory])
  if "debug" in flags:
    recipes.shrink(c)
  if recipes.train_on_questions(c, given) and variant.startswith("qwen3"):
    # Responses have no room to think.
    c.data.template_args = "enable_thinking=False"
  return recipes.with_recipe(c, given.get("recipe", ""))


def _sized(variant: str, card: _Card) -> ConfigDict:
  c = common.get_config()
  c.num_steps = 200
  c.model.variant = variant
  c.model.lora.rank = card.lora_rank
  c.mesh.data = -1
  c.mesh.fsdp = card.fsdp
  c.mesh.expert = card.expert
  c.sampler_mesh.expert = card.cards

  c.data.prompts = card.prompts
  c.data.max_prompt_length = 1024
  c.rollout.group_size = 8
  c.sampler.max_new_tokens = card.new_tokens
  c.learner.minibatches = 4  # GSPO, sec. 5.1
  c.learner.micro_batch_size = card.rows * card.cards
  # Numbers of each token's experts and log-probs take gigabytes.
  c.log.instruments = False

  # All responses decode at once: most end soon, and make room in the pool.
  c.continuous_batching.slots = card.prompts * c.rollout.group_size
  c.continuous_batching.page_size = 64  # what JAX's kernel reads at a time
  c.continuous_batching.num_pages = card.pages

  # Adapters take about ten times the learning rate of all weights.
  c.optim.learning_rate = 1e-5 if card.lora_rank else 1e-6
  c.optim.warmup_steps = 20
  c.eval.every = 20
  c.eval.prompts = 128
  c.eval.samples = 4
  return c
