"""Checkpoints in and out, against transformers (support/make_goldens.py)."""

import ast
import dataclasses
import errno
import functools
import importlib
import json
import math
import os
import re
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from hf_folders import error_message, load_on_mesh, require_equal, tensors_of
from random_model import weights
from repository import ROOT
from safetensors import safe_open
from safetensors.numpy import load_file, save, save_file

from gspo_jax import model, sampler
from gspo_jax.model import hf, layers, rounding
from gspo_jax.model.hf import checkpoint as hf_checkpoint
from gspo_jax.model.hf import config as hf_config
from gspo_jax.model.hf import folder as hf_folder
from gspo_jax.model.hf import tensors as hf_tensors
from gspo_jax.model.hf.families import FAMILIES, WITH_IMAGES
from gspo_jax.model.hf.tensors import TensorFile
from gspo_jax.record import progress
from gspo_jax.runtime import multihost, sharding
from gspo_jax.sampler.samples import Prompts, SamplerConfig

GOLDENS = ROOT / "tests/support/goldens"
NAMES = (
  *("qwen3", "qwen3_moe", "qwen3_moe_raw", "qwen2", "llama3"),
  *("yarn", "olmoe", "mixtral", "qwen2_moe", "glm4_moe", "glm4_moe_air"),
  *("minimax_m2", "gpt_oss", "qwen3_next", "qwen3_5_moe", "qwen3_5"),
  *("deepseek_v3", "deepseek_v3_plain", "glm4_moe_lite"),
  *("phi3", "smollm3", "mistral", "seed_oss", "dots1"),
  *("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "mistral3"),
)
# Decoding, and rounding, of the others share all code with these.
DECODED = ("gpt_oss",)
ROUNDED = (*DECODED, "glm4_moe", "llama3", "qwen3_next", "deepseek_v3")
# Those of others share all code with them.
COPIES = (
  *("qwen3_5_moe", "deepseek_v3_plain", "glm4_moe_lite", "qwen3_moe_raw"),
  *("glm4_moe_air", "mistral", "seed_oss", "dots1"),
  *("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "mistral3"),
)
# Their tensors have names, or an order of axes, that no others have.
NAMED = "qwen3_vl_moe", "qwen2_5_vl", "mistral3"


def models(names):
  """All models; slow but for these."""
  slow = lambda name: [] if name in names else [pytest.mark.slow]
  return pytest.mark.parametrize(
    "name", [pytest.param(name, marks=slow(name)) for name in NAMES]
  )


every_model = models(set(NAMES) - set(COPIES))
MOE = {"vocab_size": 48, "num_layers": 3, "mlp_dim": 16}
QWEN2 = MOE | {"num_experts": 0, "attention_bias": True, "qk_norm": False}


def config(name):
  return hf.config_from_hf(GOLDENS / name, dtype="float32", remat="none")


@functools.cache
def loaded(name):
  return jax.device_get(hf.load_hf(GOLDENS / name, config(name)))


@functools.cache
def golden(name):
  return dict(np.load(GOLDENS / name / "golden.npz"))


def require_tensors(folder, expected):
  """The files of `folder` hold `expected`, in the same types."""
  tensors = tensors_of(folder)
  dtypes = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
  assert dtypes(tensors) == dtypes(expected)
  require_equal(tensors, expected)


def require_transformers_logits(name, folder, **changes):
  torch = pytest.importorskip("torch")
  import transformers

  theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
    folder, output_loading_info=True, **changes
  )
  assert theirs.dtype == torch.float32
  tokens = torch.tensor(golden(name)["tokens"]).long()
  with torch.no_grad():
    logits = theirs.eval()(tokens).logits
  # The golden logits, up to 3, are of another CPU.
  expected = golden(name)["logits_plain"]
  np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
  return info


# Parity.


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral"])
def test_names_of_a_family_do_not_depend_on_how_it_runs(name):
  options = {"float32_head": True, "float32_router": True}
  cfg = dataclasses.replace(config(name), **options)
  require_equal(hf.load_hf(GOLDENS / name, cfg), loaded(name))


def inputs(name, padding):
  """The golden tokens, positions and mask."""
  mask = golden(name)[f"mask_{padding}"].astype(np.int32)
  return golden(name)["tokens"], np.maximum(mask.cumsum(1) - 1, 0), mask


@every_model
def test_logits_and_gradients_are_those_of_transformers(name):
  cfg = config(name)

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def loss(params, tokens, positions, mask):
    logits = model.forward(params, cfg, tokens, positions, mask).logits
    logps = jax.nn.log_softmax(logits[:, :-1])
    nll = -jnp.take_along_axis(logps, tokens[:, 1:, None], -1)[..., 0]
    return (nll * mask[:, :-1]).sum() / mask[:, :-1].sum(), logits

  for padding in ("plain", "right", "left"):
    (value, logits), grads = loss(loaded(name), *inputs(name, padding))
    real = golden(name)[f"mask_{padding}"]
    theirs = golden(name)[f"logits_{padding}"]
    assert np.abs(logits - theirs)[real].max() < 5e-5, padding
    assert np.abs(theirs).max() > 3  # not all close to 0
  assert value == pytest.approx(golden(name)["loss"], abs=1e-5)
  theirs = jax.device_get(hf.load_hf(GOLDENS / name / "gradients", cfg))
  grads = sharding.leaves_by_path(grads)
  for path, x in sharding.leaves_by_path(theirs).items():
    largest = np.abs(x).max()
    assert largest == 0 if path.endswith("choice_bias") else largest > 1e-3
    close = {"rtol": 0, "atol": 5e-5 * max(largest, 0.1), "err_msg": path}
    np.testing.assert_allclose(grads[path], x, **close)


def in_bfloat16(name):
  return dataclasses.replace(config(name), dtype="bfloat16")


norm = jax.jit(
  layers.rms_norm, static_argnums=2, compiler_options=rounding.OPTIONS
)


@every_model
def test_a_norm_is_rounded_where_transformers_rounds_it(name):
  """Bit for bit, but for means that fall on either side of a step."""
  params, cfg = loaded(name), in_bfloat16(name)
  x_BTD = params["embed"][golden(name)["tokens"]].astype(jnp.bfloat16)
  scale = params["layers"]["attention_norm"]["scale"][0]
  # Its fields alone, so that the families share what is compiled.
  keys = "norm_eps", "norm_plus_one", "norm_rounds_last"
  cfg = model.variant("tiny", **{key: getattr(cfg, key) for key in keys})
  equal = norm(x_BTD, scale, cfg) == golden(name)["norm_bfloat16"]
  assert equal.mean() > 0.995


@models(ROUNDED)
def test_bfloat16_logits_are_as_near_as_those_of_transformers(name):
  """To float32, which cannot show a rounding in the wrong place."""
  cfg, mask = in_bfloat16(name), golden(name)["mask_left"]
  logits = jax.jit(
    lambda *args: model.forward(args[0], cfg, *args[1:]).logits,
    compiler_options=rounding.OPTIONS,
  )(loaded(name), *inputs(name, "left"))

  def distance(x):
    """The median of the tokens: a near tie may send one to other experts."""
    error = np.square(x - golden(name)["logits_left"])[mask]
    return np.median(np.sqrt(error.mean(-1)))

  theirs = distance(golden(name)["logits_bfloat16"])
  assert theirs < 0.04
  assert distance(logits) < 1.5 * theirs


@models(DECODED)
def test_greedy_responses_from_an_export_are_those_of_transformers(
  name, tmp_path
):
  cfg = config(name)
  hf.save_hf(loaded(name), cfg, tmp_path / "out")
  params = hf.load_hf(tmp_path / "out", hf.config_from_hf(tmp_path / "out"))
  mask, responses = golden(name)["mask_left"], golden(name)["answers"]
  greedy = SamplerConfig(
    group_size=1,
    max_new_tokens=responses.shape[1],
    temperature=0.0,
    stop_ids=(cfg.vocab_size,),  # no token
  )
  out = jax.jit(functools.partial(sampler.generate, cfg=cfg, sampler=greedy))(
    params,
    prompts=Prompts(golden(name)["tokens"], mask.sum(1)),
    key=jax.random.key(0),
  )
  assert responses.shape == (3, 64)
  np.testing.assert_array_equal(out.tokens, responses)


@every_model
def test_transformers_computes_the_same_from_an_export(name, tmp_path):
  """With a new config. One like an original is that original, see below."""
  hf.save_hf(loaded(name), config(name), tmp_path / "out")
  info = require_transformers_logits(name, tmp_path / "out")
  assert not any(info.values()), info


# Saved and loaded.


@pytest.mark.parametrize(
  ("name", "dtype"),
  [("qwen3_moe", "float32"), ("qwen2", "bfloat16"), ("mixtral", "bfloat16")],
)
def test_save_and_load_is_the_identity(
  name, dtype, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(progress, "SECONDS", 0.0)
  cfg = config(name)
  rounded = lambda x: x.astype(dtype).astype(np.float32)
  params = jax.tree.map(rounded, weights(cfg))
  hf.save_hf(params, cfg, tmp_path / "out", dtype=dtype)
  again = hf.load_hf(tmp_path / "out", cfg)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(again))
  require_equal(again, params)
  assert hf.config_from_hf(tmp_path / "out", remat="none") == (
    dataclasses.replace(cfg, dtype=dtype)
  )
  index = json.loads((tmp_path / "out" / hf_tensors.INDEX).read_text())
  files = {}  # each layer has one, and so has the rest
  for tensor, file in index["weight_map"].items():
    layer = tensor.removeprefix("model.layers.").split(".")[0]
    files.setdefault(file, set()).add(layer)
  *of_layers, rest = (files[file] for file in sorted(files))
  assert of_layers == [{str(i)} for i in range(cfg.num_layers)]
  assert rest == {"model", *(() if cfg.tie_embeddings else ("lm_head",))}
  size = (
    sum(x.size for x in jax.tree.leaves(params)) * jnp.dtype(dtype).itemsize
  )
  assert index["metadata"]["total_size"] == size
  assert sorted(files)[0] == f"model-00001-of-{len(files):05}.safetensors"
  out = capsys.readouterr().out
  assert f"writing {tmp_path}/out: {cfg.num_layers + 1} files in " in out
  assert f"loading {tmp_path}/out: {cfg.num_layers} layers in " in out


@models({*NAMED, *set(NAMES) - set(COPIES)})
def test_load_and_save_is_the_identity(name, tmp_path):
  hf.save_hf(
    loaded(name),
    config(name),
    tmp_path / "out",
    dtype="bfloat16",
    like=GOLDENS / name,
  )
  require_tensors(tmp_path / "out", tensors_of(GOLDENS / name))
  raw = (GOLDENS / name / "config.json").read_text()
  assert json.loads((tmp_path / "out/config.json").read_text()) == (
    json.loads(raw)
  )


def test_published_experts_of_qwen3_vl_have_their_inputs_first(tmp_path):
  like = tmp_path / "like"
  shutil.copytree(GOLDENS / "qwen3_vl_moe", like)
  stored = load_file(like / "model.safetensors")
  of_experts = [name for name in stored if ".experts." in name]
  assert len(of_experts) == 4
  for name in of_experts:
    stored[name] = np.ascontiguousarray(stored[name].swapaxes(1, 2))
  save_file(stored, like / "model.safetensors", {"format": "pt"})
  cfg = config("qwen3_vl_moe")
  require_equal(hf.load_hf(like, cfg), loaded("qwen3_vl_moe"))
  options = {"dtype": "bfloat16", "like": like}
  hf.save_hf(loaded("qwen3_vl_moe"), cfg, tmp_path / "out", **options)
  require_tensors(tmp_path / "out", stored)
  require_equal(hf.load_hf(tmp_path / "out", cfg), loaded("qwen3_vl_moe"))


def with_images(folder):
  """Writes Qwen3.5 as it is published, with tensors of images and of MTP."""
  raw = json.loads((GOLDENS / "qwen3_5_moe/config.json").read_text())
  rope = raw["rope_parameters"] | {"mrope_section": [1, 1, 0]}
  whole = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": raw | {"rope_parameters": rope, "mlp_only_layers": []},
    "tie_word_embeddings": False,
    "vision_config": {"depth": 1, "model_type": "qwen3_5_moe"},
  }
  theirs = load_file(GOLDENS / "qwen3_5_moe/model.safetensors")
  rng = np.random.default_rng(0)
  random = lambda *shape: rng.normal(size=shape).astype(jnp.bfloat16)
  stored = {
    "model.visual.patch_embed.proj.weight": random(4, 3, 2, 2, 2),
    "model.visual.merger.norm.bias": random(4).astype(np.float32),
    "mtp.layers.0.mlp.experts.gate_up_proj": random(5, 24, 16),
  }
  experts = {}
  for name, x in theirs.items():
    name = re.sub(r"^model\.", "model.language_model.", name)
    start, _, end = name.partition(".mlp.experts.")
    if end:
      e, projection, _ = end.split(".")
      experts.setdefault(f"{start}.mlp.experts", {})[projection, int(e)] = x
    else:
      stored[name] = x
  for name, of in experts.items():
    joined = lambda key, of=of: np.stack([of[key, e] for e in range(5)])
    gate_up = joined("gate_proj"), joined("up_proj")
    stored[f"{name}.gate_up_proj"] = np.concatenate(gate_up, 1)
    stored[f"{name}.down_proj"] = joined("down_proj")
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(whole))
  save_file(stored, folder / "model.safetensors", {"format": "pt"})
  return whole, stored


