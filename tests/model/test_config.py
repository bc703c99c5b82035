"""The variants against the published checkpoints, without weights."""

import math

import jax
import pytest

from gspo_jax import model
from gspo_jax.runtime.errors import UserError

# From each config.json: layers, width, heads, key-value heads, head width, MLP
# or expert width, experts, experts a token, tied; and the published total.
V = 151_936
PUBLISHED = {
  "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, 0, 0, True, 596_049_920),
  "qwen3-1.7b": (28, 2048, 16, 8, 128, 6144, 0, 0, True, 1_720_574_976),
  "qwen3-4b": (36, 2560, 32, 8, 128, 9728, 0, 0, True, 4_022_468_096),
  "qwen3-8b": (36, 4096, 32, 8, 128, 12288, 0, 0, False, 8_190_735_360),
  "qwen3-32b": (64, 5120, 64, 8, 128, 25600, 0, 0, False, 32_762_123_264),
  "qwen3-30b-a3b": (
    *(48, 2048, 32, 4, 128, 768, 128, 8, False),
    30_532_122_624,
  ),
  "qwen3-235b-a22b": (
    *(94, 4096, 64, 4, 128, 1536, 128, 8, False),
    235_093_634_560,
  ),
}
# The same with the vocabulary first.
OTHERS = {
  "qwen2.5-0.5b": (
    *(151_936, 24, 896, 14, 2, 64, 4864, 0, 0, True),
    494_032_768,
  ),
  "qwen2.5-1.5b": (
    *(151_936, 28, 1536, 12, 2, 128, 8960, 0, 0, True),
    1_543_714_304,
  ),
  "qwen2.5-7b": (
    *(152_064, 28, 3584, 28, 4, 128, 18944, 0, 0, False),
    7_615_616_512,
  ),
  "llama3.2-1b": (
    *(128_256, 16, 2048, 32, 8, 64, 8192, 0, 0, True),
    1_235_814_400,
  ),
  "llama3.1-8b": (
    *(128_256, 32, 4096, 32, 8, 128, 14336, 0, 0, False),
    8_030_261_248,
  ),
}
ACTIVE = {"qwen3-30b-a3b": 3.3e9, "qwen3-235b-a22b": 22e9}


def count(layers, width, heads, kv_heads, head, mlp, experts, used, tied):
  """Parameters of a Qwen3, counting `used` experts of a block."""
  attention = width * head * (2 * heads + 2 * kv_heads) + 2 * head
  mlp = 3 * width * mlp
  if experts:
    mlp = used * mlp + width * experts
  block = attention + mlp + 2 * width
  return layers * block + width + V * width * (1 if tied else 2)


def parameters(name):
  cfg = model.variant(name)
  shapes = jax.eval_shape(lambda k: model.init(k, cfg), jax.random.key(0))
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


@pytest.mark.parametrize("name", PUBLISHED)
def test_variant_has_the_published_number_of_parameters(name):
  *sizes, total = PUBLISHED[name]
  counted = parameters(name)
  everything = [*sizes]
  everything[7] = sizes[6]  # all experts
  assert counted == count(*everything) == total
  if name in ACTIVE:
    assert count(*sizes) == pytest.approx(ACTIVE[name], rel=0.03)


@pytest.mark.parametrize("name", PUBLISHED)
def test_variant_has_the_published_sizes(name):
  cfg = model.variant(name)
  assert PUBLISHED[name][:9] == (
    cfg.num_layers,
    cfg.embed_dim,
    cfg.num_heads,
    cfg.num_kv_heads,
    cfg.head_dim,
    cfg.mlp_dim,
    cfg.num_experts,
    cfg.experts_per_token,
    cfg.tie_embeddings,
  )
  assert (cfg.vocab_size, cfg.rope_theta, cfg.norm_eps) == (V, 1e6, 1e-6)
  assert cfg.norm_topk_prob


@pytest.mark.parametrize("name", OTHERS)
def test_qwen2_and_llama_have_the_published_sizes(name):
  *sizes, total = OTHERS[name]
  cfg, qwen2 = model.variant(name), name.startswith("qwen2")
  assert parameters(name) == total
  assert sizes == [
    cfg.vocab_size,
    cfg.num_layers,
    cfg.embed_dim,
    cfg.num_heads,
    cfg.num_kv_heads,
    cfg.head_dim,
    cfg.mlp_dim,
    cfg.num_experts,
    cfg.experts_per_token,
    cfg.tie_embeddings,
  ]
  assert (cfg.attention_bias, cfg.qk_norm) == (qwen2, False)
  rope = (1e6, None) if qwen2 else (5e5, (cfg.rope_scaling[0], 1, 4, 8192))
  assert (cfg.rope_theta, cfg.rope_scaling) == rope
  assert cfg.norm_eps == (1e-6 if qwen2 else 1e-5)


def test_every_published_variant_is_named():
  assert set(model.VARIANTS) == {"tiny", "small", *PUBLISHED, *OTHERS}


def test_changes_apply_and_leave_the_table_alone():
  before = model.VARIANTS["tiny"]
  changed = model.variant("tiny", num_layers=7, dtype="float32")
  assert (changed.num_layers, changed.dtype) == (7, "float32")
  assert changed.embed_dim == before.embed_dim
  assert model.variant("tiny") == before
  assert hash(changed) != hash(before)  # static under jit


@pytest.mark.parametrize(
  ("name", "changes", "words"),
  [
    ("qwen3-30b-a3", {}, ["'qwen3-30b-a3'", "mean 'qwen3-30b-a3b'?"]),
    ("zzz", {}, ["'zzz'", "choose one of", "qwen3-0.6b", "tiny"]),
    ("tiny", {"num_layer": 3}, ["num_layer:", "mean 'num_layers'?"]),
    ("tiny", {"dtype": "bflaot16"}, ["'bflaot16'", "mean 'bfloat16'?"]),
    ("tiny", {"dtype": "int8"}, ["'int8'", "bfloat16, float32"]),
    ("tiny", {"num_heads": 6}, ["num_heads=6", "num_kv_heads=4"]),
    ("tiny", {"head_dim": 7}, ["head_dim=7", "even"]),
    ("tiny", {"rope_scaling": (8, 1, 4)}, ["(8, 1, 4)", "length"]),
    ("tiny", {"rope_scaling": (8, 4, 1, 64)}, ["(8, 4, 1, 64)", "high > low"]),
    ("tiny", {"experts_per_token": 0}, ["per_token=0", "num_experts=8"]),
    ("tiny", {"experts_per_token": 9}, ["per_token=9", "num_experts=8"]),
  ],
)
def test_a_user_error_names_the_mistake(name, changes, words):
  with pytest.raises(UserError) as error:
    model.variant(name, **changes)
  message = str(error.value)
  assert all(part in message for part in words), message
  assert "\n" not in message
