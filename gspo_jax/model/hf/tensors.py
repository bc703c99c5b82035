"""The map between our parameters and the tensors of a Hugging Face checkpoint.

An HF tensor is a vector or a matrix [outputs, inputs]. Our parameters have the
inputs first, a separate axis of heads, and all experts in one array. "HF order"
of a parameter: experts if any, then the axes of the tensor's rows, then the
axes of its columns. In HF order an array splits into tensors without transpose.
"""

import difflib
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import PurePosixPath
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import tensorstore
from etils import epath

from gspo_jax.model import parameters
from gspo_jax.model.config import ModelConfig
from gspo_jax.model.hf import quantised
from gspo_jax.model.hf.config import family_name, has_images
from gspo_jax.model.hf.families import FAMILIES
from gspo_jax.record import json_file
from gspo_jax.record.run_files import in_bucket, is_file
from gspo_jax.runtime.errors import (
  UserError,
  content_of,
  how_to_download,
  with_reason,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"BF16": jnp.bfloat16, "F16": np.float16, "F32": np.float32}
# Quantised tensors are read as their codes; adapters may have 64 bits.
_DTYPES = FLOATS | {"F8_E4M3": np.uint8, "U8": np.uint8, "F64": np.float64}
# Simultaneous requests to a bucket, the maximum bytes of one request, and
# threads that read and dequantise files on this machine.
_REQUESTS, _BLOCK_BYTES = 32, 8 << 20
_CPU_THREADS = min(32, os.cpu_count())
# How tensorstore's errors begin where the same request may succeed later.
_OUTAGE = re.compile(
  "ABORTED|DEADLINE_EXCEEDED|INTERNAL|RESOURCE_EXHAUSTED|UNAVAILABLE|UNKNOWN"
)
_MAX_TENSORS = 1 << 20  # of a model; the largest published ones have 70,000
_MAX_NAMES = 16  # in one error; a wrong folder has thousands
# Tensors that predict further tokens (multi-token prediction), or that see
# images.
_CARRIED = re.compile(
  r"mtp\..+|(?:model\.)?(?:visual|vision_tower|multi_modal_projector)\..+"
  r"|(model\.layers\.(\d+))\..+"
)
HEAD = "lm_head.weight"
# How names begin beside those of images.
_STARTS = "model.language_model.", "language_model.model."


class Layout(NamedTuple):
  """What may differ between folders of the same model."""

  start: str = "model."  # of names, or one of `_STARTS`
  # All experts are one tensor, and not one each.
  fused_experts: bool = False
  # Queries, keys and values are one tensor, gates and ups another.
  fused: bool = False
  inputs_first: bool = False  # the tensors of experts are not transposed

  @property
  def head(self) -> str:
    return ("language_model." if self.start == _STARTS[1] else "") + HEAD


PLAIN = Layout()


def layout_in(names: Collection[str]) -> Layout:
  """Of tensors, or of PEFT's adapters to them."""
  has = lambda pattern: any(re.search(pattern, name) for name in names)
  starts = [x for x in _STARTS if has(rf"(^|\.){x}layers\.")]
  return Layout(
    *(starts or ["model."]),
    has(r"\.layers\.\d+\.mlp\.experts\.gate_up_proj$"),
    has(r"\.self_attn\.qkv_proj\."),
  )


def layout_of(folder: epath.PathLike) -> Layout:
  """Of a folder that may be without tensors, or not be there."""
  path = epath.Path(folder) / "config.json"
  raw = json_file.read(path) if is_file(path) else {}
  layout = Layout(_STARTS[0]) if has_images(raw) else PLAIN
  if names := _names(epath.Path(folder)):
    layout = layout_in(names)
  if layout.fused_experts and raw.get("model_type") == "qwen3_vl_moe":
    # As published; transformers also writes the usual order.
    end, inputs = ".experts.gate_up_proj", raw["text_config"]["hidden_size"]
    name, x = next(pair for pair in names.items() if pair[0].endswith(end))
    x = _open(path.parent / x).tensors[name] if isinstance(x, str) else x
    layout = layout._replace(inputs_first=x.shape[1] == inputs)
  return layout


