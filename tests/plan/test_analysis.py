"""A function's report: what else is in memory, and what its numbers mean."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from gspo_jax.plan import analysis, chips
from gspo_jax.plan import compile as plan_compile
from gspo_jax.plan.hlo.collectives import Collective
from gspo_jax.plan.hlo.cost import DataDependent, HloCost
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding

GIB = 2**30
WHERE = chips.parse("v5e:2x4")
STATIC, PAGED = (SimpleNamespace(batching=slots) for slots in (None, 8))


@pytest.fixture(scope="module")
def made():
  """Programs with 4 GiB of moments over 8 devices, and a count on each.

  The second has a reference of five times that, and a critic.
  """
  mesh = sharding.make_mesh(fsdp=8)
  split = jax.ShapeDtypeStruct(
    (8, GIB // 8), jnp.float32, sharding=sharding.batch_sharding(mesh)
  )
  count = jax.ShapeDtypeStruct(
    (), jnp.int32, sharding=sharding.replicated(mesh)
  )
  critic = SimpleNamespace(params=[split] * 2, opt_state=[split] * 3)
  state = SimpleNamespace(
    params=[split] * 4,
    opt_state=[split, count],
    reference=[split] * 5,
    critic=critic,
  )
  bare = SimpleNamespace(
    params=[split], opt_state=[split, count], reference=None, critic=None
  )
  return program(bare), program(state)


def program(state, generate=STATIC, separate=None):
  """A program with the state of its learner alone."""
  return SimpleNamespace(
    abstract_policy=state.params,
    learner=SimpleNamespace(abstract=state),
    sampler=SimpleNamespace(generate=generate, separate=separate),
  )


def memory(name, made, temporaries, max_staleness=0):
  sizes = plan_compile.Memory(GIB, 0, 0, temporaries, 0, 0)
  return analysis.memory(name, sizes, made, WHERE, max_staleness)


def test_what_a_function_does_not_read_stays(made):
  _, whole = made
  resident = lambda name: memory(name, whole, 0)["memory"]["resident"]
  assert resident("update") == 0
  assert resident("old_logps") == 0  # the same program
  assert resident("generate") == (1 + 3 + 5 + 2) * GIB // 2 + 4
  assert resident("reference_and_values") == (4 + 1 + 3) * GIB // 2 + 4


def test_moments_stay_while_other_functions_run(made):
  made, _ = made
  moments = GIB // 2 + 4
  assert memory("update", made, 0)["memory"]["resident"] == 0
  report = memory("generate", made, 0)["memory"]
  assert report["resident"] == moments
  assert report["needed"] == GIB + moments
  assert report["free"] == WHERE.chip.hbm - GIB - moments


def test_with_pages_the_parameters_stay_while_others_decode(made):
  bare, _ = made
  paged = program(bare.learner.abstract, PAGED)
  resident = lambda name, of: memory(name, of, 0)["memory"]["resident"]
  parameters = GIB // 2
  for name, more in (("decode_params", 0), ("prefill", parameters)):
    assert resident(name, paged) == resident("generate", bare) + more
  assert resident("generate", paged) == resident("prefill", paged)


def test_a_sampler_of_its_own_devices_holds_weights_alone(made):
  """Those in use, and one copy for each batch ahead; no moments."""
  _, whole = made
  state = whole.learner.abstract
  separate = SimpleNamespace(weights=state.params, in_transit=state.params)
  weights = 4 * GIB // 2
  resident = lambda name, of, ahead=0: memory(name, of, 0, ahead)["memory"][
    "resident"
  ]
  static = program(state, separate=separate)
  paged = program(state, PAGED, separate)
  for ahead in (0, 1, 4):
    # Weights are an argument of these two.
    assert resident("generate", static, ahead) == ahead * weights
    assert resident("decode_params", paged, ahead) == ahead * weights
    for name in ("prefill", "generate"):
      assert resident(name, paged, ahead) == (1 + ahead) * weights
  # The trainer holds a copy on its way.
  assert resident("update", paged) == weights
  assert resident("reference_and_values", paged) == weights + resident(
    "reference_and_values", whole
  )


def test_the_weights_below_adapters_stay_and_have_no_gradient(debug_config):
  debug_config.objective.kl_coef = 0.1
  mesh = sharding.make_mesh(jax.devices()[:1])
  build = lambda: build_program(parse(debug_config), mesh)
  plain = build()
  flops = lambda name, made: analysis._model_flops(
    name, parse(debug_config), made
  )
  update = flops("update", plain)
  debug_config.model.lora.rank = 4
  made, mib = build(), 2**20
  assert flops("update", made) == pytest.approx(update * 2 / 3)
  assert flops("reference_and_values", made) == flops("old_logps", made) > 0
  size = analysis._bytes
  state = made.learner.abstract
  assert 1 * mib < size(state.base) < 1.1 * mib  # 0.26M float32 numbers
  assert size(state.opt_state) == 2 * size(state.params) + 8 < 0.5 * mib
  assert size(state.policy) == size(state.base) + size(state.params)
  # Sampling reads weights and adapters; what it does not read are the moments.
  assert size(analysis._unread("generate", state)) == size(state.opt_state)
  # The reference reads only the weights, which an update returns as they are.
  unread = analysis._unread("reference_and_values", state)
  assert size(unread) == size(state.params) + size(state.opt_state)


def test_what_the_compiler_fits_may_not_fit_beside_the_moments(made):
  made, _ = made
  temporaries = int(14.5 * GIB)
  assert "fits" not in memory("update", made, temporaries)
  report = memory("generate", made, temporaries)
  assert report["fits"] is False
  assert report["reason"] == (
    "16.00 GiB needed, 0.50 of it for state that generate does not read, but "
    "15.75 GiB there"
  )


def test_links_follow_where_the_mesh_puts_devices():
  device = lambda x, y: SimpleNamespace(coords=(x, y, 0))
  grid = [device(x, y) for x in range(2) for y in range(4)]
  mesh = SimpleNamespace(devices=SimpleNamespace(flat=grid))
  bandwidth = analysis._bandwidth(mesh, WHERE)
  link = WHERE.chip.link
  call = lambda *members: bandwidth(Collective("all-gather", members, 1.0))
  assert call(0, 1, 2, 3) == call(0, 4) == link
  assert call(*range(8)) == 2 * link
  # Bytes to the far end of a line of 4 also pass through those between.
  to_all = Collective("all-to-all", tuple(range(8)), 1.0)
  assert bandwidth(to_all) == link
  ragged = Collective("ragged-all-to-all", tuple(range(8)), 1.0)
  assert bandwidth(ragged) == link


STEP = HloCost(roofline_seconds=2, flops=3, hbm_bytes=4)
DECODING = DataDependent("decoding", 99, 1, STEP)


def total(*, branch):
  """A prefill of 10 seconds; then decoding, perhaps in a branch not taken."""
  cost = HloCost(roofline_seconds=10, flops=100, hbm_bytes=1000)
  cost.loops.append(DataDependent("experts", 5, 1, HloCost(roofline_seconds=1)))
  cost.branches.append(
    DataDependent("overflow", 5, 1, HloCost(roofline_seconds=1))
  )
  if branch:
    inner = HloCost(roofline_seconds=2, loops=[DECODING])
    cost.branches.append(DataDependent("longer", 9, 1, inner))
  else:
    cost.add(STEP)
    cost.loops.append(DECODING)
  return cost


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("steps", [1, 7])
def test_every_decode_step_is_in_the_sum_once(branch, steps):
  """And what is counted is not listed as uncounted."""
  cost = total(branch=branch)
  assert analysis._unroll(cost, steps) is STEP
  assert cost.roofline_seconds == 10 + steps * STEP.roofline_seconds
  assert cost.flops == 100 + steps * STEP.flops
  assert cost.hbm_bytes == 1000 + steps * STEP.hbm_bytes
  assert [o.source for o in cost.loops] == ["experts"]
  assert [o.source for o in cost.branches] == ["overflow"]


def test_without_a_loop_there_is_no_decoding():
  cost = HloCost(roofline_seconds=10)
  assert analysis._unroll(cost, 7) is None
  assert cost.roofline_seconds == 10


def test_what_data_decides_is_told_once_a_source():
  cost = lambda seconds: HloCost(roofline_seconds=seconds)
  opened = [
    DataDependent("layers/cond", 1.0, times, cost(seconds))
    for times, seconds in ((48, 2.0), (2, 3.0))
  ]
  assert analysis._open(opened) == [
    {"source": "layers/cond", "times": 50, "seconds": 3.0}
  ]
