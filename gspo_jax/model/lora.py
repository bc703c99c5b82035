"""Low-rank adapters: LoRA (Hu et al. 2021, arXiv 2106.09685), of PEFT's form.

A frozen weight `W` acts as `W + alpha / rank * A B`. The weights are the base.
The adapters are a small tree of their own, with `q_lora_a` and `q_lora_b` for a
weight `q`. `join` puts both into one tree for `forward`. Given the base alone,
`forward` runs it without adapters.

Dimension key: L layers, E experts, r rank, R rows.
"""

import dataclasses
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax.model import grouped_matmul
from gspo_jax.model.rounding import rounded, wide
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.key import POSITIVE, ZERO_OR_MORE, Choice, check, key

A, B = "_lora_a", "_lora_b"

# Regular expression for the end of a weight's path -> its part of a block, and
# how many of its axes are: of experts, summed over, of the output. The router
# is not adapted: its output is a choice.
_ADAPTED = (
  (r"attention/[qkv]", "attention", (0, 1, 2)),
  (r"attention/o", "attention", (0, 2, 1)),
  (r"mlp/(gate|up|down)", "mlp", (0, 1, 1)),
  (r"moe/(gate_up|down)", "mlp", (1, 1, 1)),
)
TARGETS = ("attention", "mlp", "all-linear")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Which weights have adapters, and of which size.

  An expert has an A and a B of its own. Its gate and up share A, because they
  are one matrix here.
  """

  rank: int = key(
    0,
    "columns of A and rows of B; 0: no adapters, all weights are trained",
    ZERO_OR_MORE,
  )
  alpha: float = key(
    32.0, "alpha / rank multiplies what an adapter adds", POSITIVE
  )
  targets: str = key(
    "all-linear",
    '"attention" (q, k, v and o), "mlp" (gate, up and down of the MLP or of '
    'every expert), "all-linear": both',
    Choice(TARGETS),
  )
  checkpoint: str = key(
    "",
    'a PEFT folder with the first adapters; "": new ones, which change nothing '
    "yet",
  )

  def __post_init__(self):
    check(self, "model.lora")
    if self.checkpoint and not self.rank:
      raise UserError(
        f"model.lora.checkpoint={self.checkpoint!r}: expected '' with "
        "model.lora.rank=0, where there are no adapters"
      )

  @property
  def scale(self) -> float:
    """The factor of A B."""
    return self.alpha / self.rank


class Axes(NamedTuple):
  """How many axes of one layer's weight are of which kind, in this order."""

  experts: int
  inputs: int
  outputs: int


def axes(path: str) -> Axes | None:
  """The axes of a weight by its slash-joined path; None: it has no adapter."""
  return next((Axes(*n) for _, n in _rules(path)), None)


def _rules(path):
  return [
    (part, n) for end, part, n in _ADAPTED if re.search(f"(^|/){end}$", path)
  ]


def is_adapter(path: str) -> bool:
  """Whether the path of a leaf is that of an adapter."""
  return path.endswith((A, B))


def adapted(base: Any, lora: LoraConfig) -> dict[str, Any]:
  """The weights of a tree that have adapters, by their paths."""
  return {
    path: leaf
    for path, leaf in sharding.leaves_by_path(base).items()
    if any(lora.targets in (part, "all-linear") for part, _ in _rules(path))
  }


def adapter_shapes(path: str, weight: tuple[int, ...], rank: int):
  """The shapes of A and of B for one weight, which may have an axis of layers.

  Args:
    path: of the weight.
    weight: its shape: ([L,] [E,] *inputs, *outputs).
    rank: r.

  Returns:
    ([L,] [E,] *inputs, r) and ([L,] [E,] r, *outputs).
  """
  _, inputs, outputs = axes(path)
  lead = weight[: -inputs - outputs]
  return (
    (*lead, *weight[-inputs - outputs : -outputs], rank),
    (*lead, rank, *weight[-outputs:]),
  )


