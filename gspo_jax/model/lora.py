"""Low-rank adapters: LoRA (Hu et al. 2021, arXiv 2106.09685), as in PEFT.

A frozen weight `W` acts as `W + alpha / rank * A B`. The frozen weights are the
base. The adapters are a second tree: `q_lora_a` and `q_lora_b` for a weight
`q`. `join` makes one tree of both, for `forward`.

Dimension key: L layers, E experts, r rank, A rows.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax.model import exact, grouped_matmul, parameters
from gspo_jax.model.config import LoraConfig, ModelConfig
from gspo_jax.model.parameters import A, B
from gspo_jax.model.rounding import rounded, wide
from gspo_jax.runtime import sharding


def is_adapter(path: str) -> bool:
  return path.endswith((A, B))


def init(key: jax.Array, cfg: ModelConfig) -> dict:
  """New float32 adapters: B is 0; A is uniform within 1 / sqrt(inputs)."""
  leaves = {}
  for i, row in enumerate(parameters.adapted(cfg)):
    a, b = row.adapters
    inputs = [a.shape(cfg)[axis] for axis in a.groups[1]]
    limit = math.prod(inputs) ** -0.5
    leaves[a.path] = jax.random.uniform(
      jax.random.fold_in(key, i),
      a.stack_shape(cfg),
      minval=-limit,
      maxval=limit,
    )
    leaves[b.path] = jnp.zeros(b.stack_shape(cfg))
  return sharding.tree_of_paths(leaves)


def join(base: dict, adapters: dict) -> dict:
  """Base and adapters as one tree for `forward`; no array is copied."""
  joined = dict(base)
  for name, x in adapters.items():
    joined[name] = join(base[name], x) if name in base else x
  return joined


def split(params: dict) -> tuple[dict, dict]:
  """The inverse of `join`."""
  leaves = sharding.leaves_by_path(params)
  parts = {path: x for path, x in leaves.items() if is_adapter(path)}
  base = {path: x for path, x in leaves.items() if path not in parts}
  return sharding.tree_of_paths(base), sharding.tree_of_paths(parts)


def merge(params: dict, lora: LoraConfig | None, dtype=None) -> dict:
  """The weights `W + alpha / rank * A B`, summed in float32, without adapters.

  Layers must be stacked. The sum is rounded once, to `dtype` or the base's
  dtype. bfloat16 loses changes below half a unit in the last place: 0.2 to
  0.4 % of W. If there are no adapters, it returns `params`.
  """
  base, adapters = split(params)
  if not adapters:
    return params
  # One layer at a time: the float32 sum of all layers would be large.
  one = functools.partial(merge_layer, lora=lora, dtype=dtype)
  whole = base | {"layers": parameters.map_layers(one, params["layers"])}
  return jax.tree.map(lambda x: x.astype(dtype), whole) if dtype else whole


def merge_layer(layer: dict, lora, dtype=None) -> dict:
  """`merge` of the modules of one layer."""
  leaves = sharding.leaves_by_path(layer)
  weights = {path: x for path, x in leaves.items() if not is_adapter(path)}
  for path, weight in weights.items():
    if path + A not in leaves:
      continue
    a, b = wide(leaves[path + A]), wide(leaves[path + B])
    product = lambda a, b: jnp.tensordot(a, b, 1, precision="highest")
    if parameters.find(path).groups[0]:  # a matrix for each expert
      product = jax.vmap(product)
    whole = wide(weight) + lora.scale * product(a, b)
    weights[path] = whole.astype(dtype or weight.dtype)
  return sharding.tree_of_paths(weights)


class Experts(NamedTuple):
  """One projection of the experts of a device."""

  weight: jax.Array  # [e, inputs, outputs]
  a: jax.Array | None = None  # [e, inputs, r], or None without an adapter
  b: jax.Array | None = None  # [e, r, outputs], or None
  bias: jax.Array | None = None  # [e, outputs], or None


def grouped_product(x_AD, experts: Experts, sizes_e, weights_A=None):
  """The products of `grouped_matmul.matmul`, of adapters too, and the bias.

  `weights_A` multiplies the bias, for rows that have their weight already.
  """
  cast = lambda w: w.astype(x_AD.dtype)
  y = grouped_matmul.matmul(x_AD, cast(experts.weight), sizes_e)
  if experts.a is not None:
    low = grouped_matmul.matmul(x_AD, cast(experts.a), sizes_e)
    delta = grouped_matmul.matmul(low, cast(experts.b), sizes_e)
    y = rounded(wide(y) + wide(delta), x_AD.dtype)
  if experts.bias is None:
    return y
  bias = cast(experts.bias)
  bias_AF = grouped_matmul.bias_of_rows(bias, sizes_e, len(x_AD))

  def add(y, bias_AF, weights_A):
    if weights_A is not None:
      bias_AF *= wide(weights_A)[:, None]
    return rounded(wide(y) + bias_AF, x_AD.dtype)

  return exact.chosen(add, axes=1)(y, bias_AF, weights_A)
