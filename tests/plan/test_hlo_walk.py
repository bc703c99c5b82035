"""Costs of modules, against arithmetic by hand and known JAX programs."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspo_jax.plan import chips
from gspo_jax.plan import compile as plan_compile
from gspo_jax.plan.hlo import cost as hlo_cost
from gspo_jax.plan.hlo import module as hlo_module
from gspo_jax.plan.hlo import walk as hlo_walk

CHIP = chips.Chip(
  flops=1e6,
  hbm=1e9,
  hbm_bandwidth=1e3,
  link=100.0,
  network=1.0,
  axes=2,
  cubes=False,
  flops_a_cycle=1000,
)


def cost_of(text):
  module = hlo_module.parse(text)
  return hlo_walk.walk(module, CHIP, lambda c: CHIP.link, devices=4)


BODY = """
%body (t: (s32[], f32[500])) -> (s32[], f32[500]) {
  %t = (s32[], f32[500]{0}) parameter(0)
  %i = s32[]{:S(6)} get-tuple-element(%t), index=0
  %x = f32[500]{0} get-tuple-element(%t), index=1
  %one = s32[]{:S(6)} constant(1)
  %j = s32[]{:S(6)} add(%i, %one)
  %y = f32[500]{0} add(%x, %x), metadata={op_name="twice"}
  %z = f32[500]{0} all-reduce(%y), replica_groups={{0,1,2,3}}
  ROOT %out = (s32[], f32[500]{0}) tuple(%j, %z)
}
"""
TEST = """
%test (u: (s32[], f32[500])) -> pred[] {
  %u = (s32[], f32[500]{0}) parameter(0)
  %k = s32[] get-tuple-element(%u), index=0
  %c = s32[] constant(5)
  ROOT %go = pred[] compare(%k, %c), direction=LT
}
"""
BY_DATA = """
%test (u: (s32[], f32[500])) -> pred[] {
  %u = (s32[], f32[500]{0}) parameter(0)
  ROOT %go = pred[] custom-call(%u), custom_call_target="AllocateBuffer"
}
"""
LOOP = """
ENTRY %main (x: f32[500]) -> (s32[], f32[500]) {
  %x0 = f32[500]{0} parameter(0)
  %zero = s32[] constant(0)
  %in = (s32[], f32[500]{0}) tuple(%zero, %x0)
  ROOT %loop = (s32[], f32[500]{0}) while(%in), condition=%test, body=%body
}
"""


def test_a_scan_counts_its_trips():
  cost = cost_of(BODY + TEST + LOOP)
  # two reads and a write of 2000 bytes, at 1000 a second, and what the
  # collective reads and writes
  assert cost.hbm_bytes == 5 * (6000 + 4000)
  assert cost.roofline_seconds == pytest.approx(5 * 6)
  # 2 * 3/4 of 2000 bytes, at 100 a second
  ((kind, traffic),) = cost.collectives.items()
  assert kind == ("all-reduce", 4, False)
  assert (traffic.count, traffic.wire, traffic.seconds) == (5, 15000, 150)
  assert traffic.hbm_bytes == 5 * 4000
  assert cost.by_source["twice"] == (30, 0, 30000, 30)
  assert cost.perfect_overlap == 150
  assert cost.scheduled == cost.no_overlap == 180


def test_a_data_dependent_loop_counts_once_and_is_listed():
  cost = cost_of(BODY + BY_DATA + LOOP)
  assert cost.no_overlap == 36
  (loop,) = cost.loops
  assert loop.cost.no_overlap == 36
  assert loop.state_bytes == 2004
  assert hlo_cost.longest_loop(cost) == (loop, loop)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_the_caller_can_give_the_trips_of_a_loop(count):
  named = LOOP.replace(
    "body=%body",
    'body=%body, metadata={op_name="jit(f)/while/body/mine/while"}',
  )
  module = hlo_module.parse(BODY + BY_DATA + named)
  walk = lambda scope: hlo_walk.walk(
    module, CHIP, lambda c: CHIP.link, devices=4, trips={scope: count}
  )
  cost = walk("mine")
  assert cost.no_overlap == 36 * count
  assert not cost.loops
  assert len(walk("other").loops) == 1


BRANCHES = """
%cheap (p: f32[500]) -> f32[500] {
  ROOT %p = f32[500]{0} parameter(0)
}

%costly (q: f32[500]) -> f32[500] {
  %q = f32[500]{0} parameter(0)
  %zero = s32[] constant(0)
  %in = (s32[], f32[500]{0}) tuple(%zero, %q)
  %loop = (s32[], f32[500]{0}) while(%in), condition=%test, body=%body
  %x2 = f32[500]{0} get-tuple-element(%loop), index=1
  ROOT %sum = f32[500]{0} add(%x2, %x2)
}

