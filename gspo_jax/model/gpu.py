"""Kernels for NVIDIA GPUs: tokamax's, from compute capability 8.0 on.

On Hopper, tokamax's Mosaic kernels where they support the operands, else its
Triton kernels. Older GPUs, such as a T4, have neither.

Dimension key: B rows, T tokens, N query heads, K key-value heads, H head width,
V width of a value head, A sorted rows, e groups, D and F widths.
"""

import contextlib
import functools
import logging

import jax
import jax.numpy as jnp
from absl import flags
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import triton
from jax.extend import backend

from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import needs_extra

_LEAST_TILE = 16  # rows and columns that tensor cores multiply
# Of the gradient of a group's matrix: its rows and columns, and the rows of a
# step. Three steps of 16-bit numbers are loaded at a time: 48 KiB.
_TILE, _ROWS = 128, 32
_MOSAIC_TILE = 128  # queries
# Keys of a block of tokamax 0.0.12's gradient. In a row whose length is a
# multiple of 16 but not of 64 its last block reads queries beyond the row.
_KEY_BLOCK = 64
# Compute capabilities with at least 163 KiB for a block, after the CUDA C++
# Programming Guide.
_MUCH_SHARED_MEMORY = (8.0, 8.7, 9.0, 10.0, 10.3)


def has_kernels() -> bool:
  """Whether the mesh's devices are GPUs that Triton compiles for."""
  return sharding.platform() == "gpu" and _capability() >= 8


def _capability() -> float:
  """The compute capability; of an absent GPU if it is the default device."""
  return float(backend.get_default_device().compute_capability)


def _has_mosaic() -> bool:
  """Whether the GPU is a Hopper, the only one that they were compiled for."""
  return _capability() == 9.0


def fills_tiles(*sizes: int) -> bool:
  """Whether Triton can load tiles of these sizes."""
  return all(n >= _LEAST_TILE and n & (n - 1) == 0 for n in sizes)


def has_attention(dtype, head_dim: int, v_head_dim: int) -> bool:
  """Whether `attend` takes heads of these widths.

  Triton pads a width to a power of two. Compiled for 8.9, keys and values of
  more than 384 columns together exceed its 99 KiB of shared memory.
  """
  narrow = min(head_dim, v_head_dim) < _LEAST_TILE
  if dtype == jnp.float32 or narrow or not has_kernels():
    return False
  columns = sum(pl.next_power_of_2(n) for n in (head_dim, v_head_dim))
  return columns <= 384 or _capability() in _MUCH_SHARED_MEMORY


def attend(q_BTNH, k_BTKH, v_BTKV, segments_BT, window, scale: float):
  """`attention.attend`, without the blocks of keys that no query sees.

  A segment is a run of tokens: equal numbers apart are two segments.
  """
  _prepare()
  from tokamax._src.ops.attention import api, base

  T = q_BTNH.shape[1]
  token_T = jnp.arange(T)
  is_first_BT = jnp.diff(segments_BT, prepend=segments_BT[:, :1]) != 0
  first_BT = jax.lax.cummax(jnp.where(is_first_BT, token_T, 0), axis=1)
  if window is not None:
    first_BT = jnp.maximum(first_BT, token_T - window + 1)
  pad = lambda x: jnp.pad(x, [(0, 0), (0, -T % _KEY_BLOCK)] + [(0, 0)] * 2)
  q_BTNH, k_BTKH, v_BTKV = map(pad, (q_BTNH, k_BTKH, v_BTKV))
  first_BT = jnp.pad(first_BT, ((0, 0), (0, -T % _KEY_BLOCK)), mode="edge")
  # The public function has no first keys, from which whole blocks are skipped.
  mask = base.Mask(k_start=first_BT[:, None], is_causal=True)
  # Mosaic reads first keys for a whole tile of queries.
  use_mosaic = _has_mosaic() and q_BTNH.shape[1] % _MOSAIC_TILE == 0
  kernel = api.IMPLEMENTATIONS["mosaic_gpu" if use_mosaic else "triton"]
  out_BTNV = kernel(q_BTNH, k_BTKH, v_BTKV, mask=mask, logits_scale=scale)
  return out_BTNV[:, :T]


