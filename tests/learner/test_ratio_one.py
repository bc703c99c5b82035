"""A policy that has not moved has ratio 1, in every bit, in bfloat16."""

import jax
import pytest

from benchmarks import ratio_one
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding


def measure(mesh="1", apart=False, **asked):
  devices = jax.devices()[: int(mesh.split()[0])]
  made = sharding.make_mesh(devices, **ratio_one.MESHES[mesh])
  config = ratio_one.config_of(**asked)
  return ratio_one.measure(config, made, apart=apart)


# One of each kind; `benchmarks.ratio_one` has the whole table.
@pytest.mark.parametrize(
  "asked",
  [
    {"mesh": "8 fsdp, expert, tensor"},
    {"experts": False, "remat": False, "micro": 8, "objective": "ppo"},
    {"remat": False, "replay": "r3", "objective": "rspo"},
    *[
      pytest.param(asked, marks=pytest.mark.slow)
      for asked in ratio_one.table(quick=False)
    ],
  ],
  ids=str,
)
def test_an_unmoved_policy_has_ratio_one(asked):
  row = measure(**asked)
  for unit in ("sequence", "token"):
    assert row[f"ratio/{unit}_std"] == 0
  # SAPO and CISPO clip at other numbers, and nothing at 1 either.
  for unit in ("sequence", "token"):
    assert row[f"clip_frac/{unit}"] == 0
  assert row["ratio/moved"] == row["ratio/first_minibatch_std"] == 0
  assert row["grad/norm"] > 0


def test_log_probs_of_another_program_have_another_ratio():
  """Or the test above would say nothing; the metric sees it, too."""
  row = measure(apart=True)
  assert row["ratio/sequence_std"] > 1e-4
  assert row["ratio/first_minibatch_std"] > 1e-4
  assert row["clip_frac/sequence"] > 0.1


@pytest.mark.parametrize(
  ("minibatches", "asked", "scores"),
  [
    (1, {}, False),  # the only pass is that of the old policy
    (1, {"kl_coef": 0.1, "kl_estimator": "k1"}, True),  # a reward needs them
    (4, {}, True),
    (4, {"old_logps": "sampler", "experts": False}, False),
    (4, {"old_logps": "sampler"}, True),  # for the old policy's routing
  ],
)
def test_who_is_scored(minibatches, asked, scores):
  config = ratio_one.config_of(**asked)
  config.learner.minibatches = minibatches
  made = build_program(parse(config), sharding.make_mesh(jax.devices()[:1]))
  assert made.learner.needs_old_logprobs == scores


def test_one_minibatch_is_not_scored_and_has_ratio_one():
  config = ratio_one.config_of(experts=False)
  config.learner.minibatches, config.learner.micro_batch_size = 1, 32
  mesh = sharding.make_mesh(jax.devices()[:1])
  row = ratio_one.measure(config, mesh)
  assert row["ratio/token_std"] == row["ratio/first_minibatch_std"] == 0
  assert row["mismatch/token_abs_mean"] > 0  # measured in the update
