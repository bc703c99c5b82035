"""Every parameter of the policy, declared once.

A row of `TABLE` has the dimensions of a parameter and their sharding, its
initialiser, its tensors in a Hugging Face checkpoint, and whether it is a
matrix that LoRA adapts and Muon updates. Dimensions are written as a map:
"D -> N H" sums over D, "E | D -> 2F" has such a matrix for each expert, and "H"
is a vector, a bias or the scale of a norm.

The parameters of the blocks are stacked: in the tree they have one more axis in
front, of the layers. All parameters are float32. Only matrices decay.

Dimension key: V vocabulary, D model width, N query heads, K key-value heads, H
head width, F hidden width, E experts, r rank of an adapter; q and k, the width
of a norm of queries and of keys.
"""

import dataclasses
from collections.abc import Callable, Iterable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn import initializers

from gspo_jax.model.config import ModelConfig
from gspo_jax.model.rounding import rounded, wide
from gspo_jax.runtime import sharding

# The ends of the paths of an adapter's matrices, see lora.py.
A, B = "_lora_a", "_lora_b"
_LAYERS = "layers/"


def _sizes(cfg: ModelConfig) -> dict[str, int]:
  H, over_heads = cfg.head_dim, cfg.qk_norm_over_heads
  return {
    "V": cfg.vocab_size,
    "D": cfg.embed_dim,
    "N": cfg.num_heads,
    "K": cfg.num_kv_heads,
    "H": H,
    "q": cfg.num_heads * H if over_heads else H,
    "k": cfg.num_kv_heads * H if over_heads else H,
    "F": cfg.mlp_dim,
    "2F": 2 * cfg.mlp_dim,
    "E": cfg.num_experts,
    "r": cfg.lora.rank if cfg.lora else 0,
  }


def _by_inputs(row: "Parameter", cfg):
  """Variance 1 / inputs."""
  del cfg
  experts, inputs, outputs = row.groups
  return initializers.lecun_normal(inputs, outputs, experts)


def _by_width(row, cfg):
  """Variance 1 / D.

  An RMSNorm follows the embedding, so that its scale matters only where it is
  the output matrix, too.
  """
  del row
  return initializers.normal(cfg.embed_dim**-0.5)


_always = lambda cfg: True
_ones = lambda row, cfg: initializers.ones
_zeros = lambda row, cfg: initializers.zeros


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One array of the policy.

  Attributes:
    path: slash-joined, in the tree of parameters.
    dims: the dimensions of one layer's array, as the head of this file says.
    axes: the logical axis of each, for `sharding.RULES`.
    init: (row, cfg) -> the initialiser of one layer's array.
    tensors: the names of its Hugging Face tensors, whose rows are concatenated;
      {e}: one for each expert. In a layer they begin with "model.layers.{i}.".
    mixtral: other names that Mixtral has for them.
    transposed: the tensors are [outputs, inputs], as those of linear layers.
    target: the part of a block, "attention" or "mlp", of a matrix that LoRA
      adapts and Muon updates; None for other parameters.
    heads_first: a TPU decodes with the outputs before the inputs in memory.
    exists: whether a model has it.
  """

  path: str
  dims: str
  axes: str
  init: Callable = _by_inputs
  tensors: tuple[str, ...] = ()
  mixtral: tuple[str, ...] = ()
  transposed: bool = True
  target: str | None = None
  heads_first: bool = False
  exists: Callable[[ModelConfig], bool] = _always

  @property
  def stacked(self) -> bool:
    """Whether it has an axis of layers."""
    return self.path.startswith(_LAYERS)

  @property
  def end(self) -> str:
    """The end of the path of every array that belongs to it."""
    return self.path.removeprefix(_LAYERS)

  @property
  def decays(self) -> bool:
    return "->" in self.dims

  @property
  def groups(self) -> tuple[tuple[int, ...], ...]:
    """The axes of experts, of inputs and of outputs in one layer's array."""
    groups, first = [], 0
    for names in self._names():
      groups.append(tuple(range(first, first := first + len(names))))
    return tuple(groups)

  def _names(self):
    experts, _, rest = self.dims.rpartition("|")
    inputs, _, outputs = rest.rpartition("->")
    return experts.split(), inputs.split(), outputs.split()

  def shape(self, cfg: ModelConfig) -> tuple[int, ...]:
    """The shape of one layer's array."""
    sizes = _sizes(cfg)
    return tuple(sizes[name] for names in self._names() for name in names)

  def initial(self, key: jax.Array | None, cfg: ModelConfig) -> jax.Array:
    """Initial values of one layer's array."""
    return self.init(self, cfg)(key, self.shape(cfg))

  @property
  def logical_axes(self) -> tuple[str, ...]:
    """The logical axes of the array, the layers included."""
    return ("layers",) * self.stacked + tuple(self.axes.split())

  @property
  def adapters(self) -> tuple["Parameter", "Parameter"]:
    """A and B of its adapter; their rank is not sharded."""
    experts, inputs, outputs = (" ".join(names) for names in self._names())
    start = f"{experts} |" if experts else ""
    axes = self.axes.split()
    pick = lambda group: [axes[i] for i in self.groups[group]]
    a = " ".join([*pick(0), *pick(1), "whole"])
    b = " ".join([*pick(0), "whole", *pick(2)])
    return (
      Parameter(self.path + A, f"{start} {inputs} -> r", a),
      Parameter(self.path + B, f"{start} r -> {outputs}", b),
    )


