"""What a model needs at least, against its own parameters and cache."""

import jax
import pytest

from gspo_jax import model
from gspo_jax.model import cache as kv
from gspo_jax.plan import lower_bounds

VARIANTS = ["tiny", "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"]


def matrices(cfg):
  """Sizes of the parameters that multiply something, by path."""
  shapes = jax.eval_shape(lambda k: model.init(k, cfg), jax.random.key(0))
  flat, _ = jax.tree.flatten_with_path(shapes)
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
  return {name(p): x.size for p, x in flat if "scale" not in name(p)}


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


def test_the_30b_model_has_3b_active():
  cfg = model.variant("qwen3-30b-a3b")
  head = cfg.embed_dim * cfg.vocab_size
  assert 3.0e9 < lower_bounds.active_parameters(cfg) + head < 3.4e9


def test_tokens_in_steps_cost_what_they_cost_at_once():
  cfg = model.variant("tiny")
  at_once = lower_bounds.forward_flops(cfg, rows=3, tokens=64, has_old_logps=64)
  steps = sum(
    lower_bounds.forward_flops(
      cfg, rows=3, tokens=8, has_old_logps=8, past=past
    )
    for past in range(0, 64, 8)
  )
  assert steps == pytest.approx(at_once)


def test_the_square_of_attention():
  cfg = model.variant("qwen3-0.6b")
  flops = lambda tokens: lower_bounds.forward_flops(cfg, 1, tokens, 0)
  linear = 2 * lower_bounds.active_parameters(cfg) * 1000
  pairs = 1000 * 1000 / 2
  products = 2 * 2 * cfg.num_layers * cfg.num_heads * cfg.head_dim
  assert flops(1000) - linear == pytest.approx(products * pairs)


def test_a_dense_model_reads_its_weights_and_its_cache():
  cfg = model.variant("qwen3-0.6b", dtype="float32")
  sizes = matrices(cfg)
  weights = 4 * sum(sizes.values())  # tied: the embedding is the head
  cache = jax.eval_shape(lambda: (kv.empty(cfg, 24, 100), kv.empty(cfg, 3, 50)))
  cache = sum(4 * x.size for c in cache for x in (*c.k, *c.v))
  least = lower_bounds.decode_bytes(
    cfg,
    prompts=3,
    rows=24,
    slots=100,
    prompt_slots=50,
    devices=1,
    expert=1,
    tensor=1,
  )
  assert least == pytest.approx(weights + cache)


def test_experts_are_read_when_tokens_choose_them():
  cfg = model.variant("qwen3-30b-a3b")

  def least(rows, **split):
    sizes = {"devices": 16, "expert": 1, "tensor": 1} | split
    return lower_bounds.decode_bytes(
      cfg, prompts=1, rows=rows, slots=0, prompt_slots=0, **sizes
    )

  experts = 2 * sum(
    size
    for path, size in matrices(cfg).items()
    if path.endswith(("moe/gate_up", "moe/down"))
  )
  one, many = least(16), least(16 * 1000)
  # One token for each device meets 8 of 128 experts, 1000 meet all.
  assert many - one == pytest.approx(experts * 120 / 128)
  # Where 16 devices share them, each holds a sixteenth.
  assert least(16 * 1000, expert=16) < many / 10