@jax.custom_vjp
def grouped_matmul(x_AD, weights_eDF, sizes_e):
  """`grouped_matmul.matmul`; products of float32 numbers are TensorFloat-32."""
  tokamax = _prepare()
  # Mosaic's copies take whole lines of 128 bytes, so no adapters of rank 8, and
  # eight rows at a time.
  whole = all(n % 64 == 0 for n in weights_eDF.shape[1:]) and len(x_AD) % 8 == 0
  use_mosaic = _has_mosaic() and whole
  kernels = ("mosaic", "triton") if use_mosaic else ("triton",)
  return tokamax.ragged_dot(x_AD, weights_eDF, sizes_e, implementation=kernels)


def _backward(operands, dy_AF):
  x_AD, weights_eDF, sizes_e = operands
  # Else XLA would keep a transposed copy of the matrices of all layers.
  by_rows = Layout(major_to_minor=(0, 1, 2))
  weights_eDF = with_layout_constraint(weights_eDF, by_rows)
  dx_AD = grouped_matmul(dy_AF, weights_eDF.mT, sizes_e)
  return dx_AD, _weight_gradient(x_AD, dy_AF, sizes_e), None


grouped_matmul.defvjp(
  lambda *operands: (grouped_matmul(*operands), operands), _backward
)


def _weight_gradient(x_AD, dy_AF, sizes_e):
  """[e, D, F]. That of tokamax 0.0.12 is not zero for an empty group."""
  D, F = x_AD.shape[1], dy_AF.shape[1]
  ends_e = jnp.cumsum(sizes_e)
  dtype = jnp.promote_types(x_AD.dtype, dy_AF.dtype)

  def kernel(x_ref, dy_ref, starts_ref, ends_ref, out_ref):
    group, i, j = (pl.program_id(axis) for axis in range(3))
    start, end = starts_ref[group], ends_ref[group]

    def load(ref, row, column):
      rows, columns = row + jnp.arange(_ROWS), column + jnp.arange(_TILE)
      inside = (rows < end)[:, None] & (columns < ref.shape[1])
      tile = ref.at[pl.ds(row, _ROWS), pl.ds(column, _TILE)]
      return triton.load(tile, mask=inside, other=0)

    def add(step, total):
      row = start + step * _ROWS
      x, dy = load(x_ref, row, i * _TILE), load(dy_ref, row, j * _TILE)
      return total + triton.dot(x.T, dy)

    steps = pl.cdiv(end - start, _ROWS)
    total = jnp.zeros((_TILE, _TILE), jnp.float32)
    total = jax.lax.fori_loop(0, steps, add, total)
    rows, columns = (k * _TILE + jnp.arange(_TILE) for k in (i, j))
    inside = (rows < D)[:, None] & (columns < F)
    triton.store(out_ref, total.astype(dtype), mask=inside)

  whole = pl.no_block_spec
  return pl.pallas_call(
    kernel,
    grid=(len(sizes_e), pl.cdiv(D, _TILE), pl.cdiv(F, _TILE)),
    in_specs=[whole] * 4,
    out_specs=pl.BlockSpec((None, _TILE, _TILE), lambda e, i, j: (e, i, j)),
    out_shape=jax.ShapeDtypeStruct((len(sizes_e), D, F), dtype),
    compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
    name="grouped_weight_gradient",
  )(x_AD, dy_AF, ends_e - sizes_e, ends_e)


@functools.cache
def _prepare(extra: str = "gpu", user: str = "a GPU"):
  """The module tokamax; without it a UserError that `user` needs `extra`."""
  with needs_extra(extra, user):
    import tokamax
  # tokamax parses the command line, but that of a notebook has no flags.
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  # It warns of each shape for which it has no measured tiles.
  logging.getLogger("absl").addFilter(
    lambda record: "Autotuning cache miss" not in str(record.msg)
  )
  return tokamax


@contextlib.contextmanager
def for_absent(device: jax.Device):
  """Traces kernels for `device`: they ask the default one what it can do."""
  if device.platform != "gpu":
    yield
    return
  tokamax = _prepare("plan-gpu", "a plan for GPUs")
  with jax.default_device(device), tokamax.config.cross_compile(True):
    yield
