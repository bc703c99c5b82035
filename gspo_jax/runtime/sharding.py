"""The device mesh, and how arrays are sharded over it.

`RULES` maps each logical axis of an array to mesh axes. Samples are sharded by
rows over all axes but `tensor`. Rows of an update are sharded over `data`,
`fsdp` and `expert`; inside the model, tokens over `context`. XLA partitions
most of the program (axes of type Auto). What it partitions badly (experts,
attention kernels, the vocabulary) is a `shard_map`.
"""

import contextvars
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gspo_jax.runtime import tpus
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.key import ZERO_OR_MORE, key
from gspo_jax.runtime.multihost import by_process

Tree = TypeVar("Tree")  # of arrays, shapes or shardings
Array = jax.Array | np.ndarray  # on devices, or on the host before it is sent

AXES = ("data", "fsdp", "context", "expert", "tensor")
BATCH_AXES = ("data", "fsdp", "context", "expert")  # of samples
ROW_AXES = ("data", "fsdp", "expert")  # of an update
# Weights are split over these, and gathered where they are used.
WEIGHT_AXES = ("fsdp", "context")
# The specs of arrays [rows, ...] and [rows, tokens, ...] of an update.
ROWS = PartitionSpec(ROW_AXES)
TOKENS = PartitionSpec(ROW_AXES, "context")

