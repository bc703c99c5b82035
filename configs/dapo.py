"""DAPO (arXiv 2503.14476): its four parts together.

  python -m gspo_jax.main --config=configs/dapo.py --workdir=runs/dapo
  python -m gspo_jax.main --config=configs/dapo.py:./Qwen3-0.6B \\
    --workdir=runs/dapo_qwen3

The first trains on the embedded task, as configs/tiny_cpu.py does. The second
is `configs/hugging_face.py:./Qwen3-0.6B,recipe=dapo`; `recipe=dapo` goes with
configs/moe_tpu.py, too. Clip-higher and the token mean are
`objective.name="dapo"`; dynamic sampling samples up to three batches until one
is full of groups whose rewards differ (`dynamic_sampling/*` is its cost);
overlong shaping takes off up to 1 in the last fifth of the tokens allowed, as
in the paper. `:debug` shrinks all.
"""

from ml_collections import ConfigDict

from gspo_jax.configs import hugging_face, recipes, tiny_cpu


def get_config(arg: str = "") -> ConfigDict:
  """arg: "", a checkpoint's folder with a / in it, or "debug"."""
  if "/" in arg:
    return recipes.with_recipe(hugging_face.of_folder(arg), "dapo")
  if arg not in ("", "debug"):
    raise ValueError(
      f"configs/dapo.py:{arg}: expected 'debug', a folder: ./DIR, or nothing"
    )
  c = tiny_cpu.get_config(arg)
  if not arg:
    c.sampler.max_new_tokens = 96  # correct responses have 59 tokens
  return recipes.with_recipe(c, "dapo")
