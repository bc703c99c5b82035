"""A policy that has not moved has ratio 1, in every bit, in bfloat16."""

import jax
import pytest

from benchmarks import ratio_one
from gspo_jax.runtime import sharding


def measure(mesh="1", apart=False, **options):
  devices = jax.devices()[: int(mesh.split()[0])]
  config = ratio_one.config_of(**options)
  mesh = sharding.make_mesh(devices, **ratio_one.MESHES[mesh])
  return ratio_one.measure(config, mesh, apart=apart)


# The slow ones are the whole table of `benchmarks.ratio_one` and two more.
@pytest.mark.parametrize(
  "options",
  [{"mesh": "8 fsdp, expert, tensor"},
   *[pytest.param(options,
    marks=pytest.mark.slow) for options in ({"experts": False, "remat": False,
    "micro": 8, "objective": "ppo"}, {"remat": False, "replay": "r3",
    "objective": "rspo"}, *ratio_one.table(quick=False))]],
  ids=str,
)  # fmt: skip
def test_an_unmoved_policy_has_ratio_one(options):
  metrics = measure(**options)
  for unit in ("sequence", "token"):
    assert metrics[f"ratio/{unit}_std"] == 0
  # SAPO and CISPO clip at other numbers, and nothing at 1 either.
  for unit in ("sequence", "token"):
    assert metrics[f"clip_frac/{unit}"] == 0
  assert metrics["ratio/moved"] == metrics["ratio/first_minibatch_std"] == 0
  assert metrics["grad/norm"] > 0


@pytest.mark.slow
def test_a_float32_head_and_float32_routers_keep_ratio_one():
  config = ratio_one.config_of()
  config.model.float32_head = config.model.float32_router = True
  metrics = ratio_one.measure(config, sharding.make_mesh(jax.devices()[:1]))
  assert metrics["ratio/moved"] == metrics["ratio/first_minibatch_std"] == 0
  assert metrics["grad/norm"] > 0


@pytest.mark.slow  # a control
def test_logps_of_another_program_have_another_ratio():
  """Else the test above would always pass; the metric shows it, too."""
  metrics = measure(apart=True)
  assert metrics["ratio/sequence_std"] > 1e-4
  assert metrics["ratio/first_minibatch_std"] > 1e-4
  assert metrics["clip_frac/sequence"] > 0.1


def test_one_minibatch_needs_no_old_logps_and_has_ratio_one():
  config = ratio_one.config_of(experts=False)
  config.learner.minibatches, config.learner.micro_batch_size = 1, 32
  mesh = sharding.make_mesh(jax.devices()[:1])
  metrics = ratio_one.measure(config, mesh)
  assert metrics["ratio/token_std"] == metrics["ratio/first_minibatch_std"] == 0
  assert metrics["mismatch/token_abs_mean"] > 0  # measured in the update
