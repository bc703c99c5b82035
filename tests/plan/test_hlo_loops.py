"""Trip counts, compared with `range` in Python."""

import pytest

from gspo_jax.plan.hlo import module as hlo_module
from gspo_jax.plan.hlo.loops import trip_count

LOOP = """\
%next (p: s32[], q: s32[]) -> s32[] {{
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  ROOT %sum = s32[] add(%p, %q)
}}

%body (t: (s32[], f32[9], s32[])) -> (s32[], f32[9], s32[]) {{
  %t = (s32[], f32[9], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[9] get-tuple-element(%t), index=1
  %n = s32[] get-tuple-element(%t), index=2
  %s = s32[] constant({step})
  %j = {advance}
  ROOT %out = (s32[], f32[9], s32[]) tuple(%j, %x, {passed})
}}

%test (u: (s32[], f32[9], s32[])) -> pred[] {{
  %u = (s32[], f32[9], s32[]) parameter(0)
  %k = s32[] get-tuple-element(%u), index=0
  %m = s32[] get-tuple-element(%u), index=2
  %c = s32[] constant({bound})
  ROOT %go = {test}
}}

ENTRY %main (x: f32[9]) -> (s32[], f32[9], s32[]) {{
  %x0 = f32[9] parameter(0)
  %zero = s32[] constant({start})
  %copied = s32[] copy(%zero)
  %limit = s32[] constant({bound})
  %in = (s32[], f32[9], s32[]) tuple(%copied, %x0, %limit)
  ROOT %loop = (s32[], f32[9], s32[]) while(%in), condition=%test, body=%body
}}
"""
LESS = "pred[] compare(%k, %c), direction=LT"


def trips(**changes):
  values = {"start": 0, "step": 1, "bound": 7, "passed": "%n", "test": LESS}
  values["advance"] = "s32[] add(%i, %s)"
  module = hlo_module.parse(LOOP.format(**(values | changes)))
  return trip_count(module, module.entry, module.entry.root)


@pytest.mark.parametrize(
  ("start", "bound", "step"), [(0, 7, 1), (3, 7, 1), (0, 7, 2), (9, 7, 1)]
)
def test_a_loop_with_a_counter(start, bound, step):
  expected = len(range(start, bound, step))
  assert trips(start=start, bound=bound, step=step) == expected


@pytest.mark.parametrize(
  "changes",
  [
    {"test": "pred[] compare(%c, %k), direction=GT"},
    {"test": "pred[] compare(%k, %m), direction=LT"},  # bound in the tuple
    {"advance": "s32[] fusion(%i, %s), kind=kLoop, calls=%next"},
    {"advance": "s32[] add(%s, %i)"},
  ],
)
def test_other_forms_of_the_same_loop(changes):
  assert trips(**changes) == 7


@pytest.mark.parametrize(
  "changes",
  [
    {"test": "pred[] and(%k, %c)"},
    {"test": "pred[] compare(%k, %c), direction=EQ"},
    {"test": "pred[] compare(%c, %k), direction=LT"},
    {"advance": "s32[] multiply(%i, %s)"},
    {"advance": "s32[] add(%i, %n)"},
    {"step": 0},
    # The bound changes.
    {"test": "pred[] compare(%k, %m), direction=LT", "passed": "%i"},
  ],
)
def test_a_data_dependent_loop_has_no_trip_count(changes):
  assert trips(**changes) is None
