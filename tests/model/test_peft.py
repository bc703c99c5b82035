"""Adapters in PEFT's format: a round trip, PEFT's own logits, mistakes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, SIZES
from hf_folders import tensors_of
from random_model import base_and_adapters
from safetensors.numpy import load_file, save_file

from gspo_jax import model
from gspo_jax.model import hf, lora
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError

MOE = model.variant("tiny", lora=model.LoraConfig(rank=3, alpha=5.0), **SIZES)
DENSE = dataclasses.replace(
  MOE, num_experts=0, experts_per_token=0, attention_bias=True, qk_norm=False
)
EXPERTS_ALONE = dataclasses.replace(MOE, lora=model.LoraConfig(3, 5.0, "mlp"))
MIXTRAL = dataclasses.replace(MOE, qk_norm=False)
OTHERS = {
  name: dataclasses.replace(cfg, lora=MOE.lora)
  for name, cfg in FAMILIES.items()
}
# transformers has this limit in its code.
OTHERS["gpt-oss"] = dataclasses.replace(OTHERS["gpt-oss"], swiglu_limit=7.0)
# Its projections are Qwen3-Next's.
NEXT = dataclasses.replace(OTHERS["qwen3.5"], linear_fused=True)
each_model = pytest.mark.parametrize(
  "cfg", [DENSE, MOE, *OTHERS.values()], ids=["dense", "moe", *OTHERS]
)


@pytest.fixture
def saved(tmp_path):
  """Adapters of the dense model, in a folder."""
  hf.save_peft(base_and_adapters(DENSE)[1], DENSE, tmp_path / "peft", base="")
  return tmp_path / "peft"


def test_a_folder_with_files_is_left_as_it_is(tmp_path):
  (tmp_path / "notes.txt").write_text("x")
  with pytest.raises(UserError, match="exists: expected a new or empty folder"):
    hf.save_peft(base_and_adapters(DENSE)[1], DENSE, tmp_path, base="")
  assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@each_model
def test_a_round_trip_changes_no_bit(cfg, tmp_path):
  _, adapters = base_and_adapters(cfg)
  hf.save_peft(adapters, cfg, tmp_path / "peft", base="org/name")
  again = hf.load_peft(tmp_path / "peft", cfg)
  jax.tree.map(np.testing.assert_array_equal, again, adapters)
  mesh = sharding.make_mesh(fsdp=2, expert=2, tensor=2)
  place = model.shardings(adapters, mesh)
  again = hf.load_peft(tmp_path / "peft", cfg, place)
  jax.tree.map(np.testing.assert_array_equal, again, adapters)
  assert jax.tree.map(lambda x: x.sharding, again) == place


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float64])
def test_adapters_are_read_in_any_float(saved, dtype):
  file = saved / "adapter_model.safetensors"
  save_file({k: x.astype(dtype) for k, x in load_file(file).items()}, file)
  _, adapters = base_and_adapters(DENSE)
  rounded = jax.tree.map(lambda x: x.astype(dtype).astype("f4"), adapters)
  again = hf.load_peft(saved, DENSE)
  jax.tree.map(np.testing.assert_array_equal, again, rounded)


def test_adapters_of_other_numbers_are_refused(saved):
  file = saved / "adapter_model.safetensors"
  tensors = load_file(file)
  name = next(iter(tensors))
  for x, words in (
    (tensors[name] * np.nan, rf"NaN or infinite weights \(1\): {name}"),
    (tensors[name].astype("i4"), f"{name} I32, expected one of BF16, F16, F32"),
  ):
    save_file(tensors | {name: x}, file)
    with pytest.raises(UserError, match=words):
      hf.load_peft(saved, DENSE)


QKVO = {f"{name}_proj" for name in "qkvo"}
MODULES = {
  "dense": (DENSE, {*QKVO, "gate_proj", "up_proj", "down_proj"}),
  "qwen3.5": (
    OTHERS["qwen3.5"],
    {*QKVO, *(f"in_proj_{end}" for end in ("qkv", "z", "b", "a")), "out_proj"},
  ),
  "next": (NEXT, {*QKVO, "in_proj_qkvz", "in_proj_ba", "out_proj"}),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_tensors_are_those_of_linear_layers(name, tmp_path):
  """An export of the sum has alpha / r lora_B lora_A more in each of them."""
  cfg, modules = MODULES[name]
  base, adapters = base_and_adapters(cfg)
  merged = lora.merge(lora.join(base, adapters), cfg.lora)
  hf.save_peft(adapters, cfg, tmp_path / "peft", base="")
  config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
  assert (config["peft_type"], config["r"]) == ("LORA", 3)
  assert config["lora_alpha"] == 5
  assert set(config["target_modules"]) == modules
  exports = []
  for number, params in enumerate((base, merged)):
    folder = tmp_path / str(number)
    hf.save_hf(params, dataclasses.replace(cfg, lora=None), folder)
    exports.append(tensors_of(folder))
  before, after = exports
  tensors = load_file(tmp_path / "peft/adapter_model.safetensors")
  found = set()
  for key, a in tensors.items():
    module = key.removeprefix("base_model.model.").partition(".lora_A")[0]
    if (weight := f"{module}.weight") in after:
      b = tensors[key.replace("lora_A", "lora_B")]
      added = after[weight] - before[weight]
      np.testing.assert_allclose(5 / 3 * (b @ a), added, atol=1e-5)
      found.add(module.rpartition(".")[2])
  assert found >= modules


def test_experts_are_numbered_as_in_peft(tmp_path):
  """lora_A counts (expert, rank), lora_B counts (rank, expert)."""
  _, adapters = base_and_adapters(MOE)
  hf.save_peft(adapters, MOE, tmp_path / "peft", base="")
  config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
  assert set(config["target_parameters"]) == {
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
  }
  tensors = load_file(tmp_path / "peft/adapter_model.safetensors")
  moe = adapters["layers"]["moe"]
  start = "base_model.model.model.layers.0.mlp.experts."
  for name, key in (("gate_up", "base_layer."), ("down", "")):
    a, b = (tensors[f"{start}{key}lora_{end}.weight"] for end in "AB")
    for expert, rank in ((0, 2), (5, 1)):
      np.testing.assert_array_equal(
        a[expert * 3 + rank], moe[f"{name}_lora_a"][0, expert, :, rank]
      )
      np.testing.assert_array_equal(
        b[:, rank * 8 + expert], moe[f"{name}_lora_b"][0, expert, rank]
      )


@pytest.mark.slow
@pytest.mark.parametrize(
  "cfg",
  [DENSE, MOE, EXPERTS_ALONE, MIXTRAL, NEXT, *OTHERS.values()],
  ids=["dense", "moe", "experts alone", "mixtral", "next", *OTHERS],
)
def test_peft_gives_our_logits(cfg, tmp_path):
  torch = pytest.importorskip("torch")
  peft = pytest.importorskip("peft")
  from transformers import AutoModelForCausalLM

  base, adapters = base_and_adapters(cfg)
  hf.save_hf(base, dataclasses.replace(cfg, lora=None), tmp_path / "base")
  hf.save_peft(adapters, cfg, tmp_path / "peft", base=str(tmp_path / "base"))
  plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
  theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "peft")
  tokens = np.random.default_rng(0).integers(0, 24, (8, 6))
  with torch.no_grad():
    expected = theirs(torch.tensor(tokens)).logits.numpy()
  positions, real = np.indices(tokens.shape)[1], np.ones(tokens.shape, int)
  run = lambda params: np.asarray(
    model.forward(params, cfg, tokens, positions, real).logits
  )
  actual = run(lora.join(base, adapters))
  np.testing.assert_allclose(actual, expected, atol=1e-4)
  assert np.abs(run(base) - expected).max() > 0.5
  theirs.save_pretrained(tmp_path / "again")
  again = hf.load_peft(tmp_path / "again", cfg)
  jax.tree.map(np.testing.assert_array_equal, again, adapters)


@pytest.mark.slow
def test_adapters_that_peft_made_of_two_weights_are_read(tmp_path):
  """Of rank 4 with rsLoRA: alpha 6 is divided by 2."""
  torch = pytest.importorskip("torch")
  peft = pytest.importorskip("peft")
  from transformers import AutoModelForCausalLM

  cfg = dataclasses.replace(DENSE, lora=model.LoraConfig(4, 12.0, "attention"))
  base = base_and_adapters(cfg)[0]
  hf.save_hf(base, dataclasses.replace(cfg, lora=None), tmp_path / "base")
  theirs = peft.get_peft_model(
    AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
    peft.LoraConfig(
      r=4,
      lora_alpha=6,
      target_modules=["q_proj", "v_proj"],
      use_rslora=True,
      init_lora_weights=False,
      task_type="CAUSAL_LM",
    ),
  )
  theirs.save_pretrained(tmp_path / "peft")
  adapters = hf.load_peft(tmp_path / "peft", cfg)
  ends = {f"{name}_lora_{end}" for name in "qv" for end in "ab"}
  assert adapters["layers"]["attention"].keys() == ends
  tokens = np.random.default_rng(0).integers(0, 24, (8, 6))
  with torch.no_grad():
    expected = theirs.eval()(torch.tensor(tokens)).logits.numpy()
  positions, real = np.indices(tokens.shape)[1], np.ones(tokens.shape, int)
  params = lora.join(base, adapters)
  out = model.forward(params, cfg, tokens, positions, real)
  np.testing.assert_allclose(out.logits, expected, atol=1e-4)


def test_adapters_to_a_model_of_images_are_read(tmp_path):
  """As PEFT names them where it adapts the whole model."""
  cfg, folder = OTHERS["qwen3.5"], tmp_path / "peft"
  adapters = base_and_adapters(cfg)[1]
  hf.save_peft(adapters, cfg, folder, base="")
  file = folder / "adapter_model.safetensors"
  names = lambda x: x.replace(".model.layers.", ".model.language_model.layers.")
  save_file({names(name): x for name, x in load_file(file).items()}, file)
  again = hf.load_peft(folder, cfg)
  jax.tree.map(np.testing.assert_array_equal, again, adapters)


def change(folder, **keys):
  path = folder / "adapter_config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize(
  ("keys", "words"),
  [({"r": 8}, r"model.lora.rank=3: expected 8, which is r in .*json"),
   ({"lora_alpha": 16}, r"model.lora.alpha=5.0: expected 16"),
   ({"use_rslora": True}, r"alpha=5.0: expected 8.66\d*, which is lora_alpha"
    " times the root of r in"),
   ({"peft_type": "IA3"}, "peft_type=IA3: expected 'LORA'"),
   ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa: expected True"),
   ({"alora_invocation_tokens": [7]}, r"tokens=\[7\]: expected None"),
   ({"rank_pattern": {"q_proj": 8}}, "rank_pattern=.*expected {}")],
)  # fmt: skip
def test_other_settings_are_refused(saved, keys, words):
  change(saved, **keys)
  with pytest.raises(UserError, match=words):
    hf.load_peft(saved, DENSE)


def test_rank_stabilised_adapters_have_another_scale(saved):
  change(saved, use_rslora=True)
  wide = model.LoraConfig(3, 5 * 3**0.5)
  assert wide.scale == pytest.approx(5 / 3**0.5)
  again = hf.load_peft(saved, dataclasses.replace(DENSE, lora=wide))
  expected = base_and_adapters(DENSE)[1]
  jax.tree.map(np.testing.assert_array_equal, again, expected)


def test_other_tensors_are_named(saved):
  attention = dataclasses.replace(DENSE.lora, targets="attention")
  with pytest.raises(UserError, match=r"not among model.lora.targets \(12\)"):
    hf.load_peft(saved, dataclasses.replace(DENSE, lora=attention))
  file = saved / "adapter_model.safetensors"
  tensors = load_file(file)
  name = next(name for name in tensors if "q_proj.lora_A" in name)
  save_file({**tensors, name: tensors[name][:, :3]}, file)
  with pytest.raises(UserError, match=rf"misshapen \(1\): {name} \(3, 3\)"):
    hf.load_peft(saved, DENSE)
  save_file({k: x for k, x in tensors.items() if k != name}, file)
  with pytest.raises(UserError, match=rf"missing \(1\): {name}"):
    hf.load_peft(saved, DENSE)
  file.unlink()
  with pytest.raises(UserError, match="no such file"):
    hf.load_peft(saved, DENSE)
  with pytest.raises(UserError, match="expected a checkpoint's folder"):
    hf.load_peft(saved / "none", DENSE)