def test_a_model_of_images_is_read_and_exported(tmp_path, capsys):
  like, out = tmp_path / "like", tmp_path / "out"
  raw, stored = with_images(like)
  cfg = hf.config_from_hf(like, dtype="float32", remat="none")
  assert cfg == config("qwen3_5_moe")
  assert hf.context_length(like) == 256
  params = hf.load_hf(like, cfg)
  words = "3 tensors of multi-token prediction or of i"
  assert words in capsys.readouterr().out
  require_equal(params, loaded("qwen3_5_moe"))
  hf.save_hf(params, cfg, out, dtype="bfloat16", like=like)
  require_tensors(out, stored)
  assert json.loads((out / "config.json").read_text()) == raw
  (like / "model.safetensors").unlink()
  hf.save_hf(params, cfg, tmp_path / "wide", like=like)
  text = json.loads((tmp_path / "wide/config.json").read_text())["text_config"]
  assert text["dtype"] == "float32"
  index = json.loads((tmp_path / "wide" / hf_tensors.INDEX).read_text())
  start = "model.language_model.layers.0.mlp.experts.4.up_proj"
  assert f"{start}.weight" in index["weight_map"]


def test_transformers_reads_the_same_from_a_model_of_images(tmp_path):
  with_images(tmp_path / "like")
  changes = {"dtype": "float32"}
  require_transformers_logits("qwen3_5_moe", tmp_path / "like", **changes)