# Logical axis -> mesh axes, the slowest-varying first.
RULES = {
  "layers": (),  # of a stack; an array of one layer has no such axis
  "whole": (),
  "vocab": ("tensor",),
  "table": (*WEIGHT_AXES, "expert"),  # the width of the embedding and the head
  "embed": WEIGHT_AXES,
  "heads": ("tensor",),
  "head_dim": WEIGHT_AXES,
  "mlp": ("tensor",),
  # Whole experts on each device: they are gathered along the expert axis.
  "experts": ("expert", "tensor", *WEIGHT_AXES),
}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices along each axis; `make_mesh` checks that they multiply to all."""

  data: int = key(-1, "replicas")
  fsdp: int = key(1, "parameters and rows are split")
  context: int = key(
    1,
    "parameters and the tokens of each row are split; the heads in attention",
  )
  expert: int = key(1, "experts and rows are split")
  tensor: int = key(1, "heads, hidden columns and vocabulary are split")


@dataclasses.dataclass(frozen=True)
class SamplerMeshConfig:
  """Devices of the sampler, and along two of its axes."""

  devices: int = key(
    0,
    "devices of the sampler's own, the last ones; the others train meanwhile. "
    "With several processes: half of all devices. 0: all devices sample and "
    "train in turns.",
    ZERO_OR_MORE,
  )
  expert: int = key(
    0, "devices among which experts and vocabulary are split", ZERO_OR_MORE
  )
  tensor: int = key(0, "devices among which heads are split, too", ZERO_OR_MORE)


def make_mesh(devices=None, **sizes: int) -> Mesh:
  """A mesh of all devices, or of `devices`, with the axes `AXES`.

  A size is 1 if absent; one axis may be -1, which takes the remaining devices.
  Neighbours in a TPU's mesh are neighbours in its torus. With several slices,
  each has a contiguous part of `data`.
  """
  devices = jax.devices() if devices is None else devices
  shape = [sizes.get(axis, 1) for axis in AXES]
  known = math.prod(n for n in shape if n != -1)
  if shape.count(-1) == 1 and known > 0 and len(devices) % known == 0:
    shape[shape.index(-1)] = len(devices) // known
  if min(shape) < 1 or math.prod(shape) != len(devices):
    part = len(devices) < len(devices[0].client.devices())
    raise UserError(
      f"mesh={dict(zip(AXES, shape, strict=True))} does not multiply to the "
      f"{len(devices)} devices"
      f"{' without those of sampler_mesh.devices' if part else ''}; give one "
      "axis -1 to take what is left"
    )
  return _mesh(_arrange(devices, shape))


def split_devices(sampler: int, devices=None) -> tuple[list, list]:
  """Splits devices into the trainer's and `sampler` devices of the sampler.

  A single process gives the sampler its last devices. Each of several processes
  gives the last half of its devices: so every process runs both programs, and
  weights move between two devices of one process.
  """
  devices = list(jax.devices() if devices is None else devices)
  if not sampler:
    return devices, []
  processes = by_process(devices)
  if len(processes) > 1:
    _require_halves(sampler, processes)
    trainer = [d for group in processes for d in group[: len(group) // 2]]
    return trainer, [d for group in processes for d in group[len(group) // 2 :]]
  if not 0 < sampler < len(devices):
    raise UserError(
      f"sampler_mesh.devices={sampler}: expected at most {len(devices) - 1} of "
      f"the {len(devices)} devices, for the others train; 0: all devices do "
      "both in turns"
    )
  return devices[:-sampler], devices[-sampler:]


def _require_halves(sampler, processes):
  devices = sum(map(len, processes))
  if sampler * 2 != devices or any(len(group) % 2 for group in processes):
    raise UserError(
      f"sampler_mesh.devices={sampler}: expected 0, or with {len(processes)} "
      f"processes half of the {devices} devices, an equal part of each process"
    )
  kind = processes[0][0].device_kind
  if not tpus.of_kind(kind).splits_hosts:
    raise UserError(
      f"sampler_mesh.devices={sampler}: expected 0 on several hosts of {kind}: "
      "its compiler (libtpu 0.0.51) crashes where a program has a part of the "
      "chips of each host"
    )


def beside(mesh: Mesh, devices) -> Mesh:
  """The same mesh, each device replaced by another of its process."""
  processes = by_process(mesh.devices.flat), by_process(devices)
  pairs = {}
  for old, new in zip(*processes, strict=True):
    pairs |= zip(old, new, strict=True)
  return _mesh(np.vectorize(pairs.get, otypes=[object])(mesh.devices))


def _mesh(grid: np.ndarray) -> Mesh:
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _arrange(devices, shape) -> np.ndarray:
  if devices[0].platform != "tpu":
    return np.asarray(devices).reshape(shape)
  devices = _without_gaps(devices)
  slices = len({d.slice_index for d in devices})
  if shape[0] % slices:
    raise UserError(
      f"mesh.data={shape[0]} is not a multiple of the {slices} slices; only "
      "`data` may cross slices, the other axes need the links inside one"
    )
  grid = mesh_utils.create_hybrid_device_mesh(
    (shape[0] // slices, *shape[1:]),
    (slices, 1, 1, 1, 1),
    devices,
    allow_split_physical_axes=True,
  )
  return np.vectorize(lambda placed: placed.device, otypes=[object])(grid)


class _Placed:
  """A device with other coordinates."""

  def __init__(self, device, coords):
    self.device, self.coords = device, coords
    self.slice_index = getattr(device, "slice_index", 0)

  def __getattr__(self, name):
    return getattr(self.device, name)


def _without_gaps(devices) -> list[_Placed]:
  """Gives devices coordinates without empty rows: JAX arranges whole boxes."""
  coords = np.array([d.coords for d in devices])
  for axis in coords.T:
    axis[:] = np.unique(axis, return_inverse=True)[1]
  return list(map(_Placed, devices, map(tuple, coords.tolist())))


def reshape_mesh(mesh: Mesh, *, expert: int, tensor: int) -> Mesh:
  """The same devices over `data`, `expert` and `tensor`, for decoding."""
  if mesh.size % (expert * tensor):
    raise UserError(
      f"sampler_mesh: {expert=} times {tensor=} does not divide the "
      f"{mesh.size} devices"
    )
  return _mesh(mesh.devices.reshape(-1, 1, 1, expert, tensor))


def rule(path: str, rules: Mapping[str, Any]) -> Any:
  """The value of the one rule whose key the path ends in, else ValueError.

  "attention/q" is a rule for "layers/attention/q" and for its moment
  "mu/layers/attention/q".
  """
  parts = path.split("/")
  ends = ("/".join(parts[i:]) for i in range(len(parts)))
  matching = {end: rules[end] for end in ends if end in rules}
  if len(matching) != 1:
    raise ValueError(f"{path}: expected one rule to match, got {matching}")
  return next(iter(matching.values()))


# End of a path -> logical axes; an array of one layer lacks the axis "layers".
LogicalAxes = Mapping[str, Sequence[str]]


def spec(
  path: str, shape: tuple[int, ...], mesh: Mesh, axes: LogicalAxes
) -> PartitionSpec:
  """The PartitionSpec of one array of the training state; scalars are whole.

  ValueError unless exactly one rule matches, with as many dimensions; UserError
  if the mesh axes do not divide a dimension.
  """
  if not shape:
    return PartitionSpec()
  names = rule(path, axes)
  if names[0] == "layers" and len(shape) == len(names) - 1:
    names = names[1:]
  if len(names) != len(shape):
    raise ValueError(f"{path} {shape}: expected the axes {names}")
  for name, size in zip(names, shape, strict=True):
    if size % math.prod(mesh.shape[axis] for axis in RULES[name]):
      raise UserError(
        f"{name}={size} of {path} {shape} is not divisible by "
        + " x ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in RULES[name])
      )
  return partition_spec(names)


def partition_spec(names: Sequence[str]) -> PartitionSpec:
  """The PartitionSpec of an array with these logical axes."""
  for i, name in enumerate(names):
    for other in names[:i]:
      if both := set(RULES[name]) & set(RULES[other]):
        raise ValueError(
          f"{names}: {sorted(both)} stands for {other} -> {RULES[other]} and "
          f"for {name} -> {RULES[name]}"
        )
  return PartitionSpec(*[RULES[name] for name in names])


def state_shardings(shapes, mesh: Mesh, axes: LogicalAxes):
  def place(keys, x):
    return NamedSharding(mesh, spec(path_name(keys), x.shape, mesh, axes))

  return jax.tree.map_with_path(place, shapes)


def path_name(keys) -> str:
  return jax.tree_util.keystr(keys, simple=True, separator="/")


def leaves_by_path(tree) -> dict[str, Any]:
  """The leaves of a pytree by their slash-joined paths."""
  return {path_name(keys): x for keys, x in jax.tree.leaves_with_path(tree)}


def tree_of_paths(leaves: dict[str, Any]) -> dict:
  """The inverse of `leaves_by_path`, for nested dicts."""
  tree = {}
  for path, leaf in leaves.items():
    *parents, name = path.split("/")
    subtree = tree
    for parent in parents:
      subtree = subtree.setdefault(parent, {})
    subtree[name] = leaf
  return tree


def batch_sharding(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def batch_shards(mesh: Mesh) -> int:
  """The number of parts into which `batch_sharding` splits a batch."""
  return mesh.size // mesh.shape["tensor"]


def row_shards(mesh: Mesh) -> int:
  """The number of parts into which `ROWS` splits the rows of an update."""
  return batch_shards(mesh) // mesh.shape["context"]


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def key_beside(rows: NamedSharding, key: jax.Array) -> jax.Array:
  """Copies every process's key to the devices of `rows`, for one `jax.jit`."""
  if not key.committed and key.sharding.device_set <= rows.device_set:
    return key
  copy = key.addressable_data(0)
  return jax.make_array_from_single_device_arrays(
    key.shape,
    replicated(rows.mesh),
    [jax.device_put(copy, d) for d in rows.mesh.local_devices],
  )


