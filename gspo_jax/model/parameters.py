"""Every parameter of the policy, declared once. All are float32.

Dimensions are written as a map: "D -> N H" sums over D, "E | D -> 2F" is one
matrix for each expert, and "H" is a vector: a bias or the scale of a norm. A
path that begins with "layers/" has one more axis in front: the layers that have
its module, such as "moe".

Dimension key: V vocabulary, D model width, N query heads, K key-value heads, H
head width, Hq width of a query with its gate, F hidden width of an expert, Fd
of a dense layer's MLP, Fs of the shared expert, E experts, r rank of an
adapter, q and k widths of the norms of queries and keys.

Of MLA: Cq and C widths of the latents of queries and of keys and values, Cr C
and the rotary columns of a key, Hkv the rest of a key and a value, Ho a value.
Of a gated DeltaNet: G key heads, Hk their width, M value heads, Hv their width,
R value heads of a key head, X columns of a key head: its query, its key and its
values, Xz its gates, too, W tokens of the convolution.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn import initializers

from gspo_jax.model.config import Layer, ModelConfig
from gspo_jax.model.rounding import rounded, wide
from gspo_jax.runtime import sharding

# The ends of the paths of an adapter's matrices, see lora.py.
A, B = "_lora_a", "_lora_b"


def _sizes(cfg: ModelConfig) -> dict[str, int]:
  N, K, H, F = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.mlp_dim
  q, k = (N * H, K * H) if cfg.qk_norm_over_heads else (H, H)
  sizes = {"V": cfg.vocab_size, "D": cfg.embed_dim, "E": cfg.num_experts}
  sizes |= {"N": N, "K": K, "H": H, "q": q, "k": k, "F": F, "2F": 2 * F}
  sizes |= {"Fd": cfg.dense_dim, "Fs": cfg.shared_dim, "1": 1}
  sizes |= {"Hq": 2 * H if cfg.output_gate else H, "Ho": cfg.value_dim}
  sizes |= {"Cq": cfg.q_lora_rank, "C": cfg.kv_lora_rank}
  sizes |= {"Cr": cfg.kv_lora_rank + cfg.rotary_width}
  sizes |= {"Hkv": H - cfg.rotary_width + cfg.value_dim}
  sizes |= {"G": cfg.linear_num_key_heads, "Hk": cfg.linear_key_head_dim}
  sizes |= {"M": cfg.linear_num_value_heads, "Hv": cfg.linear_value_head_dim}
  sizes |= {"W": cfg.linear_conv_kernel_dim}
  R = sizes["M"] // max(1, sizes["G"])
  sizes |= {"2R": 2 * R, "RHv": R * sizes["Hv"]}
  sizes["X"] = 2 * sizes["Hk"] + sizes["RHv"]
  sizes["Xz"] = sizes["X"] + sizes["RHv"]
  return sizes | {"r": cfg.lora.rank if cfg.lora else 0}


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One array of the policy."""

  path: str  # slash-joined, in the tree of parameters
  dims: str  # of one layer's array, see the head of this file
  axes: str  # the logical axis of each, for `sharding.RULES`
  # The names of its Hugging Face tensors, whose rows are concatenated; {e}: one
  # for each expert. In a layer they begin with "model.layers.{i}.".
  tensors: tuple[str, ...] = ()
  # The part of a block, "attention" or "mlp", of a matrix that LoRA adapts and
  # Muon updates; None for other parameters.
  target: str | None = None
  # A model has it if some layer has the module, all these fields of ModelConfig
  # are set, and `exists` is true.
  needs: tuple[str, ...] = ()
  exists: Callable[[ModelConfig], bool] = lambda cfg: True
  # "inputs": normal with variance 1 / inputs; "width": 1 / D; "scale": ones, or
  # zeros with `norm_plus_one`; "ones"; "zeros"; "decay": of `A_log`;
  # "convolution": normal with variance 1 / W.
  init: str = "inputs"
  # The tensors are [outputs, inputs], as in linear layers.
  transposed: bool = True
  # Of an array in groups of columns, the dimensions of a group. The rows of its
  # tensor are those of all groups for the first one, then for the second one.
  parts: tuple[str, ...] = ()
  # Names of the tensors in a family that has others, by its `Family.names`.
  other_names: dict[str, tuple[str, ...]] = dataclasses.field(
    default_factory=dict
  )
  # It is never rounded, also not for decoding or in an export.
  float32: bool = False
  # Configs with which a forward pass does not round it.
  unrounded: Callable[[ModelConfig], bool] = lambda cfg: False

  @property
  def stacked(self) -> bool:
    return self.path.startswith("layers/")

  @property
  def end(self) -> str:
    """The path within a layer; paths of moments also end in it."""
    return self.path.removeprefix("layers/")

  @property
  def module(self) -> str:
    """The part of a layer that has it."""
    return self.end.partition("/")[0]

  @property
  def router(self) -> bool:
    """Whether the choice of experts depends on it alone."""
    return self.end.startswith("moe/router")

  @property
  def decays(self) -> bool:
    """Weight decay is for matrices only."""
    return "->" in self.dims

  @property
  def names(self) -> tuple[list[str], list[str], list[str]]:
    """The dimensions of experts, of inputs and of outputs."""
    experts, _, rest = self.dims.rpartition("|")
    inputs, _, outputs = rest.rpartition("->")
    return experts.split(), inputs.split(), outputs.split()

  @property
  def groups(self) -> tuple[tuple[int, ...], ...]:
    """The axes of experts, of inputs and of outputs in one layer's array."""
    e, i, o = map(len, self.names)
    axes = tuple(range(e + i + o))
    return axes[:e], axes[e : e + i], axes[e + i :]

  @property
  def logical_axes(self) -> tuple[str, ...]:
    return ("layers",) * self.stacked + tuple(self.axes.split())

  @property
  def adapters(self) -> tuple["Parameter", "Parameter"]:
    """A and B of its adapter; the rank is not sharded."""
    experts, inputs, outputs = (" ".join(names) for names in self.names)
    e, i, o = ([self.axes.split()[a] for a in axes] for axes in self.groups)
    a = f"{experts}|{inputs} -> r", " ".join([*e, *i, "whole"])
    b = f"{experts}|r -> {outputs}", " ".join([*e, "whole", *o])
    return Parameter(self.path + A, *a), Parameter(self.path + B, *b)

  def shape(self, cfg: ModelConfig) -> tuple[int, ...]:
    """The shape of one layer's array."""
    sizes = _sizes(cfg)
    return tuple(sizes[name] for names in self.names for name in names)

  def stack_shape(self, cfg: ModelConfig) -> tuple[int, ...]:
    return (len(self.layers(cfg)),) * self.stacked + self.shape(cfg)

  def layers(self, cfg: ModelConfig) -> tuple[int, ...]:
    """The numbers of the layers that have it; 0 for what is in no layer."""
    return cfg.layers_with(self.module) if self.stacked else (0,)

  def widths(self, cfg: ModelConfig) -> tuple[int, ...]:
    return tuple(_sizes(cfg)[name] for name in self.parts)

  def initial(self, key: jax.Array, cfg: ModelConfig) -> jax.Array:
    experts, inputs, outputs = self.groups
    initializer = {
      "inputs": initializers.lecun_normal(inputs, outputs, experts),
      "width": initializers.normal(cfg.embed_dim**-0.5),
      "scale": initializers.constant(0 if cfg.norm_plus_one else 1),
      "ones": initializers.ones,
      "zeros": initializers.zeros,
      "decay": _decay_rates,
      "convolution": initializers.normal(cfg.linear_conv_kernel_dim**-0.5),
    }
    return initializer[self.init](key, self.shape(cfg))


