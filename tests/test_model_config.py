"""The variants against the published Qwen3 checkpoints, by arithmetic alone."""

import math

import jax
import pytest

from gspo_jax import model
from gspo_jax.errors import UserError

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
ACTIVE = {"qwen3-30b-a3b": 3.3e9, "qwen3-235b-a22b": 22e9}


def count(layers, width, heads, kv_heads, head, mlp, experts, used, tied):
  """Parameters, when `used` experts of a block count."""
  attention = width * head * (2 * heads + 2 * kv_heads) + 2 * head
  feed = 3 * width * mlp
  if experts:
    feed = used * feed + width * experts
  block = attention + feed + 2 * width
  return layers * block + width + V * width * (1 if tied else 2)


@pytest.mark.parametrize("name", PUBLISHED)
def test_variant_has_the_published_number_of_parameters(name):
  *sizes, total = PUBLISHED[name]
  cfg = model.variant(name)
  shapes = jax.eval_shape(lambda k: model.init(k, cfg), jax.random.key(0))
  counted = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
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


def test_every_published_variant_is_named():
  assert set(model.VARIANTS) == {"tiny", *PUBLISHED}


def test_changes_apply_and_leave_the_table_alone():
  before = model.VARIANTS["tiny"]
  changed = model.variant("tiny", num_layers=7, dtype="float32")
  assert (changed.num_layers, changed.dtype) == (7, "float32")
  assert changed.embed_dim == before.embed_dim
  assert model.variant("tiny") == before
  assert hash(changed) != hash(before)  # static under jit


@pytest.mark.parametrize(
  ("name", "changes", "said"),
  [
    ("qwen3-30b-a3", {}, ["'qwen3-30b-a3'", "mean 'qwen3-30b-a3b'?"]),
    ("zzz", {}, ["'zzz'", "choose one of", "qwen3-0.6b", "tiny"]),
    ("tiny", {"num_layer": 3}, ["num_layer:", "mean 'num_layers'?"]),
    ("tiny", {"dtype": "bfloat"}, ["'bfloat'", "mean 'bfloat16'?"]),
    ("tiny", {"dtype": "int8"}, ["'int8'", "bfloat16, float32"]),
    ("tiny", {"num_heads": 6}, ["num_heads=6", "num_kv_heads=4"]),
    ("tiny", {"head_dim": 7}, ["head_dim=7", "even"]),
    ("tiny", {"experts_per_token": 0}, ["per_token=0", "num_experts=8"]),
    ("tiny", {"experts_per_token": 9}, ["per_token=9", "num_experts=8"]),
  ],
)
def test_a_mistake_is_a_user_error_that_names_it(name, changes, said):
  with pytest.raises(UserError) as error:
    model.variant(name, **changes)
  message = str(error.value)
  assert all(part in message for part in said), message
  assert "\n" not in message
