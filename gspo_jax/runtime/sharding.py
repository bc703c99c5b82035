"""How everything is laid over the devices: one mesh, one table.

A parameter's path gives logical axes, and a logical axis gives mesh axes. Rows
of a batch lie over `data`, `fsdp` and `expert` together. Axis types are Auto:
XLA partitions what is simple, and what it partitions badly (experts, attention
kernels, the vocabulary) is an `island`: a shard_map with collectives by hand.
"""

import dataclasses
import math
import re
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gspo_jax.runtime.errors import UserError

AXES = ("data", "fsdp", "expert", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")

# logical axis -> mesh axes, the slowest first
LOGICAL = {
  "whole": (),
  "vocab": ("tensor",),
  "table": ("fsdp", "expert"),  # the model's width in embedding and head
  "embed": ("fsdp",),
  "heads": ("tensor",),
  "head_dim": ("fsdp",),
  "mlp": ("tensor",),
  # Whole experts on each device: `fsdp` gathers them along their first axis.
  "expert": ("expert", "tensor", "fsdp"),
}

# end of the parameter's path -> logical axes; a stack of layers has one more,
# whole, in front
TABLE = (
  (r"embed", ("vocab", "table")),
  (r"head", ("table", "vocab")),
  (r"value_head", ("whole",)),
  (r"(final|attention|mlp|q|k)_norm/scale", ("whole",)),
  (r"attention/[qkv]", ("embed", "heads", "whole")),
  (r"attention/[qkv]_bias", ("heads", "head_dim")),
  (r"attention/o", ("heads", "head_dim", "whole")),
  (r"mlp/(gate|up)", ("embed", "mlp")),
  (r"mlp/down", ("mlp", "embed")),
  (r"moe/router", ("embed", "whole")),
  (r"moe/gate_up", ("expert", "whole", "whole")),
  (r"moe/down", ("expert", "whole", "whole")),
)


def make_mesh(devices=None, **sizes: int) -> Mesh:
  """A mesh with the axes `AXES`; an absent size is 1, and one may be -1.

  TPU devices are put where neighbours in the mesh are neighbours in the torus;
  of several slices, each holds a contiguous part of `data`.

  Args:
    devices: those to use; all by default.
    **sizes: devices along each axis; -1 takes what the others leave.

  Raises:
    UserError: the sizes do not multiply to the number of devices, or `data`
      is not a multiple of the slices.
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
  return _mesh(_arrange(devices, shape))


def _mesh(grid: np.ndarray) -> Mesh:
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _arrange(devices, shape) -> np.ndarray:
  if devices[0].platform != "tpu":
    return np.asarray(devices).reshape(shape)
  slices = len({getattr(d, "slice_index", 0) for d in devices})
  if shape[0] % slices:
    raise UserError(
      f"mesh.data={shape[0]} is not a multiple of the {slices} slices; the "
      "other axes need the links inside a slice"
    )
  within = (shape[0] // slices, *shape[1:])
  if slices == 1:
    return mesh_utils.create_device_mesh(
      within, devices, allow_split_physical_axes=True
    )
  return mesh_utils.create_hybrid_device_mesh(
    within, (slices, 1, 1, 1), devices, allow_split_physical_axes=True
  )


def reshape_mesh(mesh: Mesh, *, expert: int, tensor: int) -> Mesh:
  """The same devices in the same order, none on `fsdp`: for decoding.

  Raises:
    UserError: `expert` times `tensor` does not divide the devices.
  """
  if mesh.size % (expert * tensor):
    raise UserError(
      f"sampler_mesh: {expert=} times {tensor=} does not divide the "
      f"{mesh.size} devices"
    )
  return _mesh(mesh.devices.reshape(-1, 1, expert, tensor))


def spec(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  """Where one array of the training state lives.

  Args:
    path: slash-joined; moments of the optimizer end in their parameter's path.
    shape: of the array; scalars are replicated.
    mesh: from `make_mesh`.

  Raises:
    ValueError: no rule matches the path, or more than one, or the rule gives
      one mesh axis to two dimensions.
    UserError: a dimension is not divisible by its mesh axes.
  """
  if not shape:
    return PartitionSpec()
  rules = [r for r in TABLE if re.search(f"(^|/){r[0]}$", path)]
  stacked = len(shape) - len(rules[0][1]) if len(rules) == 1 else -1
  if stacked not in (0, 1) or (stacked and "layers/" not in path):
    raise ValueError(f"{path} {shape}: expected one rule to match, got {rules}")
  names = ("whole",) * stacked + rules[0][1]
  axes = [LOGICAL[name] for name in names]
  _require_disjoint(path, names, axes)
  for name, over, size in zip(names, axes, shape, strict=True):
    if size % math.prod(mesh.shape[axis] for axis in over):
      raise UserError(
        f"{name}={size} of {path} {shape} is not divisible by "
        + " x ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in over)
      )
  return PartitionSpec(*[_entry(over) for over in axes])


def _entry(over: tuple[str, ...]):
  return over if len(over) > 1 else over[0] if over else None


def _require_disjoint(path, names, axes):
  for i, over in enumerate(axes):
    for j in range(i):
      if both := set(over) & set(axes[j]):
        raise ValueError(
          f"{path}: {sorted(both)} stands for {names[j]} -> {axes[j]} and for "
          f"{names[i]} -> {over}"
        )


def state_shardings(shapes, mesh: Mesh):
  """The tree of shardings for a tree of shapes: a state, or parameters."""

  def place(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return NamedSharding(mesh, spec(name, leaf.shape, mesh))

  return jax.tree.map_with_path(place, shapes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Batches: the first axis over all of `BATCH_AXES`."""
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def batch_shards(mesh: Mesh) -> int:
  """D, parts of a mesh's devices that have rows of their own."""
  return mesh.size // mesh.shape["tensor"]


def replicated(mesh: Mesh) -> NamedSharding:
  """A copy on every device."""
  return NamedSharding(mesh, PartitionSpec())


# What follows works inside jit, on the mesh of `jax.set_mesh`; with none, or
# one device, it does nothing.


def ambient():
  """The mesh of the context, abstract; None without one."""
  mesh = jax.sharding.get_abstract_mesh()
  return None if mesh.empty else mesh


def platform() -> str:
  """That of the mesh, which may be one to compile for; else of the backend."""
  mesh = ambient()
  device = mesh.abstract_device if mesh else None
  return device.platform if device else jax.default_backend()


def size(*axes: str) -> int:
  """Devices along these axes together."""
  mesh = ambient()
  return math.prod(mesh.shape[axis] for axis in axes) if mesh else 1


def constrain(tree, *over):
  """Lays the axes of each leaf over mesh axes, as in a PartitionSpec."""
  if not ambient():
    return tree
  lay = PartitionSpec(*over)
  return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, lay), tree)


