"""The part of gspo_jax in benchmarks/peers.py."""

import functools
import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import gspo_jax
from benchmarks.iteration import Iterations
from benchmarks.turns import turns
from gspo_jax.configs import hugging_face

# Arguments of the losses of benchmarks/peers.py: the clip range.
METHODS = dict.fromkeys(
  ("gspo", "grpo", "dr_grpo", "dapo"),
  lambda low, high: {"clip_low": low, "clip_high": high},
) | {"cispo": lambda low, high: {"cap": high}, "sapo": lambda *_: {}}


def losses(given) -> dict[str, np.ndarray]:
  """The loss of each method, and its gradient with respect to `logps`."""
  found = {}
  for name, limits in METHODS.items():
    clip = limits(*(float(given[f"{name}/{end}"]) for end in ("low", "high")))
    loss = functools.partial(getattr(gspo_jax, f"{name}_loss"), **clip)
    keys = f"{name}/logps", f"{name}/old_logps", "advantages", "mask"
    (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(
      *(jnp.asarray(given[key]) for key in keys)
    )
    found |= {f"{name}/loss": value, f"{name}/gradient": gradient}
  return found


def config_of(plan, continuous: bool):
  """All the keys of configs/common.py: GSPO, one optimizer step a batch."""
  c = hugging_face.get_config(plan["model"])
  c.model.dtype, c.model.remat = "float32", "none"
  c.model.lora.rank = plan["lora_rank"]
  c.data.source = c.data.eval_source = f"jsonl:{plan['problems']}"
  c.data.instruction = "{problem}"
  c.data.prompts = len(plan["prompts"])
  c.data.max_prompt_length = plan["prompt_tokens"]
  c.rollout.group_size = plan["group"]
  c.sampler.max_new_tokens = plan["max_new_tokens"]
  c.reward.names, c.reward.weights = ("final_answer",), (1.0,)
  c.learner.minibatches = 1
  c.learner.micro_batch_size = plan["micro_batch"]
  c.eval.every = 0
  if continuous:
    c.continuous_batching.slots = plan["slots"]
    c.learner.micro_batch_size = max(1, plan["micro_batch"] // 4)  # fuller rows
  return c


def iterate(plan, continuous: bool) -> None:
  with tempfile.TemporaryDirectory() as folder:
    config = config_of(plan, continuous)
    iteration = Iterations(config, folder, packed=continuous)
    lengths = lambda: np.asarray(iteration.samples.lengths).tolist()
    with iteration.reward_pool:
      for step, _ in enumerate(turns(sys.stdin, lengths)):
        iteration(step)


def main() -> None:
  folder, part = Path(sys.argv[1]), sys.argv[2]
  if part == "losses":
    found = losses(np.load(folder / "losses.npz"))
    np.savez(folder / "losses_ours.npz", **found)
  else:
    plan = json.loads((folder / "plan.json").read_text())
    iterate(plan, continuous=part == "continuous")


if __name__ == "__main__":
  main()