def _decay_rates(key, shape):
  """Logarithms of numbers from 0.01 to 16, as Qwen3-Next's first ones."""
  return jnp.log(jax.random.uniform(key, shape, minval=0.01, maxval=16))


_NORM = {"init": "scale"}
_BIAS = {"init": "zeros", "needs": ("attention_bias",)}
_QK_NORM = _NORM | {"needs": ("qk_norm",)}
_ATTENTION = {"target": "attention"}
_Q_LORA = {"needs": ("q_lora_rank",)}
_GROUPED = {"parts": ("Hk", "Hk", "RHv")}
_FUSED = {"needs": ("linear_fused",)}
_SEPARATE = {"exists": lambda cfg: not cfg.linear_fused}
_MLP = {"target": "mlp"}
# One tensor has the rows of all of them, in the order of the table.
_QKV = {"other_names": {"phi3": ("self_attn.qkv_proj.weight",)}}
_GATE_UP = {"other_names": {"phi3": ("mlp.gate_up_proj.weight",)}}
_ROUTER = {"unrounded": lambda cfg: cfg.float32_router}
_EXPERT_BIAS = {"init": "zeros", "needs": ("expert_bias",)}


def _shared_names(end: str) -> dict:
  return {
    "tensors": (f"mlp.shared_experts.{end}.weight",),
    "other_names": {"qwen2_moe": (f"mlp.shared_expert.{end}.weight",)},
  }