@pytest.mark.parametrize("name", model.VARIANTS)
def test_the_config_of_a_variant_is_read_back(name, tmp_path):
  cfg = model.variant(name)
  (tmp_path / "config.json").write_text(
    json.dumps(hf_checkpoint.config_to_hf(cfg, "bfloat16", None))
  )
  same = {"unroll": cfg.unroll, "remat": cfg.remat}
  assert hf.config_from_hf(tmp_path, **same) == cfg


def test_an_export_says_what_servers_read():
  written = lambda name: hf_checkpoint.config_to_hf(
    model.variant(name), "bfloat16", None
  )
  mla, minimax = written("tiny-moonlight"), written("tiny-minimax-m2")
  assert mla["scoring_func"] == minimax["scoring_func"] == "sigmoid"
  assert (mla["topk_method"], mla["moe_layer_freq"]) == ("noaux_tc", 1)
  assert minimax["qk_norm_type"] == "per_layer"
  assert minimax["use_qk_norm"] is minimax["use_routing_bias"] is True


# Meshes.


def on_a_mesh(name):
  """A model whose axes two devices divide."""
  if name in ("moe", "fused", "qwen2"):
    changes = QWEN2 if name == "qwen2" else MOE
    return model.variant("tiny", dtype="float32", **changes)
  changes = {"v_head_dim": 6}
  if name == "qwen3_next":
    changes = {"num_experts": 8, "linear_value_head_dim": 10}
  return dataclasses.replace(config(name), vocab_size=48, **changes)


def save_for_mesh(name, params, cfg, folder):
  """`fused`: all experts in one tensor, as in a folder without weights."""
  like = None
  if name == "fused":
    like = folder.with_name("like")
    like.mkdir()
    raw = hf_checkpoint.config_to_hf(cfg, "float32", None)
    (like / "config.json").write_text(json.dumps(raw))
    names = {"model.layers.0.mlp.experts.gate_up_proj": "x"}
    (like / hf_tensors.INDEX).write_text(json.dumps({"weight_map": names}))
  hf.save_hf(params, cfg, folder, like=like)


on_meshes = pytest.mark.parametrize(
  "name",
  [
    *("moe", "fused", "qwen2", "qwen3_next"),
    pytest.param("deepseek_v3", marks=pytest.mark.slow),
  ],
)


@on_meshes
def test_a_mesh_loads_and_saves_the_same(name, tmp_path, monkeypatch):
  cfg = on_a_mesh(name)
  params = weights(cfg)
  save_for_mesh(name, params, cfg, tmp_path / "out")
  read, sizes = hf_checkpoint.HFCheckpoint.read, {}

  def recorded(self, layer, wanted):
    layer_parts = read(self, layer, wanted)
    for tensor, parts in layer_parts.items():
      sizes.setdefault(tensor.path, []).extend(x.size for x in parts.values())
    return layer_parts

  monkeypatch.setattr(hf_checkpoint.HFCheckpoint, "read", recorded)
  again = load_on_mesh(tmp_path / "out", cfg)
  require_equal(jax.device_get(again), params)
  shardings = model.shardings(params, again["embed"].sharding.mesh)
  # Some leave out `context`, an axis of one device.
  assert jax.tree.all(
    jax.tree.map(
      lambda x, wanted: x.sharding.is_equivalent_to(wanted, x.ndim),
      again,
      shardings,
    )
  )
  # No number is read twice, although some are on several devices.
  places = sharding.leaves_by_path(shardings)
  for path, leaf in sharding.leaves_by_path(params).items():
    assert sum(sizes[path]) == leaf.size
    whole = places[path].is_fully_replicated
    assert (
      len(sizes[path]) > len(leaf) or not path.startswith("layers") or whole
    )
  monkeypatch.undo()
  hf.save_hf(again, cfg, tmp_path / "again")
  require_equal(hf.load_hf(tmp_path / "again", cfg), params)


def test_only_the_primary_process_writes(tmp_path, monkeypatch):
  monkeypatch.setattr(multihost, "is_primary", lambda: False)
  hf.save_hf(loaded("qwen3"), config("qwen3"), tmp_path / "out")
  assert not list(tmp_path.iterdir())


# Missing, unknown and wrong tensors.


@pytest.fixture
def checkpoint(tmp_path):
  """A folder, its tensors, and a function that writes and loads them."""
  folder = tmp_path / "checkpoint"
  shutil.copytree(GOLDENS / "qwen3", folder)
  tensors = load_file(folder / "model.safetensors")

  def write():
    save_file(tensors, folder / "model.safetensors")
    return hf.load_hf(folder, config("qwen3"))

  return folder, tensors, write


def test_missing_and_unknown_tensors_are_named(checkpoint):
  _, tensors, write = checkpoint
  missing = ("model.layers.0.mlp.up_proj.weight", "model.norm.weight")
  for name in missing:
    del tensors[name]
  tensors["model.layers.0.mlp.up_project.weight"] = np.zeros((20, 16), "f4")
  tensors["vision.patches"] = np.zeros(3, "f4")
  message = error_message(write)
  assert f"missing (2): {', '.join(missing)};" in message
  assert f"up_project.weight (did you mean {missing[0]}?)" in message
  assert "not of this model (2)" in message
  assert message.endswith(", vision.patches")  # without a near choice


