"""Quantised folders of Hugging Face, and tensors that are only carried over."""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES
from hf_folders import error_message, load_on_mesh, require_equal, tensors_of
from random_model import weights
from safetensors.numpy import load_file

from gspo_jax import model
from gspo_jax.model import hf
from gspo_jax.model.hf import checkpoint as hf_checkpoint
from gspo_jax.model.hf import quantised
from gspo_jax.model.hf import tensors as hf_tensors
from gspo_jax.model.hf.tensors import TensorFile

FP8 = {
  "quant_method": "fp8",
  "activation_scheme": "dynamic",
  "weight_block_size": [128, 128],
}
CHANNELS = {
  "quant_method": "compressed-tensors", "format": "float-quantized",
  "config_groups": {"group_0": {"weights": {"strategy": "channel"},
   "input_activations": {"strategy": "token", "dynamic": True}}},
}  # fmt: skip
NAMES = {"float8_e4m3fn": "F8_E4M3", "bfloat16": "BF16", "float32": "F32"}
NAMES |= {"uint8": "U8", "int64": "I64"}


def write(path, tensors):
  """safetensors' numpy functions have no 8-bit floats."""
  header, data = {}, b""
  for name, x in tensors.items():
    span = [len(data), len(data) + x.nbytes]
    kind = NAMES[x.dtype.name]
    header[name] = {"dtype": kind, "shape": x.shape, "data_offsets": span}
    data += x.tobytes()
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def blocks(shape, size):
  return tuple(math.ceil(n / k) for n, k in zip(shape, size, strict=True))


def expanded(scale, size, shape):
  return np.kron(scale, np.ones(size, np.float32))[: shape[0], : shape[1]]


def quantise(x, size, rng):
  """Codes and scales; the scales do not fit, so that mixed ones are seen."""
  scale = rng.uniform(0.01, 2, blocks(x.shape, size)).astype(np.float32)
  codes = (x / expanded(scale, size, x.shape)).astype(jnp.float8_e4m3fn)
  return codes, scale


def dequantised(codes, scale, size):
  return codes.astype(np.float32) * expanded(scale, size, codes.shape)


SIZES = {"vocab_size": 32, "num_layers": 2, "embed_dim": 200, "mlp_dim": 136}
SIZES |= {"num_kv_heads": 4, "head_dim": 16, "dtype": "float32"}
CFG = model.variant("tiny", **SIZES)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
  """A folder in float32."""
  folder = tmp_path_factory.mktemp("plain") / "out"
  hf.save_hf(weights(CFG), CFG, folder)
  return folder


def make(folder, plain, config=FP8):
  """Writes a quantised folder; returns its tensors, and what they mean."""
  rng = np.random.default_rng(0)
  end = "_scale" if config is CHANNELS else "_scale_inv"
  stored, meant = {}, {}
  for name, x in tensors_of(plain).items():
    stored[name] = meant[name] = x
    if re.search(r"proj(_qkvz?|_z|_with_mqa)?\.weight$", name):
      size = (1, x.shape[1]) if config is CHANNELS else (128, 128)
      codes, scale = quantise(x, size, rng)
      stored |= {name: codes, name + end: scale}
      meant[name] = dequantised(codes, scale, size)
    elif not name.endswith("norm.weight"):
      stored[name] = x.astype(jnp.bfloat16)
      meant[name] = stored[name].astype(np.float32)
  folder.mkdir()
  raw = json.loads((plain / "config.json").read_text())
  raw |= {"quantization_config": config}
  (folder / "config.json").write_text(json.dumps(raw))
  write(folder / "model.safetensors", stored)
  return stored, meant


@pytest.fixture
def in_blocks(plain, tmp_path):
  """A folder with scales of blocks, its tensors, and what they mean."""
  return tmp_path / "quantised", *make(tmp_path / "quantised", plain)


def load_floats(folder, meant, cfg=CFG):
  folder.mkdir()
  write(folder / "model.safetensors", meant)
  return hf.load_hf(folder, cfg)


