"""The map between our parameters and the tensors of a Hugging Face checkpoint.

An HF tensor is a vector or a matrix [outputs, inputs]. Our parameters have the
inputs first, a separate axis of heads, and all experts in one array. In "HF
order" a parameter has the experts first, if any, then the axes of the tensor's
rows, then those of its columns. An array in HF order can be split into tensors,
or joined from them, without a transpose.
"""

import difflib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax.model.config import ModelConfig
from gspo_jax.model.transformer import init
from gspo_jax.runtime.errors import UserError, how_to_download, missing_package

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("BF16", "F16", "F32")
_MAX_NAMES = 16  # in one error; a wrong folder has thousands
_INPUTS_LAST = ((1,), (0,))

# From the end of a parameter's path to (tensor names, axes). The rows of these
# tensors are concatenated; names in layers lack their "model.layers.{i}.".
# `axes` are the axes of the parameter that form the rows, then the columns.
TABLE = {
  "embed": (["model.embed_tokens.weight"], ((0,), (1,))),
  "head": (["lm_head.weight"], _INPUTS_LAST),
  "final_norm/scale": (["model.norm.weight"], ((0,),)),
  "attention_norm/scale": (["input_layernorm.weight"], ((0,),)),
  "mlp_norm/scale": (["post_attention_layernorm.weight"], ((0,),)),
  "attention/q_norm/scale": (["self_attn.q_norm.weight"], ((0,),)),
  "attention/k_norm/scale": (["self_attn.k_norm.weight"], ((0,),)),
  "attention/q": (["self_attn.q_proj.weight"], ((1, 2), (0,))),
  "attention/k": (["self_attn.k_proj.weight"], ((1, 2), (0,))),
  "attention/v": (["self_attn.v_proj.weight"], ((1, 2), (0,))),
  "attention/q_bias": (["self_attn.q_proj.bias"], ((0, 1),)),
  "attention/k_bias": (["self_attn.k_proj.bias"], ((0, 1),)),
  "attention/v_bias": (["self_attn.v_proj.bias"], ((0, 1),)),
  "attention/o": (["self_attn.o_proj.weight"], ((2,), (0, 1))),
  "mlp/gate": (["mlp.gate_proj.weight"], _INPUTS_LAST),
  "mlp/up": (["mlp.up_proj.weight"], _INPUTS_LAST),
  "mlp/down": (["mlp.down_proj.weight"], _INPUTS_LAST),
  "moe/router": (["mlp.gate.weight"], _INPUTS_LAST),
  "moe/gate_up": (
    [f"mlp.experts.{{e}}.{n}_proj.weight" for n in ("gate", "up")],
    ((2,), (1,)),
  ),
  "moe/down": (["mlp.experts.{e}.down_proj.weight"], ((2,), (1,))),
}

# The rows of TABLE that have other names in Mixtral.
_MIXTRAL = {
  "moe/router": (["block_sparse_moe.gate.weight"], _INPUTS_LAST),
  "moe/gate_up": (
    [f"block_sparse_moe.experts.{{e}}.w{n}.weight" for n in (1, 3)],
    ((2,), (1,)),
  ),
  "moe/down": (["block_sparse_moe.experts.{e}.w2.weight"], ((2,), (1,))),
}


