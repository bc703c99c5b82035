"""How everything is laid over the devices: one mesh, one table.

A parameter's path gives logical axes, and a logical axis gives a mesh axis.
Rows of a batch lie over `data`, `fsdp` and `expert` together. Axis types are
Auto: XLA partitions the functions, the table only says where arrays live.
"""

import math
import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gspo_jax.errors import UserError

AXES = ("data", "fsdp", "expert", "tensor")
ROWS = ("data", "fsdp", "expert")

# logical axis -> mesh axis
LOGICAL = {
  "layer": None,
  "scale": None,
  "routes": None,
  "head": None,
  "vocab": "tensor",
  "embed": "fsdp",
  "heads": "tensor",
  "mlp": "tensor",
  "expert": "expert",
}

# end of the parameter's path -> logical axes
TABLE = (
  (r"embed", ("vocab", "embed")),
  (r"head", ("embed", "vocab")),
  (r"final_norm/scale", ("scale",)),
  (r"layers/(attention|mlp)_norm/scale", ("layer", "scale")),
  (r"layers/attention/[qk]_norm/scale", ("layer", "scale")),
  (r"layers/attention/[qkv]", ("layer", "embed", "heads", "head")),
  (r"layers/attention/o", ("layer", "heads", "head", "embed")),
  (r"layers/mlp/(gate|up)", ("layer", "embed", "mlp")),
  (r"layers/mlp/down", ("layer", "mlp", "embed")),
  (r"layers/moe/router", ("layer", "embed", "routes")),
  (r"layers/moe/gate_up", ("layer", "expert", "embed", "mlp")),
  (r"layers/moe/down", ("layer", "expert", "mlp", "embed")),
)


def make_mesh(devices=None, **sizes: int) -> Mesh:
  """A mesh with the axes `AXES`; an absent size is 1, and one may be -1.

  Args:
    devices: those to use; all by default.
    **sizes: devices along each axis; -1 takes what the others leave.

  Raises:
    UserError: the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  shape = [sizes.get(axis, 1) for axis in AXES]
  known = math.prod(n for n in shape if n != -1)
  if shape.count(-1) == 1 and known > 0 and len(devices) % known == 0:
    shape[shape.index(-1)] = len(devices) // known
  if min(shape) < 1 or math.prod(shape) != len(devices):
    raise UserError(
      f"mesh={dict(zip(AXES, shape, strict=True))} does not multiply to the "
      f"{len(devices)} devices here; give one axis -1 to take what is left"
    )
  grid = np.asarray(devices).reshape(shape)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  """Where one array of the training state lives.

  Args:
    path: slash-joined; moments of the optimizer end in their parameter's path.
    shape: of the array; scalars are replicated.
    mesh: from `make_mesh`.

  Raises:
    ValueError: no rule matches the path, or more than one.
    UserError: a dimension is not divisible by its mesh axis.
  """
  if not shape:
    return PartitionSpec()
  rules = [r for r in TABLE if re.search(f"(^|/){r[0]}$", path)]
  if len(rules) != 1 or len(rules[0][1]) != len(shape):
    raise ValueError(f"{path} {shape}: expected one rule to match, got {rules}")
  logical = rules[0][1]
  axes = [LOGICAL[name] for name in logical]
  for name, axis, size in zip(logical, axes, shape, strict=True):
    if axis and size % mesh.shape[axis]:
      raise UserError(
        f"mesh.{axis}={mesh.shape[axis]} does not divide {name}={size} of "
        f"{path} {shape}"
      )
  return PartitionSpec(*axes)


def state_shardings(shapes, mesh: Mesh):
  """The tree of shardings for a tree of shapes: a state, or parameters."""

  def place(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return NamedSharding(mesh, spec(name, leaf.shape, mesh))

  return jax.tree.map_with_path(place, shapes)


def rows(mesh: Mesh) -> NamedSharding:
  """Batches: the first axis over all of `ROWS`."""
  return NamedSharding(mesh, PartitionSpec(ROWS))


def everywhere(mesh: Mesh) -> NamedSharding:
  """A copy on every device."""
  return NamedSharding(mesh, PartitionSpec())


def constrain_rows(tree, axis: int):
  """Inside jit, under `jax.set_mesh`: lays axis `axis` of each leaf over rows.

  Without a mesh it does nothing.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return tree
  lay = PartitionSpec(*[None] * axis, ROWS)
  return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, lay), tree)
