"""TRL's part of benchmarks/peers.py, in an environment that has TRL."""

import json
import random
import sys
from pathlib import Path

import datasets
import numpy as np
import peft
import torch
import transformers
from trl import GRPOConfig, GRPOTrainer

from benchmarks.turns import turns

# Arguments of GRPOConfig for the methods of benchmarks/peers.py.
METHODS = {
  "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
  "grpo": {"loss_type": "grpo"},
  "dr_grpo": {"loss_type": "dr_grpo"},
  "dapo": {"loss_type": "dapo"},
  "cispo": {"loss_type": "cispo"},
  "sapo": {"loss_type": "sapo"},
}


def trainer(plan, reward, callbacks=(), **arguments) -> GRPOTrainer:
  """GRPO of the model in this folder, in float32."""
  folder, micro, rank = plan["model"], plan["micro_batch"], plan["lora_rank"]
  adapters = (
    peft.LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear")
    if rank
    else None
  )
  rows = len(plan["prompts"]) * plan["group"]
  return GRPOTrainer(
    transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32
    ),
    reward,
    GRPOConfig(
      f"{folder}-trl",
      beta=0.0,
      num_generations=plan["group"],
      max_completion_length=plan["max_new_tokens"],
      per_device_train_batch_size=micro,
      gradient_accumulation_steps=rows // micro,
      max_steps=1_000_000,
      use_cpu=True,
      bf16=False,
      gradient_checkpointing=False,
      save_strategy="no",
      logging_strategy="no",
      report_to="none",
      disable_tqdm=True,
      **arguments,
    ),
    datasets.Dataset.from_dict({"prompt": plan["prompts"]}),
    processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    callbacks=[*callbacks],
    peft_config=adapters,
  )


def losses(plan, given) -> dict[str, np.ndarray]:
  """The loss of each method, and its gradient with respect to `logps`.

  The forward pass is replaced by the given log-probs, in float64.
  """
  mask = torch.tensor(given["mask"], dtype=torch.int64)
  tokens = torch.ones_like(mask)
  plan = plan | {"max_new_tokens": mask.shape[1]}  # what Dr. GRPO divides by
  found = {}
  for name, arguments in METHODS.items():
    low, high = (float(given[f"{name}/{end}"]) for end in ("low", "high"))
    unused = lambda completions, **_: [0.0 for _ in completions]
    trl = trainer(plan, unused, epsilon=low, epsilon_high=high, **arguments)
    trl.model.eval()  # in training the loss is that of a share of a batch
    double = lambda key: torch.tensor(given[key], dtype=torch.float64)
    logps = double(f"{name}/logps").requires_grad_()
    trl._get_per_token_logps_and_entropies = lambda *_, logps=logps, **__: (
      logps,
      torch.zeros_like(logps),
      None,
    )
    loss = trl._compute_loss(
      trl.model,
      {
        "prompt_ids": tokens[:, :1],
        "prompt_mask": tokens[:, :1],
        "completion_ids": tokens,
        "completion_mask": mask,
        "advantages": double("advantages"),
        "old_per_token_logps": double(f"{name}/old_logps"),
        "num_items_in_batch": mask.sum(),
      },
    )
    loss.backward()
    found[f"{name}/loss"] = loss.detach().numpy()
    found[f"{name}/gradient"] = logps.grad.numpy()
  return found


class InTurns(transformers.TrainerCallback):
  """Waits before each optimizer step: a generation and an update."""

  def __init__(self, lengths):
    self._turns = turns(sys.stdin, lengths)

  def on_step_begin(self, *_, **__):
    if next(self._turns, "over") == "over":
      sys.exit()


def iterate(plan) -> None:
  """GSPO, one optimizer step on each batch."""
  lengths = []

  def reward(completion_ids, **_):
    lengths[:] = [len(ids) for ids in completion_ids]
    return [random.random() for _ in completion_ids]

  callback = InTurns(lambda: lengths)
  gspo = METHODS["gspo"] | {"epsilon": 3e-4, "epsilon_high": 4e-4}
  trainer(plan, reward, [callback], **gspo).train()


def main() -> None:
  folder, part = Path(sys.argv[1]), sys.argv[2]
  plan = json.loads((folder / "plan.json").read_text())
  if part == "losses":
    found = losses(plan, np.load(folder / "losses.npz"))
    np.savez(folder / "losses_trl.npz", **found)
  else:
    iterate(plan)


if __name__ == "__main__":
  main()