class TensorMap(NamedTuple):
  """One of our parameters and its HF tensors.

  Attributes:
    path: slash-joined, in the tree of parameters.
    shape: of the parameter, without the axis of layers.
    names: of the tensors, for `.format(i=layer, e=expert)`.
    axes: axes of the parameter that are a tensor's rows, and its columns.
  """

  path: str
  shape: tuple[int, ...]
  names: tuple[str, ...]
  axes: tuple[tuple[int, ...], ...]

  @property
  def stacked(self) -> bool:
    """Whether the parameter has an axis of layers."""
    return self.path.startswith("layers/")

  @property
  def experts(self) -> int | None:
    """The number of experts, if each has its own tensors."""
    return self.shape[0] if "{e}" in self.names[0] else None

  @property
  def order(self) -> tuple[int, ...]:
    """The transpose from the parameter to HF order."""
    first = () if self.experts is None else (0,)
    return first + tuple(a for group in self.axes for a in group)

  @property
  def hf_shape(self) -> tuple[int, ...]:
    """The shape of the parameter in HF order."""
    return tuple(self.shape[a] for a in self.order)

  @property
  def tensor_shape(self) -> tuple[int, ...]:
    """The shape of one tensor."""
    rows, *columns = (
      math.prod(self.shape[a] for a in group) for group in self.axes
    )
    return rows // len(self.names), *columns

  def tensors(self, layer: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Each tensor's name, and its (expert, position in `names`)."""
    for e in range(self.experts or 1):
      for part, name in enumerate(self.names):
        yield name.format(i=layer, e=e), (e, part)


def tensor_maps(cfg: ModelConfig) -> list[TensorMap]:
  """The maps of all parameters of a model."""
  tree = jax.eval_shape(lambda key: init(key, cfg), jax.random.key(0))
  is_mixtral = cfg.num_experts and not cfg.qk_norm
  table, maps = TABLE | (_MIXTRAL if is_mixtral else {}), []
  for keys, leaf in jax.tree.leaves_with_path(tree):
    path = jax.tree_util.keystr(keys, simple=True, separator="/")
    key, shape, prefix = path, leaf.shape, ""
    if path.startswith("layers/"):
      key, shape = path.removeprefix("layers/"), leaf.shape[1:]
      prefix = "model.layers.{i}."
    names, axes = table[key]
    maps.append(TensorMap(path, shape, tuple(prefix + n for n in names), axes))
  return maps


def expected(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
  """The shape of every HF tensor of a model, by name."""
  return {
    name: tensor.tensor_shape
    for tensor in tensor_maps(cfg)
    for layer in range(cfg.num_layers if tensor.stacked else 1)
    for name, _ in tensor.tensors(layer)
  }


def import_safetensors():
  """The package safetensors, of the extra hf; UserError without it."""
  try:
    import safetensors.numpy
  except ImportError as error:
    raise missing_package(error, "hf", "a Hugging Face checkpoint") from error
  return safetensors


class _Stored(NamedTuple):
  """Where a tensor is stored, its shape, and its safetensors dtype."""

  file: Path
  shape: tuple[int, ...]
  dtype: str


class HFCheckpoint:
  """Reads parts of the tensors in the safetensors files of a folder.

  Args:
    folder: with model.safetensors, or an index of several files.

  Raises:
    UserError: no such files, or a damaged one.
  """

  def __init__(self, folder: str | Path):
    self.folder = Path(folder)
    self._tensors: dict[str, _Stored] = {}
    # Only the last file stays open: layers are read in the order of files.
    self._open_path, self._open_file = None, None
    for path in _files(self.folder):
      file = _open(path)
      for name in file.keys():  # noqa: SIM118, not a dict
        part = file.get_slice(name)
        shape = tuple(part.get_shape())
        self._tensors[name] = _Stored(path, shape, part.get_dtype())

  def require(self, cfg: ModelConfig) -> None:
    """Raises UserError unless the tensors are exactly those of the model."""
    shapes = expected(cfg)
    names = {name for name in self._tensors if not _is_ignored(name, cfg)}
    missing = sorted(shapes.keys() - names)
    unknown = sorted(names - shapes.keys())
    misshapen, dtypes = [], []
    for name in sorted(shapes.keys() & names):
      _, shape, dtype = self._tensors[name]
      if shape != shapes[name]:
        misshapen.append(f"{name} {shape}, expected {shapes[name]}")
      if dtype not in _FLOATS:
        dtypes.append(f"{name} {dtype}, expected one of {', '.join(_FLOATS)}")
    problems = [
      listed("missing", missing),
      listed("not of this model", unknown, missing),
      listed("misshapen", misshapen),
      listed("dtype", dtypes),
    ]
    if any(problems):
      raise UserError(f"{self.folder}: " + "; ".join(filter(None, problems)))

  def read(self, tensor: TensorMap, layer: int, spans) -> np.ndarray:
    """Reads a part of a parameter, in HF order and the file's dtype.

    Args:
      tensor: of which parameter.
      layer: of which layer.
      spans: (start, end) along each axis of `tensor.hf_shape`.
    """
    names = [name.format(i=layer, e="{e}") for name in tensor.names]
    if tensor.experts is None:
      return self._join(tensor, names, spans)
    (first, end), *spans = spans
    # Preallocated: np.stack would need the memory twice.
    out = None
    for e in range(first, end):
      part = self._join(tensor, [name.format(e=e) for name in names], spans)
      if out is None:
        out = np.empty((end - first, *part.shape), part.dtype)
      out[e - first] = part
    return out

  def _join(self, tensor, names, spans):
    """Reads one expert's part, or that of a parameter without experts.

    Of several axes that form a tensor's rows or columns, the file is sliced
    along the first one; the others are sliced in memory.
    """
    in_file, shape, in_memory, axis = [], [], [], 0
    for group in tensor.axes:
      sizes = [tensor.shape[a] for a in group]
      (first, end), *inner = spans[axis : axis + len(group)]
      axis += len(group)
      stride = math.prod(sizes[1:])
      in_file.append(slice(first * stride, end * stride))
      shape += [end - first, *sizes[1:]]
      in_memory += [slice(None), *(slice(*span) for span in inner)]
    if len(names) == 1:
      array = self._slice(names[0], in_file)
      return array.reshape(shape)[tuple(in_memory)]
    all_rows = [slice(None), *in_file[1:]]
    arrays = [self._slice(name, all_rows) for name in names]
    return np.concatenate(arrays)[in_file[0]]

  def _slice(self, name, slices):
    path = self._tensors[name].file
    if self._open_path != path:
      self._open_path, self._open_file = path, _open(path)
    return self._open_file.get_slice(name)[tuple(slices)]


def _files(folder: Path) -> list[Path]:
  if not folder.is_dir():
    raise UserError(
      f"{str(folder)!r}: expected a checkpoint's folder"
      + how_to_download(folder)
    )
  if (folder / SINGLE).exists():
    return [folder / SINGLE]
  if not (folder / INDEX).exists():
    raise UserError(f"{str(folder)!r} holds neither {SINGLE} nor {INDEX}")
  try:
    names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
  except (ValueError, LookupError, TypeError, AttributeError) as error:
    raise UserError(f"{folder / INDEX}: not an index: {error!r}") from None
  missing = sorted(name for name in names if not (folder / name).is_file())
  if missing:
    raise UserError(f"{folder}: {listed('missing files', missing)}")
  return [folder / name for name in sorted(names)]


def _open(path):
  safetensors = import_safetensors()
  try:
    return safetensors.safe_open(path, framework="np")
  except (safetensors.SafetensorError, OSError) as error:
    raise UserError(f"{path}: damaged or truncated: {error}") from None


def _is_ignored(name: str, cfg: ModelConfig) -> bool:
  """Whether a tensor is not needed: a frequency table, or a tied head."""
  tied = cfg.tie_embeddings and name == "lm_head.weight"
  return tied or name.endswith("rotary_emb.inv_freq")


def listed(problem: str, names: list[str], choices=()) -> str:
  """`problem (count): names`: the first 16, each with its nearest choice."""
  if not names:
    return ""
  first = []
  for name in names[:_MAX_NAMES]:
    close = difflib.get_close_matches(name, choices, n=1)
    first.append(f"{name} (did you mean {close[0]}?)" if close else name)
  others = len(names) - len(first)
  more = f", and {others} more" if others else ""
  return f"{problem} ({len(names)}): {', '.join(first)}{more}"
