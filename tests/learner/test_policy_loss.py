"""The objective: every term of a config reaches the loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.learner import train_batch
from gspo_jax.learner.objective import ObjectiveConfig
from gspo_jax.learner.policy_loss import INSTRUMENTS, policy_loss
from gspo_jax.logprobs import TokenLogprobs
from gspo_jax.losses import Mean
from gspo_jax.sampler.samples import Prompts

CFG = model.variant("tiny", dtype="float32")
B, S, R, L, K = 6, 3, 4, CFG.num_layers, CFG.experts_per_token
GSPO = ObjectiveConfig("gspo")
policy_loss = functools.partial(policy_loss, cfg=CFG, max_length=R)


def demonstrations(rng):
  ids = lambda width: rng.integers(0, 256, (B, width)).astype(np.int32)
  return train_batch.unpacked(
    Prompts(ids(S), np.full(B, S, np.int32)),
    ids(R),
    np.array([4, 1, 2, 3, 4, 4], np.int32),
  )


def with_old_policy(batch, old, rng):
  """The batch, with the fields of an old policy and random advantages."""
  noise = lambda: rng.normal(0, 0.3, (B, R)).astype(np.float32)
  return dataclasses.replace(
    batch,
    old_logps=old.logps,
    advantages=jnp.asarray(
      np.repeat(rng.standard_normal((B, 1)), R, axis=1), jnp.float32
    ),
    experts=old.experts.swapaxes(0, 1),
    router_logps=old.router_logps.swapaxes(0, 1),
    sampler_logps=old.logps + noise(),
    reference_logps=old.logps + noise(),
  )


def tabular(params, cfg, batch, **options):
  """In the place of a model: its outputs are its parameters."""
  zeros = jnp.zeros((L, B, R))
  experts = jnp.zeros((L, B, S + R, K), jnp.uint8)
  return TokenLogprobs(
    params["logps"],
    params["entropy"],
    experts,
    params["router_logps"],
    zeros,
    jnp.zeros(L, jnp.int32),
  )


def tabular_params(rng):
  uniform = lambda *shape: rng.random(shape, np.float32)
  return {
    "logps": -uniform(B, R),
    "entropy": uniform(B, R),
    "router_logps": -uniform(L, B, R, K),
  }


@pytest.fixture
def table(monkeypatch):
  """The parameters of `tabular`, which stands for the model, and a batch."""
  monkeypatch.setattr(train_batch, "response_logps", tabular)
  rng = np.random.default_rng(0)
  old, params = tabular_params(rng), tabular_params(rng)
  return params, with_old_policy(demonstrations(rng), tabular(old, CFG, 0), rng)


def test_instruments_change_no_loss(table):
  params, batch = table
  loss = functools.partial(policy_loss, params, objective=GSPO, temperature=1.0)
  bare = dataclasses.replace(batch, experts=None, router_logps=None)
  full, scalars = loss(batch), loss(bare, instruments=False)
  assert full.loss.value() == pytest.approx(scalars.loss.value(), abs=1e-6)
  assert "moe/router_shift_ratio" in full.metrics
  assert not [key for key in scalars.metrics if key.startswith("moe/")]
  # Of the metrics of the old policy, only instruments are left out.
  names = set(full.old_policy_metrics)
  rest = loss(batch, instruments=False).old_policy_metrics
  assert set(rest) < names
  assert names - set(rest) < set(INSTRUMENTS)
  assert all(np.ndim(metric.value()) == 0 for metric in rest.values())
  assert isinstance(rest["moe/dropped"], Mean)


def test_a_dense_model_has_no_metrics_of_its_routing():
  dense = model.variant(
    "tiny", dtype="float32", num_experts=0, experts_per_token=0
  )
  batch = dataclasses.replace(
    demonstrations(np.random.default_rng(0)), sampler_logps=jnp.zeros((B, R))
  )
  params = jax.eval_shape(lambda key: model.init(key, dense), jax.random.key(0))
  out = jax.eval_shape(
    functools.partial(policy_loss, cfg=dense, objective=GSPO, temperature=1.0),
    params,
    batch,
  )
  assert list(out.old_policy_fields) == ["old_logps"]
  names = [*out.metrics, *out.old_policy_metrics]
  assert not [name for name in names if name.startswith("moe/")]


def test_experts_that_have_changed_are_flips_unless_they_are_replayed(table):
  params, batch = table
  moved = batch.experts.at[:, 0].set(1)  # of the first layer
  batch = dataclasses.replace(batch, experts=moved)
  loss = functools.partial(policy_loss, params, batch, temperature=1.0)
  free = loss(objective=GSPO).metrics
  np.testing.assert_array_equal(free["moe/layer_flip_rate"].value(), [1, 0])
  assert free["moe/expert_flip_rate"].value() == 0.5
  # The experts are the old ones then, so flips would say nothing.
  replayed = loss(objective=ObjectiveConfig("gspo", replay="r2")).metrics
  assert not [name for name in replayed if name.endswith("flip_rate")]
  assert 0 < replayed["moe/router_shift_ratio"].value() < 1
