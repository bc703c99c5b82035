"""Low-rank adapters in the format of Hugging Face PEFT (0.18 and later).

A linear layer has the tensors `lora_A` [rank, inputs] and `lora_B`
[outputs, rank]. In transformers 5 all experts are two parameters, gate_up_proj
and down_proj. PEFT adapts them by `target_parameters`: one `lora_A`
[experts * rank, inputs] and one `lora_B` [outputs, rank * experts].
"""

import json
import math
from typing import NamedTuple

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
  import_safetensors,
  listed,
  require_tensors,
  save_tensors,
  swap_last,
  tensor_maps,
)
from gspo_jax.record.run_files import is_file
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError, content_of, with_reason

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_DTYPES = FLOATS | {"F64": np.float64}
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
  "use_rslora": (False,),
  "use_dora": (False,),
  "lora_bias": (False,),
  "modules_to_save": (None, []),
  "rank_pattern": ({},),
  "alpha_pattern": ({},),
  "layer_replication": (None,),
  "alora_invocation_tokens": (None,),
  "kasa_config": (None,),
  # Others, such as "pissa", also change the weights below the adapters.
  "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}


class _Matrix(NamedTuple):
  path: str  # in the tree of adapters
  name: str  # what the config calls its weight: a module, or a parameter
  is_parameter: bool  # whether PEFT adapts a parameter, not a linear layer
  key: str  # the tensor's name, for `.format(i=layer)`
  is_b: bool
  layers: tuple[int, ...]  # that have it
  shape: tuple[int, ...]  # of one layer
  sizes: tuple[int, int, int]  # of this shape: experts, rows, columns
  # The outputs of gates and ups take turns in the file.
  interleaved: bool

  @property
  def tensor_shape(self) -> tuple[int, int]:
    experts, rows, columns = self.sizes
    if self.is_b:  # output by (rank, expert)
      return columns, rows * experts
    return experts * columns, rows  # (expert, rank) by input

  def to_peft(self, array: np.ndarray) -> np.ndarray:
    grid = array.reshape(self.sizes)
    if self.interleaved:
      grid = swap_last(grid, (2, -1))
    grid = grid.T if self.is_b else grid.swapaxes(1, 2)
    return np.ascontiguousarray(grid).reshape(self.tensor_shape)

  def from_peft(self, tensor: np.ndarray) -> np.ndarray:
    experts, rows, columns = self.sizes
    if self.is_b:
      grid = tensor.reshape(columns, rows, experts).T
    else:
      grid = tensor.reshape(experts, columns, rows).swapaxes(1, 2)
    if self.interleaved:
      grid = swap_last(grid, (-1, 2))
    return grid.astype(np.float32).reshape(self.shape)


def _matrices(cfg: ModelConfig) -> list[_Matrix]:
  matrices = []
  tensors = {tensor.path: tensor for tensor in tensor_maps(cfg)}
  for row in parameters.adapted(cfg):
    tensor = tensors[row.path]
    module = tensor.names[0].removesuffix(".weight")
    is_parameter = bool(cfg.num_experts) and row.target == "mlp"
    if row.end in _EXPERT_PARAMETERS:
      name, end = _EXPERT_PARAMETERS[row.end]
      module = "model.layers.{i}." + end
    elif is_parameter:
      # Beside experts, PEFT takes a module gate_proj for a part of an expert.
      name = tensor.names[0].removeprefix("model.layers.{i}.")
    else:
      name = module.rpartition(".")[2]
    for kind, x in zip("AB", row.adapters, strict=True):
      shape = x.shape(cfg)
      sizes = tuple(math.prod(shape[a] for a in axes) for axes in x.groups)
      key = f"base_model.model.{module}.lora_{kind}.weight"
      matrices.append(
        _Matrix(
          x.path,
          name,
          is_parameter,
          key,
          kind == "B",
          row.layers(cfg),
          shape,
          sizes,
          kind == "B" and tensor.interleaved,
        )
      )
  return matrices


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
  leaves, matrices = sharding.leaves_by_path(adapters), _matrices(cfg)
  arrays = {
    matrix.key.format(i=i): matrix.to_peft(layer)
    for matrix in matrices
    for i, layer in zip(
      matrix.layers, multihost.to_host(leaves[matrix.path]), strict=True
    )
  }
  on_primary(lambda: _write(folder, _config(matrices, cfg, base), arrays))


def _config(matrices, cfg, base) -> dict:
  modules = dict.fromkeys(x.name for x in matrices if not x.is_parameter)
  arrays = dict.fromkeys(x.name for x in matrices if x.is_parameter)
  alpha = cfg.lora.alpha
  return {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base or None,
    "r": cfg.lora.rank,
    "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": list(modules),
    "target_parameters": list(arrays) or None,
    "inference_mode": True,
  }


def _write(folder, config, arrays):
  with folders.writing(folder):
    partial = folders.begin(folder)
    save_tensors(arrays, partial / WEIGHTS)
    (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    folders.finish(partial, folder)


def load_peft(folder: epath.PathLike, cfg: ModelConfig, shardings=None) -> dict:
  """Reads the float32 adapters in `folder`; all processes call this.

  Without shardings they are on the first device. UserError if `cfg` has another
  rank, alpha or targets, or the folder has a variant of LoRA.
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
  _require_supported(folder / CONFIG, read(folder / CONFIG), cfg.lora)
  stored, matrices = _stored(folder / WEIGHTS), _matrices(cfg)
  shapes = {
    x.key.format(i=i): x.tensor_shape for x in matrices for i in x.layers
  }
  kinds = {name: (tuple(t["shape"]), t["dtype"]) for name, t in stored.items()}
  require_tensors(folder, kinds, shapes, _DTYPES, "among model.lora.targets")
  tensors = {
    name: np.frombuffer(t["data"], _DTYPES[t["dtype"]]).reshape(t["shape"])
    for name, t in stored.items()
  }
  infinite = [name for name, x in tensors.items() if not np.isfinite(x).all()]
  if infinite:
    raise UserError(f"{folder}: {listed('NaN or infinite weights', infinite)}")
  return {
    x.path: np.stack(
      [x.from_peft(tensors[x.key.format(i=i)]) for i in x.layers]
    )
    for x in matrices
  }


def _stored(path: epath.Path) -> dict[str, dict]:
  safetensors = import_safetensors()
  with with_reason(str(path)), content_of(f"{path}: damaged"):
    if not is_file(path):
      raise UserError(f"{path}: no such file")
    return dict(safetensors.deserialize(path.read_bytes()))


def _require_supported(path, raw, wanted: LoraConfig):
  for key, values in _SUPPORTED.items():
    if key in raw and raw[key] not in values:
      raise UserError(
        f"{path}: {key}={str(raw[key])[:80]}: expected {values[0]!r}"
      )
  for key, name in (("r", "rank"), ("lora_alpha", "alpha")):
    value = getattr(wanted, name)
    if raw.get(key) != value:
      raise UserError(
        f"model.lora.{name}={value}: expected {raw.get(key)}, which is {key} "
        f"in {path}"
      )
