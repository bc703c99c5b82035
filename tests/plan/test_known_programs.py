"""FLOPs, HBM bytes and bytes sent of programs that are known by construction.

Each is compiled by libtpu for four devices of each kind of chip. Arrays are
larger than the compiler keeps in fast memory, or are used only once. What
`besides` lists was read from the text that libtpu 0.0.51 compiled.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import absent_devices, needs_libtpu
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspo_jax.plan import chips, hlo
from gspo_jax.plan import compile as plan_compile

pytestmark = needs_libtpu

SLICES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x1x1")
NARROW, WIDE, WHOLE = jnp.bfloat16, jnp.float32, jnp.int32
MB = 2**20


class Known(NamedTuple):
  """A program and its cost on each of four devices."""

  function: Callable  # of arrays, per device
  arrays: tuple  # (shape, dtype) of each whole argument
  flops: float = 0.0  # of matrix products
  hbm: float = 0.0  # bytes read from and written to HBM
  wire: float = 0.0  # bytes sent
  split: bool = False  # whether the arguments are split over the devices
  result: bool = False  # whether the result is
  donated: tuple[int, ...] = ()  # arguments whose memory the result takes
  # Bytes of HBM that the compiler moves besides, by the kind of chip.
  besides: dict[str, float] = {}  # noqa: RUF012


PROGRAMS = {}


def known(*arrays, **cost):
  def add(function):
    PROGRAMS[function.__name__] = Known(function, arrays, **cost)
    return function

  return add


# Matrix products.


@known(
  ((4096, 2048), NARROW),
  ((2048, 8192), NARROW),
  flops=2 * 4096 * 2048 * 8192,
  hbm=2 * (4096 * 2048 + 2048 * 8192 + 4096 * 8192),
)
def product(a, b):
  return a @ b


@known(
  ((16, 1024, 512), NARROW),
  ((16, 512, 2048), NARROW),
  flops=2 * 16 * 1024 * 512 * 2048,
  hbm=2 * 16 * (1024 * 512 + 512 * 2048 + 1024 * 2048),
)
def batched_product(a, b):
  return jnp.einsum("nij,njk->nik", a, b)


@known(
  ((8192, 512), NARROW),
  ((512, 16384), NARROW),
  ((8192, 16384), NARROW),
  flops=2 * 2 * 8192 * 512 * 16384,
  hbm=2 * (2 * (8192 + 16384) * 512 + 2 * 8192 * 16384),
)
def gradients_of_a_product(a, b, dc):
  """Both read `dc`, which is larger than what is kept."""
  return jax.vjp(jnp.matmul, a, b)[1](dc)


@known(
  ((16, 2048), NARROW),
  ((24, 2048, 2048), NARROW),
  flops=24 * 2 * 16 * 2048**2,
  hbm=2 * 24 * 2048**2,
  besides={"tpu7x": 2 * 2 * 24 * 2048**2},
)
def scan_of_products(x, weights):
  """tpu7x first copies a stack of bfloat16 into another layout."""
  return lax.scan(lambda x, w: (x @ w, None), x, weights)[0]


# Element-wise, and moves.


@known(((4 * 64 * MB,), WIDE), hbm=2 * 4 * 64 * MB, split=True, result=True)
def elementwise(a):
  return a * 2 + 1


@known(((64, MB), WIDE), hbm=4 * 65 * MB)
def reduction(a):
  return a.sum(0)


@known(((8192, 8192), WIDE), hbm=2 * 4 * 64 * MB)
def transpose(a):
  return a.T


# Stacks of layers: a slice is read or written in each trip, not the stack.

STACK = ((48, 2048, 1024), WIDE)
LAYER = 4 * 2 * MB


@known(STACK, ((1024,), WIDE), hbm=LAYER * 2 * 48, donated=(0,))
def update_of_a_stack(stack, x):
  def body(n, stack):
    return stack.at[n].set(stack[n] * 2 + x)

  return lax.fori_loop(0, 48, body, stack)


@known(((2048, 1024), WIDE), hbm=LAYER * (48 + 1))
def stacked_results(x):
  def body(x, _):
    return x + 1, x * 2

  return lax.scan(body, x, None, length=48)[1]


@known(((2048, 1024), NARROW), hbm=LAYER * (48 + 1 / 2))
def stacked_results_of_another_type(x):
  def body(x, _):
    x = x + 1
    return x, x.astype(WIDE)

  return lax.scan(body, x, None, length=48)[1]


@known(
  ((16, 2048), NARROW),
  ((24, 2048, 2048), NARROW),
  # forward, and two products of the backward pass
  flops=3 * 24 * 2 * 16 * 2048**2,
  # The weights twice, and their gradients: zeros before the loop.
  hbm=2 * 24 * 2048**2 * 4,
  besides={"tpu7x": 2 * 24 * 2048**2 * 3 * 2},
)
def gradient_of_a_scan(x, weights):
  """On tpu7x three stacks have another layout inside the loops."""

  def loss(weights):
    body = lambda x, w: (jnp.tanh(x @ w), None)
    return lax.scan(body, x, weights)[0].astype(WIDE).sum()

  return jax.grad(loss)(weights)


@known(STACK, hbm=LAYER * 2 * 12, donated=(0,))
def nested_loops_over_a_stack(stack):
  """Twelve layers, each in four parts."""

  def part(m, state):
    n, stack = state
    old = lax.dynamic_slice(stack, (n, 512 * m, 0), (1, 512, 1024))
    return n, lax.dynamic_update_slice(stack, old * 2, (n, 512 * m, 0))

  def layer(n, stack):
    return lax.fori_loop(0, 4, part, (n, stack))[1]

  return lax.fori_loop(0, 12, layer, stack)


# Rows by index.


@known(((MB, 512), WIDE), ((32768,), WHOLE), hbm=(2 * 512 + 1) * 4 * 32768)
def gather(table, rows):
  return table.at[rows].get(mode="promise_in_bounds")


@known(
  ((MB, 512), WIDE),
  ((32768,), WHOLE),
  ((32768, 512), WIDE),
  hbm=3 * 4 * 32768 * 512 + 4 * 32768,
  donated=(0,),
)
def scatter_add(table, rows, x):
  return table.at[rows].add(x, mode="promise_in_bounds")


@known(((2**16,), WHOLE), hbm=2 * 4 * 2**16)
def sort(a):
  return lax.sort(a, is_stable=False)


# Collectives of 4 x 256 MB, with an operation on the result.

QUARTER = 4 * 64 * MB
SHARDS = ((4 * 64 * MB // 1024, 1024), WIDE)
BOTH_SPLIT = {"split": True, "result": True}


@known(SHARDS, wire=3 * QUARTER, hbm=(1 + 4 + 2 * 4) * QUARTER, split=True)
def all_gather(a):
  return lax.all_gather(a, "x", tiled=True) * 2


@known(
  SHARDS,
  wire=3 * QUARTER,
  hbm=(4 + 1 + 2) * QUARTER,
  besides=dict.fromkeys(("v5e", "v5p", "v6e"), 2 * QUARTER),
  result=True,
)
def reduce_scatter(a):
  """These chips sum padded shards, and then put them together once more."""
  return lax.psum_scatter(a, "x", tiled=True) * 2


@known(SHARDS, wire=6 * QUARTER, hbm=(4 + 4) * QUARTER + 2 * 4 * QUARTER)
def all_reduce(a):
  return lax.psum(a, "x") * 2


@known(SHARDS, wire=QUARTER * 3 / 4, hbm=(1 + 1 + 2) * QUARTER, **BOTH_SPLIT)
def all_to_all(a):
  return lax.all_to_all(a, "x", 0, 0, tiled=True) * 2


@known(SHARDS, wire=QUARTER, hbm=(1 + 1 + 2) * QUARTER, **BOTH_SPLIT)
def permute(a):
  return lax.ppermute(a, "x", [(n, (n + 1) % 4) for n in range(4)]) * 2


# Experts: 8 groups of 16,384 rows.

GROUPED = ((16384, 1024), NARROW), ((8, 1024, 512), NARROW), ((8,), WHOLE)
GROUPED_COST = {
  "flops": 2 * 16384 * 1024 * 512,
  "hbm": 2 * (16384 * 1024 + 8 * 1024 * 512 + 16384 * 512),
}


@known(*GROUPED, **GROUPED_COST)
def grouped_product(x, w, sizes):
  return lax.ragged_dot(x, w, sizes)


@known(*GROUPED, ((16384, 512), NARROW), **GROUPED_COST)
def gradient_of_grouped_matrices(x, w, sizes, dy):
  return jax.vjp(lambda w: lax.ragged_dot(x, w, sizes), w)[1](dy)


@functools.cache
def mesh(topology):
  return Mesh(np.array(absent_devices(topology)), ("x",))


@functools.cache
def compiled(name, topology):
  """The text of a compiled program."""
  program, devices = PROGRAMS[name], mesh(topology)
  spec = P("x") if program.split else P()
  arguments = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(devices, spec))
    for shape, dtype in program.arrays
  ]
  mapped = jax.shard_map(
    program.function,
    mesh=devices,
    in_specs=(spec,) * len(arguments),
    out_specs=P("x") if program.result else P(),
    check_vma=False,
  )
  jitted = jax.jit(mapped, donate_argnums=program.donated)
  return plan_compile.compile_one(jitted.lower(*arguments)).text


def cost_of(name, topology, **options):
  chip = chips.parse(topology).chip
  return hlo.cost_of(
    compiled(name, topology), chip, lambda *_: chip.link, 4, **options
  )


def cases():
  """Slow, except the cheapest programs of one chip of each generation."""
  cheap = {("update_of_a_stack", "tpu7x:2x1x1"), ("all_gather", "v6e:2x2")}
  for name in PROGRAMS:
    for topology in SLICES:
      fast = (name, topology) in cheap
      marks = () if fast else pytest.mark.slow
      yield pytest.param(name, topology, marks=marks)


@pytest.mark.parametrize(("name", "topology"), [*cases()])
def test_the_cost_is_the_known_one(name, topology):
  program, cost = PROGRAMS[name], cost_of(name, topology)
  wire = sum(traffic.wire for traffic in cost.collectives.values())
  assert cost.flops == program.flops
  hbm = program.hbm + program.besides.get(topology.partition(":")[0], 0.0)
  assert cost.hbm_bytes == pytest.approx(hbm, rel=0.05)
  assert wire == pytest.approx(program.wire, rel=0.05)
  assert not cost.loops
  assert not cost.branches
  assert not cost.unknown_kernels


@pytest.mark.slow
@pytest.mark.parametrize("topology", SLICES)
def test_at_the_chips_clock_a_large_product_is_near_the_peak(topology):
  """And not above it: half the FLOPs of a cycle would make it twice as fast."""
  best = cost_of("product", topology).roofline_seconds
  estimate = cost_of("product", topology, by_compiler=True)
  assert estimate.estimated_seconds > 0.9 * estimate.roofline_seconds
  assert best < estimate.roofline_seconds < 1.4 * best