def test_a_tensor_of_another_shape_or_type_is_named(checkpoint):
  _, tensors, write = checkpoint
  key = "model.layers.1.mlp.down_proj.weight"
  tensors[key] = np.ascontiguousarray(tensors[key].T)
  tensors["model.norm.weight"] = np.zeros(16, np.int8)
  message = error_message(write)
  assert f"misshapen (1): {key} (20, 16), expected (16, 20)" in message
  assert "dtype (1): model.norm.weight I8, expected one of BF16" in message


def test_the_error_for_a_wrong_folder_names_16_tensors(checkpoint):
  folder, *_ = checkpoint
  cfg = dataclasses.replace(config("qwen3"), num_layers=40)
  message = error_message(lambda: hf.load_hf(folder, cfg))
  assert "missing (418): " in message
  assert message.endswith(", and 402 more")
  assert message.count("model.layers.") == 16


def test_frequency_tables_and_a_tied_head_are_ignored(checkpoint):
  _, tensors, write = checkpoint
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, "f4")
  require_equal(write(), loaded("qwen3"))


def test_a_tied_head_that_differs_is_refused(checkpoint, tmp_path):
  """As an untied one it is read and exported, as transformers does."""
  folder, tensors, write = checkpoint
  head = tensors["model.embed_tokens.weight"].copy()
  head[-1, -1] += 1
  tensors["lm_head.weight"] = head
  message = error_message(write)
  assert "lm_head.weight differs from model.embed_tokens.weight" in message
  assert "tie_word_embeddings=true: expected false" in message
  raw = json.loads((folder / "config.json").read_text())
  raw["tie_word_embeddings"] = False
  (folder / "config.json").write_text(json.dumps(raw))
  cfg = hf.config_from_hf(folder, dtype="float32")
  params = hf.load_hf(folder, cfg)
  np.testing.assert_array_equal(params["head"], head.T)
  hf.save_hf(params, cfg, tmp_path / "out", like=folder)
  require_equal(hf.load_hf(tmp_path / "out", cfg), params)
  tensors["lm_head.weight"] = np.zeros((3, 16), "f4")
  assert "misshapen (1): lm_head.weight (3, 16), expected" in error_message(
    write
  )


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_named(wrong, checkpoint):
  _, tensors, write = checkpoint
  for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
    whole = tensors[name]
    tensors[name] = whole.copy()
    tensors[name].flat[3] = wrong
    message = error_message(write)
    assert message.endswith(f"NaN or infinite weights (1): {name}")
    tensors[name] = whole


def test_an_expert_that_is_not_finite_is_named_on_any_mesh(tmp_path):
  cfg = model.variant("tiny", dtype="float32", **MOE)
  hf.save_hf(weights(cfg), cfg, tmp_path / "out")
  name = "model.layers.2.mlp.experts.3.up_proj.weight"
  file = tmp_path / "out/model-00003-of-00004.safetensors"
  tensors = load_file(file)
  tensors[name].flat[-1] = np.nan
  save_file(tensors, file)
  load = lambda: load_on_mesh(tmp_path / "out", cfg)
  assert error_message(load).endswith(f"infinite weights (1): {name}")


@on_meshes
def test_a_bucket_sends_each_byte_once(name, tmp_path, monkeypatch):
  """Of tensors that devices share by columns, too; the store is a folder."""
  cfg = on_a_mesh(name)
  params = weights(cfg)
  save_for_mesh(name, params, cfg, tmp_path / "out")
  shapes = hf_tensors.expected(cfg).values()
  sent, at_once, most, read = [], set(), [], TensorFile.read
  monkeypatch.setattr(hf_tensors, "_BLOCK_BYTES", 4096)

  def recorded(self, start, end):
    at_once.add(request := object())
    sent.append(end - start)
    time.sleep(5e-3)
    most.append(len(at_once))
    at_once.remove(request)
    return read(self, start, end)

  monkeypatch.setattr(hf_tensors, "in_bucket", lambda path: True)
  bucket = lambda path: TensorFile(f"file://{path}")
  monkeypatch.setattr(hf_tensors, "_open", bucket)
  source = hf_tensors.HFCheckpoint(tmp_path / "out", cfg)
  monkeypatch.setattr(TensorFile, "read", recorded)
  monkeypatch.setattr(hf_checkpoint, "HFCheckpoint", lambda folder, cfg: source)
  again = load_on_mesh(tmp_path / "out", cfg)
  require_equal(jax.device_get(again), params)
  assert sum(sent) == 4 * sum(map(math.prod, shapes))
  # What a thread holds, beside the parts: at least an expert of a fused tensor.
  assert max(sent) <= (8192 if name == "fused" else 4096)
  assert 8 < max(most) <= 32


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_ranges_of_bytes_are_the_slices_of_safetensors(scheme, tmp_path):
  """The store is a folder here; tests/test_export.py has a bucket."""
  array = np.arange(60, dtype=np.float32).reshape(5, 3, 4)
  tensors = {
    "a": array.astype(jnp.bfloat16),
    "b": array.astype(np.float16),
    "c": array[0, 0],
  }
  path = tmp_path / "model.safetensors"
  save_file(tensors, path, {"format": "pt"})
  ours = TensorFile(f"{scheme}{path}")
  theirs = safe_open(path, framework="np")
  assert sorted(ours.tensors) == sorted(theirs.keys())
  whole, rows = slice(None), slice(1, 4)
  for name in tensors:
    a, b = ours.tensors[name], theirs.get_slice(name)
    assert (list(a.shape), a.dtype) == (b.get_shape(), b.get_dtype())
    for slices in ((whole,), (rows,), (rows, whole, slice(2, 4))):
      slices = slices[: len(a.shape)]
      np.testing.assert_array_equal(a[slices], b[slices])
      assert a[slices].dtype == tensors[name].dtype
  whole = path.read_bytes()
  for size in (0, 8, 40, len(whole) - 1):
    path.write_bytes(whole[:size])
    with pytest.raises(ValueError, match=r"range|JSON|value|empty|expected"):
      TensorFile(f"{scheme}{path}")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32])
