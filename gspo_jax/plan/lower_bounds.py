"""The least FLOPs and bytes that a model needs, in any implementation.

FLOPs are counted as in papers: 2 for each active parameter and token, half of
the squared length for causal attention, and three forward passes for a forward
and a backward pass. The embedding is a look-up without FLOPs. The output head
counts only for tokens that need logits. With low-rank adapters the base weights
have no gradient: forward and backward count as two forward passes, and the
adapters count nothing.

A gated DeltaNet counts 6 K V for each head and token, with a state [K, V]: the
state is read with the key, written, and read with the query (arXiv 2412.06464,
eq. 10; by chunk it is more). MLA attends with heads of full width in a whole
pass, and in the space of its latents in a decode step; what takes a query there
and an output back are products with the parameters of keys and values.
"""

import math

import numpy as np

from gspo_jax.model import Layer, ModelConfig, parameters
from gspo_jax.model import cache as kv_cache


def _layer_parameters(cfg: ModelConfig, of_experts: bool) -> int:
  """The numbers of all layers' matrices, those of experts or the others.

  A router is one of the others.
  """
  return sum(
    math.prod(row.stack_shape(cfg))
    for row in parameters.rows(cfg)
    if row.stacked and row.decays and bool(row.names[0]) == of_experts
  )


def active_parameters(cfg: ModelConfig) -> int:
  experts = _layer_parameters(cfg, of_experts=True)
  if cfg.num_experts:
    experts = experts * cfg.experts_per_token // cfg.num_experts
  return _layer_parameters(cfg, of_experts=False) + experts


def _pair_flops(cfg: ModelConfig, layer: Layer, cached: bool) -> int:
  """FLOPs of a query with one key and value, all heads."""
  if layer.mixer == "delta_net":
    return 0
  key, value = cfg.head_dim, cfg.value_dim
  if layer.mixer == "mla" and cached:
    key, value = cfg.kv_lora_rank + cfg.rotary_width, cfg.kv_lora_rank
  return 2 * cfg.num_heads * (key + value)


def forward_flops(
  cfg: ModelConfig, batch: int, tokens: int, head_tokens: int, past: int = 0
) -> float:
  """FLOPs of a forward pass over `batch` sequences of `tokens` new tokens.

  `past` tokens are in the cache; `head_tokens` of the new ones need logits.
  """
  head = cfg.embed_dim * cfg.vocab_size
  products = active_parameters(cfg) * tokens + head * head_tokens

  def pairs(end, window):
    """The pairs of a query before `end` and a key that it attends to."""
    if window is None:
      return end**2 / 2
    inside = np.minimum(end, window)
    return inside**2 / 2 + (end - inside) * window

  attention = sum(
    _pair_flops(cfg, layer, cached=bool(np.any(past)))
    * (pairs(past + tokens, layer.window) - pairs(past, layer.window))
    for layer in cfg.layers
  )
  states = len(cfg.layers_with("delta_net")) * cfg.linear_num_value_heads
  states *= 6 * cfg.linear_key_head_dim * cfg.linear_value_head_dim
  return batch * (2.0 * products + states * tokens + attention)


def update_passes(cfg: ModelConfig) -> int:
  """A forward and a backward pass, in FLOPs of a forward pass."""
  return 2 if cfg.lora else 3


def _element_bytes(cfg: ModelConfig) -> int:
  return 2 if cfg.dtype == "bfloat16" else 4


def cache_bytes(
  cfg: ModelConfig, tokens: float, *, rows: int = 0, tensor: int = 1
) -> float:
  """Bytes of what the layers keep of `tokens`.

  With `rows`, only what a decode step of that many sequences reads: a layer
  with a window reads the last tokens. Each of `tensor` devices has all latents
  of MLA, and its part of the heads of other keys and values.
  """
  total = 0.0
  for layer in cfg.layers:
    held = tokens
    if layer.window is not None and rows:
      held = min(tokens, layer.window * rows)
    copies = tensor if layer.mixer == "mla" else 1
    shapes = kv_cache.token_shapes(cfg, layer)
    total += copies * held * sum(heads * width for heads, width in shapes)
  return _element_bytes(cfg) * total


def state_bytes(cfg: ModelConfig) -> int:
  """Bytes of the states of one sequence; a decode step reads and writes them.

  A gated DeltaNet has them, of the same size at any length.
  """
  total = 0
  for i in cfg.layers_with("delta_net"):
    state, tail = kv_cache.state_shapes(cfg, cfg.layers[i])
    total += 4 * math.prod(state.shape)
    total += _element_bytes(cfg) * math.prod(tail.shape)
  return total


def decode_bytes(
  cfg: ModelConfig,
  *,
  rows: int,
  tokens: float,
  devices: int,
  expert: int,
  tensor: int,
) -> float:
  """HBM bytes that a device moves to decode one token of each response.

  It reads its weights and its part of the cache once, and reads and writes its
  part of the states. `tokens` (cached) and the others are as of `weight_bytes`.
  """
  weights = weight_bytes(
    cfg, rows=rows, devices=devices, expert=expert, tensor=tensor
  )
  cached = cache_bytes(cfg, tokens, rows=rows, tensor=tensor)
  return weights + (cached + 2 * rows * state_bytes(cfg)) / devices


def weight_bytes(
  cfg: ModelConfig, *, rows: int, devices: int, expert: int, tensor: int
) -> float:
  """HBM bytes of the weights that a device reads in a decode step.

  An expert's weights only if a token is routed to it, with an even load. `rows`
  is a total over `devices`. Experts and vocabulary are sharded over `expert` x
  `tensor` devices, heads and other matrices over `tensor`.
  """
  group = expert * tensor
  used = 0.0  # the expected share of the experts
  if cfg.num_experts:
    unused = 1 - cfg.experts_per_token / cfg.num_experts
    used = 1 - unused ** (rows * group / devices)
  layers = _layer_parameters(cfg, of_experts=False) / tensor
  layers += used * _layer_parameters(cfg, of_experts=True) / group
  head = cfg.embed_dim * cfg.vocab_size / group
  head_bytes = 4 if cfg.float32_head else _element_bytes(cfg)
  return _element_bytes(cfg) * layers + head_bytes * head