class TensorMap(NamedTuple):
  """A row of `parameters.TABLE`, with the sizes of a model."""

  path: str  # slash-joined, in the tree of parameters
  shape: tuple[int, ...]  # of the parameter, without the axis of layers
  names: tuple[str, ...]  # of the tensors, for `.format(i=layer, e=expert)`
  # Axes of the parameter that are a tensor's rows, and its columns. A tensor of
  # all experts has three groups: experts, rows and columns. So has one of a
  # convolution, whose second axis is 1: channels, none, and tokens.
  axes: tuple[tuple[int, ...], ...]
  layers: tuple[int, ...]  # the numbers of the layers that have it
  # The columns of gates and ups take turns in the file.
  interleaved: bool = False
  # The parameter's rows by their numbers in the file; (): in the same order.
  rows: tuple[int, ...] = ()
  first_row: int = 0  # in a tensor with other parameters

  @property
  def stacked(self) -> bool:
    return self.path.startswith("layers/")

  @property
  def experts(self) -> int | None:
    """The number of experts, if each has separate tensors."""
    return self.shape[0] if "{e}" in self.names[0] else None

  @property
  def order(self) -> tuple[int, ...]:
    """The transpose from the parameter to HF order."""
    first = () if self.experts is None else (0,)
    return first + tuple(a for group in self.axes for a in group)

  @property
  def hf_shape(self) -> tuple[int, ...]:
    return tuple(self.shape[a] for a in self.order)

  @property
  def tensor_shape(self) -> tuple[int, ...]:
    rows, *columns = (
      math.prod(self.shape[a] for a in group) for group in self.axes
    )
    return rows // len(self.names), *columns

  @property
  def form(self) -> "TensorMap":
    """What `from_hf` and `to_hf` depend on."""
    name = "{e}" if self.experts else ""
    return self._replace(path="", names=(name,), layers=())

  def from_hf(self, x):
    """The parameter from an array in HF order."""
    x = _in_order(x, self.rows).transpose(np.argsort(self.order))
    return _swap_last(x, (-1, 2)) if self.interleaved else x

  def to_hf(self, x):
    """The inverse of `from_hf`."""
    x = _swap_last(x, (2, -1)) if self.interleaved else x
    return _in_order(x.transpose(self.order), np.argsort(self.rows))

  def tensors(self, layer: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Each tensor's name, and its (expert, position in `names`)."""
    for e in range(self.experts or 1):
      for part, name in enumerate(self.names):
        yield name.format(i=layer, e=e), (e, part)


def tensor_maps(cfg: ModelConfig, layout: Layout = PLAIN) -> list[TensorMap]:
  """All parameters of a model, in the order of its tree."""
  family = FAMILIES.get(family_name(cfg))
  styles = family.names if family else ()
  styles = ("phi3",) if layout.fused else styles
  maps, ends = [], {}
  for row in parameters.rows(cfg):
    names = next(
      (row.other_names[x] for x in styles if x in row.other_names), row.tensors
    )
    experts, inputs, outputs = row.groups
    axes = (outputs, inputs) if row.transposed else (inputs, outputs)
    gpt_oss = bool(experts) and "{e}" not in names[0]
    if gpt_oss:
      axes = experts, inputs, outputs
    elif experts and layout.fused_experts:
      end = row.end.rpartition("/")[2]
      names, axes = (f"mlp.experts.{end}_proj",), (experts, outputs, inputs)
      axes = (experts, inputs, outputs) if layout.inputs_first else axes
    axes = tuple(filter(None, axes))  # a vector has no inputs
    if row.init == "convolution":
      axes = outputs[:-1], (), outputs[-1:]
    start = "model.layers.{i}." if row.stacked else ""
    names = tuple(start + name for name in names)
    names = tuple(re.sub(r"^model\.", layout.start, name) for name in names)
    names = tuple(layout.head if name == HEAD else name for name in names)
    tensor = TensorMap(
      *(row.path, row.shape(cfg), names, axes, row.layers(cfg)),
      gpt_oss and "2F" in row.dims,
      _rows(cfg.linear_num_key_heads, row.widths(cfg)),
      ends.get(names, 0),
    )
    ends[names] = tensor.first_row + tensor.tensor_shape[0]
    maps.append(tensor)
  return sorted(maps, key=lambda tensor: tensor.path.split("/"))


def _rows(groups: int, widths: Sequence[int]) -> tuple[int, ...]:
  """The rows of a tensor by group; it has all groups width after width."""
  ends = groups * np.cumsum((0, *widths))
  parts = [np.arange(a, b).reshape(groups, -1) for a, b in pairwise(ends)]
  return tuple(np.concatenate(parts, 1).ravel().tolist()) if parts else ()


def _in_order(x, rows: Sequence[int]):
  """The rows of these numbers, which are all of them; (): as they are."""
  if not len(rows):
    return x
  return x.reshape(len(rows), -1)[np.array(rows)].reshape(x.shape)


def _swap_last(x, shape):
  """The last axis as a matrix of this shape, transposed."""
  grid = x.reshape(*x.shape[:-1], *shape)
  return grid.swapaxes(-1, -2).reshape(x.shape)


def expected(
  cfg: ModelConfig, layout: Layout = PLAIN
) -> dict[str, tuple[int, ...]]:
  """The shape of every HF tensor of a model, by name."""
  shapes = {}
  for tensor in sorted(tensor_maps(cfg, layout), key=lambda x: x.first_row):
    rows, *columns = tensor.tensor_shape
    shape = tensor.first_row + rows, *columns
    names = (name for i in tensor.layers for name, _ in tensor.tensors(i))
    shapes |= dict.fromkeys(names, shape)
  return shapes


def require_tensors(folder, kinds: dict, shapes: dict, dtypes, owner: str):
  """UserError if `kinds`, (shape, dtype) by name, are not as expected."""
  missing = sorted(shapes.keys() - kinds)
  unknown = sorted(kinds.keys() - shapes)
  misshapen, others = [], []
  for name in sorted(shapes.keys() & kinds):
    shape, dtype = kinds[name]
    if shape != shapes[name]:
      misshapen.append(f"{name} {shape}, expected {shapes[name]}")
    if dtype not in dtypes:
      others.append(f"{name} {dtype}, expected one of {', '.join(dtypes)}")
  problems = [
    listed("missing", missing),
    listed(f"not {owner}", unknown, missing),
    listed("misshapen", misshapen),
    listed("dtype", others),
  ]
  if any(problems):
    raise UserError(f"{folder}: " + "; ".join(filter(None, problems)))


# (start, end) along each axis of a parameter in HF order.
Spans = tuple[tuple[int, int], ...]


class HFCheckpoint:
  """Reads parts of the tensors in a folder of safetensors files.

  UserError if there are no such files, a file is damaged, or the tensors are
  not exactly the model's. Those of multi-token prediction and of images may
  also be there: `carried` has them by name.
  """

  def __init__(self, folder: epath.PathLike, cfg: ModelConfig):
    self.folder = epath.Path(folder)
    self._threads = _REQUESTS if in_bucket(folder) else _CPU_THREADS
    with with_reason(str(folder)):
      files = _files(self.folder)
    stored = {}
    for path in files:
      stored |= _open(path).tensors
    tensors = {
      name: tensor
      for name, tensor in quantised.as_floats(self.folder, stored).items()
      # Frequency tables of rotary embeddings are computed.
      if not name.endswith("rotary_emb.inv_freq")
    }
    self._tensors, self.layout = tensors, layout_of(folder)
    self._require_count(cfg)
    self.carried = _carried(tensors, cfg.num_layers)
    shapes = expected(cfg, self.layout)
    if self.has_second_head(cfg):
      shapes[self.layout.head] = cfg.vocab_size, cfg.embed_dim
    shapes |= {name: tensor.shape for name, tensor in self.carried.items()}
    kinds = {name: (x.shape, x.dtype) for name, x in tensors.items()}
    require_tensors(self.folder, kinds, shapes, FLOATS, "of this model")

  def has_second_head(self, cfg: ModelConfig) -> bool:
    """Whether there is an output matrix although embeddings are tied."""
    return cfg.tie_embeddings and self.layout.head in self._tensors

  def _require_count(self, cfg):
    layers, experts = cfg.num_layers, cfg.num_experts
    count = sum(
      len(tensor.layers) * (tensor.experts or 1) * len(tensor.names)
      for tensor in tensor_maps(cfg, self.layout)
    )
    if count > _MAX_TENSORS:
      raise UserError(
        f"{self.folder}: num_hidden_layers={layers} and num_experts={experts} "
        f"in config.json make {count:,} tensors, the files hold "
        f"{len(self._tensors):,}"
      )

  def read(
    self, layer: int, wanted: Mapping[TensorMap, Collection[Spans]]
  ) -> dict[TensorMap, dict[Spans, np.ndarray]]:
    """Reads parts of one layer's parameters, in HF order and the file's dtype.

    A bucket sends only whole rows. So a block of rows is read once, and copied
    into all parts with these rows. Two parts share all rows or none.
    """
    arrays, blocks = {}, []
    for tensor, parts in wanted.items():
      names = [name for name, _ in tensor.tensors(layer)]
      dtypes = {self._tensors[name].dtype for name in names}
      dtype = FLOATS[dtypes.pop()] if len(dtypes) == 1 else np.float32
      arrays[tensor] = {
        spans: np.empty([end - start for start, end in spans], dtype)
        for spans in parts
      }
      blocks += self._blocks(tensor, layer, arrays[tensor])
    with ThreadPoolExecutor(self._threads) as threads:
      # The list raises what `_fill` raises.
      list(threads.map(lambda block: self._fill(*block), blocks))
    return arrays

  def _blocks(self, tensor, layer, parts) -> Iterator[tuple]:
    """The arguments of `_fill` for all rows of the parts, each row once."""
    axis = 0 if tensor.experts is None else 1  # of the rows
    by_rows = {}
    for spans, array in parts.items():
      by_rows.setdefault(spans[: axis + 1], {})[spans] = array
    length = tensor.hf_shape[axis] // len(tensor.names)
    stride = math.prod(tensor.shape[a] for a in tensor.axes[0][1:])
    columns = math.prod(tensor.tensor_shape[1:])
    step = max(1, _BLOCK_BYTES // (stride * columns * 4))  # bytes, at most
    for rows, same_rows in by_rows.items():
      *experts, (first, end) = rows
      for name, (e, number) in tensor.tensors(layer):
        if experts and e not in range(*experts[0]):
          continue
        offset = number * length
        end_here = min(end, offset + length)
        for start in range(max(first, offset), end_here, step):
          span = start, min(start + step, end_here)
          row = tensor.first_row + (start - offset) * stride
          yield tensor, name, e, row, span, same_rows

  def _fill(self, tensor, name, e, row, span, parts):
    """Copies a block of a tensor's rows into the parts that have them.

    Rows and columns may have several axes: the file is sliced along the first,
    the block in memory along the others. `row` is the first in the file.
    """
    axis = 0 if tensor.experts is None else 1
    rows, *columns = ([tensor.shape[a] for a in group] for group in tensor.axes)
    start, end = span
    stride = math.prod(rows[1:])
    in_file = [slice(row, row + (end - start) * stride)]
    shape, shifts = [end - start, *rows[1:]], [0] * (len(rows) - 1)
    for sizes in columns:
      if not sizes:
        in_file.append(slice(None))
        continue
      of_parts = [spans[axis + len(shape)] for spans in parts]
      first, last = min(a for a, _ in of_parts), max(b for _, b in of_parts)
      stride = math.prod(sizes[1:])
      in_file.append(slice(first * stride, last * stride))
      shape += [last - first, *sizes[1:]]
      shifts += [first] + [0] * (len(sizes) - 1)
    block = self._tensors[name][tuple(in_file)].reshape(shape)
    for spans, array in parts.items():
      inner = zip(spans[axis + 1 :], shifts, strict=True)
      cut = [slice(a - shift, b - shift) for (a, b), shift in inner]
      target = array[e - spans[0][0]] if axis else array
      first = spans[axis][0]
      target[start - first : end - first] = block[(slice(None), *cut)]


def save_tensors(arrays: Mapping[str, np.ndarray], path: epath.Path) -> None:
  """Writes arrays to a safetensors file, each of a dtype in `FLOATS`.

  An array may be anything with dtype, shape, nbytes and `__array__`, which is
  called when its turn comes, so that one at a time is in memory.
  safetensors' own function copies all tensors in memory for a bucket, and lets
  only the owner read the file.
  """
  names = {np.dtype(dtype): name for name, dtype in FLOATS.items()}
  header, end = {"__metadata__": {"format": "pt"}}, 0
  for name, x in sorted(arrays.items()):
    span = [end, end := end + x.nbytes]
    dtype = names[x.dtype]
    header[name] = {"dtype": dtype, "shape": x.shape, "data_offsets": span}
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # so that tensors are aligned
  with path.open("wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for _, x in sorted(arrays.items()):
      data = np.ascontiguousarray(x).reshape(-1).view(np.uint8).data
      # A bucket's file holds written data in memory until they are sent.
      for start in range(0, len(data), _BLOCK_BYTES):
        file.write(data[start : start + _BLOCK_BYTES])


class TensorFile:
  """A safetensors file, on this machine or in a bucket.

  The file has the header's size (8 bytes, little endian), the header in JSON,
  and the tensors (github.com/huggingface/safetensors, "Format"). ValueError:
  the file is damaged, or missing in the bucket. ConnectionError: the bucket
  does not answer.
  """

  def __init__(self, path: epath.PathLike):
    folder, _, self._name = str(path).rpartition("/")
    if in_bucket(path):
      self._store = tensorstore.KvStore.open(f"{folder}/").result()
    else:
      self._store = None
      self._bytes = np.asarray(np.memmap(path, np.uint8, "r"))
    size = int.from_bytes(self.read(0, 8).tobytes(), "little")
    header = json.loads(self.read(8, 8 + size).tobytes())
    header.pop("__metadata__", None)
    self.tensors, last = {}, 8 + size
    spans = sorted(t["data_offsets"] for t in header.values())
    if any(
      a != b
      for (a, _), (_, b) in zip(spans, [(0, 0), *spans[:-1]], strict=True)
    ):
      raise ValueError("tensors overlap, or leave bytes between them")
    for name, t in header.items():
      start, end = (8 + size + offset for offset in t["data_offsets"])
      tensor = StoredTensor(self, t["dtype"], tuple(t["shape"]), start)
      if tensor.dtype in _DTYPES and tensor.nbytes != end - start:
        raise ValueError(
          f"{name}: its shape takes {tensor.nbytes:,} bytes, the file has "
          f"{end - start:,}"
        )
      self.tensors[name], last = tensor, max(last, end)
    self.read(last - 1, last)  # an error if the file is truncated

  def read(self, start: int, end: int) -> np.ndarray:
    if self._store is None:
      if end > len(self._bytes):
        raise ValueError(f"{len(self._bytes):,} bytes, expected {end:,}")
      return self._bytes[start:end]
    span = slice(start, end)
    try:
      data = self._store.read(self._name, byte_range=span).result().value
    except ValueError as error:
      if _OUTAGE.match(str(error)):
        raise ConnectionError(f"{self._name}: {error}") from error
      raise
    return np.frombuffer(data, np.uint8)


class StoredTensor(NamedTuple):
  """A tensor in a `TensorFile`; `start` is its first byte."""

  file: TensorFile
  dtype: str  # as safetensors names it
  shape: tuple[int, ...]
  start: int

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * np.dtype(_DTYPES[self.dtype]).itemsize

  def __getitem__(self, slices: tuple[slice, ...]) -> np.ndarray:
    """A bucket sends whole rows."""
    first, end, _ = slices[0].indices(self.shape[0])
    dtype = np.dtype(_DTYPES[self.dtype])
    row = math.prod(self.shape[1:]) * dtype.itemsize
    data = self.file.read(self.start + first * row, self.start + end * row)
    rows = data.view(dtype).reshape(end - first, *self.shape[1:])
    return rows[(slice(None), *slices[1:])]


def _carried(tensors: Mapping, num_layers: int) -> dict:
  """The tensors of `mtp.*`, of images, or of later layers with `eh_proj`."""
  found = {}
  for name, tensor in tensors.items():
    if match := _CARRIED.fullmatch(name):
      layer, number = match.groups()
      is_after = number and int(number) >= num_layers
      if not number or (is_after and f"{layer}.eh_proj.weight" in tensors):
        found[name] = tensor
  return found


def has_carried(folder: epath.PathLike, cfg) -> bool:
  """Whether a folder, which may be without weights, names such tensors."""
  return bool(_carried(_names(epath.Path(folder)), cfg.num_layers))


def _names(folder: epath.Path) -> Mapping:
  """The names of a folder's tensors, which may have none, as keys."""
  if (folder / SINGLE).exists():
    return _open(folder / SINGLE).tensors
  if (folder / INDEX).exists():
    return json_file.read(folder / INDEX)["weight_map"]
  return {}


def _files(folder: epath.Path) -> list[epath.Path]:
  if not folder.is_dir():
    raise UserError(
      f"{str(folder)!r}: expected a checkpoint's folder"
      + how_to_download(folder)
    )
  if (folder / SINGLE).exists():
    names = {SINGLE}
  elif (folder / INDEX).exists():
    path = folder / INDEX
    with content_of(f"{path}: not an index"):
      names = set(json_file.read(path)["weight_map"].values())
      outside = [name for name in names if name != PurePosixPath(name).name]
    if outside:
      raise UserError(
        f"{path}: {listed('names outside of its folder', sorted(outside))}"
      )
  else:
    raise UserError(f"{str(folder)!r} holds neither {SINGLE} nor {INDEX}")
  missing = sorted(name for name in names if not is_file(folder / name))
  if missing:
    raise UserError(f"{folder}: {listed('missing files', missing)}")
  return [folder / name for name in sorted(names)]


def _open(path: epath.Path) -> TensorFile:
  with with_reason(str(path)), content_of(f"{path}: damaged or truncated"):
    return TensorFile(path)


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
