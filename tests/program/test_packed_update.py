"""An update of packed rows is the update of one response a row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.configs import tiny_cpu
from gspo_jax.learner import packing, train_batch, train_step
from gspo_jax.logprobs import TokenLogprobs
from gspo_jax.program import settings
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.sampler.samples import STOPPED, TRUNCATED, Prompts, Samples

P, G, S, R, V = 8, 4, 6, 10, 16
B = P * G
# Two of each: one token, as many as there is room for, none; and others.
LENGTHS = np.array([1, R, 0, *range(1, R + 1), 2, 3, 0])[:16].repeat(2)


def config_of(name="gspo", **options):
  """Two minibatches of 16 responses; micro-batches of 8 rows."""
  c = tiny_cpu.get_config("debug")
  c.data.prompts, c.rollout.group_size = P, G
  c.data.max_prompt_length, c.sampler.max_new_tokens = S, R
  c.learner.minibatches, c.learner.micro_batch_size = 2, 8
  c.objective.name, c.model.num_layers = name, 1
  for key, value in options.items():
    c.objective[key] = value
  return c


def made_samples():
  rng = np.random.default_rng(1)
  ids = lambda *shape: rng.integers(1, V, shape).astype(np.int32)
  lengths = rng.permutation(LENGTHS).astype(np.int32)
  finish = np.where(np.arange(B) % 3, STOPPED, TRUNCATED).astype(np.int8)
  samples = Samples(
    ids(B, R),
    rng.normal(-2.8, 0.3, (B, R)).astype(np.float32),
    lengths,
    finish,
    np.int32(R),
  )
  return Prompts(ids(P, S), rng.integers(1, S + 1, P).astype(np.int32)), samples


def placements(learner, prompts, samples):
  """Packed rows, and one response a row."""
  key = jax.random.key(3)
  packed = learner.pack(prompts.lengths, samples.lengths, key)
  order = packing.shuffled_groups(key, P, G)
  alone = packing.pack(
    np.full(len(order), learner.packing.width), order, learner.packing
  )
  assert packed.num_micro_batches.sum() < alone.num_micro_batches.sum()
  return packed, alone


def assert_same_metrics(one, other):
  assert one.keys() == other.keys()
  for name, metric in one.items():
    a, b = np.asarray(metric.value()), np.asarray(other[name].value())
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.fixture
def table_policy(monkeypatch):
  """A policy that is a table of log-probs: nothing but the losses compiles."""

  def logprobs(params, cfg, batch, **options):
    logps = jax.nn.log_softmax(params["logits"])
    responses = batch.tokens[:, -batch.response_mask.shape[1] :]
    entropy = -(jnp.exp(logps) * logps).sum()
    tables = params["routers"][:, :, batch.tokens]  # [losses, layers, B, T]
    return TokenLogprobs(
      logps[responses],
      jnp.full(responses.shape, entropy),
      load_balance=tables[0],
      z_loss=tables[1],
    )

  monkeypatch.setattr(train_batch, "response_logps", logprobs)


TERMS = (
  {"kl_coef": 0.1, "entropy_coef": 0.01, "mismatch": "tis_sequence"},
  {"truncated": "zero_advantage"},
)


@pytest.mark.parametrize(
  ("name", "options"),
  # One of each mean; tests/losses/test_losses.py has every method.
  [(name, {}) for name in ("gspo", "dapo", "dr_grpo")]
  + [("gspo", options) for options in TERMS]
  + [("grpo", {"kl_coef": 0.3, "kl_estimator": "k2"})],
  ids=str,
)
def test_an_objective_has_the_gradient_of_unpacked_rows(
  table_policy, name, options
):
  gradients, learner = gradients_of(config_of(name, **options))
  samples = made_samples()
  packed, alone = placements(learner, *samples)
  compare(gradients(*samples, packed), gradients(*samples, alone))


def compare(gradients, expected):
  for one, other in zip(gradients, expected, strict=True):
    norm = np.abs(other[0]["logits"]).max()
    assert norm > 1e-4
    np.testing.assert_allclose(
      one[0]["logits"], other[0]["logits"], atol=1e-6 * max(norm, 1)
    )
    assert_same_metrics(one[2], other[2])


def gradients_of(config):
  """A function of samples that gives the gradient of each minibatch."""
  mesh = sharding.make_mesh(jax.devices()[:1])
  program = build_program(parse(config), mesh)
  cfg = dataclasses.replace(program.cfg, num_experts=0, experts_per_token=0)
  learner = settings.policy_learner(parse(config), cfg)
  objective = parse(config).objective
  rng = np.random.default_rng(0)
  params = {
    "logits": jnp.asarray(rng.normal(size=V), jnp.float32),
    "routers": jnp.asarray(rng.normal(size=(2, 3, V)), jnp.float32),
  }
  rng_advantages = rng.standard_normal(B).astype(np.float32)

  @jax.jit
  def gradients(prompts, samples, placement):
    batch = packing.train_batch_from_samples(
      prompts,
      samples,
      placement,
      cfg=cfg,
      objective=objective,
      instruments=True,
      packing_config=program.learner.packing,
    )
    advantages = jnp.asarray(rng_advantages)[batch.rows.response_index]
    rows = dataclasses.replace(
      batch.rows,
      advantages=jnp.where(batch.rows.response_mask, advantages, 0.0),
      old_logps=batch.rows.sampler_logps,
    )
    if objective.has_reference:
      rows = dataclasses.replace(rows, reference_logps=rows.sampler_logps - 0.1)
    return [
      train_step.gradient(
        params,
        jax.tree.map(lambda x, m=m: x[m], rows),
        learner,
        count=batch.num_micro_batches[m],
      )
      for m in range(2)
    ]

  return gradients, program.learner


@pytest.mark.parametrize("name", ["gspo", "dapo"])
def test_a_masked_response_is_as_if_it_had_no_tokens(table_policy, name):
  """In the numerator and in the denominator, which spans micro-batches."""
  gradients, learner = gradients_of(
    config_of(name, truncated="mask", entropy_coef=0.1)
  )
  prompts, samples = made_samples()
  kept = np.where(samples.finish == TRUNCATED, 0, samples.lengths)
  without = dataclasses.replace(samples, lengths=kept)
  one, _ = placements(learner, prompts, samples)
  other, _ = placements(learner, prompts, without)
  found = gradients(prompts, samples, one)
  compare(found, gradients(prompts, without, other))
  count = sum(metrics["loss/policy"].count for _, _, metrics in found)
  assert count == ((kept > 0) if name == "gspo" else kept).sum()


@pytest.mark.parametrize("name", ["gspo", "dr_grpo"])
def test_losses_of_routers_are_means_over_all_tokens_and_layers(
  table_policy, name
):
  """Of prompts and responses, for any method, micro-batches and packing."""
  coefs = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.25}
  gradients, learner = gradients_of(config_of(name, **coefs))
  prompts, samples = made_samples()
  packed, _ = placements(learner, prompts, samples)
  found = gradients(prompts, samples, packed)
  # [B, S + R]: prompts are padded on the left; an empty response has no place.
  ids = np.concatenate([prompts.tokens.repeat(G, 0), samples.tokens], axis=1)
  column = np.arange(S + R)
  real = column >= S - prompts.lengths.repeat(G)[:, None]
  real &= column < S + samples.lengths[:, None]
  real &= samples.lengths[:, None] > 0
  for m, (slopes, _, metrics) in enumerate(found):
    own = packed.row // (B // 2) == m
    tokens = ids[own][real[own]]
    share = np.bincount(tokens, minlength=V) / len(tokens) / 3
    for slope, coef in zip(slopes["routers"], coefs.values(), strict=True):
      expected = np.broadcast_to(coef * share, slope.shape)
      np.testing.assert_allclose(slope, expected, rtol=1e-5)
    assert metrics["loss/router_z"].count == len(tokens)
