"""The variants against the published checkpoints, without weights."""

import dataclasses
import math

import jax
import pytest

from gspo_jax import model
from gspo_jax.runtime.errors import UserError

# The total of parameters that each checkpoint has; from its config.json query
# heads, key-value heads, head width, experts a token, and rope_theta. Together
# they fix all sizes.
PUBLISHED = {
  "qwen3-0.6b": (596_049_920, 16, 8, 128, 0, 1e6),
  "qwen3-1.7b": (1_720_574_976, 16, 8, 128, 0, 1e6),
  "qwen3-4b": (4_022_468_096, 32, 8, 128, 0, 1e6),
  "qwen3-8b": (8_190_735_360, 32, 8, 128, 0, 1e6),
  "qwen3-14b": (14_768_307_200, 40, 8, 128, 0, 1e6),
  "qwen3-32b": (32_762_123_264, 64, 8, 128, 0, 1e6),
  "qwen3-30b-a3b": (30_532_122_624, 32, 4, 128, 8, 1e6),
  "qwen3-30b-a3b-2507": (30_532_122_624, 32, 4, 128, 8, 1e7),
  "qwen3-235b-a22b": (235_093_634_560, 64, 4, 128, 8, 1e6),
  "qwen3-235b-a22b-2507": (235_093_634_560, 64, 4, 128, 8, 5e6),
  "qwen3-coder-30b-a3b": (30_532_122_624, 32, 4, 128, 8, 1e7),
  "qwen3-coder-480b-a35b": (480_154_875_392, 96, 8, 128, 8, 1e7),
  "qwen2.5-0.5b": (494_032_768, 14, 2, 64, 0, 1e6),
  "qwen2.5-1.5b": (1_543_714_304, 12, 2, 128, 0, 1e6),
  "qwen2.5-7b": (7_615_616_512, 28, 4, 128, 0, 1e6),
  "llama3.2-1b": (1_235_814_400, 32, 8, 64, 0, 5e5),
  "llama3.1-8b": (8_030_261_248, 32, 8, 128, 0, 5e5),
  "smollm2-135m": (134_515_008, 9, 3, 64, 0, 1e5),
  "smollm2-360m": (361_821_120, 15, 5, 64, 0, 1e5),
  "smollm2-1.7b": (1_711_376_384, 32, 32, 64, 0, 1.3e5),
  "olmoe-1b-7b": (6_919_161_856, 16, 16, 128, 8, 1e4),
  "mixtral-8x7b": (46_702_792_704, 32, 8, 128, 2, 1e6),
  "qwen1.5-moe-a2.7b": (14_315_784_192, 16, 16, 128, 4, 1e6),
  # The files have 110,468,824,832 and 358,337,791,296: a layer that predicts
  # another token, with its own embedding and head, is not trained.
  "glm-4.5-air": (106_852_251_264, 96, 8, 128, 8, 1e6),
  "glm-4.5": (352_797_829_024, 96, 8, 128, 8, 1e6),
  "minimax-m2": (228_689_764_864, 48, 8, 128, 8, 5e6),
  "gpt-oss-20b": (20_914_757_184, 64, 8, 64, 4, 1.5e5),
  "gpt-oss-120b": (116_829_156_672, 64, 8, 64, 4, 1.5e5),
  # Of the text model: images' encoder and the layer that predicts another token
  # are not trained.
  "qwen3.5-35b-a3b": (34_660_610_688, 16, 2, 256, 8, 1e7),
  "qwen3.6-35b-a3b": (34_660_610_688, 16, 2, 256, 8, 1e7),
  "qwen3.5-122b-a10b": (122_111_526_912, 32, 2, 256, 8, 1e7),
  "qwen3.5-0.8b": (752_393_024, 8, 2, 256, 0, 1e7),
  "qwen3.5-4b": (4_205_751_296, 16, 4, 256, 0, 1e7),
  "qwen3.5-9b": (8_953_803_264, 16, 4, 256, 0, 1e7),
  "qwen3.5-27b": (26_895_998_464, 24, 4, 256, 0, 1e7),
  "qwen3-next-80b-a3b": (79_674_391_296, 16, 2, 256, 10, 1e7),
  "moonlight-16b-a3b": (15_960_110_208, 16, 16, 192, 6, 5e4),
  "glm-4.7-flash": (29_943_393_920, 20, 20, 256, 4, 1e6),
  "deepseek-v3": (671_026_419_200, 128, 128, 192, 8, 1e4),
  "kimi-k2": (1_026_408_232_448, 64, 64, 192, 8, 5e4),
}
ACTIVE = {
  "qwen3-30b-a3b": 3.3e9, "qwen3-235b-a22b": 22e9,
  "qwen3-coder-30b-a3b": 3.3e9, "qwen3-coder-480b-a35b": 35e9,
  "mixtral-8x7b": 12.9e9, "qwen3.5-122b-a10b": 10e9, "kimi-k2": 32e9,
}  # fmt: skip