# The order within a module is the order of the random keys.
# fmt: off
TABLE = (
  # A norm follows the embedding: its scale matters only as the head.
  Parameter("embed", "V -> D", "vocab table", ("model.embed_tokens.weight",),
            init="width", transposed=False,
            unrounded=lambda cfg: cfg.float32_head and cfg.tie_embeddings),
  Parameter("layers/attention_norm/scale", "D", "whole",
            ("input_layernorm.weight",), **_NORM),
  Parameter("layers/attention/q", "D -> N Hq", "embed heads whole",
            ("self_attn.q_proj.weight",), **_ATTENTION, **_QKV),
  Parameter("layers/attention/k", "D -> K H", "embed heads whole",
            ("self_attn.k_proj.weight",), **_ATTENTION, **_QKV),
  Parameter("layers/attention/v", "D -> K H", "embed heads whole",
            ("self_attn.v_proj.weight",), **_ATTENTION, **_QKV),
  Parameter("layers/attention/o", "N H -> D", "heads head_dim whole",
            ("self_attn.o_proj.weight",), **_ATTENTION),
  Parameter("layers/attention/q_norm/scale", "q", "whole",
            ("self_attn.q_norm.weight",), **_QK_NORM),
  Parameter("layers/attention/k_norm/scale", "k", "whole",
            ("self_attn.k_norm.weight",), **_QK_NORM),
  Parameter("layers/attention/q_bias", "N H", "heads head_dim",
            ("self_attn.q_proj.bias",), **_BIAS),
  Parameter("layers/attention/k_bias", "K H", "heads head_dim",
            ("self_attn.k_proj.bias",), **_BIAS),
  Parameter("layers/attention/v_bias", "K H", "heads head_dim",
            ("self_attn.v_proj.bias",), **_BIAS),
  Parameter("layers/attention/o_bias", "D", "whole",
            ("self_attn.o_proj.bias",),
            init="zeros", needs=("output_bias",)),
  Parameter("layers/attention/sinks", "N", "heads",
            ("self_attn.sinks",), init="zeros", needs=("sinks",)),
  Parameter("layers/mla/q", "D -> N H", "embed heads whole",
            ("self_attn.q_proj.weight",), **_ATTENTION,
            exists=lambda cfg: not cfg.q_lora_rank),
  Parameter("layers/mla/q_a", "D -> Cq", "embed whole",
            ("self_attn.q_a_proj.weight",), **_ATTENTION, **_Q_LORA),
  Parameter("layers/mla/q_a_norm/scale", "Cq", "whole",
            ("self_attn.q_a_layernorm.weight",), **_NORM, **_Q_LORA),
  Parameter("layers/mla/q_b", "Cq -> N H", "embed heads whole",
            ("self_attn.q_b_proj.weight",), **_ATTENTION, **_Q_LORA),
  Parameter("layers/mla/kv_a", "D -> Cr", "embed whole",
            ("self_attn.kv_a_proj_with_mqa.weight",), **_ATTENTION),
  Parameter("layers/mla/kv_a_norm/scale", "C", "whole",
            ("self_attn.kv_a_layernorm.weight",), **_NORM),
  Parameter("layers/mla/kv_b", "C -> N Hkv", "embed heads whole",
            ("self_attn.kv_b_proj.weight",), **_ATTENTION),
  Parameter("layers/mla/o", "N Ho -> D", "heads head_dim whole",
            ("self_attn.o_proj.weight",), **_ATTENTION),
  # As in the files, for PEFT's adapter of a linear layer has one A.
  Parameter("layers/delta_net/qkvz", "D -> G Xz", "embed heads whole",
            ("linear_attn.in_proj_qkvz.weight",), **_FUSED, **_ATTENTION),
  Parameter("layers/delta_net/ba", "D -> G 2R", "embed heads whole",
            ("linear_attn.in_proj_ba.weight",), **_FUSED, **_ATTENTION),
  Parameter("layers/delta_net/qkv", "D -> G X", "embed heads whole",
            ("linear_attn.in_proj_qkv.weight",),
            **_GROUPED, **_SEPARATE, **_ATTENTION),
  Parameter("layers/delta_net/z", "D -> M Hv", "embed heads whole",
            ("linear_attn.in_proj_z.weight",), **_SEPARATE, **_ATTENTION),
  Parameter("layers/delta_net/b", "D -> M", "embed heads",
            ("linear_attn.in_proj_b.weight",), **_SEPARATE, **_ATTENTION),
  Parameter("layers/delta_net/a", "D -> M", "embed heads",
            ("linear_attn.in_proj_a.weight",), **_SEPARATE, **_ATTENTION),
  Parameter("layers/delta_net/conv", "G X W", "heads whole whole",
            ("linear_attn.conv1d.weight",), init="convolution", **_GROUPED),
  Parameter("layers/delta_net/A_log", "M", "heads", ("linear_attn.A_log",),
            init="decay", float32=True),
  Parameter("layers/delta_net/dt_bias", "M", "heads", ("linear_attn.dt_bias",),
            init="ones", float32=True),
  Parameter("layers/delta_net/norm/scale", "Hv", "whole",
            ("linear_attn.norm.weight",), init="ones"),
  Parameter("layers/delta_net/o", "M Hv -> D", "heads head_dim whole",
            ("linear_attn.out_proj.weight",), **_ATTENTION),
  Parameter("layers/mlp_norm/scale", "D", "whole",
            ("post_attention_layernorm.weight",), **_NORM),
  Parameter("layers/mlp/gate", "D -> Fd", "embed mlp",
            ("mlp.gate_proj.weight",), **_MLP, **_GATE_UP),
  Parameter("layers/mlp/up", "D -> Fd", "embed mlp",
            ("mlp.up_proj.weight",), **_MLP, **_GATE_UP),
  Parameter("layers/mlp/down", "Fd -> D", "mlp embed",
            ("mlp.down_proj.weight",), **_MLP),
  # Neither LoRA nor Muon takes the router: its output is a choice.
  Parameter("layers/moe/router", "D -> E", "embed whole",
            ("mlp.gate.weight",), **_ROUTER,
            other_names={"mixtral": ("block_sparse_moe.gate.weight",),
                         "gpt_oss": ("mlp.router.weight",)}),
  Parameter("layers/moe/router_bias", "E", "whole", ("mlp.router.bias",),
            init="zeros", needs=("router_bias",), **_ROUTER),
  # State of pre-training: it has no gradient.
  Parameter("layers/moe/choice_bias", "E", "whole",
            ("mlp.gate.e_score_correction_bias",),
            init="zeros", needs=("choice_bias",), float32=True,
            other_names={
              "mixtral": ("block_sparse_moe.e_score_correction_bias",)}),
  # Gate and up side by side: one matmul, and no relayout on a TPU.
  Parameter("layers/moe/gate_up", "E | D -> 2F", "experts whole whole",
            ("mlp.experts.{e}.gate_proj.weight",
             "mlp.experts.{e}.up_proj.weight"), **_MLP,
            other_names={
              "mixtral": ("block_sparse_moe.experts.{e}.w1.weight",
                          "block_sparse_moe.experts.{e}.w3.weight"),
              "gpt_oss": ("mlp.experts.gate_up_proj",)}),
  Parameter("layers/moe/down", "E | F -> D", "experts whole whole",
            ("mlp.experts.{e}.down_proj.weight",), **_MLP,
            other_names={
              "mixtral": ("block_sparse_moe.experts.{e}.w2.weight",),
              "gpt_oss": ("mlp.experts.down_proj",)}),
  Parameter("layers/moe/gate_up_bias", "E | 2F", "experts whole",
            ("mlp.experts.gate_up_proj_bias",), **_EXPERT_BIAS),
  Parameter("layers/moe/down_bias", "E | D", "experts whole",
            ("mlp.experts.down_proj_bias",), **_EXPERT_BIAS),
  Parameter("layers/shared/gate", "D -> Fs", "embed mlp",
            **_shared_names("gate_proj"), **_MLP),
  Parameter("layers/shared/up", "D -> Fs", "embed mlp",
            **_shared_names("up_proj"), **_MLP),
  Parameter("layers/shared/down", "Fs -> D", "mlp embed",
            **_shared_names("down_proj"), **_MLP),
  Parameter("layers/shared/expert_gate", "D -> 1", "embed whole",
            ("mlp.shared_expert_gate.weight",), needs=("shared_gate",)),
  Parameter("final_norm/scale", "D", "whole", ("model.norm.weight",), **_NORM),
  Parameter("head", "D -> V", "table vocab", ("lm_head.weight",), init="width",
            exists=lambda cfg: not (cfg.tie_embeddings or cfg.classifier),
            unrounded=lambda cfg: cfg.float32_head),
  Parameter("score", "D -> 1", "whole whole", ("score.weight",), init="zeros",
            needs=("classifier",)),
  # A critic has it in place of the head.
  Parameter("value_head", "D ->", "whole", init="zeros",
            exists=lambda cfg: False),
)
# fmt: on

