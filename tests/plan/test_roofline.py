"""The work of a function, and what its numbers mean."""

import json
from types import SimpleNamespace

import jax
import pytest

from gspo_jax.plan import chips, lower, lower_bounds, roofline
from gspo_jax.plan import memory as plan_memory
from gspo_jax.plan.hlo.cost import DataDependent, HloCost
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding


def test_the_weights_below_adapters_stay_and_have_no_gradient(debug_config):
  debug_config.objective.kl_coef = 0.1
  mesh = sharding.make_mesh(jax.devices()[:1])
  build = lambda: build_program(parse(debug_config), mesh)
  plain = build()
  flops = lambda name, made: roofline._model_flops(
    name, lower.Planned(parse(debug_config), made, None)
  )
  update = flops("update", plain)
  debug_config.model.lora.rank = 4
  made, mib = build(), 2**20
  assert flops("update", made) == pytest.approx(update * 2 / 3)
  assert flops("reference_and_values", made) == flops("old_logps", made) > 0
  size = plan_memory.array_bytes
  state = made.learner.abstract
  assert 1 * mib < size(state.base) < 1.1 * mib  # 0.26M float32 numbers
  assert size(state.opt_state) == 2 * size(state.params) + 8 < 0.5 * mib
  assert size(state.policy) == size(state.base) + size(state.params)
  # Sampling reads weights and adapters; what it does not read are the moments.
  assert size(plan_memory._unread("generate", state)) == size(state.opt_state)
  # The reference reads only the weights, which an update returns as they are.
  unread = plan_memory._unread("reference_and_values", state)
  assert size(unread) == size(state.params) + size(state.opt_state)


def test_a_teacher_scores_with_its_own_model(debug_config, tmp_path):
  """A plan reads what its run says of the model, and no weights."""
  debug_config.model.variant = "small"
  saved = json.dumps(parse(debug_config).as_json())
  (tmp_path / "run_config.json").write_text(saved)
  debug_config.model.variant = "tiny"
  debug_config.objective.name = "gspo_token"
  debug_config.objective.distillation.teachers = (str(tmp_path),)
  config = parse(debug_config)
  made = build_program(config, sharding.make_mesh(jax.devices()[:1]))
  (teacher,) = made.teachers
  assert teacher.cfg.vocab_size == 2048
  forward = lower_bounds.forward_flops(teacher.cfg, 16, 8 + 12, 12)
  planned = lower.Planned(config, made, None)
  scored = roofline._model_flops("reference_and_values", planned)
  assert scored == forward > 0
  size = plan_memory.array_bytes
  (weights,) = made.learner.teachers
  assert size(weights) == size(teacher.abstract_params) > 2**20
  lowered = lower.functions(config, made)["reference_and_values"]
  (_, _, (taken,), _), _ = lowered.in_avals
  assert {str(x.dtype) for x in jax.tree.leaves(taken)} == {"float32"}


def test_links_follow_where_the_mesh_puts_devices():
  device = lambda x, y: SimpleNamespace(coords=(x, y, 0))
  grid = [device(x, y) for x in range(2) for y in range(4)]
  mesh = SimpleNamespace(devices=SimpleNamespace(flat=grid))
  tpu_slice = chips.parse("v5e:2x4")
  bandwidth, latency = roofline._links(mesh, tpu_slice)
  link = tpu_slice.chip.link
  assert bandwidth((0, 1, 2, 3), False) == bandwidth((0, 4), False) == link
  assert bandwidth(range(8), False) == 2 * link
  assert latency((0, 3)) == 3 * latency((0, 1)) == 3 * tpu_slice.chip.hop
  # Bytes to the far end of a line of 4 also pass through those between.
  assert bandwidth(range(8), True) == link


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
  assert roofline._unroll(cost, steps) is STEP
  assert cost.roofline_seconds == 10 + steps * STEP.roofline_seconds
  assert cost.flops == 100 + steps * STEP.flops
  assert cost.hbm_bytes == 1000 + steps * STEP.hbm_bytes
  assert [o.source for o in cost.loops] == ["experts"]
  assert [o.source for o in cost.branches] == ["overflow"]


def test_what_data_decides_is_told_once_a_source():
  cost = lambda seconds: HloCost(roofline_seconds=seconds)
  opened = [
    DataDependent("layers/cond", 1.0, times, cost(seconds))
    for times, seconds in ((48, 2.0), (2, 3.0))
  ]
  assert roofline._open(opened) == [
    {"source": "layers/cond", "times": 50, "seconds": 3.0}
  ]
