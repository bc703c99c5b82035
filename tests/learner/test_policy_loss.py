"""The objective: every term of a config reaches the loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import losses, model
from gspo_jax.learner import train_batch
from gspo_jax.learner.objective import ObjectiveConfig
from gspo_jax.learner.policy_loss import INSTRUMENTS, policy_loss
from gspo_jax.logprobs import TokenLogprobs
from gspo_jax.losses import METHODS, Mean
from gspo_jax.sampler.samples import Prompts

CFG = model.variant("tiny", dtype="float32")
B, S, R, L, K = 6, 3, 4, CFG.num_layers, CFG.experts_per_token
GRPO, GSPO = ObjectiveConfig("grpo"), ObjectiveConfig("gspo")
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


@pytest.fixture(scope="module")
def params():
  return jax.jit(model.init, static_argnums=1)(jax.random.key(0), CFG)


@functools.cache
def jitted_logps():
  return jax.jit(
    functools.partial(train_batch.response_logps, cfg=CFG),
    static_argnames=("temperature", "replay"),
  )


@pytest.fixture(scope="module")
def batch(params):
  """Six responses, whose old policy is not quite the present one."""
  rng = np.random.default_rng(0)
  batch = demonstrations(rng)
  other = jax.tree.map(
    lambda x: x + 0.05 * rng.standard_normal(x.shape).astype(np.float32),
    params,
  )
  old = jitted_logps()(other, batch=batch, temperature=0.7)
  return with_old_policy(batch, old, rng)


@pytest.fixture(scope="module")
def jitted_loss(params):
  """(batch, is_old_policy, objective=, temperature=) -> `LossOutput`."""
  jitted = jax.jit(
    policy_loss,
    static_argnames=("objective", "temperature"),
  )
  return functools.partial(jitted, params, temperature=0.7)


def test_replay_sends_tokens_to_the_experts_of_the_old_policy(
  jitted_loss, batch
):
  r2 = dataclasses.replace(GRPO, replay="r2")
  free = jitted_loss(batch, False, objective=GRPO).metrics
  replayed = jitted_loss(batch, False, objective=r2).metrics
  flips = free["moe/expert_flip_rate"].value()
  assert flips > 0
  assert flips == pytest.approx(free["moe/layer_flip_rate"].value().mean())
  assert free["moe/layer_flip_rate"].value().shape == (L,)
  # The experts are the old ones then, so flips would say nothing.
  assert "moe/expert_flip_rate" not in replayed
  assert "moe/layer_flip_rate" not in replayed
  assert 0 < free["moe/router_shift_ratio"].value() < 1
  assert 0 < replayed["moe/router_shift_ratio"].value() < 1
  assert replayed["kl/old_new"].value() != free["kl/old_new"].value()
  assert free["kl/reference"].value() > 0


def random_routes():
  """Experts [B, L, S + R, K] that no router chose."""
  rng = np.random.default_rng(1)
  shape = B, L, S + R, CFG.num_experts
  order = rng.permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=-1)
  return jnp.asarray(order[..., :K].astype(np.uint8))


@pytest.mark.parametrize("replay", ["none", "r3"])
def test_the_old_policy_has_the_routing_of_its_own_pass(
  params, jitted_loss, batch, replay
):
  """R3: the sampler's experts, whatever they are; else the router's own."""
  objective, routes = dataclasses.replace(GRPO, replay=replay), {}
  if replay == "r3":
    batch = dataclasses.replace(batch, experts=random_routes())
    routes = {"routes": random_routes().swapaxes(0, 1), "replay": True}
  out = jitted_loss(batch, True, objective=objective)
  fields = out.old_policy_fields
  forward = functools.partial(
    jitted_logps(), params, batch=batch, temperature=0.7
  )
  expected = forward(**routes)
  close = functools.partial(np.testing.assert_allclose, atol=1e-5)
  mask = np.asarray(batch.response_mask)
  close(fields["old_logps"][mask], expected.logps[mask])
  close(fields["router_logps"], expected.router_logps.swapaxes(0, 1))
  if replay == "r3":  # they are in the batch already
    assert "experts" not in fields
    free = forward().logps
    assert np.abs(fields["old_logps"] - free)[mask].mean() > 0.01
  else:
    experts = expected.experts.swapaxes(0, 1)
    np.testing.assert_array_equal(fields["experts"], experts)
    assert fields["experts"].dtype == np.uint8
  # The ratio to itself is 1, whatever the batch had before.
  assert out.metrics["ratio/token_std"].value() < 1e-6


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


@pytest.mark.parametrize("name", METHODS)
def test_the_numbers_of_a_method_are_its_defaults_or_those_typed(name):
  defaults = ObjectiveConfig(name)
  assert hash(defaults) is not None  # a static argument
  assert defaults.loss_numbers == METHODS[name].numbers
  for key in defaults.loss_numbers:
    typed = ObjectiveConfig(f"{name}:{key}=0.125").loss_numbers
    assert typed == defaults.loss_numbers | {key: 0.125}
  if name == "ppo":
    for field in dataclasses.fields(defaults.critic):
      typed = ObjectiveConfig(f"ppo:critic_{field.name}=1").critic
      assert typed == dataclasses.replace(defaults.critic, **{field.name: 1})


def test_dr_grpo_gets_the_longest_response_allowed(table):
  params, batch = table
  dr_grpo = ObjectiveConfig("dr_grpo")
  out = policy_loss(
    params, batch, objective=dr_grpo, temperature=1, max_length=7
  )
  expected, _ = losses.dr_grpo_loss(
    params["logps"],
    batch.old_logps,
    batch.advantages,
    batch.response_mask,
    max_length=7,
  )
  assert out.loss.value() == pytest.approx(float(expected), rel=1e-5)
