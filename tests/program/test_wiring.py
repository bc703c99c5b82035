"""From a config to the gradient of each method and term, by float64 loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import unpacked

from gspo_jax import model
from gspo_jax.configs import tiny_cpu
from gspo_jax.learner import credit, critic, train_batch, train_step
from gspo_jax.learner.packing import shuffled_groups
from gspo_jax.learner.train_batch import TrainBatch
from gspo_jax.logprobs import TokenLogprobs
from gspo_jax.losses import METHODS
from gspo_jax.program import learner_functions, settings
from gspo_jax.program.config import parse
from gspo_jax.sampler.samples import STOPPED, TRUNCATED


@pytest.fixture(scope="module", autouse=True)
def caches():
  """Single operations by the thousand crowd out what later tests count."""
  yield
  jax.clear_caches()


P, G, R, L, K = 4, 2, 5, 2, 2
B = P * G
CFG = model.variant("tiny")  # only its experts matter
TEMPERATURE = 0.5  # a power of two, so that dividing by it does not round
REWARDS = np.array([1.0, 0.0, 0.5, 2.0, 0.25, 0.75, 0.5, 0.5])
CUT = np.array([0, 0, 1, 0, 0, 1, 0, 0], bool)
MASK = np.arange(R) < np.array([5, 1, 3, 4, 5, 2, 4, 5])[:, None]

NAMES = list(METHODS)
# Numbers that differ from the methods' defaults and change what is clipped.
NUMBERS = {
  "gspo": {"clip_low": 2e-4, "clip_high": 8e-4},
  "gspo_token": {"clip_low": 2e-4, "clip_high": 8e-4},
  "gmpo": {"clip_low": 0.2, "clip_high": 0.5},
  "rspo": {"clip_low": 0.2, "clip_high": 0.5}, "cispo": {"cap": 1.5},
  "sapo": {"tau_positive": 0.5, "tau_negative": 2.0},
  "luspo": {"clip_low": 1e-3, "clip_high": 4e-3},
  "vespo": {**{"k_positive": 1.5, "lambda_positive": 2.0},
   **{"k_negative": 4.0, "lambda_negative": 1.0}},
  "dppo_tv": {"delta": 0.02}, "dppo_kl": {"delta": 0.2},
  "ctpo": {"clip_low": 0.01, "clip_high": 0.1},
}  # fmt: skip
OTHERS = {"clip_low": 0.1, "clip_high": 0.35}
NUMBERS_OF_ORACLES = ("clip", "cap", "tau", "k_", "lambda_", "delta")
# Ratios of sequences spread less than those of tokens.
DUAL_CLIP = {"gspo": 1.0001, "gspo_token": 1.0001, "luspo": 1.0005}
TERMS = {
  "nothing": {},
  "numbers": {},
  "k1": {"kl_coef": 0.3, "kl_estimator": "k1"},
  "k2": {"kl_coef": 0.3, "kl_estimator": "k2"},
  "k3": {"kl_coef": 0.3, "kl_estimator": "k3"},
  "k3_unbiased": {"kl_coef": 0.3, "kl_estimator": "k3_unbiased"},
  "entropy": {"entropy_coef": 0.1},
  "dual clip": {},
  "tis_token": {"mismatch": "tis_token:cap=1.3"},
  "tis_sequence": {"mismatch": "tis_sequence:cap=1.1"},
  "mis_token": {"mismatch": "mis_token:cap=1.3,floor=0.8"},
  "mis_sequence": {"mismatch": "mis_sequence:cap=1.1,floor=0.9"},
  "icepop": {"mismatch": "icepop:cap=1.3,floor=0.8"},
  "centering": {"score_centering": 2},
  "centering of weighted tokens": {
    **{"score_centering": 2, "mismatch": "tis_token:cap=1.1"},
  },
  "centering of weighted sequences": {
    **{"score_centering": 2, "mismatch": "mis_sequence:cap=1.1,floor=0.9"},
    **{"kl_coef": 0.3, "kl_estimator": "k3"},
  },
  "off-policy mask": {"off_policy_mask_threshold": 0.05},
  "router shift": {},
  "r2": {"replay": "r2"},
  "r3": {"replay": "r3"},
  "zero_advantage": {"truncated": "zero_advantage"},
  "distillation": {
    "truncated": "zero_advantage",  # a teacher scores truncated responses, too
    "distillation": {"teachers": ("-",), "coef": 0.7, "reward_weight": 0.4},
    "off_policy_mask_threshold": 0.05,
  },
  "everything": {
    **{"kl_coef": 0.3, "kl_estimator": "k3", "entropy_coef": 0.1},
    **{"mismatch": "mis_token:cap=1.3,floor=0.8"},
    **{"replay": "r3", "truncated": "zero_advantage"},
    **{"off_policy_mask_threshold": 0.05, "score_centering": 2},
  },
}
# Each method by itself, and with its numbers and all terms; each term with a
# method that clips sequences and with one that clips tokens.
METHODS_OF = {
  "distillation": ("gspo_token", "grpo", "ppo"),
  "numbers": ("dppo_tv", "dppo_kl"),  # they cut nothing beside all terms
  "k1": ("gspo", "grpo", "ppo"),  # of responses, and of tokens
}
CASES = [
  (name, term)
  for name in NAMES
  for term in TERMS
  if term in ("nothing", "everything")
  or name in METHODS_OF.get(term, ("gspo", "grpo"))
]


def numbers_of(name, term):
  """The numbers of the method that a case sets."""
  numbers = {}
  if term in ("numbers", "everything"):
    numbers |= NUMBERS.get(name, OTHERS)
  if term in ("router shift", "everything"):
    numbers["router_shift_floor"] = 0.95
  clips_ratio = name not in oracles.UNCLIPPED
  if term == "dual clip" or (term == "everything" and clips_ratio):
    numbers["dual_clip"] = DUAL_CLIP.get(name, 1.1)
  if name == "ppo":
    numbers |= {"critic_discount": 0.9, "critic_trace_decay": 0.8}
    numbers["critic_clip"] = 0.1
  return numbers


def make_config(name, term):
  """Two minibatches of two groups, of two micro-batches each."""
  config = tiny_cpu.get_config("debug")
  config.rollout.group_size, config.sampler.temperature = G, TEMPERATURE
  config.sampler.max_new_tokens = R
  config.learner.minibatches = config.learner.micro_batch_size = 2
  numbers = ",".join(f"{k}={v}" for k, v in numbers_of(name, term).items())
  config.objective.name = f"{name}:{numbers}" if numbers else name
  config.objective.update(TERMS[term])
  return config


@functools.cache
def params_and_batch(name):
  """Parameters, and a batch of an older policy: some ratios are clipped."""
  rng = np.random.default_rng(3)
  normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  old = rng.uniform(-4, -0.1, (B, R)).astype(np.float32)
  router, values = -np.abs(normal(B, L, R, K)), normal(B, R)
  spread = np.float32(oracles.SETTINGS[name][1])
  params = {
    "logps": TEMPERATURE * (old + spread * normal(B, R)),
    "router": router + np.float32(0.15) * normal(B, L, R, K),
    "values": values + np.float32(0.2) * normal(B, R),
  }
  tokens = np.zeros((B, 1 + R), np.int32)
  tokens[:, 0] = np.arange(B)  # the row of the table
  rows = TrainBatch(
    tokens,
    positions=tokens,
    segment_ids=np.pad(MASK, ((0, 0), (1, 0)), constant_values=1).astype(int),
    response_mask=MASK,
    old_logps=old,
    advantages=np.zeros((B, R), np.float32),
    response_index=np.arange(B)[:, None].repeat(R, axis=1),
    experts=rng.integers(0, 8, (B, L, 1 + R, K)).astype(np.uint8),
    router_logps=router,
    sampler_logps=old + np.float32(0.3) * normal(B, R),
    reference_logps=old + np.float32(0.5) * normal(B, R),
    teacher_logps=old + np.float32(0.5) * np.roll(normal(B, R), 1),
    values=values,
    head_ids=np.zeros((B, 2, R), np.int32),
    head_logps=(old - 1.2 - 0.4 * np.abs(normal(2, B, R))).swapaxes(0, 1),
  )
  return params, rows


HEAD = np.array([4.0, 5.0])  # how much less likely the two ids of a head are


CHOSEN = np.array([3, 5], np.uint8)  # the experts that the router chooses


def replay_shift(experts_BTk):
  """What replay adds to a log-prob, by the expert of its token."""
  far = experts_BTk[:, 1:, 0].astype(np.float32) - np.float32(CHOSEN[0])
  return np.float32(0.002) * far


def entropy(x):
  return x * x / 8


def table(
  params,
  cfg,
  rows,
  *,
  temperature,
  routes=None,
  replay=False,
  use_own_experts=None,
  router_losses=False,
  head_ids=None,
):
  """Stands for `train_batch.response_logps`."""
  i = rows.tokens[:, 0]
  logps = params["logps"][i] / temperature
  chosen = jnp.broadcast_to(CHOSEN, (L, len(i), 1 + R, K))
  if routes is None:
    routes = chosen
  if use_own_experts is not None:
    routes = jnp.where(use_own_experts, chosen, routes)
  if replay:
    logps = logps + replay_shift(routes[0])
  router = params["router"][i].swapaxes(0, 1)
  return TokenLogprobs(
    logps,
    entropy(logps),
    experts=routes if replay else chosen,
    router_logps=router,
    router_entropy=-router[..., 0],
    dropped=jnp.zeros(L, jnp.int32),
    head_logps=logps[:, None] - HEAD[:, None],
  )


@pytest.fixture
def policy(monkeypatch):
  """The table, in place of the model and of the critic."""
  monkeypatch.setattr(train_batch, "response_logps", table)
  values = lambda params, cfg, rows: params["values"][rows.tokens[:, 0]]
  monkeypatch.setattr(critic, "values", values)


def assign(config, rows):
  finish = jnp.where(CUT, TRUNCATED, STOPPED).astype(jnp.int8)
  rewards = jnp.asarray(REWARDS, jnp.float32)
  if not config.objective.distillation.teachers:
    rows = dataclasses.replace(rows, teacher_logps=None)
  batch = credit.assign_advantages(
    unpacked.cut(rows),
    rewards,
    finish,
    objective=parse(config).objective,
    group_size=G,
  )
  return unpacked.join(batch)


def of_tokens(advantages):
  """[B, R], from those of responses or of tokens."""
  if advantages.ndim == 1:
    advantages = advantages[:, None]
  return np.where(MASK, advantages, 0)


def typed(config):
  """The name of the method, and the numbers that follow it."""
  name, _, text = config.objective.name.partition(":")
  pairs = (pair.split("=") for pair in text.split(",") if pair)
  return name, {key: float(value) for key, value in pairs}


def expect(config, params, rows) -> tuple[oracles.Case, dict]:
  """The arguments of the oracles for a config, in float64."""
  c = config.objective
  name, numbers = typed(config)
  floor = numbers.get("router_shift_floor")
  advantages, _ = expected_advantages(config, rows)
  if c.distillation.teachers:
    gap = rows.teacher_logps.astype(float) - rows.old_logps
    advantages = of_tokens(advantages) + c.distillation.coef * gap
  weights = shift = penalty = None
  if c.mismatch != "none":
    spec, _, text = c.mismatch.partition(":")
    bounds = dict(pair.split("=") for pair in text.split(","))
    method, unit = spec.replace("icepop", "mis_token").split("_")
    cap, least = float(bounds["cap"]), float(bounds.get("floor", 0))
    weights, *_ = oracles.mismatch_weights(
      rows.old_logps,
      rows.sampler_logps,
      MASK,
      *(method, unit, cap, least),
    )
  if floor is not None or name == "rspo":
    moved = np.abs(params["router"].astype(float) - rows.router_logps)
    shift = moved.mean((1, 3))
  estimators = {
    "k1": lambda gap: 0.0,  # the advantages have it
    "k2": lambda gap: gap**2 / 2,
    "k3": lambda gap: np.exp(gap) - 1 - gap,
    "k3_unbiased": lambda gap: np.exp(gap) - 1 - gap,
  }
  x = params["logps"] / TEMPERATURE
  if c.replay != "none":
    x = x + replay_shift(rows.experts[:, 0])
  centers = None
  if c.score_centering:
    centers = of_tokens(advantages)[..., None] * surplus(c, x, rows, weights)
  if c.kl_coef or c.entropy_coef or c.score_centering:

    def penalty(x, i, t):
      gap = float(rows.reference_logps[i, t]) - x
      divergence = estimators[c.kl_estimator](gap)
      if c.kl_estimator == "k3_unbiased":
        divergence *= np.exp(x - float(rows.old_logps[i, t]))
      total = c.kl_coef * divergence - c.entropy_coef * entropy(x)
      return total if centers is None else total + centers[i, t] @ (x - HEAD)

  if c.off_policy_mask_threshold:
    kept, _ = oracles.off_policy_mask(
      x,
      rows.sampler_logps,
      np.broadcast_to(advantages.reshape(B, -1), (B, R)),
      MASK,
      c.off_policy_mask_threshold,
    )
    weights = kept if weights is None else kept * weights
    if centers is not None:
      centers *= kept[..., None]
  case = oracles.Case(
    x,
    rows.old_logps,
    advantages,
    MASK,
    router_shift=shift,
    weights=weights,
    penalty=penalty,
  )
  bounds = (v for k, v in numbers.items() if k.startswith(NUMBERS_OF_ORACLES))
  return case, {
    "dual_clip": numbers.get("dual_clip"),
    "bounds": tuple(bounds),
    "floor": floor or 0.8,
  }


def surplus(c, x, rows, weights):
  """[B, R, 2]: what multiplies the log-probs of a head; its equation."""
  p = np.exp(x[..., None] - HEAD)
  q = np.exp(np.moveaxis(rows.head_logps.astype(float), 1, -1))
  rho = np.divide(*(1 - d.sum(-1, keepdims=True) for d in (q, p)))
  assert (rho > 0).all()
  method, _, text = c.mismatch.partition(":")
  bounds = {
    k: float(v) for k, v in (x.split("=") for x in text.split(",") if x)
  }
  cap, floor = bounds.get("cap"), bounds.get("floor")
  if method.endswith("_sequence"):
    return weights[..., None] * (q - rho * p)
  of = {
    "none": lambda r: 1.0,
    "tis_token": lambda r: np.minimum(r, cap),
    "mis_token": lambda r: np.where((floor <= r) & (r <= cap), r, 0),
  }[method]
  return q * of(p / q) - rho * of(1 / rho) * p


def slope_of(name, case, options, rows=None):
  """The gradient with respect to the parameters, of all rows or of some."""
  if rows is not None:
    case = case._replace(m=MASK & np.isin(np.arange(B), rows)[:, None])
  return oracles.gradient(name, case, **options) / TEMPERATURE


def expected_advantages(config, rows):
  c, (name, _) = config.objective, typed(config)
  fee = np.zeros((B, R))
  if c.kl_coef and c.kl_estimator == "k1":
    gap = rows.old_logps.astype(float) - rows.reference_logps
    fee = np.where(MASK, c.kl_coef * gap, 0)
  returns = None
  if name == "ppo":
    token_rewards = -fee
    token_rewards[np.arange(B), MASK.sum(1) - 1] += REWARDS
    advantages = oracles.generalized_advantages(
      token_rewards, rows.values, MASK, 0.9, 0.8
    )
    returns = np.where(MASK, advantages + rows.values, 0)
    real = advantages[MASK]
    advantages = np.where(MASK, (advantages - real.mean()) / real.std(), 0)
  else:
    groups = REWARDS.reshape(P, G)
    advantages = groups - groups.mean(1, keepdims=True)
    if name not in oracles.FIXED_LENGTH:
      advantages /= groups.std(1, keepdims=True) + 1e-6
    fees = fee.sum(1).reshape(P, G)
    advantages = (advantages - fees + fees.mean(1, keepdims=True)).ravel()
  if c.truncated == "zero_advantage":
    advantages[CUT] = 0
  if c.distillation.teachers:
    advantages = c.distillation.reward_weight * advantages
  return advantages, returns


@functools.cache
def oracle(name, term):
  """The loss, and its gradient with respect to the parameters."""
  case, options = expect(make_config(name, term), *params_and_batch(name))
  loss, _ = oracles.loss(name, case, **options)
  return loss, slope_of(name, case, options)


def assert_close(found, expected):
  atol = 1e-6 + 3e-5 * np.abs(expected).max()
  np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


def loss_and_gradient(loss, params, rows):
  """The loss of all rows, and its gradient."""

  def mean(params):
    found = loss(params, rows, is_old_policy=False)
    return found.loss.total / found.loss.count

  return jax.value_and_grad(mean)(jax.tree.map(jnp.asarray, params))


@pytest.mark.parametrize(("name", "term"), CASES)
def test_loss_and_gradient_are_those_of_the_oracle(policy, name, term):
  config = make_config(name, term)
  params, rows = params_and_batch(name)
  rows = assign(config, rows)
  advantages, _ = expected_advantages(config, rows)
  assert_close(rows.advantages, of_tokens(advantages))
  learner = settings.policy_learner(parse(config), CFG)
  value, grads = loss_and_gradient(learner.loss, params, rows)
  loss, slope = oracle(name, term)
  assert_close(value, loss)
  assert_close(grads["logps"], slope)
  if term != "nothing":  # the term must have an effect
    _, plain = oracle(name, "nothing")
    assert np.abs(slope - plain).max() > 3e-4 * np.abs(plain).max()


def start(config, params):
  """A state, and an update by plain gradient descent."""
  learner = settings.policy_learner(parse(config), CFG)
  learner = learner._replace(optimizer=optax.sgd(1.0))
  state = train_step.init_state(
    jax.tree.map(jnp.asarray, params), optimizer=learner.optimizer
  )

  def update(state, rows, **options):
    rows = jax.tree.map(jnp.asarray, rows)
    batch = unpacked.cut(rows, config.learner.minibatches, 2, ORDER)
    with jax.disable_jit():
      state, batch, metrics = train_step.update(
        state, batch, learner=learner, **options
      )
    return state, unpacked.join(batch, ORDER), metrics

  return state, update


ORDER = shuffled_groups(jax.random.key(1), P, G)
FIRST, SECOND = ORDER.reshape(2, -1)  # the rows of two minibatches


@pytest.mark.parametrize(
  # One of each mean: over sequences, over tokens, with a critic.
  "name",
  ["gspo", "dapo", "ppo"],
)
def test_a_whole_update_takes_the_gradient_of_the_oracle(policy, name):
  """The second minibatch, whose ratios are not 1, in two micro-batches."""
  config = make_config(name, "everything")
  params, rows = params_and_batch(name)
  rows = assign(config, rows)
  state, update = start(config, params)
  new, *_ = update(state, rows)
  slope = slope_of(name, *expect(config, params, rows), SECOND)
  change = params["logps"] - new.params["logps"]
  assert_close(change[SECOND], slope[SECOND])
  assert np.abs(slope[SECOND]).max() > 1e-3


def test_a_reference_follows_the_policy_in_each_second_update(policy):
  config = make_config("grpo", "nothing")
  params, rows = params_and_batch("grpo")
  batch = unpacked.cut(assign(config, rows), 2, 2, ORDER)
  state, _ = start(config, params)
  state = dataclasses.replace(state, reference=state.params)
  learner = settings.policy_learner(parse(config), CFG)
  for expected in (state.params, None):
    with jax.disable_jit():
      state, *_ = learner_functions._update(
        state,
        batch,
        np.True_,
        learner=learner._replace(optimizer=optax.sgd(1.0)),
        value_learner=None,
        reference_every=2,
      )
    expected = expected or state.params
    jax.tree.map(np.testing.assert_array_equal, state.reference, expected)


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("old_logps", ["recompute", "sampler"])
def test_a_first_minibatch_is_on_policy_or_has_the_samplers_logps(
  policy, old_logps, minibatches
):
  config = make_config("grpo", "nothing")
  config.objective.old_logps = old_logps
  config.learner.minibatches = minibatches
  params, rows = params_and_batch("grpo")
  rows = assign(config, rows)
  state, update = start(config, params)
  new, _, metrics = update(state, rows)
  if old_logps == "recompute":
    at_once = params["logps"] / np.float32(TEMPERATURE)
    rows = dataclasses.replace(rows, old_logps=at_once)
  first = ORDER[: B // minibatches]
  slope = slope_of("grpo", *expect(config, params, rows), first)
  change = params["logps"] - new.params["logps"]
  assert_close(change[first], slope[first])
  # Known before the update, they are compared with the update's pass.
  known = old_logps == "sampler" or minibatches == 2
  assert (metrics["ratio/first_minibatch_std"].value() > 0) == known


@pytest.mark.parametrize(
  ("minibatches", "term"),
  [*((1, term) for term in ("nothing", "k1")),
   *((2, term) for term in ("k1", "r2", "everything"))],
)  # fmt: skip
def test_an_update_after_old_logps_is_on_policy(policy, minibatches, term):
  """The rows of a minibatch move only in its step, so all ratios are 1."""
  config = make_config("gspo", term)
  config.learner.minibatches = minibatches
  params, rows = params_and_batch("gspo")
  rows = dataclasses.replace(rows, teacher_logps=None)  # no distillation
  recorded = config.objective.replay == "r3"
  # The fields of an old policy with these parameters.
  at_once = params["logps"] / np.float32(TEMPERATURE)
  experts = np.broadcast_to(CHOSEN, rows.experts.shape)
  if recorded:
    experts, at_once = rows.experts, at_once + replay_shift(rows.experts[:, 0])
  known = dataclasses.replace(
    rows, old_logps=at_once, experts=experts, router_logps=params["router"]
  )
  blank = dataclasses.replace(
    rows,
    old_logps=np.zeros_like(rows.old_logps),
    experts=rows.experts if recorded else np.zeros_like(rows.experts),
    router_logps=np.zeros_like(rows.router_logps),
  )
  state, update = start(config, params)
  scored, sums = blank, []
  asked = settings.needs_old_logps(parse(config), CFG)
  assert asked == (minibatches == 2 or term == "k1")
  if asked:
    state, scored, metrics = update(state, blank, apply_updates=np.False_)
    assert int(state.step) == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    # The update measures the first minibatch, this pass the others.
    later = B - B // minibatches
    assert metrics["mismatch/sequence_abs_mean"].count == later
    if minibatches == 2:
      for name in ("old_logps", "experts", "router_logps"):
        found, expected = (getattr(x, name)[SECOND] for x in (scored, known))
        np.testing.assert_array_equal(found, expected)
    # One micro-batch of the first is enough, unless rewards need them all.
    rows_known = (np.asarray(scored.old_logps) != 0).any(1).sum()
    assert rows_known == (B if term == "k1" else later + 2)
    sums.append(metrics)
  new, _, metrics = update(
    state, assign(config, scored), apply_updates=np.True_
  )
  assert int(new.step) == 1
  metrics = functools.reduce(
    functools.partial(jax.tree.map, jnp.add), sums, metrics
  )

  parts = (FIRST, SECOND) if minibatches == 2 else [ORDER]
  expected = expect(config, params, known)
  slope = sum(slope_of("gspo", *expected, part) for part in parts)
  assert_close(params["logps"] - new.params["logps"], slope)
  # Every row, and every token, is counted once.
  assert metrics["mismatch/sequence_abs_mean"].count == B
  total, count = metrics["policy/entropy"]
  assert_close(total, entropy(at_once)[MASK].sum())
  assert count == MASK.sum()
  assert metrics["clip_frac/token"].count == MASK.sum()
  assert metrics["grad/norm"].count == minibatches
  assert metrics["ratio/moved"].value() == 0
  assert metrics["moe/router_shift_ratio"].value() == 1
  assert metrics["ratio/first_minibatch_std"].value() == 0
  if not recorded and term != "r2":
    assert metrics["moe/expert_flip_rate"].value() == 0


def test_the_samplers_logps_can_be_the_old_ones(policy):
  """The gap to them is measured all the same, of every response once."""
  config = make_config("gspo", "nothing")
  config.objective.old_logps = "sampler"
  params, rows = params_and_batch("gspo")
  rows = dataclasses.replace(rows, teacher_logps=None)  # no distillation
  rows = dataclasses.replace(rows, old_logps=rows.sampler_logps)
  state, update = start(config, params)
  state, scored, first = update(state, rows, apply_updates=np.False_)
  np.testing.assert_array_equal(scored.old_logps, rows.sampler_logps)
  _, _, second = update(state, assign(config, scored), apply_updates=np.True_)
  metrics = jax.tree.map(jnp.add, first, second)
  assert metrics["mismatch/sequence_abs_mean"].count == B
  gap = np.abs(params["logps"] / TEMPERATURE - rows.sampler_logps)[MASK]
  assert_close(metrics["mismatch/token_abs_mean"].value(), gap.mean())
  # The first minibatch is that far from ratio 1.
  assert metrics["ratio/first_minibatch_std"].value() > 0.01


def test_the_critics_loss_has_the_numbers_of_the_config(policy):
  config = make_config("ppo", "nothing")
  params, rows = params_and_batch("ppo")
  rows = assign(config, rows)
  _, returns = expected_advantages(config, rows)
  np.testing.assert_allclose(rows.returns, returns, atol=1e-5)
  critic_learner = settings.critic_learner(parse(config), CFG)
  value, grads = loss_and_gradient(critic_learner.loss, params, rows)
  losses, cuts, slopes = oracles.value_loss(
    params["values"], rows.values, returns, MASK, clip=0.1
  )
  assert 0 < cuts.sum() < MASK.sum()
  assert_close(value, losses.sum() / MASK.sum())
  assert_close(grads["values"], slopes / MASK.sum())
