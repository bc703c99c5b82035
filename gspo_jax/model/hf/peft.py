"""Low-rank adapters in the format of Hugging Face PEFT (0.18 and later).

A linear layer has the tensors `lora_A` [rank, inputs] and `lora_B`
[outputs, rank]. In transformers 5 all experts are two parameters, gate_up_proj
and down_proj. PEFT adapts them by `target_parameters`: one `lora_A`
[experts * rank, inputs] and one `lora_B` [outputs, rank * experts].

Where n of our weights are the rows of one linear layer, such as the queries,
keys and values of a gated DeltaNet, its adapter has n times the rank: A has
their n parts one above the other, B is 0 but for a block of each. An adapter of
such a layer that has the rank itself is read as well: the n weights begin with
the same A.
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
  PLAIN,
  Layout,
  TensorMap,
  import_safetensors,
  layout_in,
  layout_of,
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
  weight: TensorMap  # that it adapts
  shape: tuple[int, ...]  # of one layer
  sizes: tuple[int, int, int]  # of this shape: experts, rows, columns
  number: int  # of its weight, among those of this linear layer
  count: int  # of these weights

  def file_shape(self, is_wide: bool) -> tuple[int, int]:
    """The shape of the tensor; `is_wide`: each weight has its own columns."""
    experts, rows, columns = self.sizes
    count = self.count if is_wide else 1
    if not self.is_b:  # (weight, expert, rank) by input
      return count * experts * columns, rows
    if part := self.weight.part:
      columns = part.groups * part.size
    return columns, count * rows * experts  # output by (weight, rank, expert)

  def put(self, array: np.ndarray, tensors: dict, layer: int) -> None:
    """Adds one layer to the tensors by name."""
    own, name = self.to_peft(array), self.key.format(i=layer)
    if name not in tensors:
      tensors[name] = np.zeros(self.file_shape(True), own.dtype)
    view = self._own(tensors[name], True)
    view[...] = own.reshape(view.shape)

  def take(self, tensors: dict, layer: int, is_wide: bool) -> np.ndarray:
    """The inverse of `put`."""
    return self.from_peft(self._own(tensors[self.key.format(i=layer)], is_wide))

  def _own(self, tensor: np.ndarray, is_wide: bool) -> np.ndarray:
    """A view of this matrix in its tensor: the rows of A, or columns of B."""
    experts, rows, columns = self.sizes
    if is_wide:
      size = experts * (rows if self.is_b else columns)
      own = slice(self.number * size, (self.number + 1) * size)
      tensor = tensor[:, own] if self.is_b else tensor[own]
    part = self.weight.part
    return part.of(tensor) if self.is_b and part else tensor

  def to_peft(self, array: np.ndarray) -> np.ndarray:
    grid = array.reshape(self.sizes)
    if self.is_b and self.weight.interleaved:
      grid = swap_last(grid, (2, -1))
    grid = grid.T if self.is_b else grid.swapaxes(1, 2)
    return np.ascontiguousarray(grid)

  def from_peft(self, tensor: np.ndarray) -> np.ndarray:
    experts, rows, columns = self.sizes
    if self.is_b:
      grid = tensor.reshape(columns, rows, experts).T
    else:
      grid = tensor.reshape(experts, columns, rows).swapaxes(1, 2)
    if self.is_b and self.weight.interleaved:
      grid = swap_last(grid, (-1, 2))
    return grid.astype(np.float32).reshape(self.shape)


def _matrices(cfg: ModelConfig, layout: Layout) -> list[_Matrix]:
  matrices = []
  layout = layout._replace(fused_experts=False)
  tensors = {tensor.path: tensor for tensor in tensor_maps(cfg, layout)}
  for row in parameters.adapted(cfg):
    tensor = tensors[row.path]
    module = tensor.names[0].removesuffix(".weight")
    start, layer, rest = module.partition("layers.{i}.")
    is_parameter = bool(cfg.num_experts) and row.target == "mlp"
    if row.end in _EXPERT_PARAMETERS:
      name, end = _EXPERT_PARAMETERS[row.end]
      module = start + layer + end
    elif is_parameter:
      # Beside experts, PEFT takes a module gate_proj for a part of an expert.
      name = f"{rest}.weight"
    else:
      name = module.rpartition(".")[2]
    number, count = 0, 1
    if part := tensor.part:
      same = [x.part for x in tensors.values() if x.names == tensor.names]
      number, count = sum(x.first < part.first for x in same), len(same)
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
          tensor,
          shape,
          sizes,
          number,
          count,
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
  layout = multihost.run_on_all(lambda: layout_of(base) if base else PLAIN)
  # Without images, as `AutoModelForCausalLM` reads the folder.
  matrices = _matrices(cfg, layout._replace(with_images=False))
  leaves = sharding.leaves_by_path(adapters)
  arrays = {x.path: multihost.to_host(leaves[x.path]) for x in matrices}
  tensors, config = _tensors(matrices, arrays), _config(matrices, cfg, base)
  on_primary(lambda: _write(folder, config, tensors))


def _tensors(matrices, arrays: dict) -> dict[str, np.ndarray]:
  """By name, from stacks of layers by path."""
  tensors = {}
  for matrix in matrices:
    for i, layer in zip(matrix.weight.layers, arrays[matrix.path], strict=True):
      matrix.put(layer, tensors, i)
  return tensors


def _patterns(matrices, lora: LoraConfig) -> dict[str, dict]:
  """PEFT's settings of linear layers that have several weights in them."""
  counts = {x.name: x.count for x in matrices if x.count > 1}
  return {
    "rank_pattern": {name: n * lora.rank for name, n in counts.items()},
    "alpha_pattern": {name: n * lora.alpha for name, n in counts.items()},
  }


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
  } | _patterns(matrices, cfg.lora)


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
  raw = read(folder / CONFIG)
  _require_supported(folder / CONFIG, raw, cfg.lora)
  stored = _stored(folder / WEIGHTS)
  matrices = _matrices(cfg, layout_in(stored))
  is_wide = bool(raw.get("rank_pattern"))
  for key, pattern in _patterns(matrices, cfg.lora).items():
    wanted = pattern if is_wide else {}
    if (got := raw.get(key) or {}) != wanted:
      raise UserError(f"{folder / CONFIG}: {key}={got}: expected {wanted}")
  shapes = {
    x.key.format(i=i): x.file_shape(is_wide)
    for x in matrices
    for i in x.weight.layers
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
  arrays = {
    x.path: np.stack([x.take(tensors, i, is_wide) for i in x.weight.layers])
    for x in matrices
  }
  if is_wide:
    again = _tensors(matrices, arrays)
    mixed = [name for name, x in again.items() if (x != tensors[name]).any()]
    if mixed:
      problem = "not 0 outside of the blocks of several weights"
      raise UserError(f"{folder}: {listed(problem, mixed)}")
  return arrays


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
