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
  "qwen3-14b": (40, 5120, 40, 8, 128, 17408, 0, 0, False, 14_768_307_200),
  "qwen3-32b": (64, 5120, 64, 8, 128, 25600, 0, 0, False, 32_762_123_264),
  "qwen3-30b-a3b": (
    *(48, 2048, 32, 4, 128, 768, 128, 8, False),
    30_532_122_624,
  ),
  "qwen3-235b-a22b": (
    *(94, 4096, 64, 4, 128, 1536, 128, 8, False),
    235_093_634_560,
  ),
  "qwen3-coder-30b-a3b": (
    *(48, 2048, 32, 4, 128, 768, 128, 8, False),
    30_532_122_624,
  ),
  "qwen3-coder-480b-a35b": (
    *(62, 6144, 96, 8, 128, 2560, 160, 8, False),
    480_154_875_392,
  ),
}
# Releases of the same sizes.
for name in ("qwen3-30b-a3b", "qwen3-235b-a22b"):
  PUBLISHED[f"{name}-2507"] = PUBLISHED[name]
# rope_theta; 1e6 otherwise.
ROPE_THETA = {
  "qwen3-30b-a3b-2507": 1e7,
  "qwen3-235b-a22b-2507": 5e6,
  "qwen3-coder-30b-a3b": 1e7,
  "qwen3-coder-480b-a35b": 1e7,
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
OTHERS |= {
  "smollm2-135m": (
    *(49_152, 30, 576, 9, 3, 64, 1536, 0, 0, True),
    134_515_008,
  ),
  "smollm2-360m": (
    *(49_152, 32, 960, 15, 5, 64, 2560, 0, 0, True),
    361_821_120,
  ),
  "smollm2-1.7b": (
    *(49_152, 24, 2048, 32, 32, 64, 8192, 0, 0, True),
    1_711_376_384,
  ),
  "olmoe-1b-7b": (
    *(50_304, 16, 2048, 16, 16, 128, 1024, 64, 8, False),
    6_919_161_856,
  ),
  "mixtral-8x7b": (
    *(32_000, 32, 4096, 32, 8, 128, 14336, 8, 2, False),
    46_702_792_704,
  ),
}
LLAMA3 = model.Llama3Scaling
# Base of the rotary frequencies, their scaling, epsilon of the norms.
CONSTANTS = {
  "qwen2.5": (1e6, None, 1e-6),
  "llama3.2": (5e5, LLAMA3(32.0, 1.0, 4.0, 8192), 1e-5),
  "llama3.1": (5e5, LLAMA3(8.0, 1.0, 4.0, 8192), 1e-5),
  "smollm2-135m": (1e5, None, 1e-5),
  "smollm2-360m": (1e5, None, 1e-5),
  "smollm2-1.7b": (1.3e5, None, 1e-5),
  "olmoe": (1e4, None, 1e-5),
  "mixtral": (1e6, None, 1e-5),
}
ACTIVE = {
  "qwen3-30b-a3b": 3.3e9,
  "qwen3-235b-a22b": 22e9,
  "qwen3-coder-30b-a3b": 3.3e9,
  "qwen3-coder-480b-a35b": 35e9,
}


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
  theta = ROPE_THETA.get(name, 1e6)
  assert (cfg.vocab_size, cfg.rope_theta, cfg.norm_eps) == (V, theta, 1e-6)
  assert cfg.norm_topk_prob


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_have_the_published_sizes(name):
  *sizes, total = OTHERS[name]
  cfg = model.variant(name)
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
  qwen2, olmoe = name.startswith("qwen2"), name.startswith("olmoe")
  assert (cfg.attention_bias, cfg.qk_norm) == (qwen2, olmoe)
  assert cfg.qk_norm_over_heads == olmoe
  assert cfg.norm_topk_prob == (not olmoe)
  (constants,) = (c for start, c in CONSTANTS.items() if name.startswith(start))
  assert (cfg.rope_theta, cfg.rope_scaling, cfg.norm_eps) == constants


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
    ("tiny", {"rope_scaling": (8, 1, 4)}, ["(8, 1, 4)", "YarnScaling"]),
    ("tiny", {"qk_norm": False, "qk_norm_over_heads": True}, ["qk_norm=True"]),
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


@pytest.mark.parametrize(
  ("kind", "numbers", "words"),
  [
    (model.Llama3Scaling, (8, 4, 1, 64), "low=4, high=1, .* 0 < low < high"),
    (model.Llama3Scaling, (0.5, 1, 4, 64), "factor=0.5, .* factor >= 1"),
    (model.YarnScaling, (0.5, 64), "factor=0.5, .* factor >= 1"),
    (model.YarnScaling, (8, 0), "length=0, .* length > 0"),
    (model.YarnScaling, (8, 64, 1, 2), "0 < beta_slow <= beta_fast"),
    (model.YarnScaling, (8, 64, 32, 1, 0.0), "attention_factor > 0"),
  ],
)
def test_impossible_scalings_are_refused(kind, numbers, words):
  with pytest.raises(UserError, match=words):
    kind(*numbers)
