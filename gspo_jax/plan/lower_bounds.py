"""The least FLOPs and bytes that a model needs, in any implementation.

FLOPs are counted as in papers: 2 for each active parameter and token, half of
the squared length for causal attention, and three forward passes for a forward
and a backward pass. The embedding is a look-up without FLOPs. The output head
counts only for tokens that need logits. With low-rank adapters the base weights
have no gradient: forward and backward count as two forward passes, and the
adapters count nothing.
"""

from gspo_jax.model import ModelConfig


def _attention_parameters(cfg: ModelConfig) -> int:
  return 2 * cfg.embed_dim * cfg.head_dim * (cfg.num_heads + cfg.num_kv_heads)


def _expert_parameters(cfg: ModelConfig) -> int:
  """The parameters of one expert, or of a dense layer's MLP."""
  return 3 * cfg.embed_dim * cfg.mlp_dim


def active_parameters(cfg: ModelConfig) -> int:
  experts = cfg.experts_per_token if cfg.num_experts else 1
  router = cfg.embed_dim * cfg.num_experts
  layer = _attention_parameters(cfg) + router
  return cfg.num_layers * (layer + experts * _expert_parameters(cfg))


def forward_flops(
  cfg: ModelConfig, batch: int, tokens: int, head_tokens: int, past: int = 0
) -> float:
  """FLOPs of a forward pass over `batch` sequences of `tokens` new tokens.

  `past` tokens are in the cache; `head_tokens` of the new ones need logits.
  """
  head = cfg.embed_dim * cfg.vocab_size
  products = active_parameters(cfg) * tokens + head * head_tokens
  pairs = tokens * past + tokens**2 / 2
  attention = 4 * cfg.num_layers * cfg.num_heads * cfg.head_dim * pairs
  return batch * (2.0 * products + attention)


def update_passes(cfg: ModelConfig) -> int:
  """A forward and a backward pass, in FLOPs of a forward pass."""
  return 2 if cfg.lora else 3


def _element_bytes(cfg: ModelConfig) -> int:
  return 2 if cfg.dtype == "bfloat16" else 4


def cache_bytes(cfg: ModelConfig, tokens: float) -> float:
  heads = 2 * cfg.num_layers * cfg.num_kv_heads
  return _element_bytes(cfg) * heads * cfg.head_dim * tokens


def decode_bytes(
  cfg: ModelConfig,
  *,
  rows: int,
  tokens: float,
  devices: int,
  expert: int,
  tensor: int,
) -> float:
  """HBM bytes that a device reads to decode one token of each response.

  It reads its shards of weights and cache once; an expert's weights only if a
  token is routed to it, with an even load. `rows` and `tokens` (cached) are
  totals over `devices`. Experts and vocabulary are sharded over `expert` x
  `tensor` devices, heads over `tensor`.
  """
  group = expert * tensor
  router = cfg.embed_dim * cfg.num_experts
  attention = (_attention_parameters(cfg) + router) / tensor
  used = 1.0  # the expected share of the experts
  if cfg.num_experts:
    unused = 1 - cfg.experts_per_token / cfg.num_experts
    used = 1 - unused ** (rows * group / devices)
  mlp = used * max(cfg.num_experts, 1) * _expert_parameters(cfg)
  mlp /= group if cfg.num_experts else tensor
  head = cfg.embed_dim * cfg.vocab_size / group
  weights = _element_bytes(cfg) * (cfg.num_layers * (attention + mlp) + head)
  return weights + cache_bytes(cfg, tokens) / devices