def constrain_batch(tree, axis: int):
  """Lays axis `axis` of each leaf over rows."""
  return constrain(tree, *[None] * axis, BATCH_AXES)


def constrain_state(tree):
  """Lays parameters, or what has their paths, as the table says."""
  mesh = ambient()
  if not mesh:
    return tree

  def place(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return jax.lax.with_sharding_constraint(leaf, spec(name, leaf.shape, mesh))

  return jax.tree.map_with_path(place, tree)


def shard_map(body: Callable, in_specs, out_specs) -> Callable:
  """`body` on each device's own part of the arrays: a shard_map."""
  if size(*AXES) == 1:
    return body
  return jax.shard_map(
    body, in_specs=in_specs, out_specs=out_specs, check_vma=False
  )


def param_spec(path: str) -> PartitionSpec:
  """Where the array at the end of this path lives, of one layer."""
  (names,) = [names for end, names in TABLE if re.fullmatch(end, path)]
  return PartitionSpec(*[_entry(LOGICAL[name]) for name in names])


# Inside an island; an axis of one device, or none, costs nothing. The sum that
# undoes a `gather` in the backward pass is in the type of what was gathered: of
# weights, the model's, so gradients are summed over `fsdp` in 16 bits where the
# model computes in them, and over the other axes, too.


def gather(x, *over: str, dim: int):
  """The parts of `x` on all devices of these axes, joined along `dim`."""
  over = _shared(over)
  return jax.lax.all_gather(x, over, axis=dim, tiled=True) if over else x


def scatter(x, *over: str, dim: int):
  """The sum of `x` over these axes, of which each device keeps its part."""
  over = _shared(over)
  if not over:
    return x
  return jax.lax.psum_scatter(x, over, scatter_dimension=dim, tiled=True)


def all_to_all(x, *over: str, split: int, join: int):
  """Each device gives away parts of `split` and joins parts along `join`."""
  over = _shared(over)
  return jax.lax.all_to_all(x, over, split, join, tiled=True) if over else x


def psum(x, *over: str):
  """The sum over these axes."""
  over = _shared(over)
  return jax.lax.psum(x, over) if over else x


def pmax(x, *over: str):
  """The maximum over these axes."""
  over = _shared(over)
  return jax.lax.pmax(x, over) if over else x


def index(*over: str):
  """This device's place among those of these axes."""
  over = _shared(over)
  return jax.lax.axis_index(over) if over else 0


def _shared(axes):
  return tuple(axis for axis in axes if size(axis) > 1)


@dataclasses.dataclass(frozen=True)
class MeshJit:
  """A jitted function that is traced and called in the context of a mesh."""

  jitted: Callable
  mesh: jax.sharding.Mesh

  def __call__(self, *args):
    with jax.set_mesh(self.mesh):
      return self.jitted(*args)

  def lower(self, *args):
    """For ahead-of-time compilation; arguments may be shapes."""
    with jax.set_mesh(self.mesh):
      return self.jitted.lower(*args)
