"""Loads and saves Hugging Face checkpoints, one layer at a time.

The host holds one layer or the embedding, never the whole model. Each process
reads only what its devices need: parts of tensors, or whole rows from a bucket.
"""

import functools
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from gspo_jax.model import parameters
from gspo_jax.model.config import ModelConfig
from gspo_jax.model.hf import folder as folders
from gspo_jax.model.hf.config import config_to_hf
from gspo_jax.model.hf.tensors import (
  FLOATS,
  HEAD,
  INDEX,
  PLAIN,
  HFCheckpoint,
  Spans,
  StoredTensor,
  TensorMap,
  has_carried,
  layout_of,
  listed,
  save_tensors,
  tensor_maps,
)
from gspo_jax.model.transformer import Params
from gspo_jax.record.progress import Progress
from gspo_jax.runtime import multihost
from gspo_jax.runtime.sharding import leaves_by_path, tree_of_paths

# Files copied from `like`: tokenizer and generation config.
_COPIED_FILES = (
  *("added_tokens.json", "chat_template.jinja", "chat_template.json"),
  *("generation_config.json", "merges.txt", "special_tokens_map.json"),
  *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"),
)


def load_hf(
  folder: epath.PathLike, cfg: ModelConfig, *, shardings=None
) -> Params:
  """Loads the float32 parameters of a checkpoint; all processes call this.

  Args:
    folder: on this machine or in a bucket, with safetensors files in bfloat16,
      float16 or float32, or in a format of `quantised`.
    cfg: from `config_from_hf`.
    shardings: from `model.shardings`. None, only outside of `jax.set_mesh`: all
      on the first device.

  Raises:
    UserError: no such files, or their tensors are not exactly the model's, or
      not finite. The error names up to 16 tensors of each kind.
  """
  source = multihost.run_on_all(lambda: HFCheckpoint(folder, cfg))
  if source.carried:
    multihost.print_once(
      f"{folder}: {len(source.carried)} tensors of multi-token prediction or of"
      f" images are not loaded, from {min(source.carried)} on"
    )
  by_path, params = leaves_by_path(shardings), {}
  one_device = SingleDeviceSharding(jax.local_devices()[0])
  shardings = {
    tensor: by_path.get(tensor.path, one_device)
    for tensor in tensor_maps(cfg, source.layout)
  }
  stacked = {t: s for t, s in shardings.items() if t.stacked}
  for tensor, sharding in stacked.items():
    shape = (len(tensor.layers), *tensor.shape)
    zeros = jax.jit(jnp.zeros, static_argnums=0, out_shardings=sharding)
    params[tensor.path] = zeros(shape)
  # The host holds one of these parts at a time.
  parts = [(0, {t: s}) for t, s in shardings.items() if not t.stacked]
  for i in range(cfg.num_layers):
    parts.append((i, {t: s for t, s in stacked.items() if i in t.layers}))
  with Progress(f"loading {folder}", cfg.num_layers, "layers") as progress:
    for i, part in parts:
      checked = {}
      for tensor, array in _read(source, i, part).items():
        params[tensor.path], finite = _from_hf(
          array,
          params.get(tensor.path),
          tensor.layers.index(i),
          form=tensor.form,
          sharding=part[tensor],
        )
        checked[tensor] = array, finite
      # It waits: otherwise the host would read all parts ahead of the copies.
      _require_finite(source, i, checked)
      for tensor, (array, _) in checked.items():
        if tensor.path == "embed" and source.has_second_head(cfg):
          _require_equal_head(source, array, tensor, part[tensor])
      progress.advance(part.keys() <= stacked.keys())
  return tree_of_paths(params)


def _require_finite(source: HFCheckpoint, layer: int, checked: dict) -> None:
  """UserError that names tensors; `checked`: arrays in HF order, and flags."""
  flags = {tensor: finite for tensor, (_, finite) in checked.items()}
  names = [
    name
    for tensor, finite in jax.device_get(flags).items()
    if not finite
    for name, part in _split(
      tensor, multihost.to_host(checked[tensor][0]), layer
    ).items()
    if not np.isfinite(part).all()
  ]
  if names:
    raise multihost.AgreedError(
      f"{source.folder}: {listed('NaN or infinite weights', names)}"
    )