@pytest.mark.parametrize("size", [(128, 128), (1, 300)])
def test_any_part_of_a_matrix_has_its_own_scales(size):
  rng = np.random.default_rng(0)
  codes, scale = quantise(rng.normal(size=(200, 300)), size, rng)
  whole = dequantised(codes, scale, size)
  matrix = quantised.Float8(codes.view(np.uint8), scale, size)
  borders = (0, 1, 100, 127, 128, 129, 200, 256, 257, 300)
  for _ in range(200):
    a, b = np.sort(rng.choice(borders, (2, 2)))
    part = slice(*a.clip(0, 200)), slice(*b)
    np.testing.assert_array_equal(matrix[part], whole[part])
  assert np.unique(scale).size > 4


def test_every_8_bit_float_is_that_of_ml_dtypes():
  codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
  one = np.ones((1, 1), np.float32)
  whole = quantised.Float8(codes, one, (128, 128))[:, :]
  floats = codes.view(jnp.float8_e4m3fn).astype(np.float32)
  np.testing.assert_array_equal(whole, floats)
  assert np.isnan(whole).sum() == 2


@pytest.mark.parametrize("config", [FP8, CHANNELS], ids=["blocks", "channels"])
def test_a_quantised_folder_is_read_on_any_mesh(config, plain, tmp_path):
  folder = tmp_path / "quantised"
  _, meant = make(folder, plain, config)
  cfg = hf.config_from_hf(folder, dtype="float32", remat="none")
  params = load_floats(tmp_path / "floats", meant)
  require_equal(hf.load_hf(folder, cfg), params)
  again = load_on_mesh(folder, cfg)
  require_equal(jax.device_get(again), params)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(again))


# The names of qwen3.5 are others where the experts' weights are not normed.
DELTA_NET = dataclasses.replace(
  FAMILIES["qwen3.5"],
  **SIZES | {"rotary_dim": 4, "norm_topk_prob": False},
  linear_key_head_dim=40,
  linear_value_head_dim=52,
  linear_fused=True,
)
MLA = dataclasses.replace(
  FAMILIES["deepseek-v3"],
  **SIZES | {"dense_mlp_dim": 136, "shared_dim": 136, "rotary_dim": 8},
  q_lora_rank=140,
  kv_lora_rank=150,
  v_head_dim=40,
)


@pytest.mark.parametrize(
  "cfg",
  [DELTA_NET, pytest.param(MLA, marks=pytest.mark.slow)],
  ids=["qwen3-next", "deepseek-v3"],
)
def test_parts_of_a_quantised_matrix_have_their_scales(cfg, tmp_path):
  hf.save_hf(weights(cfg), cfg, tmp_path / "plain")
  stored, meant = make(tmp_path / "quantised", tmp_path / "plain")
  assert sum(x.dtype == jnp.float8_e4m3fn for x in stored.values()) > 30
  params = load_floats(tmp_path / "floats", meant, cfg)
  again = load_on_mesh(tmp_path / "quantised", cfg)
  require_equal(jax.device_get(again), params)


def test_a_bucket_sends_each_byte_of_a_quantised_folder_once(
  in_blocks, tmp_path, monkeypatch
):
  """Of scales, a row that two parts of a matrix share may be sent twice."""
  folder, stored, meant = in_blocks
  params = load_floats(tmp_path / "floats", meant)
  sent, read = [], TensorFile.read

  def recorded(self, start, end):
    sent.append((start, end))
    return read(self, start, end)

  monkeypatch.setattr(hf_tensors, "in_bucket", lambda path: True)
  bucket = TensorFile(f"file://{folder}/model.safetensors")
  monkeypatch.setattr(hf_tensors, "_open", lambda path: bucket)
  source = hf_tensors.HFCheckpoint(folder, CFG)
  monkeypatch.setattr(hf_checkpoint, "HFCheckpoint", lambda folder, cfg: source)
  monkeypatch.setattr(TensorFile, "read", recorded)
  require_equal(jax.device_get(load_on_mesh(folder, CFG)), params)
  times = np.zeros((folder / "model.safetensors").stat().st_size, np.int8)
  for start, end in sent:
    times[start:end] += 1
  for name, tensor in bucket.tensors.items():
    assert tensor.nbytes == stored[name].nbytes
    of_tensor = times[tensor.start : tensor.start + tensor.nbytes]
    most = 2 if name.endswith("_scale_inv") else 1
    assert 1 <= of_tensor.min() <= of_tensor.max() <= most


