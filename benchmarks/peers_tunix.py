"""Tunix' part of benchmarks/peers.py, in an environment that has Tunix."""

import json
import random
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
import transformers
from flax import nnx
from tunix.models.qwen3 import model, params
from tunix.rl import algo_core, common
from tunix.rl.grpo.dapo_learner import DAPOConfig
from tunix.rl.grpo.drgrpo_learner import DrGRPOConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import (
  ClusterConfig,
  RLCluster,
  RLTrainingConfig,
  Role,
)
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.turns import turns

METHODS = {
  "gspo": lambda **clip: GRPOConfig(beta=0.0, loss_algo="gspo-token", **clip),
  "grpo": lambda **clip: GRPOConfig(beta=0.0, **clip),
  "dr_grpo": lambda **clip: DrGRPOConfig(beta=0.0, **clip),
  "dapo": DAPOConfig,
}


def algorithm(name: str, low: float, high: float, **arguments):
  """The config of a method of benchmarks/peers.py, with its clip range."""
  config = METHODS[name](epsilon=low, **arguments)
  config.epsilon_high = high  # which GRPOConfig reads, but does not take
  return config


def losses(given) -> dict[str, np.ndarray]:
  """The loss of each method, and its gradient with respect to `logps`.

  The forward pass is replaced by the given log-probs. Tunix computes losses in
  float32.
  """
  found = {}
  for name in METHODS:
    low, high = (float(given[f"{name}/{end}"]) for end in ("low", "high"))
    config = algorithm(name, low, high)
    config.temperature = 1.0
    mask = jnp.asarray(given["mask"])
    tokens = jnp.ones_like(mask, jnp.int32)
    example = common.TrainExample(
      prompt_ids=tokens[:, :1],
      prompt_mask=tokens[:, :1],
      completion_ids=tokens,
      completion_mask=mask,
      advantages=jnp.asarray(given["advantages"]),
      ref_per_token_logps=None,
      old_per_token_logps=jnp.asarray(given[f"{name}/old_logps"]),
    )

    def loss(logps, example=example, config=config):
      logits = jnp.zeros((*logps.shape, 2))
      common.compute_per_token_logps = lambda *_, **__: (logps, logits)
      return algo_core.grpo_loss_fn(nnx.Module(), example, config, 0, 0)[0]

    value, gradient = jax.value_and_grad(loss)(
      jnp.asarray(given[f"{name}/logps"])
    )
    found[f"{name}/loss"] = np.asarray(value)
    found[f"{name}/gradient"] = np.asarray(gradient)
  return found


def policy(folder: str, mesh, lora_rank: int = 0) -> model.Qwen3:
  """Qwen3 with the weights of a Hugging Face folder, in float32."""
  keys = json.loads((Path(folder) / "config.json").read_text())
  experts = {}
  if "num_experts" in keys:
    experts = {k: keys[k] for k in ("num_experts", "num_experts_per_tok")}
  width = "moe_intermediate_size" if experts else "intermediate_size"
  config = model.ModelConfig(
    num_layers=keys["num_hidden_layers"],
    vocab_size=keys["vocab_size"],
    embed_dim=keys["hidden_size"],
    hidden_dim=keys[width],
    num_heads=keys["num_attention_heads"],
    head_dim=keys["head_dim"],
    num_kv_heads=keys["num_key_value_heads"],
    rope_theta=int(keys["rope_theta"]),
    norm_eps=keys["rms_norm_eps"],
    **experts,
  )
  weights = params.create_model_from_safe_tensors(
    folder, config, mesh, dtype=jnp.float32
  )
  if not lora_rank:
    return weights
  adapters = qwix.LoraProvider(
    module_path=".*_proj", rank=lora_rank, alpha=32.0
  )
  return qwix.apply_lora_to_model(
    weights, adapters, **weights.get_model_input(), rngs=nnx.Rngs(0)
  )


def cluster(plan, actor, mesh, packed: bool) -> RLCluster:
  """Trainer and sampler in turns on one device."""
  prompts = len(plan["prompts"])
  longest = plan["prompt_tokens"] + plan["max_new_tokens"]
  roles = dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh)
  return RLCluster(
    actor=actor,
    tokenizer=transformers.AutoTokenizer.from_pretrained(plan["model"]),
    cluster_config=ClusterConfig(
      role_to_mesh=roles,
      training_config=RLTrainingConfig(
        actor_optimizer=optax.chain(
          optax.clip_by_global_norm(1.0), optax.adamw(1e-6)
        ),
        eval_every_n_steps=1_000_000,
        max_steps=1_000_000,
        mini_batch_size=prompts,
        train_micro_batch_size=plan["micro_batch"] // plan["group"],
        rollout_micro_batch_size=prompts,
        compute_logps_micro_batch_size=prompts,
        max_seq_token_per_tpu=longest if packed else None,
      ),
      rollout_config=RolloutConfig(
        max_tokens_to_generate=plan["max_new_tokens"],
        max_prompt_length=plan["prompt_tokens"],
        kv_cache_size=longest,
        temperature=1.0,
        top_p=1.0,
      ),
    ),
  )


def iterate(plan, packed: bool) -> None:
  """GSPO, one optimizer step on each batch; more of them with packed rows."""
  mesh = jax.make_mesh(
    (1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  actor, lengths = policy(plan["model"], mesh, plan["lora_rank"]), []

  def reward(prompts, completions, **_):
    # Its responses lack the stop token.
    lengths.extend(len(text.split()) + 1 for text in completions)
    return [random.random() for _ in completions]

  def batches():
    for _ in turns(sys.stdin, lambda: lengths):
      lengths.clear()
      yield {"prompts": np.array(plan["prompts"])}
      jax.block_until_ready(nnx.state(actor))

  GRPOLearner(
    cluster(plan, actor, mesh, packed),
    algorithm("gspo", 3e-4, 4e-4, num_generations=plan["group"]),
    reward,
  ).train(batches())


def main() -> None:
  folder, part = Path(sys.argv[1]), sys.argv[2]
  plan = json.loads((folder / "plan.json").read_text())
  if part == "losses":
    np.savez(
      folder / "losses_tunix.npz", **losses(np.load(folder / "losses.npz"))
    )
  else:
    iterate(plan, packed=part == "packed")


if __name__ == "__main__":
  main()
