"""How costs add up."""

import pytest

from gspo_jax.plan.hlo.cost import HloCost, Open, Traffic, longest_loop


def some_cost():
  cost = HloCost(flops=6, hbm=4, seconds=3, stalled=2)
  cost.collectives["all-gather", 4, False] = Traffic(2, 100, 5)
  cost.credit("dot", 3, 6, 4)
  cost.unknown["kernel"] = 1
  cost.loops.append(Open("loop", 8, 1, HloCost(seconds=7)))
  cost.branches.append(Open("branch", 8, 2, HloCost(seconds=1)))
  return cost


def test_ten_times_is_ten_times_each():
  once, ten = HloCost(), HloCost()
  ten.add(some_cost(), 10)
  for _ in range(10):
    once.add(some_cost())
  for name in ("flops", "hbm", "seconds", "stalled", "collectives", "unknown"):
    assert getattr(ten, name) == getattr(once, name)
  assert ten.by_source == once.by_source == {"dot": (30, 60, 40)}
  assert ten.loops[0].times == sum(o.times for o in once.loops) == 10
  assert ten.branches[0].times == sum(o.times for o in once.branches) == 20


@pytest.mark.parametrize("stalled", [0, 2, 4])
def test_bounds_are_in_order(stalled):
  cost = some_cost()
  cost.stalled = stalled
  assert cost.perfect == 5
  assert cost.serial == 8
  assert cost.perfect <= cost.scheduled <= cost.serial


def test_the_longest_loop_may_stand_in_a_branch_of_a_branch():
  inner, outer = HloCost(), some_cost()
  assert longest_loop(inner) == (None, None)
  assert longest_loop(outer) == (outer.loops[0], outer.loops[0])
  longer = Open("longer", 99, 1, HloCost())
  inner.loops.append(longer)
  middle = HloCost(branches=[Open("b", 0, 1, inner)])
  branch = Open("b", 0, 1, middle)
  outer.branches.append(branch)
  loop, listed = longest_loop(outer)
  assert loop is longer
  assert listed is branch