def _require_equal_head(source, embedding, tensor: TensorMap, sharding) -> None:
  head = tensor._replace(names=(source.layout.head,))
  (array,) = _read(source, 0, {head: sharding}).values()
  if not jax.jit(jnp.array_equal)(array, embedding):
    raise multihost.AgreedError(
      f"{source.folder}: {HEAD} differs from {tensor.names[0]}, although "
      "config.json has tie_word_embeddings=true: expected false, which is how "
      "transformers treats such weights"
    )


def _read(
  source: HFCheckpoint, layer: int, shardings: dict
) -> dict[TensorMap, jax.Array]:
  """One layer of parameters in HF order and the file's dtype, sharded."""
  shardings = {t: _in_hf_order(t, s) for t, s in shardings.items()}
  wanted = {}
  for tensor, sharding in shardings.items():
    places = sharding.addressable_devices_indices_map(tensor.hf_shape)
    wanted[tensor] = {_spans(x, tensor.hf_shape) for x in places.values()}
  parts = source.read(layer, wanted)
  return {
    tensor: jax.make_array_from_callback(
      tensor.hf_shape,
      sharding,
      lambda index, t=tensor: parts[t][_spans(index, t.hf_shape)],
    )
    for tensor, sharding in shardings.items()
  }


def _in_hf_order(tensor: TensorMap, sharding):
  if not isinstance(sharding, NamedSharding):
    return sharding
  spec = (*sharding.spec, *[None] * len(tensor.shape))[tensor.stacked :]
  spec = PartitionSpec(*[spec[a] for a in tensor.order])
  return NamedSharding(sharding.mesh, spec)


def _spans(index, shape) -> Spans:
  axes = zip(index, shape, strict=True)
  return tuple(part.indices(size)[:2] for part, size in axes)


@functools.partial(
  jax.jit, static_argnames=("form", "sharding"), donate_argnames="stack"
)
def _from_hf(array, stack=None, i=0, *, form, sharding):
  """A float32 parameter, or `stack` with its layer i; whether it is finite."""
  x = form.from_hf(array.astype(jnp.float32))
  if stack is not None:
    x = jax.lax.dynamic_update_index_in_dim(stack, x, i, 0)
  x = jax.lax.with_sharding_constraint(x, sharding)
  return x, jnp.isfinite(array).all()