def _norm(path, dims, tensor, exists=_always):
  return Parameter(path, dims, "whole", _ones, (tensor,), exists=exists)


def _attention(name, dims, axes):
  return Parameter(
    f"layers/attention/{name}",
    dims,
    axes,
    tensors=(f"self_attn.{name}_proj.weight",),
    target="attention",
    heads_first=name != "o",
  )


def _bias(name, dims):
  return Parameter(
    f"layers/attention/{name}_bias",
    dims,
    "heads head_dim",
    _zeros,
    (f"self_attn.{name}_proj.bias",),
    exists=lambda cfg: cfg.attention_bias,
  )


def _mlp(name, dims, axes):
  return Parameter(
    f"layers/mlp/{name}",
    dims,
    axes,
    tensors=(f"mlp.{name}_proj.weight",),
    target="mlp",
    exists=lambda cfg: not cfg.num_experts,
  )


def _moe(name, dims, axes, tensors, mixtral, target=None):
  return Parameter(
    f"layers/moe/{name}",
    dims,
    axes,
    tensors=tuple(f"mlp.{name}.weight" for name in tensors),
    mixtral=tuple(f"block_sparse_moe.{name}.weight" for name in mixtral),
    target=target,
    exists=lambda cfg: cfg.num_experts,
  )


_has_qk_norm = lambda cfg: cfg.qk_norm

# Within a module the order is that of the random keys.
TABLE = (
  Parameter(
    "embed",
    "V -> D",
    "vocab table",
    _by_width,
    ("model.embed_tokens.weight",),
    transposed=False,
  ),
  _norm("layers/attention_norm/scale", "D", "input_layernorm.weight"),
  _attention("q", "D -> N H", "embed heads whole"),
  _attention("k", "D -> K H", "embed heads whole"),
  _attention("v", "D -> K H", "embed heads whole"),
  _attention("o", "N H -> D", "heads head_dim whole"),
  _norm(
    *("layers/attention/q_norm/scale", "q", "self_attn.q_norm.weight"),
    _has_qk_norm,
  ),
  _norm(
    *("layers/attention/k_norm/scale", "k", "self_attn.k_norm.weight"),
    _has_qk_norm,
  ),
  _bias("q", "N H"),
  _bias("k", "K H"),
  _bias("v", "K H"),
  _norm("layers/mlp_norm/scale", "D", "post_attention_layernorm.weight"),
  _mlp("gate", "D -> F", "embed mlp"),
  _mlp("up", "D -> F", "embed mlp"),
  _mlp("down", "F -> D", "mlp embed"),
  # No matrix for LoRA and Muon: its output is a choice.
  _moe("router", "D -> E", "embed whole", ("gate",), ("gate",)),
  # Gate and up side by side: one matmul, and no relayout on a TPU.
  _moe(
    "gate_up",
    "E | D -> 2F",
    "experts whole whole",
    ("experts.{e}.gate_proj", "experts.{e}.up_proj"),
    ("experts.{e}.w1", "experts.{e}.w3"),
    "mlp",
  ),
  _moe(
    "down",
    "E | F -> D",
    "experts whole whole",
    ("experts.{e}.down_proj",),
    ("experts.{e}.w2",),
    "mlp",
  ),
  _norm("final_norm/scale", "D", "model.norm.weight"),
  Parameter(
    "head",
    "D -> V",
    "table vocab",
    _by_width,
    ("lm_head.weight",),
    exists=lambda cfg: not cfg.tie_embeddings,
  ),
  # A critic has it in place of the head.
  Parameter("value_head", "D ->", "whole", _zeros, exists=lambda cfg: False),
)

