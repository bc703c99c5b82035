"""Lower bounds, against the parameters and the cache of real models."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from gspo_jax import model
from gspo_jax.model import cache as kv
from gspo_jax.model import delta_net
from gspo_jax.plan import lower_bounds
from gspo_jax.runtime.sharding import leaves_by_path

VARIANTS = [
  *("tiny", "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"),
  *("glm-4.5-air", "gpt-oss-20b", "qwen1.5-moe-a2.7b"),
  *("qwen3.6-35b-a3b", "moonlight-16b-a3b", "deepseek-v3"),
]


def matrices(cfg):
  """Sizes of the parameters that multiply something, by path."""
  leaves = leaves_by_path(model.shapes(cfg))
  vectors = re.compile("scale|bias|sinks|A_log|conv")
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


# Without experts, whose products on a CPU are padded.
LATENT = model.variant(
  "tiny-moonlight",
  num_layers=1,
  first=(),
  pattern=(model.Layer(experts=False, mixer="mla"),),
  num_experts=0,
  experts_per_token=0,
  dtype="float32",
)


def compiled_flops(cfg, batch, new, cached=0):
  """XLA's count, of the tokens' logits too."""
  params = model.shapes(cfg)
  tokens = jax.ShapeDtypeStruct((batch, new), jnp.int32)
  run = functools.partial(model.forward, cfg=cfg)
  if cached:
    params = jax.eval_shape(lambda p: model.unstack_layers(p, cfg), params)
    cache = jax.eval_shape(lambda: kv.empty(cfg, batch, cached))
    step = jax.jit(
      lambda p, t,
      cache: run(p, tokens=t, positions=t, mask=jnp.ones_like(t), cache=cache),
    )  # fmt: skip
    lowered = step.lower(params, tokens, cache)
  else:
    whole = jax.jit(
      lambda p, t: run(p, tokens=t, positions=t, mask=jnp.ones_like(t))
    )
    lowered = whole.lower(params, tokens)
  return lowered.compile().cost_analysis()["flops"]


def test_latents_cost_what_the_compiler_counts():
  """Expanded in a whole pass, absorbed in a decode step."""
  whole = lower_bounds.forward_flops(LATENT, 1, 512, 512)
  assert compiled_flops(LATENT, 1, 512) == pytest.approx(whole, rel=0.15)
  step = lower_bounds.forward_flops(LATENT, 2, 1, 1, past=4096)
  assert compiled_flops(LATENT, 2, 1, 4096) == pytest.approx(step, rel=0.1)
  # Of 4 heads, to expand what is cached alone would be more.
  assert step < 2 * 4096 * 2 * 32 * 4 * (8 + 16)


def test_a_state_is_read_written_and_read():
  K, cfg = 128, model.variant("qwen3.6-35b-a3b")
  abstract = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  of_key, of_head = abstract(1, 1, K), abstract(1, 1, 2)
  step = jax.jit(delta_net._step).lower(
    *(abstract(1, 1, 2, K, K), of_key, of_key),
    *(abstract(1, 1, 2, K), of_head, of_head),
  )
  compiled = step.compile().cost_analysis()["flops"] / (2 * K * K)
  assert compiled == pytest.approx(6 + 1, rel=0.02)  # and the decay
  products = 2 * lower_bounds.active_parameters(cfg) * 7
  attention = 10 * 4 * 16 * 256 * 7 * 7 / 2
  rest = lower_bounds.forward_flops(cfg, 1, 7, 0) - products - attention
  assert rest == 7 * 30 * 32 * 6 * K * K


@pytest.mark.parametrize("name", ["tiny-qwen3.5", "tiny-moonlight"])
def test_latents_and_states_are_what_a_cache_has(name):
  cfg = model.variant(name, dtype="float32")
  cache = jax.eval_shape(lambda: kv.empty(cfg, 3, 50))
  size = lambda tree: sum(
    x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )
  assert lower_bounds.cache_bytes(cfg, 3 * 50) == size(cache.kv)
  assert 3 * lower_bounds.state_bytes(cfg) == size(cache.states)
  where = {"rows": 3, "devices": 2, "expert": 1, "tensor": 2}
  # A step reads and writes the states; both devices read all latents.
  more = lower_bounds.decode_bytes(cfg, tokens=150, **where)
  more -= lower_bounds.weight_bytes(cfg, **where)
  copies = 2 if name == "tiny-moonlight" else 1
  assert more == pytest.approx(copies * size(cache.kv) / 2 + size(cache.states))


def test_a_dense_model_reads_its_weights_and_cache_once():
  cfg = model.variant("qwen3-0.6b", dtype="float32")
  sizes = matrices(cfg)
  weights = 4 * sum(sizes.values())  # tied: the embedding is the head
  cache = jax.eval_shape(lambda: (kv.empty(cfg, 24, 100), kv.empty(cfg, 3, 50)))
  cache = sum(4 * x.size for c in cache for x in jax.tree.leaves(c.kv))
  tokens = 24 * 100 + 3 * 50
  least = lower_bounds.decode_bytes(
    cfg, rows=24, tokens=tokens, devices=1, expert=1, tensor=1
  )
  assert least == pytest.approx(weights + cache)


def test_a_float32_head_is_read_in_float32():
  cfg = model.variant("qwen3-30b-a3b")
  least = lambda cfg: lower_bounds.decode_bytes(
    cfg, rows=1, tokens=0, devices=1, expert=1, tensor=1
  )
  more = least(dataclasses.replace(cfg, float32_head=True)) - least(cfg)
  assert more == 2 * cfg.embed_dim * cfg.vocab_size


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
