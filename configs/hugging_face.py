"""RL of a Hugging Face checkpoint on GSM8K: any family of docs/your_model.md.

  python -m gspo_jax.main --config=configs/hugging_face.py:./Qwen3-0.6B \\
    --workdir=runs/qwen3
  python -m gspo_jax.evaluate --config=configs/hugging_face.py:./Qwen3-0.6B \\
    --checkpoint=runs/qwen3 --set=GSM8K=data/gsm8k/test.jsonl
  python -m gspo_jax.export --config=configs/hugging_face.py:./Qwen3-0.6B \\
    --workdir=runs/qwen3 --to=qwen3-gspo

Sizes and tokenizer come from the folder, problems from data/gsm8k (as
published). The whole path is run by tests/test_export.py on a tiny checkpoint;
a real one has not been trained here, for want of an accelerator: the batch is a
guess for eight devices of 16 GiB or more and a model of up to 2B parameters.
`configs/hugging_face.py:debug` shrinks every size and needs no folder.
`configs/hugging_face.py:./Qwen3-0.6B,recipe=dapo` takes the method of
configs/dapo.py, and `recipe=srpo` that of configs/srpo.py.
"""

from ml_collections import ConfigDict

from gspo_jax.configs import common, recipes


def get_config(arg: str = "") -> ConfigDict:
  """arg: the checkpoint's folder, with a / in it, or "debug"; behind it
  perhaps ",recipe=" and a name of `recipes.RECIPES`."""
  folder, comma, recipe = arg.partition(",recipe=")
  fits = folder == "debug" or ("/" in folder and "," not in folder)
  if not fits or (comma and recipe not in recipes.RECIPES):
    names = " or ,recipe=".join(recipes.RECIPES)
    raise ValueError(
      f"configs/hugging_face.py:{arg}: expected 'debug', or a folder without a "
      f"comma: ./DIR, and perhaps ,recipe={names}"
    )
  return recipes.with_recipe(of_folder(folder), recipe)


def of_folder(folder: str) -> ConfigDict:
  """The config of a checkpoint's folder, or of "debug"."""
  c = common.get_config()
  c.num_steps = 100
  c.mesh.data = 1
  c.mesh.fsdp = -1

  c.data.source = "jsonl:data/gsm8k/train.jsonl"
  c.data.instruction = (
    "{problem}\nReason step by step, and put the final answer in \\boxed{}."
  )
  c.data.prompts = 64
  c.data.max_prompt_length = 384
  c.data.too_long = "drop"
  c.rollout.group_size = 8
  c.sampler.max_new_tokens = 1024
  c.reward.names = ("gsm8k", "overlong:buffer=128")
  c.reward.weights = (1.0, 0.5)
  c.learner.micro_batch_size = 16

  c.optim.learning_rate = 1e-6
  c.optim.warmup_steps = 8
  c.eval.prompts = 256
  c.eval.samples = 4
  if folder == "debug":
    recipes.shrink(c)
  else:
    c.model.checkpoint = folder
  return c