def test_a_file_is_that_of_safetensors(dtype, tmp_path, monkeypatch):
  monkeypatch.setattr(hf_tensors, "_BLOCK_BYTES", 50)
  array = np.arange(60).reshape(5, 3, 4).astype(dtype)
  tensors = {"b": array, "a": array[0, 0], "c": array[:0]}
  path = epath.Path(tmp_path / "model.safetensors")
  hf_tensors.save_tensors(tensors, path)
  assert path.read_bytes() == save(tensors, {"format": "pt"})
  (tmp_path / "other").write_text("")
  mode = lambda file: file.stat().st_mode
  assert mode(tmp_path / "model.safetensors") == mode(tmp_path / "other")


def test_only_what_an_export_has_left_is_to_be_removed(tmp_path, monkeypatch):
  """A bucket's folder with other files may be of use."""
  monkeypatch.setattr(hf_folder, "in_bucket", lambda path: True)
  message = lambda: error_message(lambda: hf.require_new(tmp_path, "float32"))
  (tmp_path / "notes.txt").write_text("x")
  assert message().endswith("expected a new or empty folder")
  (tmp_path / "config.json").write_text("{}")
  assert "remove what a killed export has left" in message()
  (tmp_path / "model.safetensors").write_text("x")
  assert message().endswith("expected a new or empty folder")


def test_a_disk_that_fails_is_no_damaged_folder(tmp_path, monkeypatch):
  def fail(*_, **__):
    raise OSError(errno.EIO, "Input/output error")

  monkeypatch.setattr(np, "memmap", fail)
  with pytest.raises(OSError, match="Input/output"):
    hf.load_hf(GOLDENS / "qwen3", config("qwen3"))


def test_damaged_folders_are_refused(tmp_path):
  cfg = config("qwen3_moe")
  folder = tmp_path / "moe"
  load = lambda: hf.load_hf(folder, cfg)
  assert "expected a checkpoint's folder" in error_message(load)
  folder.mkdir()
  assert "holds neither model.safetensors nor" in error_message(load)
  shutil.copytree(GOLDENS / "qwen3_moe", folder, dirs_exist_ok=True)
  file = folder / "model-00003-of-00006.safetensors"
  whole = file.read_bytes()
  file.write_bytes(whole[:-1])
  assert f"{file}: damaged or truncated" in error_message(load)
  file.unlink()
  assert f"missing files (1): {file.name}" in error_message(load)
  file.write_bytes(whole)
  require_equal(load(), loaded("qwen3_moe"))
  index = folder / "model.safetensors.index.json"
  for text, words in (
    ("[]", "expected a JSON object, got []"),
    ("[" * 100_000, f"{index}: not JSON: "),
    ('{"weight_map": {"x": 3}}', f"{index}: not an index: TypeError"),
    ('{"weights": {}}', f"{index}: not an index: KeyError: 'weight_map'"),
  ):
    index.write_text(text)
    assert words in error_message(load)


def test_an_index_names_files_beside_it(tmp_path):
  shutil.copytree(GOLDENS / "qwen3_moe", tmp_path / "moe")
  index = tmp_path / "moe/model.safetensors.index.json"
  raw = json.loads(index.read_text())
  name, file = next(iter(raw["weight_map"].items()))
  for outside in (f"../{file}", str(tmp_path / "moe" / file), f"./{file}"):
    raw["weight_map"][name] = outside
    index.write_text(json.dumps(raw))
    shutil.copy(GOLDENS / "qwen3_moe" / file, tmp_path)
    load = lambda: hf.load_hf(tmp_path / "moe", config("qwen3_moe"))
    assert f"names outside of its folder (1): {outside}" in error_message(load)


def test_pipes_are_no_files(tmp_path):
  """To open one would wait for ever."""
  os.mkfifo(tmp_path / "model.safetensors")
  load = lambda: hf.load_hf(tmp_path, config("qwen3"))
  assert "missing files (1): model.safetensors" in error_message(load)
  os.mkfifo(tmp_path / "config.json")
  read = lambda: hf.config_from_hf(tmp_path)
  assert "config.json: expected a file" in error_message(read)


def test_a_number_of_tensors_without_end_is_refused(checkpoint):
  folder, *_ = checkpoint
  cfg = dataclasses.replace(config("qwen3_moe"), num_experts=10**9)
  message = error_message(lambda: hf.load_hf(folder, cfg))
  assert "num_experts=1000000000" in message
  assert "tensors, the files hold 24" in message
  layers = lambda: dataclasses.replace(config("qwen3"), num_layers=10**9)
  assert "expected at most 4096" in error_message(layers)


# Configs.


def config_with(tmp_path, base="qwen3_moe", **changes):
  """The config of a golden model with keys changed; None drops a key."""
  raw = json.loads((GOLDENS / base / "config.json").read_text()) | changes
  raw = {key: value for key, value in raw.items() if value is not None}
  (tmp_path / "config.json").write_text(json.dumps(raw))
  return hf.config_from_hf(tmp_path)


def test_a_config_is_read(tmp_path):
  assert config_with(tmp_path) == model.ModelConfig(
    vocab_size=47,
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=12,
    num_experts=5,
    experts_per_token=2,
    rope_theta=1000.0,
    norm_eps=0.01,
  )
  llama = config("llama3")
  assert llama.rope_scaling == model.Llama3Scaling(8.0, 0.1, 2.0, 32)
  assert not llama.qk_norm
  assert not llama.attention_bias
  assert config("qwen2").attention_bias
  assert not config("qwen3_moe_raw").norm_topk_prob
  assert config("qwen3").tie_embeddings
  assert not config_with(tmp_path, tie_word_embeddings=None).tie_embeddings
  assert config("qwen3").mlp_dim == 20
  assert config("yarn").rope_scaling == model.YarnScaling(8.0, 32, 3.0, 0.1)
  olmoe, mixtral = config("olmoe"), config("mixtral")
  for cfg in olmoe, mixtral:
    assert (cfg.mlp_dim, cfg.num_experts, cfg.experts_per_token) == (12, 5, 2)
  assert (olmoe.qk_norm_over_heads, olmoe.norm_topk_prob) == (True, False)
  assert (mixtral.qk_norm, mixtral.norm_topk_prob) == (False, True)


def test_older_keys_give_the_same_config(tmp_path):
  old = {
    "num_local_experts": None,
    "num_experts": 5,
    "rope_parameters": None,
    "rope_theta": 1000,
    "rope_scaling": None,
    "dtype": None,
    "torch_dtype": "bfloat16",
  }
  assert config_with(tmp_path, **old) == config_with(tmp_path)
  assert config_with(tmp_path, **old, head_dim=None).head_dim == 4
  scaled = {
    "type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 64,
  }
  cfg = config_with(tmp_path, **old | {"rope_scaling": scaled})
  assert cfg.rope_scaling == model.Llama3Scaling(8.0, 1.0, 4.0, 64)
  assert cfg.rope_theta == 1000
  assert config_with(tmp_path, dtype="float32").dtype == "float32"
  assert config_with(tmp_path, dtype="float16").dtype == "bfloat16"


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
Yarn, AT_64 = model.YarnScaling, {"original_max_position_embeddings": 64}
MSCALES = {"mscale": 0.5, "mscale_all_dim": 0.5}


