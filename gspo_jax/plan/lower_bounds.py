"""The least that a model must compute and read, whatever the program does.

FLOPs as papers count them: 2 for each active parameter and token, causal
attention at half its square, three times that for a forward and a backward
pass. The embedding is looked up, not multiplied; the head is counted for the
tokens that are scored.
"""

from gspo_jax.model import ModelConfig


def _attention(cfg: ModelConfig) -> int:
  """Parameters in the products of one layer's attention."""
  return 2 * cfg.embed_dim * cfg.head_dim * (cfg.num_heads + cfg.num_kv_heads)


def _expert(cfg: ModelConfig) -> int:
  return 3 * cfg.embed_dim * cfg.mlp_dim


def active_parameters(cfg: ModelConfig) -> int:
  """Those that a token meets in the layers."""
  experts = cfg.experts_per_token if cfg.num_experts else 1
  router = cfg.embed_dim * cfg.num_experts
  each = _attention(cfg) + router + experts * _expert(cfg)
  return cfg.num_layers * each


def forward_flops(
  cfg: ModelConfig, rows: int, tokens: int, scored: int, past: int = 0
) -> float:
  """Of a forward pass.

  Args:
    cfg: the model.
    rows: sequences.
    tokens: of each.
    scored: tokens of each that reach the head.
    past: tokens before them, in a cache.
  """
  head = cfg.embed_dim * cfg.vocab_size
  products = active_parameters(cfg) * tokens + head * scored
  pairs = tokens * past + tokens**2 / 2
  attention = 4 * cfg.num_layers * cfg.num_heads * cfg.head_dim * pairs
  return rows * (2.0 * products + attention)


def _width(cfg: ModelConfig) -> int:
  return 2 if cfg.dtype == "bfloat16" else 4


def cache_bytes(cfg: ModelConfig, tokens: float) -> float:
  """Of the keys and values of so many tokens."""
  heads = 2 * cfg.num_layers * cfg.num_kv_heads
  return _width(cfg) * heads * cfg.head_dim * tokens


def decode_bytes(
  cfg: ModelConfig,
  *,
  prompts: int,
  rows: int,
  slots: float,
  prompt_slots: int,
  devices: int,
  expert: int,
  tensor: int,
) -> float:
  """HBM bytes that a device must read to decode one token of each row.

  The weights of its part, experts only where tokens choose them (evenly drawn),
  and its part of the cache: each once.

  Args:
    cfg: the model.
    prompts: whose keys and values are shared by `rows / prompts` rows.
    rows: over all devices.
    slots: of the answers' cache.
    prompt_slots: of the prompts'.
    devices: in all.
    expert: of them share experts and vocabulary.
    tensor: of them share heads, and all of the above.
  """
  group = expert * tensor
  attention = (_attention(cfg) + cfg.embed_dim * cfg.num_experts) / tensor
  hit = 1.0
  if cfg.num_experts:
    missed = 1 - cfg.experts_per_token / cfg.num_experts
    hit = 1 - missed ** (rows * group / devices)
  mlp = hit * max(cfg.num_experts, 1) * _expert(cfg)
  mlp /= group if cfg.num_experts else tensor
  head = cfg.embed_dim * cfg.vocab_size / group
  weights = _width(cfg) * (cfg.num_layers * (attention + mlp) + head)
  tokens = rows * slots + prompts * prompt_slots
  return weights + cache_bytes(cfg, tokens) / devices
