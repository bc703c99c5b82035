"""Low-rank adapters in the format of Hugging Face PEFT (0.18 and later).

A linear layer has the tensors `lora_A` [rank, inputs] and `lora_B`
[outputs, rank]. In transformers 5 all experts are two parameters, gate_up_proj
and down_proj. PEFT adapts them by `target_parameters`: one `lora_A`
[experts * rank, inputs] and one `lora_B` [outputs, rank * experts].
"""

import json

import jax
import numpy as np
from etils import epath
from jax.sharding import SingleDeviceSharding

from gspo_jax.model import parameters
from gspo_jax.model.config import LoraConfig, ModelConfig
from gspo_jax.model.hf import folder as folders
from gspo_jax.model.hf.config import read
from gspo_jax.model.hf.tensors import (
  FLOATS,
  PLAIN,
  Layout,
  TensorFile,
  TensorMap,
  layout_in,
  layout_of,
  listed,
  require_tensors,
  save_tensors,
  tensor_maps,
)
from gspo_jax.record.run_files import is_file
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError, content_of, with_reason

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# PEFT wraps a module once for each of its parameters, the first one innermost.
_EXPERT_PARAMETERS = {
  "moe/gate_up": ("mlp.experts.gate_up_proj", "mlp.experts.base_layer"),
  "moe/down": ("mlp.experts.down_proj", "mlp.experts"),
}
# Values of adapter_config.json; with others the tensors mean something else.
_SUPPORTED = {
  "peft_type": ("LORA",),
  "bias": ("none",),
  "fan_in_fan_out": (False,),
  "use_rslora": (False, True),
  "use_dora": (False,),
  "lora_bias": (False,),
  "modules_to_save": (None, []),
  "layer_replication": (None,),
  "rank_pattern": ({}, None),
  "alpha_pattern": ({}, None),
  "alora_invocation_tokens": (None,),
  "kasa_config": (None,),
  # Others, such as "pissa", also change the weights below the adapters.
  "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}


def _maps(cfg: ModelConfig, layout: Layout) -> tuple[list[TensorMap], dict]:
  """The tensors of all adapters, and what the config says of their weights."""
  maps, modules, arrays = [], {}, {}
  tensors = {tensor.path: tensor for tensor in tensor_maps(cfg, layout)}
  for row in parameters.adapted(cfg):
    tensor = tensors[row.path]
    module = tensor.names[0].removesuffix(".weight")
    start, layer, rest = module.partition("layers.{i}.")
    if row.end in _EXPERT_PARAMETERS:
      name, end = _EXPERT_PARAMETERS[row.end]
      module = start + layer + end
      arrays[name] = None
    elif cfg.num_experts and row.target == "mlp":
      # Beside experts, PEFT takes a module gate_proj for a part of an expert.
      arrays[f"{rest}.weight"] = None
    else:
      modules[module.rpartition(".")[2]] = None
    for kind, x in zip("AB", row.adapters, strict=True):
      experts, inputs, outputs = x.groups
      # (expert, rank) by input, and output by (rank, expert).
      axes = (experts + outputs, inputs), (outputs, inputs + experts)
      adapter = tensor._replace(
        path=x.path,
        shape=x.shape(cfg),
        names=(f"base_model.model.{module}.lora_{kind}.weight",),
        axes=axes[kind == "B"],
      )
      if kind == "A":  # its rows are ranks
        adapter = adapter._replace(interleaved=False, rows=())
      maps.append(adapter)
  return maps, {
    "target_modules": [*modules],
    "target_parameters": [*arrays] or None,
  }


def save_peft(
  adapters: dict, cfg: ModelConfig, folder: epath.PathLike, *, base: str
) -> None:
  """Writes a folder that PEFT loads; all processes call this.

  The folder must be new or empty. `base` is the folder or the Hub's name of the
  weights; "" if unknown.
  """
  on_primary = lambda write: multihost.run_on_all(
    lambda: multihost.is_primary() and write()
  )
  on_primary(lambda: folders.require_new(folder, "float32"))
  # Without images, as `AutoModelForCausalLM` reads the folder.
  fused = bool(base) and layout_of(base).fused
  maps, targets = _maps(cfg, PLAIN._replace(fused=fused))
  if any(x.first_row for x in maps):
    raise UserError(
      f"{base}: several weights are one tensor, which PEFT adapts as a whole:"
      " expected an export without --peft"
    )
  leaves, tensors = sharding.leaves_by_path(adapters), {}
  for x in maps:
    stack = multihost.to_host(leaves[x.path])
    for i, layer in zip(x.layers, stack, strict=True):
      tensors[x.names[0].format(i=i)] = x.to_hf(layer).reshape(x.tensor_shape)
  alpha = cfg.lora.alpha
  config = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base or None,
    "r": cfg.lora.rank,
    "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
    "lora_dropout": 0.0,
    "bias": "none",
    "inference_mode": True,
  }
  on_primary(lambda: _write(folder, config | targets, tensors))