@pytest.mark.parametrize(
  ("scaling", "changes", "expected"),
  [({}, {}, Yarn(4.0, 256)), (AT_64, {}, Yarn(4.0, 64)),
   (AT_64, {"original_max_position_embeddings": 32}, Yarn(4.0, 32)),
   (AT_64 | {"factor": None}, {"max_position_embeddings": 192}, Yarn(3.0, 64)),
   ({"beta_fast": 16, "beta_slow": 2, "truncate": False}, {},
    Yarn(4.0, 256, 16.0, 2.0, truncate=False)),
   ({"attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 1.0}, {},
    Yarn(4.0, 256, attention_factor=1.5, mscale_all_dim=1.0)),
   (MSCALES, {}, Yarn(4.0, 256, attention_factor=1.0, mscale_all_dim=0.5)),
   ({"mscale": 0.5}, {}, Yarn(4.0, 256))],
)  # fmt: skip
def test_yarn_is_read_and_written(scaling, changes, expected, tmp_path):
  new = {"rope_parameters": YARN | scaling, "max_position_embeddings": 256}
  cfg = config_with(tmp_path, **new | changes)
  assert cfg.rope_scaling == expected
  assert cfg.rope_theta == 1e4
  raw = hf_checkpoint.config_to_hf(cfg, "bfloat16", None)
  (tmp_path / "config.json").write_text(json.dumps(raw))
  assert hf.config_from_hf(tmp_path) == cfg
  # What some releases 4 of transformers take for the factor.
  length = raw["rope_scaling"]["original_max_position_embeddings"]
  assert raw["max_position_embeddings"] / length == expected.factor


def test_each_family_has_its_base_of_the_rotary_frequencies(tmp_path):
  no_rope = {"rope_parameters": None}
  assert config_with(tmp_path, **no_rope).rope_theta == 1e4
  raw = json.loads((GOLDENS / "qwen3_vl/config.json").read_text())
  text = raw["text_config"] | no_rope
  found = config_with(tmp_path, "qwen3_vl", text_config=text)
  assert found.rope_theta == 5e5
  mixtral = no_rope | {"model_type": "mixtral", "intermediate_size": 12}
  assert config_with(tmp_path, **mixtral).rope_theta == 1e6


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"model_type": "qwen3_5"}, "text_config=None: expected a JSON object"),
    ({"model_type": "qwen3_mo"}, "are: deepseek_v3, dots1, glm4_moe, glm4_"),
    ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv=8.0: not supported"),
    ({"model_type": "mixtral", "sliding_window": 64}, "sliding_window=64: not"),
    ({"mlp_only_layers": [0]}, "mlp_only_layers=[0]: expected []"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step=2: expected 1"),
    ({"use_sliding_window": True}, "use_sliding_window=True: expected False"),
    ({"layer_types": ["full_attention", "sliding"]}, "holds 'sliding'"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"hidden_act": "gelu"}, "hidden_act=gelu: expected 'silu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method"),
    ({"n_shared_experts": 1}, "n_shared_experts=1"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: expected 1"),
    ({"rope_parameters": {"rope_type": "linear"}}, "supported are: default, l"),
    ({"rope_parameters": {"full_attention": YARN}}, "of full_attention: exp"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, "factor >= 1"),
    ({"rope_parameters": YARN | {"beta_fast": 0.5}}, "json: model.rope_"),
    ({"rope_parameters": YARN | {"beta_slow": "x"}}, "beta_slow='x': expected"),
    ({"rope_parameters": YARN | {"attn_factor": 2}}, "attn_factor=2 of rope_"),
    ({"model_type": "olmo2"}, "'olmo2': not supported: it has norms behind"),
    ({"rope_scaling": {"type": "llama3"}, "rope_parameters": None}, "factor"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "wide"}, "hidden_size='wide': expected int above 0"),
    ({"num_local_experts": None}, "num_experts or num_local_experts is"),
    ({"num_experts_per_tok": 9}, "experts_per_token=9"),
    ({"model_type": []}, "config.json: TypeError: "),
    ({"rope_parameters": "x"}, "config.json: ValueError: "),
    ({"rms_norm_eps": 10**400}, "config.json: OverflowError: "),
  ],
)  # fmt: skip
def test_an_unsupported_config_is_refused(changes, words, tmp_path):
  assert words in error_message(lambda: config_with(tmp_path, **changes))


SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = ["dense", "sparse", "dense"]
ODD_ROTARY = {"partial_rotary_factor": 0.4}


