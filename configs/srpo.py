"""SRPO (arXiv 2504.14286): two stages of data, and history resampling.

  python -m gspo_jax.main --config=configs/srpo.py:./Qwen3-0.6B \\
    --workdir=runs/srpo

The first 50 iterations take problems from data/first.jsonl, the others from it
and data/second.jsonl in equal shares: in the paper mathematics, then code, too.
The rewards must suit both: a function of your own can read the reference. A
problem whose responses were all correct is left out of later epochs
(`data/solved`); a truncated response has no advantage; the loss is GRPO's token
loss without KL. Without the two stages it is
`configs/hugging_face.py:./Qwen3-0.6B,recipe=srpo`; `recipe=srpo` goes with
configs/moe_tpu.py, too. It has not been trained on a real checkpoint here.
`configs/srpo.py:debug` shrinks every size and needs no files; the embedded task
never repeats a problem, so none is left out there.
"""

from ml_collections import ConfigDict

from gspo_jax.configs import hugging_face, recipes


def get_config(arg: str = "") -> ConfigDict:
  """arg: the checkpoint's folder, with a / in it; or "debug"."""
  if arg != "debug" and "/" not in arg:
    raise ValueError(
      f"configs/srpo.py:{arg}: expected 'debug', or a folder: ./DIR"
    )
  c = recipes.with_recipe(hugging_face.of_folder(arg), "srpo")
  if arg != "debug":
    c.data.source = "jsonl:data/first.jsonl"
    both = "jsonl:data/first.jsonl,jsonl:data/second.jsonl"
    c.data.curriculum = ((51, both),)
    c.data.eval_source = "jsonl:data/test.jsonl"
  return c