_ROWS = {
  row.end: row
  for parameter in TABLE
  for row in (parameter, *(parameter.adapters if parameter.target else ()))
}
# The end of a path -> the logical axes, for `sharding.state_shardings`.
AXES = {end: row.logical_axes for end, row in _ROWS.items()}


def find(path: str) -> Parameter:
  """The row of a parameter or adapter, whose path may begin with anything.

  Raises:
    ValueError: no row, or more than one, matches the path.
  """
  return sharding.rule(path, _ROWS)


def rows(cfg: ModelConfig) -> list[Parameter]:
  """The parameters of a model, without adapters."""
  return [row for row in TABLE if row.exists(cfg)]


def adapted(cfg: ModelConfig) -> list[Parameter]:
  """The parameters that `cfg.lora` adapts, in the order of their tree."""
  if not cfg.lora:
    return []
  chosen = lambda row: cfg.lora.targets in (row.target, "all-linear")
  matrices = [row for row in rows(cfg) if row.target and chosen(row)]
  return sorted(matrices, key=lambda row: row.path)


def shapes(cfg: ModelConfig) -> dict:
  """The tree of `init`, with the adapters of `cfg.lora`, as abstract arrays."""
  adapters = [x for row in adapted(cfg) for x in row.adapters]
  return sharding.tree_of_paths(
    {
      row.path: jax.ShapeDtypeStruct(stack_shape(row, cfg), jnp.float32)
      for row in (*rows(cfg), *adapters)
    }
  )


def stack_shape(row: Parameter, cfg: ModelConfig) -> tuple[int, ...]:
  """The shape of the array in the tree of parameters."""
  return (cfg.num_layers,) * row.stacked + row.shape(cfg)


def shardings(shapes, mesh: jax.sharding.Mesh):
  """The shardings of parameters or adapters, from their shapes.

  Raises:
    UserError: a dimension is not divisible by the size of its mesh axes.
  """
  return sharding.state_shardings(shapes, mesh, AXES)


def partition_spec(end: str) -> jax.sharding.PartitionSpec:
  """The PartitionSpec of one layer's array, for a `shard_map`."""
  return sharding.partition_spec(_ROWS[end].axes.split())


def partition_specs(part: str, names: Iterable[str]) -> dict:
  """`partition_spec` of the arrays of a module, by name."""
  return {name: partition_spec(f"{part}/{name}") for name in names}


class _Nested(nn.Module):
  """A parameter in a scope of its own."""

  @nn.compact
  def __call__(self, name, init, shape):
    return self.param(name, init, shape)


def declare(
  module: nn.Module, part: str, cfg: ModelConfig
) -> dict[str, jax.Array]:
  """The parameters of a Flax module by name, with the adapters in its weights.

  B is multiplied by alpha / rank, so that what follows needs no factor. It is
  rounded to `cfg.dtype` before, as in the weights for decoding.
  """
  weights = {}
  for row in rows(cfg):
    if not row.end.startswith(f"{part}/"):
      continue
    name = row.end.removeprefix(f"{part}/")
    init, shape = row.init(row, cfg), row.shape(cfg)
    if "/" in name:
      name, leaf = name.split("/")
      weights[name] = _Nested(name=name)(leaf, init, shape)
    else:
      weights[name] = module.param(name, init, shape)
    if module.has_variable("params", name + A):
      weights[name + A] = module.get_variable("params", name + A)
      b = wide(module.get_variable("params", name + B).astype(cfg.dtype))
      weights[name + B] = rounded(cfg.lora.scale * b, jnp.dtype(cfg.dtype))
  return weights