_ROWS = {
  row.end: row
  for parameter in TABLE
  for row in (parameter, *(parameter.adapters if parameter.target else ()))
}
# Names in a module that are never rounded.
FLOAT32 = {row.end.rpartition("/")[2] for row in TABLE if row.float32}
# The end of a path -> logical axes, for `sharding.state_shardings`.
AXES = {end: row.logical_axes for end, row in _ROWS.items()}


def find(path: str) -> Parameter:
  """The row of a parameter or an adapter; `path` may also be of a moment."""
  return sharding.rule(path, _ROWS)


def rows(cfg: ModelConfig) -> list[Parameter]:
  return [
    row
    for row in TABLE
    if row.layers(cfg)
    and all(getattr(cfg, field) for field in row.needs)
    and row.exists(cfg)
  ]


def adapted(cfg: ModelConfig) -> list[Parameter]:
  """The parameters that `cfg.lora` adapts, sorted by path."""
  if not cfg.lora:
    return []
  targets = {cfg.lora.targets} - {"all-linear"} or {"attention", "mlp"}
  chosen = [row for row in rows(cfg) if row.target in targets]
  return sorted(chosen, key=lambda row: row.path)


def shapes(cfg: ModelConfig) -> dict:
  """Abstract arrays of all parameters and of the adapters of `cfg.lora`."""
  adapters = [x for row in adapted(cfg) for x in row.adapters]
  leaves = {
    row.path: jax.ShapeDtypeStruct(row.stack_shape(cfg), jnp.float32)
    for row in (*rows(cfg), *adapters)
  }
  return sharding.tree_of_paths(leaves)