def _write(folder, config, arrays):
  with folders.writing(folder):
    partial = folders.begin(folder)
    save_tensors(arrays, partial / WEIGHTS)
    (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    folders.finish(partial, folder)


def load_peft(folder: epath.PathLike, cfg: ModelConfig, shardings=None) -> dict:
  """Reads the float32 adapters in `folder`; all processes call this.

  Weights whose adapters the folder lacks in all layers are left out. Without
  shardings they are on the first device. UserError if `cfg` has another rank,
  alpha or targets, or the folder has a variant of LoRA.
  """
  arrays = multihost.run_on_all(lambda: _read(epath.Path(folder), cfg))
  by_path = shardings and sharding.leaves_by_path(shardings)
  leaves = {}
  for path, x in arrays.items():
    place = by_path[path] if by_path else SingleDeviceSharding(jax.devices()[0])
    leaves[path] = jax.make_array_from_callback(x.shape, place, x.__getitem__)
  return sharding.tree_of_paths(leaves)


def _read(folder: epath.Path, cfg) -> dict[str, np.ndarray]:
  """All adapters by path, with stacked layers."""
  raw = read(folder / CONFIG)
  _require_supported(folder / CONFIG, raw, cfg.lora)
  path = folder / WEIGHTS
  if not is_file(path):
    raise UserError(f"{path}: no such file")
  with with_reason(str(path)), content_of(f"{path}: damaged"):
    stored = TensorFile(path).tensors
  maps, _ = _maps(cfg, layout_in(stored)._replace(fused=False))
  names = lambda x: {x.names[0].format(i=i) for i in x.layers}
  pairs = zip(maps[::2], maps[1::2], strict=True)  # A and B
  found = [x for x in pairs if stored.keys() & (names(x[0]) | names(x[1]))]
  maps = [x for pair in found for x in pair] or maps
  shapes = {name: x.tensor_shape for x in maps for name in names(x)}
  kinds = {name: (x.shape, x.dtype) for name, x in stored.items()}
  dtypes = *FLOATS, "F64"
  require_tensors(folder, kinds, shapes, dtypes, "among model.lora.targets")
  whole = (slice(None),)
  tensors = {name: x[whole].astype(np.float32) for name, x in stored.items()}
  infinite = [name for name, x in tensors.items() if not np.isfinite(x).all()]
  if infinite:
    raise UserError(f"{folder}: {listed('NaN or infinite weights', infinite)}")
  layer = lambda x, i: x.from_hf(
    tensors[x.names[0].format(i=i)].reshape(x.hf_shape)
  )
  return {x.path: np.stack([layer(x, i) for i in x.layers]) for x in maps}


def _require_supported(path, raw, wanted: LoraConfig):
  for key, values in _SUPPORTED.items():
    if key in raw and raw[key] not in values:
      raise UserError(
        f"{path}: {key}={str(raw[key])[:80]}: expected {values[0]!r}"
      )
  key, alpha = "lora_alpha", raw.get("lora_alpha")
  if raw.get("use_rslora") and alpha:  # arXiv 2312.03732
    key, alpha = f"{key} times the root of r", alpha * wanted.rank**0.5
  expected = {"rank": ("r", raw.get("r")), "alpha": (key, alpha)}
  for name, (key, theirs) in expected.items():
    if (value := getattr(wanted, name)) != theirs:
      raise UserError(
        f"model.lora.{name}={value}: expected {theirs}, which is {key} in "
        f"{path}"
      )