def parameters(cfg):
  return sum(math.prod(x.shape) for x in jax.tree.leaves(model.shapes(cfg)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_variant_is_the_published_model(name):
  cfg = model.variant(name)
  assert PUBLISHED[name] == (
    parameters(cfg),
    cfg.num_heads,
    cfg.num_kv_heads,
    cfg.head_dim,
    cfg.experts_per_token,
    cfg.rope_theta,
  )
  if name in ACTIVE:
    used = dataclasses.replace(cfg, num_experts=cfg.experts_per_token)
    assert parameters(used) == pytest.approx(ACTIVE[name], rel=0.03)
  begins = name.startswith
  small = begins(("qwen", "minimax", "deepseek", "kimi"))
  assert cfg.norm_eps == (1e-6 if small else 1e-5)
  assert cfg.qk_norm_over_heads == begins(("olmoe", "minimax"))
  assert cfg.norm_topk_prob == (not begins(("olmoe", "qwen1.5-moe")))
  factor = {"llama3.2-1b": 32.0, "llama3.1-8b": 8.0}.get(name)
  scaling = factor and model.Llama3Scaling(factor, 1.0, 4.0, 8192)
  if begins("gpt-oss"):
    scaling = model.YarnScaling(32.0, 4096, truncate=False)
  if stretch := {"deepseek-v3": (40.0, 32.0), "kimi-k2": (64.0, 1.0)}.get(name):
    scaling = model.YarnScaling(
      *(stretch[0], 4096, stretch[1], 1.0, 1.0), mscale_all_dim=1.0
    )
  assert cfg.rope_scaling == scaling


def test_every_published_variant_is_named():
  others = {name for name in model.VARIANTS if name.startswith("tiny")}
  assert set(model.VARIANTS) == {"small", *others, *PUBLISHED}


@pytest.mark.parametrize(
  ("name", "changes", "words"),
  [("qwen3-30b-a3", {}, ["'qwen3-30b-a3'", "mean 'qwen3-30b-a3b'?"]),
   ("zzz", {}, ["'zzz'", "choose one of", "qwen3-0.6b", "tiny"]),
   ("tiny", {"num_layer": 3}, ["num_layer:", "mean 'num_layers'?"]),
   ("tiny", {"dtype": "bflaot16"}, ["'bflaot16'", "mean 'bfloat16'?"]),
   ("tiny", {"dtype": "int8"}, ["'int8'", "bfloat16, float32"]),
   ("tiny", {"num_heads": 6}, ["num_heads=6", "num_kv_heads=4"]),
   ("tiny", {"head_dim": 7}, ["head_dim=7", "even"]),
   ("tiny", {"rope_scaling": (8, 1, 4)}, ["(8, 1, 4)", "YarnScaling"]),
   ("tiny", {"qk_norm": False, "qk_norm_over_heads": True}, ["qk_norm=True"]),
   ("tiny", {"experts_per_token": 0}, ["per_token=0", "num_experts=8"]),
   ("tiny", {"n_group": 3}, ["n_group=3", "divisor of model.num_experts=8"]),
   ("tiny", {"n_group": 2, "topk_group": 3}, ["topk_group=3", "1 to"]),
   ("tiny", {"scoring_func": "sigmoidal"}, ["mean 'sigmoid'?"]),
   ("tiny", {"rotary_dim": 18}, ["rotary_dim=18", "head_dim=16"]),
   ("tiny-gpt-oss", {"num_layers": 3}, ["num_layers=3", "multiple of 2"]),
   ("tiny-glm-4.5", {"num_layers": 1}, ["num_experts=8", "none of the 1 "]),
   ("tiny", {"experts_per_token": 9}, ["per_token=9", "num_experts=8"])],
)  # fmt: skip
def test_a_user_error_names_the_mistake(name, changes, words):
  with pytest.raises(UserError) as error:
    model.variant(name, **changes)
  message = str(error.value)
  assert all(part in message for part in words), message
  assert "\n" not in message


@pytest.mark.parametrize(
  ("kind", "numbers", "words"),
  [(model.Llama3Scaling, (8, 4, 1, 64), "low=4, high=1, .* 0 < low < high"),
   (model.Llama3Scaling, (0.5, 1, 4, 64), "factor=0.5, .* factor >= 1"),
   (model.YarnScaling, (0.5, 64), "factor=0.5, .* factor >= 1"),
   (model.YarnScaling, (8, 0), "length=0, .* length > 0"),
   (model.YarnScaling, (8, 64, 1, 2), "0 < beta_slow <= beta_fast"),
   (model.YarnScaling, (8, 64, 32, 1, 0.0), "attention_factor > 0")],
)  # fmt: skip
def test_impossible_scalings_are_refused(kind, numbers, words):
  with pytest.raises(UserError, match=words):
    kind(*numbers)