def shardings(shapes, mesh: jax.sharding.Mesh):
  """The shardings of parameters or adapters; errors as `sharding.spec`."""
  return sharding.state_shardings(shapes, mesh, AXES)


def cast(params, cfg: ModelConfig):
  """The parameters as a forward pass reads them: most are in `cfg.dtype`."""

  def one(keys, x):
    row = find(sharding.path_name(keys))
    return x if row.float32 or row.unrounded(cfg) else x.astype(cfg.dtype)

  return jax.tree.map_with_path(one, params)


def places(
  cfg: ModelConfig, layers: Sequence[Layer]
) -> list[tuple[Layer, dict[str, int]]]:
  """Each layer with its modules, and its place in the stack of each module."""
  # In the order of the table: a program must be the same in every process, or
  # the compilation cache does not have it.
  counts = dict.fromkeys((row.module for row in rows(cfg) if row.stacked), 0)
  found = []
  for layer in layers:
    own = [module for module in counts if cfg.has(layer, module)]
    found.append((layer, {module: counts[module] for module in own}))
    for module in own:
      counts[module] += 1
  return found


def at(layers: dict, places: dict[str, int]) -> dict:
  """The parameters of one layer, from the stacks of all modules."""
  return {
    module: jax.tree.map(lambda x, i=i: x[i], layers[module])
    for module, i in places.items()
  }