# The functions below are for code inside jit. They use the mesh of
# `jax.set_mesh`, and do nothing without a mesh or with one device.


def ambient():
  """The abstract mesh of the context, or None."""
  mesh = jax.sharding.get_abstract_mesh()
  return None if mesh.empty else mesh


def platform() -> str:
  """The platform of the mesh's devices, present or not; else the default."""
  return _device().platform


def device_kind() -> str:
  """The kind of the devices of `platform`, such as "TPU v5"."""
  return _device().device_kind


def cores() -> int:
  """TensorCores of a TPU device: 2 on v5p, and on v4 unless JAX splits it."""
  return getattr(_device(), "num_cores", None) or 1


def _device():
  mesh = ambient()
  return (mesh and mesh.abstract_device) or jax.devices()[0]


def size(*axes: str) -> int:
  """The number of devices along these mesh axes together."""
  mesh = ambient()
  axes = [axis for axis in axes if axis not in _apart.get()]
  return math.prod(mesh.shape[axis] for axis in axes) if mesh else 1


def is_local() -> bool:
  """Whether arrays are whole: on one device, or in the body of a shard_map."""
  return size(*AXES) == 1 or ambient().are_all_axes_manual


def constrain(tree, *axes):
  """Constrains the sharding of each leaf to `PartitionSpec(*axes)`."""
  if not _can_constrain():
    return tree
  spec = _inside(PartitionSpec(*axes))
  return jax.lax.with_sharding_constraint(tree, spec)


def constrain_state(tree, axes: LogicalAxes):
  """Constrains each leaf to its `spec`."""
  if not _can_constrain():
    return tree
  places = state_shardings(tree, ambient(), axes)
  return jax.lax.with_sharding_constraint(tree, places)


def _can_constrain() -> bool:
  """Whether there is a mesh, and this is not the body of a shard_map."""
  return ambient() is not None and not ambient().are_all_axes_manual


def shard_map(body: Callable, in_specs, out_specs) -> Callable:
  """`jax.shard_map` on the mesh of the context; `body` itself on one device."""
  if size(*AXES) == 1:
    return body
  return jax.shard_map(
    body,
    in_specs=_inside(in_specs),
    out_specs=_inside(out_specs),
    axis_names=set(AXES) - set(_apart.get()),
    check_vma=False,
  )


# Axes whose devices each run the body of a `sum_over_data` by themselves.
_apart = contextvars.ContextVar("apart", default=())


def sum_over_data(body: Callable, in_specs, row_specs) -> Callable:
  """A function whose devices along `data` first work apart, then add up.

  `body` returns (sums, rows). For the functions of this module its mesh has no
  `data`: what they sum and constrain is of one part. The result is the sums
  over all parts, by one all-reduce, and the rows, joined by `row_specs`. Specs
  have the axis `data` alone.
  """
  if size("data") == 1:
    return body

  def of_one_part(*args):
    token = _apart.set(("data",))
    try:
      sums, rows = body(*args)
    finally:
      _apart.reset(token)
    return jax.lax.psum(sums, "data"), rows

  return jax.shard_map(
    of_one_part,
    in_specs=in_specs,
    out_specs=(PartitionSpec(), row_specs),
    # A kernel takes no axis of type Auto, not even of one device.
    axis_names=set(AXES) if size(*AXES) == size("data") else {"data"},
    check_vma=False,
  )