def init(key: jax.Array, base: dict, lora: LoraConfig) -> dict:
  """Adapters that change nothing yet: B is 0, A is random; both float32.

  A is uniform within 1 / sqrt(inputs), as in PEFT.

  Args:
    key: of A.
    base: weights, or their shapes.
    lora: the adapters; static.
  """
  leaves = {}
  for i, (path, weight) in enumerate(adapted(base, lora).items()):
    a, b = adapter_shapes(path, weight.shape, lora.rank)
    limit = math.prod(a[-1 - axes(path).inputs : -1]) ** -0.5
    leaves[path + A] = jax.random.uniform(
      jax.random.fold_in(key, i), a, minval=-limit, maxval=limit
    )
    leaves[path + B] = jnp.zeros(b)
  return sharding.tree_of_paths(leaves)


def join(base: dict, adapters: dict) -> dict:
  """One tree for `forward`; no array is copied."""
  joined = dict(base)
  for name, x in adapters.items():
    joined[name] = join(base[name], x) if name in base else x
  return joined


def split(params: dict) -> tuple[dict, dict]:
  """The base and the adapters of a tree that `join` made."""
  leaves = sharding.leaves_by_path(params)
  parts = {path: x for path, x in leaves.items() if is_adapter(path)}
  base = {path: x for path, x in leaves.items() if path not in parts}
  return sharding.tree_of_paths(base), sharding.tree_of_paths(parts)


def merge(params: dict, lora: LoraConfig | None, dtype=None) -> dict:
  """The weights `W + alpha / rank * A B`, without adapters.

  The sum is in float32 and is rounded once. In bfloat16 this loses what is
  smaller than half a unit in the last place of W, 0.2 to 0.4 % of W.

  Args:
    params: from `join`, with stacked layers; without adapters it is returned as
      it is.
    lora: the adapters; static.
    dtype: of the result; None: that of the base.
  """
  base, adapters = split(params)
  if not adapters:
    return params

  def merged(layer):
    leaves = sharding.leaves_by_path(layer)
    weights = {
      path: _merge_one(path, leaves, lora.scale, dtype)
      if path + A in leaves
      else x
      for path, x in leaves.items()
      if not is_adapter(path)
    }
    return sharding.tree_of_paths(weights)

  # One layer at a time: the float32 sum of all layers would be large.
  whole = base | {"layers": jax.lax.map(merged, params["layers"])}
  return jax.tree.map(lambda x: x.astype(dtype or x.dtype), whole)


def _merge_one(path, leaves, scale, dtype):
  weight, a, b = (leaves[path + end] for end in ("", A, B))
  product = lambda a, b: jnp.tensordot(a, b, 1, precision="highest")
  if axes(path).experts:
    product = jax.vmap(product)
  whole = wide(weight) + scale * product(wide(a), wide(b))
  return whole.astype(dtype or weight.dtype)


def of_module(module, names, cfg) -> dict:
  """The adapters of these weights that a Flax module was given, by name.

  B is multiplied by alpha / rank, so that what follows needs no factor. It is
  rounded to `cfg.dtype` before, as in the weights for decoding.
  """
  found = {}
  for name in names:
    if module.has_variable("params", name + A):
      found[name + A] = module.get_variable("params", name + A)
      b = wide(module.get_variable("params", name + B).astype(cfg.dtype))
      found[name + B] = rounded(cfg.lora.scale * b, jnp.dtype(cfg.dtype))
  return found


class Experts(NamedTuple):
  """One projection of the experts of a device.

  Attributes:
    weight: [e, inputs, outputs].
    a: [e, inputs, r], or None without an adapter.
    b: [e, r, outputs], or None.
  """

  weight: jax.Array
  a: jax.Array | None = None
  b: jax.Array | None = None


def grouped_product(x_RD, experts: Experts, sizes_e):
  """`grouped_matmul.matmul` with the adapters of each group added."""
  cast = lambda w: w.astype(x_RD.dtype)
  y = grouped_matmul.matmul(x_RD, cast(experts.weight), sizes_e)
  if experts.a is None:
    return y
  low = grouped_matmul.matmul(x_RD, cast(experts.a), sizes_e)
  delta = grouped_matmul.matmul(low, cast(experts.b), sizes_e)
  return rounded(wide(y) + wide(delta), x_RD.dtype)
