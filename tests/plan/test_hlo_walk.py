"""Costs of modules, against arithmetic by hand."""

import pytest

from gspo_jax.plan import chips, hlo
from gspo_jax.plan.hlo.cost import OperationCost

CHIP = chips.Chip(
  flops=1e6, hbm=1e9, hbm_bandwidth=1e3, link=100.0, network=1.0, axes=2,
  cubes=False, flops_a_cycle=1000,
)  # fmt: skip


def cost_of(text, **options):
  return hlo.cost_of(text, CHIP, lambda *_: CHIP.link, 4, **options)


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
  assert kind == ("all-reduce", 4)
  assert (traffic.count, traffic.wire, traffic.seconds) == (5, 15000, 150)
  assert traffic.hbm_bytes == 5 * 4000
  assert cost.by_source["twice"] == OperationCost(30, 0, 30000, 30)
  assert cost.scheduled == 180


def test_a_data_dependent_loop_counts_once_and_is_listed():
  cost = cost_of(BODY + BY_DATA + LOOP)
  assert cost.scheduled == 36
  (loop,) = cost.loops
  assert loop.cost.scheduled == 36
  assert loop.state_bytes == 2004
  assert cost.longest_loop() == (loop, loop)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_the_caller_can_give_the_trips_of_a_loop(count):
  named = LOOP.replace(
    "body=%body",
    'body=%body, metadata={op_name="jit(f)/while/body/mine/while"}',
  )
  text = BODY + BY_DATA + named
  cost = cost_of(text, trips={"mine": count})
  assert cost.scheduled == 36 * count
  assert not cost.loops
  assert len(cost_of(text, trips={"other": count}).loops) == 1


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
  assert cost.scheduled == 0
  (branch,) = cost.branches
  assert branch.cost.scheduled == 6 + 36  # with one trip of the loop in it
  loop, listed = cost.longest_loop()
  assert loop.cost.scheduled == 36
  assert listed is branch


@pytest.mark.parametrize(("costly", "seconds"), [(True, 42), (False, 0)])
def test_the_caller_can_choose_the_branch(costly, seconds):
  named = BRANCHES.replace(
    "{%costly, %cheap}",
    '{%costly, %cheap}, metadata={op_name="jit(f)/while/body/chosen/cond"}',
  )
  text = BODY + BY_DATA + named
  cost = cost_of(text, branches={"chosen": costly})
  assert cost.scheduled == seconds
  assert not cost.branches
  assert len(cost_of(text, branches={"other": costly}).branches) == 1


COVERED = """
ENTRY %main (x: f32[500]) -> f32[500] {{
  %x = f32[500]{{0}} parameter(0)
  %g-start = (f32[500]{{0}}, f32[2000]{{0}}) all-gather-start(%x), replica_groups={{{{0,1,2,3}}}}
  {between}
  %g-done = f32[2000]{{0}} all-gather-done(%g-start)
  ROOT %b = f32[500]{{0}} add(%x, %x)
}}
"""  # noqa: E501


SECOND = (
  "%h-start = (f32[500]{0}, f32[2000]{0}) all-gather-start(%x), "
  "replica_groups={{0,1,2,3}}\n  %a = f32[500]{0} add(%x, %x)\n"
  "  %h-done = f32[2000]{0} all-gather-done(%h-start)"
)


@pytest.mark.parametrize(
  ("between", "seconds", "stalled"),
  [
    ("%n = s32[] constant(0)", 60, 60),
    ("%a = f32[500]{0} add(%x, %x)", 60, 54),
    (SECOND, 120, 114),  # two share the links
  ],
)
def test_operations_before_done_overlap_a_collective(between, seconds, stalled):
  """A collective sends 3/4 of 8000 bytes, at 100 a second."""
  cost = cost_of(COVERED.format(between=between))
  assert cost.collective_seconds == seconds
  assert cost.stalled_seconds == stalled
  assert cost.scheduled == cost.roofline_seconds + stalled


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
  assert kind == ("all-gather", 4)
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
  best, estimate = (cost_of(ESTIMATED, by_compiler=by) for by in (False, True))
  assert (best.roofline_seconds, best.estimated_seconds) == (6 + 4, 0)
  assert (estimate.roofline_seconds, estimate.estimated_seconds) == (20 + 4, 20)
  assert (best.stalled_seconds, estimate.stalled_seconds) == (60 - 6, 60 - 20)
  assert best.hbm_bytes == estimate.hbm_bytes == 6000 + 4000 + 2000 + 8000
