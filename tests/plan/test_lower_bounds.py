"""Lower bounds, against the parameters and the cache of real models."""

import dataclasses
import re

import jax
import pytest

from gspo_jax import model
from gspo_jax.model import cache as kv
from gspo_jax.plan import lower_bounds
from gspo_jax.runtime.sharding import leaves_by_path

VARIANTS = [
  *("tiny", "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"),
  *("glm-4.5-air", "gpt-oss-20b", "qwen1.5-moe-a2.7b"),
]


def matrices(cfg):
  """Sizes of the parameters that multiply something, by path."""
  shapes = jax.eval_shape(lambda k: model.init(k, cfg), jax.random.key(0))
  leaves = leaves_by_path(shapes)
  vectors = re.compile("scale|bias|sinks")
  return {
    path: x.size for path, x in leaves.items() if not vectors.search(path)
  }


@pytest.mark.parametrize("name", VARIANTS)
def test_active_parameters(name):
  cfg = model.variant(name)
  share = cfg.experts_per_token / cfg.num_experts if cfg.num_experts else 1
  expected = 0
  for path, size in matrices(cfg).items():
    if path.startswith("layers/"):
      chosen = path.endswith(("moe/gate_up", "moe/down"))
      expected += size * share if chosen else size
  assert lower_bounds.active_parameters(cfg) == expected


def test_cached_steps_cost_as_much_as_one_pass():
  cfg = model.variant("tiny")
  at_once = lower_bounds.forward_flops(cfg, batch=3, tokens=64, head_tokens=64)
  steps = sum(
    lower_bounds.forward_flops(cfg, batch=3, tokens=8, head_tokens=8, past=past)
    for past in range(0, 64, 8)
  )
  assert steps == pytest.approx(at_once)


def test_attention_is_quadratic_in_the_length():
  cfg = model.variant("qwen3-0.6b")
  flops = lambda tokens: lower_bounds.forward_flops(cfg, 1, tokens, 0)
  linear = 2 * lower_bounds.active_parameters(cfg) * 1000
  pairs = 1000 * 1000 / 2
  products = 2 * 2 * cfg.num_layers * cfg.num_heads * cfg.head_dim
  assert flops(1000) - linear == pytest.approx(products * pairs)


def test_a_windowed_layer_computes_and_reads_its_window():
  cfg = model.variant("gpt-oss-20b", num_layers=2)
  full = dataclasses.replace(cfg, pattern=(model.Layer(),))
  narrow = lambda f: f(full) - f(cfg)
  flops = lambda cfg: lower_bounds.forward_flops(cfg, 1, 300, 0, past=100)
  # Of 400 tokens, in one of the two layers.
  pairs = sum(max(i - 128, 0) for i in range(100, 400))
  per_pair = 4 * cfg.num_heads * cfg.head_dim
  assert narrow(flops) == pytest.approx(per_pair * pairs, rel=0.01)
  read = lambda cfg: lower_bounds.cache_bytes(cfg, 5 * 400, rows=5)
  token = 2 * 2 * cfg.num_kv_heads * cfg.head_dim
  assert narrow(read) == 5 * (400 - 128) * token


def test_a_dense_model_reads_its_weights_and_cache_once():
  cfg = model.variant("qwen3-0.6b", dtype="float32")
  sizes = matrices(cfg)
  weights = 4 * sum(sizes.values())  # tied: the embedding is the head
  cache = jax.eval_shape(lambda: (kv.empty(cfg, 24, 100), kv.empty(cfg, 3, 50)))
  cache = sum(4 * x.size for c in cache for x in (*c.k, *c.v))
  tokens = 24 * 100 + 3 * 50
  least = lower_bounds.decode_bytes(
    cfg, rows=24, tokens=tokens, devices=1, expert=1, tensor=1
  )
  assert least == pytest.approx(weights + cache)


def test_experts_are_read_if_tokens_are_routed_to_them():
  cfg = model.variant("qwen3-30b-a3b")

  def least(rows, **split):
    sizes = {"devices": 16, "expert": 1, "tensor": 1} | split
    return lower_bounds.decode_bytes(cfg, rows=rows, tokens=0, **sizes)

  experts = 2 * sum(
    size
    for path, size in matrices(cfg).items()
    if path.endswith(("moe/gate_up", "moe/down"))
  )
  one, many = least(16), least(16 * 1000)
  # One token on each device uses 8 of 128 experts, 1000 tokens use all.
  assert many - one == pytest.approx(experts * 120 / 128)
  # Sharded over 16 devices, each holds a sixteenth.
  assert least(16 * 1000, expert=16) < many / 10
