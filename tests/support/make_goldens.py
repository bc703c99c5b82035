"""Makes goldens/ with transformers: `pip install -e '.[parity]'`, then

  python tests/support/make_goldens.py [MODEL ...]

A folder a model: a tiny random checkpoint as `save_pretrained` writes it, in
bfloat16; `gradients`, another, of `loss` on the rows padded on the left; and
golden.npz, the rest of what transformers computes from it in float32, and in
bfloat16 its first norm of the tokens and its logits of these rows.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers as hf

GOLDENS = Path(__file__).parent / "goldens"
VOCAB, ROWS, TOKENS, NEW = 47, 3, 11, 64
PADDING = (0, 3, 6)  # of each row
GAP = 3e-3  # least distance of the likeliest token from the next
# The large epsilon lets a misplaced one show.
SIZES = {
  "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2,
  "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
  "intermediate_size": 20, "max_position_embeddings": 256,
  "rms_norm_eps": 1e-2,
  "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
  "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MOE = SIZES | {
  "moe_intermediate_size": 12,
  "num_experts": 5,
  "num_experts_per_tok": 2,
}
# In 32 tokens 5.1, 0.9, 0.16 and 0.03 turns: each branch of the rule is taken.
LLAMA3 = {
  "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0,
  "low_freq_factor": 0.1, "high_freq_factor": 2.0,
  "original_max_position_embeddings": 32,
}  # fmt: skip
# The first of four frequencies is unchanged, the last divided, and those
# between are mixtures.
YARN = {
  "rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "beta_fast": 3.0,
  "beta_slow": 0.1, "original_max_position_embeddings": 32,
}  # fmt: skip
HALF_ROTARY = SIZES["rope_parameters"] | {"partial_rotary_factor": 0.5}
GLM = SIZES | {
  "rope_parameters": HALF_ROTARY,
  "attention_bias": True,
  "first_k_dense_replace": 1,
  "n_shared_experts": 1,
  "n_routed_experts": 5,
  "num_experts_per_tok": 2,
  "moe_intermediate_size": 12,
  "routed_scaling_factor": 1.5,
}
# The published betas: a frequency is unchanged, two are mixtures.
GPT_OSS_YARN = {
  "rope_type": "yarn", "rope_theta": 1000.0, "factor": 32.0, "beta_fast": 32.0,
  "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 300,
}  # fmt: skip
# Window and limit are so small that they change the logits.
GPT_OSS = SIZES | {
  "num_hidden_layers": 4,
  "intermediate_size": 12,
  "num_local_experts": 5,
  "num_experts_per_tok": 2,
  "max_position_embeddings": 32 * 300,
  "rope_parameters": GPT_OSS_YARN,
  "sliding_window": 4,
  "swiglu_limit": 1.0,
}
SMALL_HEADS = SIZES | {
  "head_dim": 4,  # of OLMoE always the width by the number of heads
  "intermediate_size": 12,
  "num_experts_per_tok": 2,
}
# A quarter of a head is rotated, by two frequencies.
DELTA = SIZES | {
  "head_dim": 16,
  "rope_parameters": SIZES["rope_parameters"] | {"partial_rotary_factor": 0.25},
  "linear_num_key_heads": 2,
  "linear_num_value_heads": 4,
  "linear_key_head_dim": 6,
  "linear_value_head_dim": 5,
}
DELTA_MOE = DELTA | {
  "moe_intermediate_size": 12,
  "shared_expert_intermediate_size": 20,
  "num_experts": 5,
  "num_experts_per_tok": 2,
}
LINEAR, FULL = "linear_attention", "full_attention"
MLA = SIZES | {
  "num_hidden_layers": 3,
  "num_key_value_heads": 4,
  "q_lora_rank": 12,
  "kv_lora_rank": 10,
  "qk_rope_head_dim": 8,
  "qk_nope_head_dim": 6,
  "v_head_dim": 5,
  "moe_intermediate_size": 12,
  "n_routed_experts": 8,
  "n_shared_experts": 2,
  "num_experts_per_tok": 3,
  "routed_scaling_factor": 1.7,
  "n_group": 1,
  "topk_group": 1,
}
del MLA["head_dim"]
# One small block beside the language model; the sections are of frequencies.
EYE = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2,
       "out_hidden_size": 16, "patch_size": 2}  # fmt: skip
PIXTRAL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
           "num_attention_heads": 2, "patch_size": 2,
           "image_size": 4}  # fmt: skip
IMAGES = {
  f"{kind}_token_id": 1 for kind in ("image", "video", "vision_start")
} | {"vision_end_token_id": 1}
MROPE = SIZES["rope_parameters"] | {"mrope_section": [2, 1, 1]}
SEES = {"rope_parameters": MROPE}
# Both are 1 in DeepSeek-V3, where sines and cosines keep their size.
MSCALES = {"mscale": 0.7, "mscale_all_dim": 1.2}
MODELS = {
  "qwen3": hf.Qwen3Config(**SIZES, tie_word_embeddings=True),
  "qwen3_moe": hf.Qwen3MoeConfig(**MOE, norm_topk_prob=True),
  "qwen3_moe_raw": hf.Qwen3MoeConfig(**MOE, norm_topk_prob=False),
  "qwen2": hf.Qwen2Config(**SIZES),
  "llama3": hf.LlamaConfig(**SIZES | {"rope_parameters": LLAMA3}),
  "yarn": hf.Qwen3Config(**SIZES | {"rope_parameters": YARN}),
  "olmoe": hf.OlmoeConfig(**SMALL_HEADS, num_experts=5),
  "mixtral": hf.MixtralConfig(**SMALL_HEADS, num_local_experts=5),
  "qwen2_moe": hf.Qwen2MoeConfig(**MOE, shared_expert_intermediate_size=20),
  "glm4_moe": hf.Glm4MoeConfig(
    **GLM | {"num_hidden_layers": 4}, use_qk_norm=True
  ),
  "glm4_moe_air": hf.Glm4MoeConfig(**GLM | {"num_hidden_layers": 3}),
  "minimax_m2": hf.MiniMaxM2Config(
    **SIZES | {"intermediate_size": 12, "rope_parameters": HALF_ROTARY},
    num_local_experts=5,
    num_experts_per_tok=2,
  ),
  "gpt_oss": hf.GptOssConfig(**GPT_OSS),
  "qwen3_next": hf.Qwen3NextConfig(**DELTA_MOE, layer_types=[LINEAR, FULL]),
  "qwen3_5_moe": hf.Qwen3_5MoeTextConfig(
    **DELTA_MOE | {"num_hidden_layers": 4}
  ),
  "qwen3_5": hf.Qwen3_5TextConfig(
    **DELTA | {"num_hidden_layers": 3},
    layer_types=[LINEAR, LINEAR, FULL],
    tie_word_embeddings=True,
  ),
  "deepseek_v3": hf.DeepseekV3Config(
    **MLA | {"n_group": 4, "topk_group": 2, "rope_parameters": YARN | MSCALES},
    first_k_dense_replace=1,
  ),
  "deepseek_v3_plain": hf.DeepseekV3Config(
    **MLA | {"num_hidden_layers": 2, "q_lora_rank": None},
    first_k_dense_replace=1,
    rope_interleave=False,
  ),
  "glm4_moe_lite": hf.Glm4MoeLiteConfig(**MLA),
  "mistral": hf.MistralConfig(**SIZES, sliding_window=4),
  "seed_oss": hf.SeedOssConfig(**SIZES, attention_out_bias=True),
  "dots1": hf.Dots1Config(
    **GLM
    | {"rope_parameters": SIZES["rope_parameters"]}
    | {"attention_bias": False}
  ),
  "phi3": hf.Phi3Config(
    **SIZES | {"head_dim": 4, "rope_parameters": HALF_ROTARY}
  ),
  "smollm3": hf.SmolLM3Config(**SIZES, no_rope_layers=[1, 0]),
  "qwen3_vl": hf.Qwen3VLConfig(
    text_config=SIZES | SEES,
    vision_config=EYE | {"deepstack_visual_indexes": [0]},
    tie_word_embeddings=True,
    **IMAGES,
  ),
  "qwen3_vl_moe": hf.Qwen3VLMoeConfig(
    text_config=MOE | SEES,
    vision_config=EYE | {"deepstack_visual_indexes": []},
    **IMAGES,
  ),
  "qwen2_5_vl": hf.Qwen2_5_VLConfig(
    text_config=SIZES
    | {"head_dim": 4, "rope_parameters": MROPE | {"mrope_section": [1, 1, 0]}},
    vision_config=EYE,
    **IMAGES,
  ),
  "mistral3": hf.Mistral3Config(
    text_config=SIZES | {"model_type": "mistral", "sliding_window": None},
    vision_config=PIXTRAL | {"model_type": "pixtral"},
    image_token_index=1,
    tie_word_embeddings=False,
  ),
}
# These stay in float32.
FLOAT32 = "e_score_correction_bias", "A_log", "dt_bias"


def auto(config):
  """The class that makes the model and reads it."""
  sees = hasattr(config, "vision_config")
  return hf.AutoModelForImageTextToText if sees else hf.AutoModelForCausalLM


def checkpoint(folder, config, seed):
  """Writes a random model."""
  torch.manual_seed(seed)
  model = auto(config).from_config(config)
  with torch.no_grad():
    for name, x in model.named_parameters():
      is_norm = "norm" in name and not x.eq(0).all()  # some add 1 to it
      mean, std = (1, 0.3) if is_norm else (0, 0.3)
      x.copy_(mean + std * torch.randn_like(x))
  # The mixture in shards, as large ones are.
  size = "4KB" if "qwen3_moe" in folder.name else "1GB"
  model.to(torch.bfloat16)
  for name, x in (*model.named_parameters(), *model.named_buffers()):
    if name.endswith(FLOAT32):
      x.data = 0.2 * torch.randn(x.shape)
  model.save_pretrained(folder, max_shard_size=size)


def load(folder, dtype):
  return (
    auto(hf.AutoConfig.from_pretrained(folder))
    .from_pretrained(
      folder,
      dtype=dtype,
      attn_implementation="eager",
      experts_implementation="eager",  # grouped_mm refuses widths such as 12
    )
    .eval()
  )


def batches():
  """Tokens, and the mask of rows that are not padded, or left, or right."""
  tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, TOKENS))
  at, pad = np.arange(TOKENS), np.array(PADDING)[:, None]
  plain = np.ones((ROWS, TOKENS), bool)
  return tokens, {"plain": plain, "left": at >= pad, "right": at < TOKENS - pad}


def run(model, tokens, mask):
  positions = np.maximum(mask.cumsum(1) - 1, 0)
  given = (torch.tensor(x) for x in (tokens, mask.astype(int), positions))
  ids, mask, positions = given
  return model(ids, attention_mask=mask, position_ids=positions).logits


def half(folder, tokens, mask):
  """Results in bfloat16: the norm before any attention, and logits."""
  model = load(folder, torch.bfloat16)
  inner = getattr(model.model, "language_model", model.model)
  with torch.no_grad():
    norm = inner.layers[0].input_layernorm(
      inner.embed_tokens(torch.tensor(tokens))
    )
    logits = run(model, tokens, mask)
  results = {"norm_bfloat16": norm, "logits_bfloat16": logits}
  return {name: x.float().numpy() for name, x in results.items()}


def loss(logits, tokens, mask):
  """Mean cross entropy of the tokens after the first of each row."""
  logps = torch.log_softmax(logits[:, :-1], -1)
  real = torch.tensor(mask[:, :-1])
  nll = -logps.gather(-1, torch.tensor(tokens)[:, 1:, None])[..., 0]
  return (nll * real).sum() / real.sum()


def gradients(folder, config, model, tokens, mask):
  """The gradient of `loss`, written as a checkpoint in float32."""
  model.zero_grad()
  value = loss(run(model, tokens, mask), tokens, mask)
  value.backward()
  grads = auto(config).from_config(config, dtype=torch.float32)
  with torch.no_grad():
    for x, y in zip(grads.parameters(), model.parameters(), strict=True):
      x.copy_(torch.zeros_like(x) if y.grad is None else y.grad)
  grads.save_pretrained(folder)
  return value.item()


def greedy(model, tokens, mask):
  """What `generate` adds to each row, and the least gap that decided."""
  out = model.generate(
    torch.tensor(tokens),
    attention_mask=torch.tensor(mask.astype(int)),
    do_sample=False,
    max_new_tokens=NEW,
    pad_token_id=0,
    output_logits=True,
    return_dict_in_generate=True,
  )
  best = torch.stack(out.logits).topk(2).values
  return out.sequences[:, TOKENS:].numpy(), (best[..., 0] - best[..., 1]).min()


def make(name, config):
  tokens, masks = batches()
  folder = GOLDENS / name
  for seed in range(100):
    shutil.rmtree(folder, ignore_errors=True)
    checkpoint(folder, config, seed)
    model = load(folder, torch.float32)
    answers, gap = greedy(model, tokens, masks["left"])
    if gap > GAP and min(len(set(a)) for a in answers.tolist()) > 6:
      break
  else:
    sys.exit(f"{name}: no seed without a near tie")
  with torch.no_grad():
    logits = {k: run(model, tokens, m).numpy() for k, m in masks.items()}
  in_bfloat16 = half(folder, tokens, masks["left"])
  value = gradients(folder / "gradients", config, model, tokens, masks["left"])
  np.savez_compressed(
    folder / "golden.npz",
    tokens=tokens.astype(np.int32),
    answers=answers.astype(np.int32),
    loss=np.float32(value),
    **{f"mask_{kind}": mask for kind, mask in masks.items()},
    **{f"logits_{kind}": x for kind, x in logits.items()},
    **in_bfloat16,
  )
  for left in folder.rglob("generation_config.json"):
    left.unlink()
  print(f"{name}: {seed=} gap={gap:.4f} {value=:.4f}")


if __name__ == "__main__":
  for name in sys.argv[1:] or MODELS:
    make(name, MODELS[name])
