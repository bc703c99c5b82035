"""Hugging Face checkpoints in and out, a layer at a time.

The arrays are made where they will live and filled layer by layer, so that the
host holds one layer of the file beside them, or the embedding, never the model.
Of a file, each process reads what its own devices need.
"""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors import SafetensorError
from safetensors.numpy import save_file

from gspo_jax.model.config import DTYPES, ModelConfig
from gspo_jax.model.hf.config import config_from_hf, config_to_hf
from gspo_jax.model.hf.tensors import (
  INDEX,
  HFCheckpoint,
  TensorMap,
  tensor_maps,
)
from gspo_jax.model.transformer import Params
from gspo_jax.runtime import multihost
from gspo_jax.runtime.errors import UserError, nearest

__all__ = ["config_from_hf", "load_hf", "save_hf"]

# What goes along from `like`: a tokenizer, and how to draw answers.
_ALONG = (
  *("added_tokens.json", "chat_template.jinja", "chat_template.json"),
  *("generation_config.json", "merges.txt", "special_tokens_map.json"),
  *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"),
)


def load_hf(folder: str | Path, cfg: ModelConfig, *, shardings=None) -> Params:
  """The float32 parameters of the checkpoint in `folder`.

  Args:
    folder: with safetensors files, bfloat16, float16 or float32.
    cfg: from `config_from_hf`.
    shardings: of the parameters, as `sharding.state_shardings` makes them; by
      default, and outside of `jax.set_mesh`, all on the first device. With
      several processes all call this.

  Raises:
    UserError: no such files, or their tensors are not exactly the model's:
      those missing, superfluous or misshapen are named, 16 of a kind.
  """
  source = multihost.run_on_all(lambda: _opened(folder, cfg))
  lays, found, params = _by_path(shardings), tensor_maps(cfg), {}
  one = SingleDeviceSharding(jax.local_devices()[0])
  lays = {place: lays.get(place.path, one) for place in found}
  for place, lay in lays.items():
    if place.stacked:
      shape = (cfg.num_layers, *place.shape)
      zeros = jax.jit(jnp.zeros, static_argnums=0, out_shardings=lay)
      params[place.path] = zeros(shape)
    else:
      part = _part(source, place, 0, lay)
      params[place.path] = _turn_back(part, place=place, lay=lay)
  for i in range(cfg.num_layers):
    for place, lay in lays.items():
      if place.stacked:
        part, stack = _part(source, place, i, lay), params[place.path]
        params[place.path] = _fill(stack, part, i, place=place, lay=lay)
    jax.block_until_ready(params)  # the host would read ahead: all layers
  return _nested(params)


def _opened(folder, cfg) -> HFCheckpoint:
  source = HFCheckpoint(folder)
  source.require(cfg)
  return source


def _by_path(tree) -> dict:
  """Leaves by slash-joined path."""
  name = lambda keys: jax.tree_util.keystr(keys, simple=True, separator="/")
  return {name(keys): x for keys, x in jax.tree.leaves_with_path(tree)}


def _nested(leaves: dict) -> Params:
  tree = {}
  for path, leaf in leaves.items():
    *above, last = path.split("/")
    at = tree
    for name in above:
      at = at.setdefault(name, {})
    at[last] = leaf
  return tree


def _part(source: HFCheckpoint, place: TensorMap, layer: int, lay) -> jax.Array:
  """One layer of one of ours, turned, in the file's type, where it belongs."""
  if isinstance(lay, NamedSharding):
    spec = (*lay.spec, *[None] * len(place.shape))[place.stacked :]
    spec = PartitionSpec(*[spec[a] for a in place.order])
    lay = NamedSharding(lay.mesh, spec)
  read = {}  # several devices may want the same

  def get(index):
    ends = zip(index, place.turned, strict=True)
    spans = tuple(one.indices(size)[:2] for one, size in ends)
    if spans not in read:
      read[spans] = source.read(place, layer, spans)
    return read[spans]

  return jax.make_array_from_callback(place.turned, lay, get)


@functools.partial(jax.jit, static_argnames=("place", "lay"))
def _turn_back(turned, *, place: TensorMap, lay):
  x = turned.astype(jnp.float32).transpose(np.argsort(place.order))
  return jax.lax.with_sharding_constraint(x, lay)