def _inside(specs):
  """The specs without the axes that are apart."""
  apart = _apart.get()
  if not apart:
    return specs

  def together(axes):
    axes = axes if isinstance(axes, tuple) else (axes,)
    return tuple(axis for axis in axes if axis not in apart)

  return jax.tree.map(
    lambda spec: PartitionSpec(*map(together, spec)),
    specs,
    is_leaf=lambda x: isinstance(x, PartitionSpec),
  )


# Collectives for the body of a `shard_map`. An axis of one device is left out.
# The backward pass of `gather` sums gradients in the dtype of the gathered
# array: a model in bfloat16 sums gradients over the mesh axes in bfloat16.


def gather(x, *axes: str, dim: int):
  """Joins the shards of `x` along dimension `dim` (all-gather)."""
  axes = _larger_than_one(axes)
  if not axes:
    return x
  join = _gather_by_gloo if _uses_gloo() else _gather
  return join(x, axes, dim)


def _gather(x, axes, dim):
  return jax.lax.all_gather(x, axes, axis=dim, tiled=True)


_gather_by_gloo = jax.custom_vjp(_gather, nondiff_argnums=(1, 2))
_gather_by_gloo.defvjp(
  lambda x, axes, dim: (_gather(x, axes, dim), None),
  lambda axes, dim, _, dy: (scatter(dy, *axes, dim=dim),),
)


def scatter(x, *axes: str, dim: int):
  """Sums `x` over the axes; each device keeps one part of dimension `dim`."""
  axes = _larger_than_one(axes)
  if not axes:
    return x
  if _uses_gloo():
    part = x.shape[dim] // size(*axes)
    return jax.lax.dynamic_slice_in_dim(
      jax.lax.psum(x, axes), index(*axes) * part, part, dim
    )
  return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def _uses_gloo() -> bool:
  """Whether Gloo runs the collectives: jax.distributed on CPUs.

  Its reduce-scatter, also as the gradient of an all-gather, sometimes gives
  process 0 wrong numbers (github.com/jax-ml/jax/issues/40830; jaxlib 0.10.2). A
  sum of whole arrays is right, but sends more.
  """
  return platform() == "cpu" and jax.distributed.is_initialized()


def all_to_all(x, *axes: str, split: int, join: int):
  """Splits dimension `split` among the devices, and joins along `join`."""
  axes = _larger_than_one(axes)
  return jax.lax.all_to_all(x, axes, split, join, tiled=True) if axes else x


class Moves(NamedTuple):
  """Slices of arrays that go to other devices; see `exchange`.

  On a device all three are [n] int32.
  """

  sent: Array  # slices that this device offers
  # The offered slice to store, counted over all devices in their order.
  source: Array
  target: Array  # where to store it; beyond the array: it is dropped


def exchange(tree, moves: Moves, *axes: str, dim: int):
  """Stores slices of dimension `dim` that devices along the axes offer.

  Whoever sends to whom, each device passes on an equal part of every slice: two
  all-to-alls of n slices, in which no link waits for another.
  """
  axes, n = _larger_than_one(axes), len(moves.sent)
  devices = size(*axes)
  sources = gather(moves.source, *axes, dim=0)

  def of_leaf(x):
    offered = jnp.moveaxis(jnp.take(x, moves.sent, axis=dim), dim, 0)
    flat = offered.reshape(n, -1)
    flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % devices)))
    parts = all_to_all(flat, *axes, split=1, join=0)  # [devices * n, a part]
    stored = all_to_all(parts[sources], *axes, split=0, join=1)
    stored = stored[:, : offered[0].size].reshape(offered.shape)
    index = (*[slice(None)] * dim, moves.target)
    return x.at[index].set(jnp.moveaxis(stored, 0, dim), mode="drop")

  return jax.tree.map(of_leaf, tree)


def psum(x, *axes: str):
  axes = _larger_than_one(axes)
  return jax.lax.psum(x, axes) if axes else x


def pmax(x, *axes: str):
  axes = _larger_than_one(axes)
  return jax.lax.pmax(x, axes) if axes else x


def index(*axes: str):
  """The index of this device along the axes, the slowest-varying first."""
  axes = _larger_than_one(axes)
  return jax.lax.axis_index(axes) if axes else 0


def _larger_than_one(axes):
  return tuple(axis for axis in axes if size(axis) > 1)