def save_hf(
  params: Params,
  cfg: ModelConfig,
  folder: epath.PathLike,
  *,
  dtype: str = "float32",
  like: epath.PathLike | None = None,
  beside: Callable[[Path], None] | None = None,
) -> None:
  """Writes a checkpoint that transformers loads; all processes call this.

  There is a file for each layer, one for the other parameters, and one for what
  `like` has of multi-token prediction and of images, which is copied. `folder`
  (in a bucket, its index) appears when all is written.

  Args:
    params: global arrays, as `load_hf` returns them.
    cfg: the model.
    folder: must not exist, or be empty.
    dtype: of the tensors, one of `config.DTYPES`.
    like: a checkpoint of the same model. Its tokenizer and generation config
      are copied, and its config.json, with `dtype` changed. Tensors have its
      names. Those of multi-token prediction and of images keep their dtype, or
      get `dtype` if quantised.
    beside: writes tokenizer and generation config into a local folder, in place
      of `like`'s.

  Raises:
    UserError: the folder is not empty or cannot be written, or `like` is
      another model.
  """
  on_primary = lambda write: multihost.run_on_all(
    lambda: folders.writing(folder)(write)() if multihost.is_primary() else None
  )
  on_primary(lambda: folders.require_new(folder, dtype))
  config = on_primary(lambda: config_to_hf(cfg, dtype, like))
  # Only the primary process has and writes them.
  carried = on_primary(lambda: _carried(cfg, dtype, like)) or {}
  partial = on_primary(lambda: _create(folder, config, like, beside))
  layout = multihost.run_on_all(lambda: layout_of(like) if like else PLAIN)
  tensors, leaves = tensor_maps(cfg, layout), leaves_by_path(params)
  index, total = {}, 0
  layers = [*range(cfg.num_layers), None]
  count = len(layers) + bool(carried)
  file_name = "model-{:05d}-of-{:05d}.safetensors".format
  with Progress(f"writing {folder}", count, "files") as progress:
    for number, i in enumerate(layers, start=1):
      file, arrays = file_name(number, count), {}
      for tensor in sorted(tensors, key=lambda x: x.first_row):
        if tensor.stacked == (i is not None) and (i or 0) in tensor.layers:
          at = tensor.layers.index(i) if tensor.stacked else None
          kept = parameters.find(tensor.path).float32
          own = "float32" if kept else dtype
          x = _to_hf(leaves[tensor.path], at, form=tensor.form, dtype=own)
          parts = _split(tensor, multihost.to_host(x), i or 0)
          for name, rows in parts.items():
            if name in arrays:  # it has several parameters
              rows = np.concatenate([arrays[name], rows])
            arrays[name] = rows
      index |= dict.fromkeys(arrays, file)
      total += sum(x.nbytes for x in arrays.values())
      on_primary(lambda file=file, x=arrays: save_tensors(x, partial / file))
      progress.advance()
    file = file_name(count, count)
    index |= dict.fromkeys(carried, file)
    total += sum(x.nbytes for x in carried.values())
    on_primary(lambda: carried and save_tensors(carried, partial / file))
    progress.advance(bool(carried))
  on_primary(lambda: _finish(folder, partial, index, total))


@functools.partial(jax.jit, static_argnames=("form", "dtype"))
def _to_hf(x, i, *, form, dtype: str):
  layer = x if i is None else x[i]
  return form.to_hf(layer.astype(dtype))


def _split(tensor: TensorMap, array: np.ndarray, layer: int) -> dict:
  """Views of what one layer has of HF tensors, by name."""
  array = np.ascontiguousarray(array)
  shape = (tensor.experts or 1, len(tensor.names), *tensor.tensor_shape)
  grid = array.reshape(shape)
  return {name: grid[index] for name, index in tensor.tensors(layer)}


class _Carried(NamedTuple):
  """A tensor of another folder, which is read when it is written."""

  tensor: Any  # of `HFCheckpoint.carried`
  dtype: np.dtype

  @property
  def shape(self) -> tuple[int, ...]:
    return self.tensor.shape

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    del dtype, copy
    return self.tensor[(slice(None),) * len(self.shape)].astype(self.dtype)


def _carried(cfg, dtype: str, like) -> dict[str, _Carried]:
  """What an export copies from `like`, which may be without tensors."""
  if not like or not has_carried(like, cfg):
    return {}
  carried = {}
  for name, tensor in HFCheckpoint(like, cfg).carried.items():
    is_plain = isinstance(tensor, StoredTensor)
    kept = FLOATS[tensor.dtype] if is_plain else dtype
    carried[name] = _Carried(tensor, jnp.dtype(kept))
  return carried


def _create(folder, config: dict, like, beside) -> epath.Path:
  """The folder to write into, with all files but the tensors."""
  partial = folders.begin(folder)
  (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
  with tempfile.TemporaryDirectory() as scratch:
    sources = [epath.Path(like) / name for name in _COPIED_FILES if like]
    if beside:
      beside(Path(scratch))
      sources = epath.Path(scratch).iterdir()
    for source in sources:
      if source.is_file():
        (partial / source.name).write_bytes(source.read_bytes())
  return partial


def _finish(folder, partial: epath.Path, names: dict, total: int) -> None:
  index = {"metadata": {"total_size": total}, "weight_map": names}
  (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
  folders.finish(partial, folder)