def map_layers(function: Callable[[dict], dict], layers: dict) -> dict:
  """`function` of the stacked modules, one layer at a time.

  It gets all modules at once that have equally many layers.
  """
  parts = {}
  for module, tree in layers.items():
    length = len(jax.tree.leaves(tree)[0])
    parts.setdefault(length, {})[module] = tree
  mapped = {}
  for modules in parts.values():
    mapped |= jax.lax.map(function, modules)
  return mapped


def partition_spec(end: str) -> jax.sharding.PartitionSpec:
  """The PartitionSpec of one layer's array, for a `shard_map`."""
  return sharding.partition_spec(_ROWS[end].axes.split())


def partition_specs(part: str, names: Iterable[str]) -> dict:
  """By name; the name of a norm stands for its scale."""
  ends = {name: f"{part}/{name}" for name in names}
  return {
    name: partition_spec(end if end in _ROWS else f"{end}/scale")
    for name, end in ends.items()
  }


class _Module(nn.Module):
  """Rows of the table as parameters of Flax, which makes the random keys."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self, tree):
    for name, x in tree.items():
      if isinstance(x, Parameter):
        self.param(name, x.initial, self.cfg)
      else:
        _Module(self.cfg, name=name)(x)


def initial_layers(keys_L, cfg: ModelConfig) -> dict:
  """Random parameters by module, of all layers that have it, stacked."""
  tree = sharding.tree_of_paths(
    {row.end: row for row in rows(cfg) if row.stacked}
  )

  def stack(module):
    init = lambda key: _Module(cfg).init(key, {module: tree[module]})
    return jax.vmap(init)(keys_L[jnp.array(cfg.layers_with(module))])

  return {module: stack(module)["params"][module] for module in tree}


def weights(module: dict, cfg: ModelConfig) -> dict:
  """A layer's parameters of one module by name; a norm stands for its scale.

  The B of an adapter is rounded to `cfg.dtype`, as for decoding, and multiplied
  by alpha / rank.
  """
  found = {}
  for name, x in module.items():
    if name.endswith(B):
      b = wide(x.astype(cfg.dtype))
      x = rounded(cfg.lora.scale * b, jnp.dtype(cfg.dtype))
    found[name] = x["scale"] if isinstance(x, dict) else x
  return found