ENTRY %main (x: f32[500], n: pred[]) -> f32[500] {
  %x0 = f32[500]{0} parameter(0)
  %n = pred[] parameter(1)
  ROOT %c = f32[500]{0} conditional(%n, %x0, %x0), branch_computations={%costly, %cheap}
}
"""  # noqa: E501


def test_a_conditional_counts_its_cheapest_branch_and_lists_the_other():
  cost = cost_of(BODY + BY_DATA + BRANCHES)
  assert cost.no_overlap == 0
  (branch,) = cost.branches
  assert branch.cost.no_overlap == 6 + 36  # with one trip of the loop in it
  loop, listed = hlo_cost.longest_loop(cost)
  assert loop.cost.no_overlap == 36
  assert listed is branch


@pytest.mark.parametrize(("costly", "seconds"), [(True, 42), (False, 0)])
def test_the_caller_can_choose_the_branch(costly, seconds):
  named = BRANCHES.replace(
    "{%costly, %cheap}",
    '{%costly, %cheap}, metadata={op_name="jit(f)/while/body/chosen/cond"}',
  )
  module = hlo_module.parse(BODY + BY_DATA + named)
  walk = lambda scope: hlo_walk.walk(
    module,
    CHIP,
    lambda c: CHIP.link,
    devices=4,
    branches={scope: costly},
  )
  cost = walk("chosen")
  assert cost.no_overlap == seconds
  assert not cost.branches
  assert len(walk("other").branches) == 1


COVERED = """
ENTRY %main (x: f32[500]) -> f32[500] {{
  %x = f32[500]{{0}} parameter(0)
  %g-start = (f32[500]{{0}}, f32[2000]{{0}}) all-gather-start(%x), replica_groups={{{{0,1,2,3}}}}
  {between}
  %g-done = f32[2000]{{0}} all-gather-done(%g-start)
  ROOT %b = f32[500]{{0}} add(%x, %x)
}}
"""  # noqa: E501


@pytest.mark.parametrize(
  ("between", "stalled"),
  [("%n = s32[] constant(0)", 60), ("%a = f32[500]{0} add(%x, %x)", 54)],
)
def test_operations_before_done_overlap_a_collective(between, stalled):
  cost = cost_of(COVERED.format(between=between))
  assert cost.collective_seconds == 60  # 3/4 of 8000 bytes, at 100 a second
  assert cost.stalled_seconds == stalled
  assert cost.scheduled == cost.roofline_seconds + stalled


def test_two_collectives_share_the_links():
  second = (
    "%h-start = (f32[500]{0}, f32[2000]{0}) all-gather-start(%x), "
    "replica_groups={{0,1,2,3}}\n  %a = f32[500]{0} add(%x, %x)\n"
    "  %h-done = f32[2000]{0} all-gather-done(%h-start)"
  )
  cost = cost_of(COVERED.format(between=second))
  assert cost.stalled_seconds == 60 + 60 - 6
  assert cost.perfect_overlap <= cost.scheduled <= cost.no_overlap


WAITING = """
ENTRY %main (x: f32[500]) -> f32[500] {{
  %x = f32[500]{{0}} parameter(0)
  %g{start} = (f32[500]{{0}}, f32[2000]{{0}}) all-gather{start}(%x), replica_groups={{{{0,1,2,3}}}}
  ROOT %b = f32[500]{{0}} add(%x, %x)
}}
"""  # noqa: E501


@pytest.mark.parametrize(("start", "stalled"), [("", 75), ("-start", 54)])
def test_a_synchronous_collective_stalls_and_all_end_with_the_computation(
  start, stalled
):
  """The result is a tuple of 10,000 bytes (75 s), else 8,000 bytes of it."""
  assert cost_of(WAITING.format(start=start)).stalled_seconds == stalled


OFFLOADED = """
%gather (a: f32[500]) -> f32[2000] {
  %a = f32[500]{0} parameter(0)
  %g-start = (f32[500]{0}, f32[2000]{0}) all-gather-start(%a), replica_groups={{0,1,2,3}}
  ROOT %g-done = f32[2000]{0} all-gather-done(%g-start)
}

%wrapped (b: f32[500]) -> f32[2000] {
  %b = f32[500]{0} parameter(0)
  ROOT %call = f32[2000]{0} custom-call(%b), custom_call_target="T", called_computations={%gather}
}

