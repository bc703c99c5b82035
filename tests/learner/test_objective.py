"""The objective: every term of a config reaches the loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import losses, model
from gspo_jax.learner import objective, routing
from gspo_jax.learner.cold_start import as_rollout
from gspo_jax.learner.objective import (
  MismatchCorrection,
  Objective,
  policy_loss,
)
from gspo_jax.logprobs import token_logprobs


@pytest.fixture(scope="module")
def cfg():
  return dataclasses.replace(model.variant("tiny"), dtype="float32")


@pytest.fixture(scope="module")
def params(cfg):
  return model.init(jax.random.key(0), cfg)


@pytest.fixture(scope="module")
def rows(cfg, params):
  """Six answers, whose old policy is not quite the present one."""
  rng = np.random.default_rng(0)
  draw = lambda width: rng.integers(0, 256, (6, width)).astype(np.int32)
  batch = {
    "tokens": draw(3),
    "length": np.full(6, 3, np.int32),
    "response": draw(4),
    "response_length": np.array([4, 1, 2, 3, 4, 4], np.int32),
  }
  rollout = as_rollout(batch)
  other = jax.tree.map(
    lambda x: x + 0.05 * rng.standard_normal(x.shape).astype(np.float32),
    params,
  )
  old = score(other, cfg, rollout)
  noise = lambda: rng.normal(0, 0.3, (6, 4)).astype(np.float32)
  return dataclasses.replace(
    rollout,
    old_logps=old.logps,
    advantages=jnp.asarray(rng.standard_normal(6), jnp.float32),
    experts=old.experts.swapaxes(0, 1),
    router_logps=old.router_logps.swapaxes(0, 1),
    sampler_logps=old.logps + noise(),
    reference_logps=old.logps + noise(),
  )


def score(params, cfg, rows, **how):
  return token_logprobs(
    params,
    cfg,
    rows.tokens,
    rows.positions,
    rows.mask,
    response_length=rows.response_mask.shape[1],
    **how,
  )


def evaluate(params, rows, cfg, chosen, temperature=1.0):
  found = policy_loss(
    params, rows, cfg=cfg, objective=chosen, temperature=temperature
  )
  return found.loss, found.metrics


TERMS = {
  "nothing": {},
  "kl": {"kl_coef": 0.3},
  "kl, k2": {"kl_coef": 0.3, "kl_estimator": "k2"},
  "entropy": {"entropy_coef": 0.1},
  "kl and entropy": {"kl_coef": 0.3, "entropy_coef": 0.1},
  "tis": {"mismatch": MismatchCorrection("tis", "token", 1.2, 0.5)},
  "mis": {"mismatch": MismatchCorrection("mis", "sequence", 1.1, 0.9)},
  "shift": {"shift_floor": 0.9},
  "dual clip": {"dual_clip": 1.1},
}


@pytest.mark.parametrize("name", TERMS)
def test_every_term_reaches_value_and_gradient(cfg, params, rows, name):
  """Against the public losses, put together by hand."""
  how = TERMS[name]
  chosen = Objective(losses.grpo_loss, **how)
  mask = rows.response_mask

  def by_hand(params):
    routes = rows.experts.swapaxes(0, 1)
    scored = score(params, cfg, rows, routes=routes)
    penalty = jnp.zeros((6, 4))
    if "kl_coef" in how:
      gap = rows.reference_logps - scored.logps
      k3 = jnp.exp(gap) - gap - 1
      penalty += 0.3 * (gap**2 / 2 if "kl_estimator" in how else k3)
    if "entropy_coef" in how:
      penalty -= 0.1 * scored.entropy
    weights = shift = None
    if "mismatch" in how:
      weights, _ = losses.mismatch_weights(
        rows.old_logps, rows.sampler_logps, mask, **how["mismatch"]._asdict()
      )
    if "shift_floor" in how:
      new = scored.router_logps.swapaxes(0, 1)
      moved = routing.shift(new, rows.router_logps)
      shift = jnp.maximum(-moved, jnp.log(0.9))
    terms = losses.Terms(shift, weights, penalty, how.get("dual_clip"))
    return losses.grpo_loss(
      scored.logps, rows.old_logps, rows.advantages, mask, terms=terms
    )[0]

  def ours(params):
    loss, metrics = evaluate(params, rows, cfg, chosen)
    return loss.total / loss.count, metrics

  expected, slope = jax.jit(jax.value_and_grad(by_hand))(params)
  (found, metrics), own = jax.jit(jax.value_and_grad(ours, has_aux=True))(
    params
  )
  assert float(found) == pytest.approx(float(expected), abs=1e-6)
  for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(slope), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)
  if name != "nothing":
    plain, _ = ours_without(params, rows, cfg)
    assert abs(plain - found) > 1e-4  # or the term is none
  assert metrics["kl/reference"].value() > 0


def ours_without(params, rows, cfg):
  loss, metrics = evaluate(params, rows, cfg, Objective(losses.grpo_loss))
  return loss.total / loss.count, metrics


def test_replay_goes_where_the_old_policy_went(cfg, params, rows):
  plain = functools.partial(evaluate, params, rows, cfg)
  _, free = plain(Objective(losses.grpo_loss))
  _, bound = plain(Objective(losses.grpo_loss, replay="r2"))
  assert free["moe/expert_flip_rate"].value() > 0
  # The experts are the old ones then, so flips would say nothing.
  assert "moe/expert_flip_rate" not in bound
  assert "moe/layer_flip_rate" not in bound
  shifted = bound["moe/router_shift_ratio"].value()
  assert 0 < shifted < 1
  assert bound["kl/old_new"].value() != free["kl/old_new"].value()


def test_log_probs_are_of_the_tempered_distribution(cfg, params, rows):
  """At the sampler's temperature a policy's own log-probs give ratio 1."""
  own = score(params, cfg, rows, temperature=0.7).logps
  rows = dataclasses.replace(rows, old_logps=own)
  chosen = Objective(losses.grpo_loss)
  _, metrics = evaluate(params, rows, cfg, chosen, temperature=0.7)
  assert metrics["ratio/token_std"].value() < 1e-5
  _, metrics = evaluate(params, rows, cfg, chosen)
  assert metrics["ratio/token_std"].value() > 0.1


def test_instruments_agree_with_one_another(cfg, params, rows):
  _, metrics = evaluate(params, rows, cfg, Objective(losses.gspo_loss))
  layers = metrics["moe/layer_flip_rate"].value()
  assert layers.shape == (cfg.num_layers,)
  flips = metrics["moe/expert_flip_rate"].value()
  assert flips == pytest.approx(layers.mean())
  assert 0 < metrics["moe/router_shift_ratio"].value() < 1
  off = Objective(losses.gspo_loss, instruments=False)
  bare = dataclasses.replace(rows, experts=None, router_logps=None)
  loss, without = evaluate(params, bare, cfg, off)
  assert not [key for key in without if key.startswith("moe/")]
  on, _ = evaluate(params, rows, cfg, Objective(losses.gspo_loss))
  assert float(loss.total) == pytest.approx(float(on.total), abs=1e-6)


def test_an_objective_can_be_a_static_argument():
  assert hash(objective.Objective(losses.gspo_loss)) is not None