@pytest.mark.parametrize(
  ("base", "key", "value", "words"),
  [
    ("glm4_moe", "n_group", 2, "n_group=2: expected a divisor of"),
    ("glm4_moe", "n_group", 5, "with at least 2 experts a group"),
    ("glm4_moe", "topk_group", 2, "topk_group=2: expected 1 to"),
    ("phi3", "rope_scaling", {"type": "yarn", "factor": 4.0}, "'default'"),
    ("smollm3", "no_rope_layers", [1, 2], "no_rope_layers: expected 0 or 1"),
    ("glm4_moe", "first_k_dense_replace", "x", "='x': expected int"),
    ("glm4_moe", "n_shared_experts", 0, "n_shared_experts=0: expected int"),
    ("glm4_moe", "hidden_act", "gelu", "hidden_act=gelu: expected 'silu'"),
    ("minimax_m2", "use_qk_norm", False, "use_qk_norm=False: expected True"),
    ("minimax_m2", "qk_norm_type", "per_head", "expected 'per_layer'"),
    ("minimax_m2", "attn_type_list", [0, 1], "attn_type_list: expected 1"),
    ("minimax_m2", "scoring_func", "softmax", "expected 'sigmoid'"),
    ("minimax_m2", "use_routing_bias", False, "use_routing_bias=False: exp"),
    ("minimax_m2", "shared_intermediate_size", 8, "size=8: expected 0"),
    ("minimax_m2", "rope_parameters", ODD_ROTARY, "rotary_dim=3: expected an"),
    ("gpt_oss", "hidden_act", "gelu", "hidden_act=gelu: expected 'silu'"),
    ("gpt_oss", "layer_types", [SLIDING, "chunked"] * 2, "layer_types: exp"),
    ("gpt_oss", "num_hidden_layers", 3, "for each of the 3 layers"),
    ("gpt_oss", "sliding_window", None, "sliding_window is missing"),
    ("gpt_oss", "rope_parameters", None, "rope_scaling is missing"),
    ("gpt_oss", "swiglu_limit", -7.0, "swiglu_limit=-7.0: expected float"),
    ("gpt_oss", "swiglu_alpha", 1.0, "swiglu_alpha=1.0: expected 1.702"),
    ("gpt_oss", "attention_bias", False, "attention_bias=False: expected T"),
    ("qwen3_next", "attn_output_gate", False, "gate=False: expected True"),
    ("qwen3_next", "mlp_only_layers", [0], "mlp_only_layers=[0]: expected []"),
    ("qwen3_next", "decoder_sparse_step", 2, "sparse_step=2: expected 1"),
    ("qwen3_next", "hidden_act", "gelu", "hidden_act=gelu: expected 'silu'"),
    ("qwen3_next", "attention_bias", True, "attention_bias=True: expected F"),
    ("qwen3_next", "layer_types", [FULL], "for each of the 2 layers"),
    ("qwen3_next", "layer_types", [SLIDING] * 2, "'linear_attention' or 'f"),
    ("qwen3_next", "linear_key_head_dim", None, "key_head_dim is missing"),
    ("qwen3_next", "linear_num_value_heads", 3, "=3: expected a multiple of"),
    ("qwen3_next", "head_dim", None, "head_dim is missing"),
    ("qwen3_5_moe", "norm_topk_prob", False, "prob=False: expected True"),
    ("qwen3_5_moe", "shared_expert_intermediate_size", None, "is missing"),
    ("deepseek_v3", "topk_method", "greedy", "greedy: expected 'noaux_tc'"),
    ("deepseek_v3", "scoring_func", "softmax", "expected 'sigmoid'"),
    ("deepseek_v3", "moe_layer_freq", 2, "moe_layer_freq=2: expected 1"),
    ("deepseek_v3", "attention_bias", True, "attention_bias=True: expected F"),
    ("deepseek_v3", "q_lora_rank", None, "q_lora_rank is missing"),
    ("deepseek_v3", "kv_lora_rank", None, "kv_lora_rank is missing"),
    ("deepseek_v3", "n_group", None, "n_group is missing"),
    ("deepseek_v3", "first_k_dense_replace", None, "replace is missing"),
    ("deepseek_v3", "num_key_value_heads", 2, "expected model.num_heads=4"),
    ("glm4_moe_lite", "mlp_layer_types", ["dense"], "each of the 3 layers"),
    ("glm4_moe_lite", "mlp_layer_types", MIXED, "'dense' for the first layers"),
    ("glm4_moe_lite", "first_k_dense_replace", 2, "first_k_dense_replace=2"),
    ("qwen2_moe", "qkv_bias", False, "qkv_bias=False: expected True"),
    ("qwen2_moe", "shared_expert_intermediate_size", None, "size is missing"),
    ("qwen2_moe", "mlp_only_layers", [0], "mlp_only_layers=[0]: expected []"),
  ],
)  # fmt: skip
def test_an_odd_config_of_a_family_is_refused(
  base, key, value, words, tmp_path
):
  read = lambda: config_with(tmp_path, base, **{key: value})
  assert words in error_message(read)


def test_layers_of_dots1_with_windows_are_refused(tmp_path):
  changes = {"max_window_layers": 1, "layer_types": None}
  message = error_message(lambda: config_with(tmp_path, "dots1", **changes))
  assert "max_window_layers=1: expected at least 2" in message


def test_all_layers_of_a_family_with_experts_may_be_dense(tmp_path):
  for base, first in (("deepseek_v3", 3), ("glm4_moe", 5)):
    cfg = config_with(tmp_path, base, first_k_dense_replace=first)
    assert cfg.num_experts == 0
    assert not any(layer.experts for layer in cfg.layers)
    assert cfg.dense_dim == config(base).dense_mlp_dim
    like = hf_checkpoint.config_to_hf(cfg, "bfloat16", tmp_path)
    assert like == json.loads((tmp_path / "config.json").read_text())


def test_windows_of_gpt_oss_in_any_order_are_read_and_written(tmp_path):
  kinds = [FULL, FULL, SLIDING]
  changes = {"num_hidden_layers": 3, "layer_types": None}
  cfg = config_with(tmp_path, "gpt_oss", **changes)
  assert [layer.window is None for layer in cfg.layers] == [False, True, False]
  changes["layer_types"] = kinds
  cfg = config_with(tmp_path, "gpt_oss", **changes)
  assert [layer.window is None for layer in cfg.layers] == [True, True, False]
  assert (
    hf_checkpoint.config_to_hf(cfg, "float32", None)["layer_types"] == kinds
  )


OLD_ROPE = {"rope_parameters": None, "rope_theta": 1000}
ROPE_OF_IMAGES = {
  "rope_type": "default",
  "rope_theta": 1000,
  "mrope_interleaved": True,
  "mrope_section": [1, 1, 0],
}


@pytest.mark.parametrize(
  ("base", "changes"),
  [
    # The published keys, where transformers 5 writes others.
    ("minimax_m2", OLD_ROPE | {"rotary_dim": 4}),
    ("minimax_m2", {"attn_type_list": [1, 1], "num_mtp_modules": 3}),
    ("minimax_m2", {"qk_norm_type": "per_layer", "scoring_func": "sigmoid"}),
    ("minimax_m2", {"shared_intermediate_size": 0, "use_mtp": True}),
    ("minimax_m2", {"use_qk_norm": True, "use_routing_bias": True}),
    ("glm4_moe", OLD_ROPE | {"partial_rotary_factor": 0.5}),
    ("glm4_moe", {"rope_scaling": None}),
    ("glm4_moe_air", {"use_qk_norm": None, "norm_topk_prob": None}),
    ("gpt_oss", {"layer_types": None, "swiglu_alpha": None}),
    ("qwen3_5_moe", {"layer_types": None, "full_attention_interval": 4}),
    ("qwen3_5_moe", {"layer_types": None}),
    ("qwen3_next", {"layer_types": None, "full_attention_interval": 2}),
    ("qwen3_next", OLD_ROPE | {"partial_rotary_factor": 0.25}),
    ("qwen3_next", {"linear_conv_kernel_dim": None}),
    ("qwen3_5", {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}),
    ("qwen3_5", {"mtp_num_hidden_layers": 1}),
    ("qwen3_5", {"rope_parameters": ROPE_OF_IMAGES}),
    ("deepseek_v3", {"head_dim": None, "qk_head_dim": None}),
    ("deepseek_v3", {"rope_interleave": None, "moe_layer_freq": 1}),
    ("deepseek_v3", {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
    ("deepseek_v3", {"model_type": "kimi_k2"}),
    ("deepseek_v3", {"model_type": "sarvam_mla"}),
    ("llama3", {"model_type": "iquestcoder"}),
    ("llama3", {"model_type": "internlm3", "qkv_bias": False}),
    ("qwen2", {"model_type": "seed_oss"}),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2}),
    ("smollm3", {"tie_word_embeddings": None}),
    ("dots1", {"max_window_layers": 2, "layer_types": None}),
    ("glm4_moe_lite", {"mlp_layer_types": None, "first_k_dense_replace": 1}),
    ("glm4_moe_lite", {"partial_rotary_factor": 1.0}),
  ],
)
def test_other_keys_of_a_family_give_the_same_config(base, changes, tmp_path):
  assert config_with(tmp_path, base, **changes) == config_with(tmp_path, base)


