"""The least FLOPs and bytes that a model needs, in any implementation.

FLOPs are counted as in papers: 2 for each active parameter and token, half of
the squared length for causal attention, and three forward passes for a forward
and a backward pass. The embedding is a look-up without FLOPs. The output head
counts only for tokens that need logits. With low-rank adapters the base weights
have no gradient: forward and backward count as two forward passes, and the
adapters count nothing.
"""

import math

import numpy as np

from gspo_jax.model import ModelConfig, parameters


def _layer_parameters(cfg: ModelConfig, module: str) -> int:
  """The numbers of a module's matrices in all layers that have it."""
  return sum(
    math.prod(row.stack_shape(cfg))
    for row in parameters.rows(cfg)
    if row.stacked and row.module == module and row.decays
  )


def _expert_parameters(cfg: ModelConfig) -> int:
  """The numbers of the matrices of all experts in all layers."""
  if not cfg.num_experts:
    return 0
  router = cfg.num_moe_layers * cfg.embed_dim * cfg.num_experts
  return _layer_parameters(cfg, "moe") - router


def _other_parameters(cfg: ModelConfig) -> int:
  """The numbers of the other matrices in all layers, the routers included."""
  modules = "attention", "mlp", "moe", "shared"
  total = sum(_layer_parameters(cfg, module) for module in modules)
  return total - _expert_parameters(cfg)


def active_parameters(cfg: ModelConfig) -> int:
  experts = _expert_parameters(cfg)
  if cfg.num_experts:
    experts = experts * cfg.experts_per_token // cfg.num_experts
  return _other_parameters(cfg) + experts


def forward_flops(
  cfg: ModelConfig, batch: int, tokens: int, head_tokens: int, past: int = 0
) -> float:
  """FLOPs of a forward pass over `batch` sequences of `tokens` new tokens.

  `past` tokens are in the cache; `head_tokens` of the new ones need logits.
  """
  head = cfg.embed_dim * cfg.vocab_size
  products = active_parameters(cfg) * tokens + head * head_tokens

  def pairs(end, window):
    """Queries before `end` with the keys that they attend to."""
    if window is None:
      return end**2 / 2
    inside = np.minimum(end, window)
    return inside**2 / 2 + (end - inside) * window

  attention = sum(
    pairs(past + tokens, layer.window) - pairs(past, layer.window)
    for layer in cfg.layers
  )
  attention = 4 * cfg.num_heads * cfg.head_dim * attention
  return batch * (2.0 * products + attention)


def update_passes(cfg: ModelConfig) -> int:
  """A forward and a backward pass, in FLOPs of a forward pass."""
  return 2 if cfg.lora else 3


def _element_bytes(cfg: ModelConfig) -> int:
  return 2 if cfg.dtype == "bfloat16" else 4


def cache_bytes(cfg: ModelConfig, tokens: float, rows: int = 0) -> float:
  """Bytes of the keys and values of `tokens`.

  With `rows`, only what a decode step of that many sequences reads: a layer
  with a window reads the last tokens.
  """
  held = [
    tokens
    if layer.window is None or not rows
    else min(tokens, layer.window * rows)
    for layer in cfg.layers
  ]
  return _element_bytes(cfg) * 2 * cfg.num_kv_heads * cfg.head_dim * sum(held)


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
  `tensor` devices, heads and other matrices over `tensor`.
  """
  group = expert * tensor
  used = 0.0  # the expected share of the experts
  if cfg.num_experts:
    unused = 1 - cfg.experts_per_token / cfg.num_experts
    used = 1 - unused ** (rows * group / devices)
  layers = _other_parameters(cfg) / tensor
  layers += used * _expert_parameters(cfg) / group
  head = cfg.embed_dim * cfg.vocab_size / group
  weights = _element_bytes(cfg) * (layers + head)
  return weights + cache_bytes(cfg, tokens, rows) / devices