ENTRY %main (x: f32[500]) -> f32[500] {
  %x = f32[500]{0} parameter(0)
  %start = ((f32[500]{0}), f32[2000]{0}, u32[]) async-start(), calls=%wrapped
  %update = ((f32[500]{0}), f32[2000]{0}, u32[]) async-update(%start, %x)
  %y = f32[500]{0} add(%x, %x)
  %done = f32[2000]{0} async-done(%update)
  ROOT %z = f32[500]{0} add(%y, %y)
}
"""  # noqa: E501


def test_a_collective_of_another_core_overlaps():
  cost = cost_of(OFFLOADED)
  ((kind, traffic),) = cost.collectives.items()
  assert kind == ("all-gather", 4, True)
  assert traffic.seconds == 60
  assert cost.roofline_seconds == 12  # two additions; the first overlaps
  assert cost.stalled_seconds == 54


ESTIMATED = """
ENTRY %main (x: f32[500]) -> f32[500] {
  %x = f32[500]{0} parameter(0)
  %g-start = (f32[500]{0}, f32[2000]{0}) all-gather-start(%x), replica_groups={{0,1,2,3}}
  %y = f32[500]{0} add(%x, %x), backend_config={"estimated_cycles":"20000"}
  %g-done = f32[2000]{0} all-gather-done(%g-start)
  ROOT %z = f32[500]{0} copy(%y)
}
"""  # noqa: E501


def test_the_compilers_cycles_replace_the_roofline():
  """20,000 cycles at 1 kHz, which hide more of the wire; a copy has none."""
  module = hlo_module.parse(ESTIMATED)
  walk = lambda by_compiler: hlo_walk.walk(
    module, CHIP, lambda c: CHIP.link, 4, by_compiler=by_compiler
  )
  best, estimate = walk(False), walk(True)
  assert (best.roofline_seconds, best.estimated_seconds) == (6 + 4, 0)
  assert (estimate.roofline_seconds, estimate.estimated_seconds) == (20 + 4, 20)
  assert (best.stalled_seconds, estimate.stalled_seconds) == (60 - 6, 60 - 20)
  assert best.hbm_bytes == estimate.hbm_bytes == 6000 + 4000 + 2000 + 8000


# JAX programs of known cost, compiled by libtpu.

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="no libtpu"
)


@pytest.fixture(scope="module")
def mesh():
  plan_compile.prepare()
  devices = plan_compile.devices(chips.parse("v5e:2x2"), 1)
  return Mesh(np.array(devices).reshape(4), ("x",))


def compiled(mesh, function, shapes, specs):
  """The cost of a shard_map, on each of its four devices."""
  arguments = [
    jax.ShapeDtypeStruct(s, t, sharding=NamedSharding(mesh, p))
    for (s, t), p in zip(shapes, specs, strict=True)
  ]
  function = jax.shard_map(
    function,
    mesh=mesh,
    in_specs=tuple(specs),
    out_specs=P(),
    check_vma=False,
  )
  done = plan_compile.compile_one(jax.jit(function).lower(*arguments))
  chip = chips.CHIPS["v5e"]
  return hlo_walk.walk(done.module, chip, lambda c: chip.link, 4)


@needs_libtpu
def test_flops_of_a_scan_of_products(mesh):
  def function(x, w):
    body = lambda c, w: (jax.nn.relu(c @ w), None)
    return jax.lax.scan(body, x, w)[0]

  shapes = [((512, 256), jnp.bfloat16), ((7, 256, 256), jnp.bfloat16)]
  cost = compiled(mesh, function, shapes, [P("x"), P()])
  assert cost.flops == 7 * 2 * 128 * 256 * 256
  weights = 7 * 256 * 256 * 2
  assert weights <= cost.hbm_bytes < 1.3 * weights  # each once


@needs_libtpu
def test_flops_of_a_gradient_through_a_batched_product(mesh):
  def function(q, k):
    scores = lambda q, k: jnp.einsum("bth,bsh->bts", q, k).astype(jnp.float32)
    loss = lambda q, k: jnp.square(scores(q, k)).sum()
    return jax.grad(loss, argnums=(0, 1))(q, k)

  shapes = [((6, 256, 128), jnp.bfloat16), ((6, 512, 128), jnp.bfloat16)]
  cost = compiled(mesh, function, shapes, [P(), P()])
  # the forward pass, and one product for each gradient
  assert cost.flops == 3 * 2 * 6 * 256 * 512 * 128


@needs_libtpu
def test_collectives_in_a_scan(mesh):
  def function(x):
    body = lambda c, _: (jax.lax.psum(c * 2, "x") * 0.25 + 1, None)
    return jax.lax.scan(body, x, None, length=5)[0]

  cost = compiled(mesh, function, [((1024, 256), jnp.float32)], [P()])
  ((kind, traffic),) = cost.collectives.items()
  assert kind == ("all-reduce", 4, False)
  assert traffic.count == 5
  assert traffic.wire == 5 * 2 * 3 / 4 * 1024 * 256 * 4


@needs_libtpu
def test_nested_and_data_dependent_loops(mesh):
  def function(x, w):
    inner = lambda c, _: (c @ w, None)
    outer = lambda c, _: (jax.lax.scan(inner, c, None, length=3)[0] + 1, None)
    x = jax.lax.scan(outer, x, None, length=4)[0]
    small = lambda x: jnp.abs(x).sum() < 1e3
    return jax.lax.while_loop(small, lambda x: (x @ w) * 2, x)

  shapes = [((128, 128), jnp.bfloat16)] * 2
  cost = compiled(mesh, function, shapes, [P(), P()])
  once = 2 * 128**3
  assert cost.flops == (12 + 1) * once
  (loop,) = cost.loops
  assert loop.cost.flops == once