@pytest.mark.parametrize(
  ("base", "outer", "inner", "tied"),
  [
    *[("qwen3_vl", True, False, True), ("qwen3_vl", False, True, False)],
    *[("qwen3_vl", None, True, True), ("qwen2_5_vl", False, True, True)],
  ],
)
def test_embeddings_are_tied_as_transformers_ties_them(
  base, outer, inner, tied, tmp_path
):
  text = json.loads((GOLDENS / base / "config.json").read_text())["text_config"]
  key = "tie_word_embeddings"
  changes = {"text_config": text | {key: inner}, key: outer}
  assert config_with(tmp_path, base, **changes).tie_embeddings == tied


def test_qwen2_5_vl_is_published_without_a_text_config(tmp_path):
  raw = json.loads((GOLDENS / "qwen2_5_vl/config.json").read_text())
  text = raw["text_config"]
  rope = {"type": "mrope", "mrope_section": [2, 1, 1]}
  old = {"model_type": "qwen2_5_vl", "rope_scaling": rope, "rope_theta": 1000.0}
  flat = text | old | {"rope_parameters": None, "text_config": None}
  assert config_with(tmp_path, "qwen2_5_vl", **flat) == config_with(
    tmp_path, "qwen2_5_vl"
  )


# What their default config lacks.
SIZES_OF = {"dots1": {"n_routed_experts": 8, "n_shared_experts": 1,
  "num_experts_per_tok": 2}, "glm4_moe": {"head_dim": 64}}  # fmt: skip
# Their class is that of a family, their published tensors are not.
OTHER_TENSORS = {"exaone", "sarvam_moe"}


def test_every_causal_language_model_is_read_or_says_what_differs():
  auto = importlib.import_module("transformers.models.auto.configuration_auto")
  # The module of this table needs torch.
  source = Path(auto.__file__).with_name("modeling_auto.py").read_text()
  table = source.partition("FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict(")[2]
  classes = dict(ast.literal_eval(table.partition("\n)\n")[0].strip()))
  families = {*FAMILIES, *WITH_IMAGES}
  path, read, refused = epath.Path("config.json"), [], []
  for name in classes:
    raw = {"model_type": name}
    if name in families:
      made = auto.CONFIG_MAPPING[name]().to_dict()
      hf_config.model_config(path, made | SIZES_OF.get(name, {}))
      read.append(name)
    else:
      message = error_message(lambda raw=raw: hf_config.model_config(path, raw))
      assert re.match(f".*='{name}': not supported: it has [a-z]", message)
      refused.append(name)
  ours = {family.loads_with for family in FAMILIES.values()}
  assert {x for x in refused if classes[x] in ours} <= OTHER_TENSORS
  assert (len(read), len(refused)) == (25, 171), (read, refused)


def test_wrong_files_and_fields_are_refused(tmp_path):
  read = lambda: hf.config_from_hf(tmp_path / "x")
  assert "expected a checkpoint's folder" in error_message(read)
  (tmp_path / "x").mkdir()
  assert "config.json: no such file" in error_message(read)
  (tmp_path / "x/config.json").write_text("{")
  assert "not JSON" in error_message(read)
  (tmp_path / "x/config.json").write_text("[]")
  assert "expected a JSON object" in error_message(read)
  change = lambda: hf.config_from_hf(GOLDENS / "qwen3", num_layer=3)
  assert (
    "model.num_layer: unknown, did you mean 'num_layers'?"
    in error_message(change)
  )


# Writing.


def test_an_export_that_fails_leaves_no_folder(tmp_path, monkeypatch):
  params, cfg, out = loaded("qwen2"), config("qwen2"), tmp_path / "out"
  files, save = 0, hf_tensors.save_tensors

  def save_two(tensors, path):
    nonlocal files
    files += 1
    save(tensors, path)
    if files == 2:
      raise error

  with monkeypatch.context() as patched:
    patched.setattr(hf_checkpoint, "save_tensors", save_two)
    error = OSError(errno.ENOSPC, "No space left on device")
    message = error_message(lambda: hf.save_hf(params, cfg, out))
    assert message == f"{str(out)!r} cannot be written: {error.strerror}"
    files, error = 0, OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output") as raised:  # an outage
      hf.save_hf(params, cfg, out)
    assert raised.value is error
  assert not out.exists()
  hf.save_hf(params, cfg, out)
  assert [path.name for path in tmp_path.iterdir()] == ["out"]
  message = error_message(lambda: hf.save_hf(params, cfg, out))
  assert "exists: expected a new or empty folder" in message


def test_a_tokenizer_is_copied(tmp_path):
  like = tmp_path / "like"
  shutil.copytree(GOLDENS / "qwen2", like)
  (like / "tokenizer.json").write_text("{}")
  (like / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
  (like / "pytorch_model.bin").write_text("x")
  hf.save_hf(loaded("qwen2"), config("qwen2"), tmp_path / "out", like=like)
  names = {path.name for path in (tmp_path / "out").iterdir()}
  index = {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
  assert names == index | {
    "config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "generation_config.json",
  }


def test_impossible_exports_are_refused(tmp_path):
  save = lambda cfg, **rest: error_message(
    lambda: hf.save_hf(loaded("qwen3"), cfg, tmp_path / "out", **rest)
  )
  cfg = config("qwen3")
  assert "dtype='float16': did you mean 'bfloat16'?" in save(
    cfg, dtype="float16"
  )
  message = save(cfg, like=GOLDENS / "qwen2")
  assert "has attention_bias=True, the model to save has False" in message
  both = dataclasses.replace(cfg, attention_bias=True)
  message = save(both)
  assert "no family of transformers has vocab_size=47" in message
  assert "attention_bias=True" in message
  mixtral = dataclasses.replace(config("mixtral"), norm_topk_prob=False)
  assert "norm_topk_prob=False" in save(mixtral)
  olmoe = dataclasses.replace(config("olmoe"), head_dim=6)
  assert "head_dim=6" in save(olmoe)
  assert not (tmp_path / "out").exists()
