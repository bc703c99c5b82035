"""The tensors of a Hugging Face checkpoint, and which of ours each is part of.

A tensor there is a vector, or a matrix of [outputs, inputs]; ours have their
inputs first, heads on an axis of their own, and experts together. Turned, one
of ours has the expert first where it has one, then the axes of the tensor's
rows, then those of its columns: what is turned is cut into tensors, or joined
of them, without moving a number.
"""

import difflib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from gspo_jax.model.config import ModelConfig
from gspo_jax.model.transformer import init
from gspo_jax.runtime.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("BF16", "F16", "F32")
_SHOWN = 16  # names in one error; a wrong folder has thousands
_INPUTS_LAST = ((1,), (0,))

# end of our path -> tensors, without "model.layers.i." where there are layers,
# whose rows follow one another; our axes that are their rows and columns
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


class TensorMap(NamedTuple):
  """One array of ours, of one layer.

  Attributes:
    path: slash-joined, in the tree of parameters.
    shape: of ours, without the axis of layers.
    names: of the tensors, for `.format(i=layer, e=expert)`.
    axes: those of ours that a tensor has as rows, and as columns.
  """

  path: str
  shape: tuple[int, ...]
  names: tuple[str, ...]
  axes: tuple[tuple[int, ...], ...]

  @property
  def stacked(self) -> bool:
    return self.path.startswith("layers/")

  @property
  def experts(self) -> int | None:
    """How many, where each has tensors of its own."""
    return self.shape[0] if "{e}" in self.names[0] else None

  @property
  def order(self) -> tuple[int, ...]:
    """Ours transposed by these axes is turned."""
    first = () if self.experts is None else (0,)
    return first + tuple(a for group in self.axes for a in group)

  @property
  def turned(self) -> tuple[int, ...]:
    return tuple(self.shape[a] for a in self.order)

  @property
  def tensor(self) -> tuple[int, ...]:
    """The shape of one tensor."""
    rows, *columns = (
      math.prod(self.shape[a] for a in group) for group in self.axes
    )
    return rows // len(self.names), *columns

  def tensors(self, layer: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Each tensor's name, and the expert and the part of rows that it is."""
    for e in range(self.experts or 1):
      for part, name in enumerate(self.names):
        yield name.format(i=layer, e=e), (e, part)


def tensor_maps(cfg: ModelConfig) -> list[TensorMap]:
  """All arrays of the model."""
  tree = jax.eval_shape(lambda key: init(key, cfg), jax.random.key(0))
  found = []
  for keys, leaf in jax.tree.leaves_with_path(tree):
    path = jax.tree_util.keystr(keys, simple=True, separator="/")
    ours, shape, prefix = path, leaf.shape, ""
    if path.startswith("layers/"):
      ours, shape = path.removeprefix("layers/"), leaf.shape[1:]
      prefix = "model.layers.{i}."
    names, axes = TABLE[ours]
    found.append(TensorMap(path, shape, tuple(prefix + n for n in names), axes))
  return found


def expected(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
  """The shape of every tensor of a checkpoint, by name."""
  return {
    name: place.tensor
    for place in tensor_maps(cfg)
    for layer in range(cfg.num_layers if place.stacked else 1)
    for name, _ in place.tensors(layer)
  }


class HFCheckpoint:
  """The safetensors files of a folder; reads parts of their tensors.

  Args:
    folder: with model.safetensors, or an index of several files.

  Raises:
    UserError: no such files, or one that is damaged.
  """

  def __init__(self, folder: str | Path):
    self.folder = Path(folder)
    self._found = {}  # name -> file, shape, type
    self._open = None, None  # tensors lie in files in the order of layers
    for path in _files(self.folder):
      file = _opened(path)
      for name in file.keys():  # noqa: SIM118, it is no dict
        part = file.get_slice(name)
        self._found[name] = path, tuple(part.get_shape()), part.get_dtype()

  def require(self, cfg: ModelConfig) -> None:
    """UserError naming what is not there, is too much or has another shape."""
    want = expected(cfg)
    have = {name for name in self._found if not _harmless(name, cfg)}
    missing, extra = sorted(want.keys() - have), sorted(have - want.keys())
    wrong = [_listed("missing", missing)]
    wrong.append(_listed("not of this model", extra, missing))
    shapes, types = [], []
    for name in sorted(want.keys() & have):
      _, shape, kind = self._found[name]
      if shape != want[name]:
        shapes.append(f"{name} {shape}, expected {want[name]}")
      if kind not in _FLOATS:
        types.append(f"{name} {kind}, expected one of {', '.join(_FLOATS)}")
    wrong += [_listed("misshapen", shapes), _listed("type", types)]
    if any(wrong):
      raise UserError(f"{self.folder}: " + "; ".join(filter(None, wrong)))

  def read(self, place: TensorMap, layer: int, spans) -> np.ndarray:
    """A part of one of ours, turned, as it is stored.

    Args:
      place: which.
      layer: of which layer.
      spans: (from, to) along each axis of `place.turned`.
    """
    names = [n.format(i=layer, e="{e}") for n in place.names]
    if place.experts is None:
      return self._join(place, names, spans)
    (first, end), *spans = spans
    # Filled, not joined, which would take the memory twice.
    out = None
    for e in range(first, end):
      part = self._join(place, [n.format(e=e) for n in names], spans)
      if out is None:
        out = np.empty((end - first, *part.shape), part.dtype)
      out[e - first] = part
    return out

  def _join(self, place, names, spans):
    """Rows and columns are cut by file along the first axis of each only."""
    cuts, shape, rest, at = [], [], [], 0
    for group in place.axes:
      sizes = [place.shape[a] for a in group]
      (first, end), *inner = spans[at : at + len(group)]
      at += len(group)
      each = math.prod(sizes[1:])
      cuts.append(slice(first * each, end * each))
      shape += [end - first, *sizes[1:]]
      rest += [slice(None), *(slice(*span) for span in inner)]
    if len(names) == 1:
      return self._tensor(names[0], cuts).reshape(shape)[tuple(rest)]
    whole = [slice(None), *cuts[1:]]
    return np.concatenate([self._tensor(n, whole) for n in names])[cuts[0]]

  def _tensor(self, name, cuts):
    path = self._found[name][0]
    if self._open[0] != path:
      self._open = path, _opened(path)
    return self._open[1].get_slice(name)[tuple(cuts)]


def _files(folder: Path) -> list[Path]:
  if not folder.is_dir():
    raise UserError(f"{str(folder)!r}: expected a checkpoint's folder")
  if (folder / SINGLE).exists():
    return [folder / SINGLE]
  if not (folder / INDEX).exists():
    raise UserError(f"{str(folder)!r} holds neither {SINGLE} nor {INDEX}")
  try:
    names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
  except (ValueError, LookupError, TypeError, AttributeError) as error:
    raise UserError(f"{folder / INDEX}: not an index: {error!r}") from None
  absent = sorted(n for n in names if not (folder / n).is_file())
  if absent:
    raise UserError(f"{folder}: {_listed('files absent', absent)}")
  return [folder / name for name in sorted(names)]


def _opened(path):
  try:
    return safe_open(path, framework="np")
  except (SafetensorError, OSError) as error:
    raise UserError(f"{path}: damaged or cut short: {error}") from None


def _harmless(name: str, cfg: ModelConfig) -> bool:
  """Tables of frequencies, and the second copy of a tied embedding."""
  tied = cfg.tie_embeddings and name == "lm_head.weight"
  return tied or name.endswith("rotary_emb.inv_freq")


def _listed(what: str, names: list[str], choices=()) -> str:
  """`what (count): names`, the first ones, each with the nearest choice."""
  if not names:
    return ""
  shown = []
  for name in names[:_SHOWN]:
    close = difflib.get_close_matches(name, choices, n=1)
    shown.append(f"{name} (did you mean {close[0]}?)" if close else name)
  more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
  return f"{what} ({len(names)}): {', '.join(shown)}{more}"