@functools.partial(
  jax.jit, static_argnames=("place", "lay"), donate_argnames="stack"
)
def _fill(stack, turned, i, *, place: TensorMap, lay):
  """Writes a layer into the stack, in place."""
  x = turned.astype(jnp.float32).transpose(np.argsort(place.order))
  x = jax.lax.dynamic_update_index_in_dim(stack, x, i, 0)
  return jax.lax.with_sharding_constraint(x, lay)


def save_hf(
  params: Params,
  cfg: ModelConfig,
  folder: str | Path,
  *,
  dtype: str = "float32",
  like: str | Path | None = None,
  beside: Callable[[Path], None] | None = None,
) -> None:
  """Writes a checkpoint that transformers loads: a file a layer, and the rest.

  `folder` appears when all is written; until then it is `folder`.partial. With
  several processes all call this with global arrays, and the first one writes.

  Args:
    params: as `load_hf` returns them.
    cfg: the model.
    folder: must not exist, or be empty.
    dtype: of the tensors, of `config.DTYPES`.
    like: a checkpoint of the same model whose config.json is taken over and
      whose tokenizer and generation config are copied.
    beside: writes other files into a folder, instead of that copying.

  Raises:
    UserError: the folder holds something or cannot be written, or `like` is
      another model.
  """
  target, folder = folder, Path(folder).absolute()
  partial = folder.with_name(folder.name + ".partial")
  first = lambda work: multihost.run_on_all(
    lambda: _written(work, folder) if multihost.is_primary() else None
  )
  first(lambda: require_new(target, dtype))
  first(lambda: _begin(partial, cfg, dtype, like, beside))
  found, leaves = tensor_maps(cfg), _by_path(params)
  index, total = {}, 0
  for number, i in enumerate([*range(cfg.num_layers), None], start=1):
    name = f"model-{number:05d}-of-{cfg.num_layers + 1:05d}.safetensors"
    tensors = {}
    for place in found:
      if place.stacked == (i is not None):
        x = _turn(leaves[place.path], i or 0, place=place, dtype=dtype)
        tensors |= _tensors(place, multihost.to_host(x), i or 0)
    index |= dict.fromkeys(tensors, name)
    total += sum(x.nbytes for x in tensors.values())
    first(lambda n=name, t=tensors: save_file(t, partial / n, {"format": "pt"}))
  first(lambda: _end(folder, partial, index, total))


@functools.partial(jax.jit, static_argnames=("place", "dtype"))
def _turn(x, i, *, place: TensorMap, dtype: str):
  """One layer of one of ours, turned, in the type of the file."""
  layer = x[i] if place.stacked else x
  return layer.astype(dtype).transpose(place.order)


def _tensors(place: TensorMap, turned: np.ndarray, layer: int) -> dict:
  """Views of `turned`, by name."""
  shape = (place.experts or 1, len(place.names), *place.tensor)
  grid = np.ascontiguousarray(turned).reshape(shape)
  return {name: grid[at] for name, at in place.tensors(layer)}


def _written(work, folder: Path):
  try:
    return work()
  except (OSError, SafetensorError) as error:
    raise UserError(f"{str(folder)!r} cannot be written: {error}") from error


def require_new(folder: str | Path, dtype: str) -> None:
  """UserError unless `save_hf` can write there, and in that type."""
  if dtype not in DTYPES:
    raise UserError(f"{dtype=}: {nearest(dtype, DTYPES)}")
  if "://" in str(folder):
    raise UserError(f"{str(folder)!r}: expected a folder on this machine")
  path = Path(folder)
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise UserError(f"{str(folder)!r} exists: expected a new or empty folder")


def _begin(partial: Path, cfg, dtype, like, beside) -> None:
  """Makes the partial folder, with all but the tensors."""
  config = config_to_hf(cfg, dtype, like)
  shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
  partial.mkdir(parents=True)
  (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
  if beside:
    beside(partial)
  for name in _ALONG if like and not beside else ():
    if (Path(like) / name).is_file():
      shutil.copy(Path(like) / name, partial)


def _end(folder: Path, partial: Path, names: dict, total: int) -> None:
  index = {"metadata": {"total_size": total}, "weight_map": names}
  (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
  partial.replace(folder)