# MXFP4.


@pytest.fixture
def packed(tmp_path):
  """3 experts with 96 inputs and 10 outputs, in a file and in a bucket."""
  rng = np.random.default_rng(0)
  codes = rng.integers(0, 256, (3, 10, 3, 16), np.uint8)
  exponents = rng.integers(90, 160, (3, 10, 3), np.uint8)
  path = tmp_path / "model.safetensors"
  write(path, {"x_blocks": codes, "x_scales": exponents})
  views = [
    quantised.as_floats("", TensorFile(name).tensors)["x"]
    for name in (path, f"file://{path}")
  ]
  return codes, exponents, views


def floats_of_4_bits(codes, exponents):
  """[experts, inputs, outputs], number by number."""
  experts, outputs, groups, _ = codes.shape
  out = np.zeros((experts, 32 * groups, outputs))
  for e, r, c in np.ndindex(experts, outputs, 32 * groups):
    byte = int(codes[e, r, c // 32, c % 32 // 2])
    bits = byte >> 4 if c % 2 else byte & 15
    sign, power, half = bits >> 3, bits >> 1 & 3, bits & 1
    size = (1 + half / 2) * 2.0 ** (power - 1) if power else half / 2
    exponent = int(exponents[e, r, c // 32]) - 127
    out[e, c, r] = (-1) ** sign * size * 2.0**exponent
  return out


def test_any_part_of_4_bit_experts_is_exact(packed):
  codes, exponents, views = packed
  whole = floats_of_4_bits(codes, exponents)
  all_of = slice(None)
  for view in views:
    assert (view.shape, view.dtype) == ((3, 96, 10), "BF16")
    for part in (
      (all_of, all_of, all_of), (slice(1, 2), slice(0, 96), slice(0, 10)),
      (slice(0, 2), slice(31, 33), slice(3, 9)),
      (slice(2, 3), slice(33, 63), slice(9, 10)),
      (slice(0, 3), slice(5, 5), slice(0, 10)),
    ):  # fmt: skip
      x = view[part]
      assert x.dtype == jnp.bfloat16
      np.testing.assert_array_equal(x.astype(np.float64), whole[part])


def test_4_bit_experts_are_those_of_transformers(packed):
  torch = pytest.importorskip("torch")
  from transformers.integrations import mxfp4

  codes, exponents, (view, _) = packed
  theirs = mxfp4.convert_moe_packed_tensors(
    torch.tensor(codes), torch.tensor(exponents)
  )
  ours = view[(slice(None),) * 3].astype(np.float32)
  np.testing.assert_array_equal(ours, theirs.float().numpy())


def test_the_smallest_and_largest_exponents():
  codes = np.full((1, 1, 1, 16), 0x21, np.uint8)  # 0.5, then 1
  for exponent, one in ((0, 2.0**-127), (254, 2.0**127), (255, np.nan)):
    scales = np.full((1, 1, 1), exponent, np.uint8)
    x = quantised.Mxfp4(codes, scales)[:, :2, :].astype(np.float64)
    np.testing.assert_array_equal(x, [[[one / 2], [one]]])


GPT_OSS = hf_checkpoint.config_to_hf(
  model.variant("tiny-gpt-oss", vocab_size=32, embed_dim=64, mlp_dim=96),
  *("bfloat16", None),
) | {"quantization_config": {"quant_method": "mxfp4"}}


def test_a_4_bit_folder_is_read_on_any_mesh_and_exported(tmp_path):
  folder, out = tmp_path / "packed", tmp_path / "out"
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(GPT_OSS))
  cfg = hf.config_from_hf(folder, dtype="float32", remat="none")
  hf.save_hf(weights(cfg), cfg, tmp_path / "plain", dtype="bfloat16")
  rng, stored, meant = np.random.default_rng(0), {}, {}
  for name, x in tensors_of(tmp_path / "plain").items():
    stored[name] = meant[name] = x
    if x.ndim == 3:
      experts, inputs, outputs = x.shape
      shape = (experts, outputs, inputs // 32, 16)
      codes = rng.integers(0, 256, shape, np.uint8)
      exponents = rng.integers(118, 128, shape[:-1], np.uint8)
      del stored[name]
      stored |= {f"{name}_blocks": codes, f"{name}_scales": exponents}
      meant[name] = floats_of_4_bits(codes, exponents).astype(jnp.bfloat16)
  write(folder / "model.safetensors", stored)
  params = load_floats(tmp_path / "floats", meant, cfg)
  for load in hf.load_hf, load_on_mesh:
    require_equal(jax.device_get(load(folder, cfg)), jax.device_get(params))
  hf.save_hf(params, cfg, out, dtype="bfloat16", like=folder)
  require_equal(tensors_of(out), meant)
  raw = json.loads((out / "config.json").read_text())
  assert raw == {k: x for k, x in GPT_OSS.items() if "quant" not in k}


# What is not trained.


MTP = "model.layers.2."


def add_multi_token_prediction(folder, stored):
  """Tensors of a layer after the model's, and of `mtp`, by what they mean."""
  rng = np.random.default_rng(2)
  codes, scale = quantise(rng.normal(size=(150, 200)), (128, 128), rng)
  name = f"{MTP}mlp.up_proj.weight"
  added = {
    f"{MTP}eh_proj.weight": rng.normal(size=(3, 6)).astype(jnp.bfloat16),
    f"{MTP}mlp.gate.e_score_correction_bias": np.ones(4, np.float32) / 3,
    "mtp.norm.weight": np.ones(5, np.float32) / 3,
  }
  packed = {name: codes, f"{name}_scale_inv": scale}
  write(folder / "model.safetensors", stored | added | packed)
  return added | {name: dequantised(codes, scale, (128, 128))}


@pytest.mark.parametrize(
  ("dtype", "scheme"), [("bfloat16", ""), ("float32", "file://")]
)
def test_multi_token_prediction_is_carried_over(
  dtype, scheme, in_blocks, tmp_path, monkeypatch, capsys
):
  opened = lambda path: TensorFile(f"{scheme}{path}")
  monkeypatch.setattr(hf_tensors, "_open", opened)
  (folder, stored, _), out = in_blocks, tmp_path / "out"
  added = add_multi_token_prediction(folder, stored)
  params = hf.load_hf(folder, CFG)
  assert capsys.readouterr().out == (
    f"{folder}: 4 tensors of multi-token prediction or of images are not "
    f"loaded, from {MTP}eh_proj.weight on\n"
  )
  hf.save_hf(params, CFG, out, dtype=dtype, like=folder)
  raw = json.loads((out / "config.json").read_text())
  assert "quantization_config" not in raw
  assert raw["torch_dtype"] == dtype
  index = json.loads((out / hf_tensors.INDEX).read_text())
  files = {file.name for file in out.glob("*.safetensors")}
  assert files == {f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)}
  written = tensors_of(out)
  for name, file in index["weight_map"].items():
    assert name in load_file(out / file)
    assert (file == "model-00004-of-00004.safetensors") == (name in added)
  assert index["weight_map"].keys() == written.keys()
  size = sum(x.nbytes for x in written.values())
  assert index["metadata"]["total_size"] == size
  for name, x in added.items():
    kept = dtype if name.endswith("up_proj.weight") else x.dtype
    assert written[name].dtype == kept
    np.testing.assert_array_equal(written[name], x.astype(kept))
  cast = lambda x: x.astype(dtype).astype(np.float32)
  require_equal(hf.load_hf(out, CFG), jax.tree.map(cast, params))


def test_a_folder_without_tensors_has_nothing_to_carry_over(plain, tmp_path):
  like, out = tmp_path / "like", tmp_path / "out"
  like.mkdir()
  (like / "config.json").write_bytes((plain / "config.json").read_bytes())
  hf.save_hf(hf.load_hf(plain, CFG), CFG, out, like=like)
  assert tensors_of(out).keys() == tensors_of(plain).keys()


def test_a_layer_too_many_is_no_multi_token_prediction(in_blocks):
  folder, stored, _ = in_blocks
  stored[f"{MTP}input_layernorm.weight"] = np.ones(200, np.float32)
  stored["vision.mtp.norm"] = np.ones(200, np.float32)
  write(folder / "model.safetensors", stored)
  message = error_message(lambda: hf.load_hf(folder, CFG))
  assert "not of this model (2): model.layers.2.input_layernorm" in message
  stored |= {"mtp.counts": np.ones(3, np.int64)}
  write(folder / "model.safetensors", stored)
  message = error_message(lambda: hf.load_hf(folder, CFG))
  assert "dtype (1): mtp.counts I64, expected one of BF16, F16, F32" in message


# What is refused.


@pytest.mark.parametrize(
  ("change", "words"),
  [(None, "no such tensor"), (np.ones((2, 1), np.float32), "F32 (2, 1)"),
   (np.ones((2, 2), np.uint8), "U8 (2, 2)")],
)  # fmt: skip
def test_scales_that_are_missing_or_wrong_are_named(change, words, in_blocks):
  folder, stored, _ = in_blocks
  name = "model.layers.1.mlp.experts.3.down_proj.weight"
  scales = stored.pop(f"{name}_scale_inv")
  assert scales.shape == (2, 2)
  if change is not None:
    stored[f"{name}_scale_inv"] = change
  write(folder / "model.safetensors", stored)
  assert error_message(lambda: hf.load_hf(folder, CFG)) == (
    f"{folder}: {name} is quantised: expected {name}_scale_inv F32 or BF16 "
    f"(2, 2), got {words}"
  )
  if change is None:
    stored |= {name: np.ones((200, 136), np.float32)}
    stored |= {f"{name}_scale_inv": scales}
    write(folder / "model.safetensors", stored)
    message = error_message(lambda: hf.load_hf(folder, CFG))
    assert f"not of this model (1): {name}_scale_inv" in message


def test_a_wrong_scale_of_4_bit_experts_is_named():
  tensor = lambda dtype, *shape: hf_tensors.StoredTensor(None, dtype, shape, 0)
  stored = {"a.x_blocks": tensor("U8", 3, 10, 3, 16)}
  stored["a.x_scales"] = tensor("U8", 3, 10, 1)
  message = error_message(lambda: quantised.as_floats("folder", stored))
  assert message == (
    "folder: a.x_blocks is quantised: expected a.x_scales U8 (3, 10, 3), got "
    "U8 (3, 10, 1)"
  )


def test_a_shape_that_is_not_that_of_its_bytes_is_damage(in_blocks):
  path = in_blocks[0] / "model.safetensors"
  data = path.read_bytes()
  path.write_bytes(data.replace(b'"shape": [200]', b'"shape": [201]', 1))
  message = error_message(lambda: hf.load_hf(path.parent, CFG))
  assert f"{path}: damaged or truncated: ValueError: model." in message
  assert message.endswith("shape takes 804 bytes, the file has 800")


@pytest.mark.parametrize(
  ("config", "words"),
  [({"quant_method": "awq", "bits": 4},
    "quant_method='awq': expected 'fp8', "),
   ({}, "quant_method=None: expected 'fp8', 'mxfp4' or 'compressed-tensors'"),
   (FP8 | {"weight_block_size": None}, "size=None: expected [128, 128]"),
   (FP8 | {"weight_block_size": [64, 64]}, "=[64, 64]: expected [128, 128]"),
   (FP8 | {"activation_scheme": "static"}, "scheme='static': expected 'dyn"),
   (CHANNELS | {"format": "pack-quantized"}, "format='pack-quantized': exp"),
   (CHANNELS | {"config_groups": {"g": {"weights": {"strategy": "group"}}}},
    "config_groups.g.weights.strategy='group': expected 'channel'"),
   (CHANNELS | {"config_groups": [1]}, "config.json: AttributeError"),
   ("fp8", "config.json: AttributeError")],
)  # fmt: skip
def test_other_quantisations_are_refused(config, words, plain, tmp_path):
  raw = json.loads((plain / "config.json").read_text())
  raw["quantization_config"] = config
  (tmp_path / "config.json").write_text(json.dumps(raw))
  assert words in error_message(lambda: hf.config_from_hf(tmp_path))


def test_configs_of_published_folders_are_read(plain, tmp_path):
  raw = json.loads((plain / "config.json").read_text())
  for config in (
    None,
    FP8 | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["lm_head"]},
    CHANNELS, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
  ):  # fmt: skip
    raw["quantization_config"] = config
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert hf.config_from_hf(tmp_path) == hf.config_from_hf(plain)
