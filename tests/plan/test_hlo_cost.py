"""How costs add up."""

import pytest

from gspo_jax.plan.hlo import cost as hlo_cost
from gspo_jax.plan.hlo.cost import DataDependent, HloCost, OperationCost

SUMS = {
  "flops": 6, "attention_flops": 1, "padding_flops": 2, "hbm_bytes": 4,
  "hbm_seconds": 0.5, "roofline_seconds": 3, "estimated_seconds": 1,
  "stalled_seconds": 2,
}  # fmt: skip


def some_cost():
  cost = HloCost(**SUMS)
  kind = hlo_cost.CollectiveKind("all-gather", 4)
  cost.collectives[kind] = hlo_cost.Traffic(2, 100, 5, 50)
  cost.by_source["dot"] = OperationCost(3, 6, 4, 5)
  cost.unknown_kernels["kernel"] = 1
  cost.loops.append(DataDependent("loop", 8, 1, HloCost(roofline_seconds=7)))
  cost.branches.append(
    DataDependent("branch", 8, 2, HloCost(roofline_seconds=1))
  )
  return cost


def test_adding_ten_times_equals_adding_once_ten_times():
  once, ten = HloCost(), HloCost()
  ten.add(some_cost(), 10)
  for _ in range(10):
    once.add(some_cost())
  for name in (*SUMS, "collectives", "unknown_kernels"):
    assert getattr(ten, name) == getattr(once, name) != getattr(HloCost(), name)
  assert (
    ten.by_source == once.by_source == {"dot": OperationCost(30, 60, 40, 50)}
  )
  assert ten.loops[0].times == sum(o.times for o in once.loops) == 10
  assert ten.branches[0].times == sum(o.times for o in once.branches) == 20


@pytest.mark.parametrize("stalled", [0, 2, 4])
def test_scheduled_time_is_at_least_the_longest_of_its_parts(stalled):
  cost = some_cost()
  cost.stalled_seconds = stalled
  assert cost.scheduled == max(5, 3 + stalled)


def test_longest_loop_searches_branches_of_branches():
  inner, outer = HloCost(), some_cost()
  assert inner.longest_loop() is None
  assert outer.longest_loop() == (outer.loops[0], outer.loops[0])
  longer = DataDependent("longer", 99, 1, HloCost())
  inner.loops.append(longer)
  middle = HloCost(branches=[DataDependent("b", 0, 1, inner)])
  branch = DataDependent("b", 0, 1, middle)
  outer.branches.append(branch)
  loop, listed = outer.longest_loop()
  assert loop is longer
  assert listed is branch
