"""For every key of a config: what changing it changes.

`ROWS` is the table: a key, what is observed, and what that is at two values or
more. A key without a row fails, and so does a row without a key. Observed are
  a made run (`made_run`): the whole of train.py, data and files, on a program
    whose functions only take notes;
  the functions of a built program, on a policy of two tables (`bigram`);
  shapes, shardings and jaxprs of a built program, of the real model.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import bigram
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from made_run import MadeRun
from ml_collections import ConfigDict

from configs import common, tiny_cpu
from gspo_jax import (
  losses,
  model,
  objective,
  program,
  rollout,
  sample_file,
  sampler,
  settings,
  sharding,
  tokenizer,
)
from gspo_jax import rows as row_readers
from gspo_jax.limits import check
from gspo_jax.losses import Terms
from gspo_jax.model import hf
from gspo_jax.on_mesh import OnMesh
from gspo_jax.paged_sampler import PagedSampler
from gspo_jax.sampler import Prompts, Samples
from gspo_jax.slots import Orders

P, G, S, R = 8, 2, 3, 4  # questions, answers to each, prompt and answer slots
B = P * G


def small() -> ConfigDict:
  """What all rows start from: two iterations of one optimizer step."""
  c = tiny_cpu.get_config("debug")
  c.num_steps = 2
  c.data.prompts, c.sampler.group_size = P, G
  c.learner.minibatches, c.learner.micro_rows = 1, B
  c.optim.warmup_steps = c.cold_start.warmup_steps = 0
  c.optim.clip_norm = 1e9
  c.cold_start.steps, c.cold_start.batch = 0, 8
  c.eval.every = c.checkpoint.every = c.log.samples_every = 10
  return c


def apart(tree_a, tree_b) -> bool:
  """Whether two observations differ, by more than rounding."""
  try:
    same(tree_a, tree_b)
  except (AssertionError, TypeError):  # one may be no number
    return True
  return False


def same(found, expected):
  """Asserts that they are equal, floats and arrays but for rounding."""
  whole = expected if isinstance(expected, tuple) else (expected,)
  if all(isinstance(x, float | np.ndarray) for x in whole):
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-6)
  else:
    assert found == expected


# A run. Each is made once for all the rows that look at it.


@pytest.fixture(scope="module", autouse=True)
def _once(tmp_path_factory):
  """Forgets the runs of the module, and gives them folders."""
  _RUNS["folder"] = tmp_path_factory.mktemp("runs")
  yield
  _RUNS.clear()


_RUNS: dict[str, Any] = {}


def run_of(config) -> MadeRun:
  return _once_for(config, MadeRun, _RUNS["folder"] / str(len(_RUNS)))


def _once_for(config, make, *args):
  """`make(config, *args)`, made once for a config."""
  key = make.__name__ + config.to_json_best_effort()
  if key not in _RUNS:
    _RUNS[key] = make(config, *args)
  return _RUNS[key]


def initial_key(config):
  (key, *_) = run_of(config).keys["init"]
  return np.asarray(jax.random.key_data(key))


def update_key(config):
  (key, *_) = run_of(config).keys["update"]
  return np.asarray(jax.random.key_data(key))


def chain_seed(config):
  made = run_of(config).run.material
  return made.stages[0].source.seed, made.held_out.seed


def questions(config):
  return run_of(config).given("generate")[0]


def imitated(config):
  return run_of(config).given("imitate")[0]


def imitated_questions(config):
  return imitated(config)["tokens"]


def steps_run(config):
  return run_of(config).rows()


def mesh_of_run(config):
  mesh = run_of(config).run.program.mesh
  queries, experts = weight_shards(config, mesh)
  return dict(mesh.shape), queries, experts


def kinds(asked: list[str]) -> dict[str, int]:
  """Questions by the file they are from; those of the chain begin with "0"."""
  letters = ("0" if q[0].isdigit() else q[0] for q in asked)
  return dict(collections.Counter(letters))


def learnt_kinds(config):
  return kinds(questions(config))


def second_kinds(config):
  return kinds(run_of(config).given("generate")[1])


def held_out_kinds(config):
  (asked,) = run_of(config).given("generate_eval")[:1]
  return set(kinds(asked))


def question_forms(config):
  return {re.sub(r"\d+", "N", question) for question in questions(config)}


def question_lengths(config):
  return {len(question) for question in questions(config)}


def rewards_given(config):
  return float(np.mean(run_of(config).given("assign")))


def demonstrations(config):
  batch, texts = imitated(config), run_of(config).run.program.tokenizer
  ids = zip(batch["response"], batch["response_length"], strict=True)
  return [texts.decode(row[: n - 1]) for row, n in ids]


def demonstration_starts(config):
  return {text[:2] for text in demonstrations(config)}


def demonstrated_steps(config):
  return {text.count(";") for text in demonstrations(config)}


def wrong_demonstrations(config):
  """Whether some show a wrong result of a step."""
  done = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
  wrong = lambda d: done[d[2]](int(d[1]), int(d[3])) % 10 != int(d[5])
  return any(map(wrong, demonstrations(config)))


def tfds_folder(config):
  def read(name, data_dir):
    raise ValueError(f"{name} in {data_dir}")

  with mock.patch.object(row_readers, "tfds", read):
    return run_of(config).error


def tokens_of_seven(config):
  """The ids of "7" for what reads answers, and the fingerprint's part."""
  made = program.build(config, one_device()).tokenizer
  return made.encode("7"), made.fingerprint == "bytes"


def asked_at_once(config):
  return len(questions(config)), run_of(config).widths


def drawn_for_a_step(config):
  return len(run_of(config).given("generate"))


def known_again(config):
  """How often a question that is answered right is asked, at most."""
  asked = [q for batch in run_of(config).given("generate") for q in batch]
  known = [q for q in asked if int(q[1:4]) < P]
  return max(collections.Counter(known).values())


def too_long(config):
  return run_of(config).error.partition(" ")[0]


def order_of_phases(config):
  first = {"generate": "g", "update": "u"}
  return "".join(first.get(name, "") for name, _ in run_of(config).events)


def budget(config):
  return set(run_of(config).given("until")[0])


def processes(config):
  return len(run_of(config).pools)


def seconds_given(config):
  return run_of(config).pools[0]["seconds"]


def imitations(config):
  return len(run_of(config).given("imitate"))


def looks(config):
  """Questions of which greedy accuracy was taken, before the first rollout."""
  names = [name for name, _ in run_of(config).events]
  return names[: names.index("generate_eval")].count("generate_greedy")


def cold_start_at(config):
  run = run_of(config)
  inside = run.folder / "cold_start"
  chosen = _RUNS["folder"] / "files" / "cold"
  return inside.is_dir(), chosen.is_dir() and str(
    chosen
  ) == config.cold_start.dir


def cold_start_saves(config):
  return sorted(
    int(p.name) for p in (run_of(config).folder / "cold_start").iterdir()
  )


def evaluated_at(config):
  run = run_of(config)
  told = zip(run.rows(), run.rows("eval/greedy"), strict=True)
  return [step for step, greedy in told if greedy is not None]


def questions_tested(config):
  run = run_of(config)
  first, then = (run.given(f"generate_{n}") for n in ("eval", "greedy"))
  half = len(first) // 2  # of the first evaluation; then comes the last
  count = lambda batches: sum(map(len, batches[:half]))
  return count(first), count(then)


def steps_kept(config):
  folder = run_of(config).folder / "checkpoints"
  return sorted(int(path.name) for path in folder.iterdir())


def sample_files(config):
  folder = run_of(config).folder / "samples"
  return sorted(
    int(path.stem.removeprefix("step_")) for path in folder.iterdir()
  )


def samples_shown(config):
  (path,) = (run_of(config).folder / "samples").iterdir()
  return len(sample_file.read(path.read_text()))


# A built program of the real model: shapes, shardings, jaxprs.


def one_device():
  return sharding.make_mesh(jax.devices()[:1])


def weight_shards(config, mesh):
  """What one device holds of the queries' weights, and of the experts'."""
  layers = program.build(config, mesh).abstract.params["layers"]
  shard = lambda x: x.sharding.shard_shape(x.shape)
  return shard(layers["attention"]["q"]), shard(layers["moe"]["gate_up"])


def decoding_mesh(config):
  made = program.build(config, sharding.make_mesh(data=8))
  each = made.generate, made.generate_eval, made.generate_greedy
  (shape,) = {tuple(function.mesh.shape.values()) for function in each}
  return shape


def embedding(config):
  cfg = program.build(config, one_device()).cfg
  shapes = program.build(config, one_device()).abstract.params["embed"].shape
  return *shapes, cfg.num_layers


def first_weights(config):
  """A number of the weights a run begins with; "drawn" where none are read."""
  init = program.build(config, one_device()).init
  if isinstance(init, OnMesh):
    return "drawn"
  return float(init(jax.random.key(0))["embed"][0, 0])


def traced(config) -> dict[str, Any]:
  """The jaxprs of score, update and generate."""
  made, key = program.build(config, one_device()), jax.random.key(0)
  trace = lambda f, *args: list(
    operations(jax.make_jaxpr(f.jitted)(*args).jaxpr)
  )
  params = made.abstract.params
  return {
    "score": lambda: trace(made.score, params, PROMPTS, made_samples()),
    "update": lambda: trace(made.update, made.abstract, made_rollout(), key),
    "generate": lambda: trace(made.generate, params, PROMPTS, key),
  }


def operations(jaxpr):
  """All of them, those inside others included."""
  for op in jaxpr.eqns:
    yield op
    for value in jax.tree.leaves(list(op.params.values())):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from operations(inner)


def types_of_products(config):
  """By function, whether matrix products are of bfloat16."""
  found = {}
  for name, trace in traced(config).items():
    products = (o for o in trace() if o.primitive.name == "dot_general")
    found[name] = "bfloat16" in {str(o.invars[0].aval.dtype) for o in products}
  return found


def kept_names(config):
  """What an update's backward pass finds stored; None where it all is."""
  policies = [o.params.get("policy") for o in traced(config)["update"]()]
  kept = [p.saveable_names for p in policies if p is not None]
  return set.union(*map(set, kept)) if kept else None


# The functions of a built program, on a policy of two tables.


def numbers(*shape, seed=0, scale=0.3):
  return np.float32(np.random.default_rng(seed).normal(0, scale, shape))


PROMPTS = Prompts(
  np.random.default_rng(1).integers(0, 256, (P, S)).astype(np.int32),
  np.full(P, S, np.int32),
)
LENGTHS = np.resize([4, 2, 3, 1, 4], B).astype(np.int32)
EXPERTS = np.random.default_rng(2).permuted(
  np.broadcast_to(np.arange(bigram.E, dtype=np.uint8), (B, 2, S + R, bigram.E)),
  axis=3,
)[..., : bigram.K]


def made_samples(experts=None) -> Samples:
  """Answers that no sampler drew."""
  tokens = np.random.default_rng(3).integers(0, 256, (B, R)).astype(np.int32)
  finish = np.where(np.arange(B) % 4, sampler.STOPPED, sampler.TRUNCATED)
  steps = np.int32(B * R)
  return Samples(
    tokens, numbers(B, R), LENGTHS, finish.astype(np.int8), steps, experts
  )


@functools.cache
def made_rollout() -> rollout.Rollout:
  """Of those answers, all fields filled; the old policy is another one."""
  rows = rollout.assemble(PROMPTS, made_samples().tokens, LENGTHS)
  own, _ = scored(bigram.params(), rows)
  old = own + numbers(B, R, seed=4)
  return dataclasses.replace(
    rows,
    old_logps=old,
    advantages=jnp.asarray(numbers(B, seed=5, scale=1)),
    experts=EXPERTS,
    router_logps=-jnp.abs(numbers(B, 2, R, bigram.K, seed=6)),
    sampler_logps=old + numbers(B, R, seed=7),
    reference_logps=old + numbers(B, R, seed=8),
    values=jnp.asarray(numbers(B, R, seed=9, scale=1)),
    returns=jnp.asarray(numbers(B, R, seed=10, scale=1)),
  )


def scored(params, rows, temperature=1.0, **how):
  """Log-probs of the answers and entropies [B, R], by the textbook."""
  logits = bigram.logits(params, rows.tokens, **how)[:, S - 1 : -1]
  logps = jax.nn.log_softmax(logits / temperature)
  picked = jnp.take_along_axis(logps, rows.tokens[:, S:, None], 2)[..., 0]
  return picked, -(jnp.exp(logps) * logps).sum(-1)


def built(config):
  return program.build(config, one_device())


def drawn(config, params=None) -> list[Samples]:
  """Answers of generate, generate_eval and generate_greedy."""
  made, params = built(config), params or bigram.params()
  each = made.generate, made.generate_eval, made.generate_greedy
  with bigram.by_the_operation():
    return [f(params, PROMPTS, jax.random.key(1)) for f in each]


def answers_drawn(config):
  """[answers, slots] of generate, generate_eval and generate_greedy."""
  made, key = built(config), jax.random.key(1)
  each = made.generate, made.generate_eval, made.generate_greedy
  shapes = lambda f: jax.eval_shape(f, bigram.params(), PROMPTS, key)
  with bigram.by_the_operation():
    return [shapes(f).tokens.shape for f in each]


def temperature_of_draws(config):
  """Of generate and generate_eval, by the log-probs that they report."""
  return [_temperature_of(samples) for samples in drawn(config)[:2]]


def _temperature_of(samples):
  """That at which the first token's log-prob is the one reported."""
  group = len(samples.tokens) // P
  logits = bigram.logits(bigram.params(), PROMPTS.tokens)[:, -1]
  first = np.asarray(samples.tokens)[:, 0]
  for temperature in (1.0, 0.5, 0.01):
    logps = jax.nn.log_softmax(logits / temperature).repeat(group, 0)
    if np.allclose(
      logps[np.arange(len(first)), first], samples.logps[:, 0], atol=1e-4
    ):
      return temperature
  raise AssertionError("no temperature fits the log-probs")


def draws_the_likeliest(config):
  """Whether generate and generate_eval draw no other first tokens."""
  best = bigram.logits(bigram.params(), PROMPTS.tokens)[:, -1].argmax(-1)
  likeliest = lambda s: s.tokens[:, 0] == best.repeat(len(s.tokens) // P)
  return [bool(likeliest(samples).all()) for samples in drawn(config)[:2]]


def lengths_of_stoppers(config):
  """Lengths of answers by a policy that wants to stop at once, of each."""
  params = bigram.params()
  params["embed"] = params["embed"].at[:, 0].set(1.0)
  params["experts"] = params["experts"].at[..., 0].set(0.0)
  params["head"] = params["head"].at[0, 257].set(99.0)
  return [set(s.lengths.tolist()) for s in drawn(config, params)]


def records_routing(config):
  """Of generate, generate_eval and generate_greedy."""
  return [samples.experts is not None for samples in drawn(config)]


def pool(config):
  """Slots, pages and tokens of a page; None where all decode together."""
  made = built(config).generate
  if not isinstance(made, PagedSampler):
    return None
  with bigram.by_the_operation():
    state, _ = made.devices.begin(made.devices.fresh(P))
  return len(state.drawn), *state.pages.k[0].shape[1:3]


def segment(config):
  """Decode steps of a segment, and tokens of a forward pass of prefill."""
  devices, params = built(config).generate.devices, bigram.params()
  state, samples = jax.eval_shape(
    lambda: devices.begin.jitted(devices.fresh.jitted(P))
  )
  like = dict.fromkeys(Orders.__dataclass_fields__, state.drawn)
  like["active"] = like["new"] = state.pages.active
  orders = Orders(**like | {"table": state.pages.table})
  with bigram.in_place():
    decode = jax.make_jaxpr(devices.decode.jitted, static_argnums=4)(
      params, state, samples, orders, None, np.int32(0), jax.random.key(0)
    )
  with _passes() as passes, bigram.in_place():
    tokens, pages = np.zeros((P, 16), np.int32), np.zeros((P, 4), np.int32)
    jax.eval_shape(
      devices.prefill.jitted, params, state, tokens, tokens[:, 0], pages
    )
  loops = [o for o in operations(decode.jaxpr) if o.primitive.name == "while"]
  bounds = [
    int(op.invars[1].val)
    for loop in loops
    for op in operations(loop.params["cond_jaxpr"].jaxpr)
    if op.primitive.name == "lt" and hasattr(op.invars[1], "val")
  ]
  ((_, T),) = passes
  return bounds, T


@contextlib.contextmanager
def _passes():
  """Notes [rows, tokens] of each forward pass."""
  found, plain = [], bigram.encode

  def encode(params, cfg, tokens, *rest, **how):
    found.append(tokens.shape)
    return plain(params, cfg, tokens, *rest, **how)

  with mock.patch.object(bigram, "encode", encode):
    yield found


def score(config, samples=None):
  """The rollout of made-up answers, and its metrics."""
  experts = EXPERTS if config.objective.replay == "r3" else None
  with bigram.by_the_operation():
    return built(config).score(bigram.params(), PROMPTS, made_samples(experts))


def temperature_of_score(config):
  return _fits(score(config)[0].old_logps, bigram.params())


def temperature_of_reference(config):
  made, rows = built(config), made_rollout()
  with bigram.by_the_operation():
    state = made.begin(bigram.params(7))
    rows = made.appraise(state, rows)
  return _fits(rows.reference_logps, bigram.params(7))


def _fits(logps, params):
  mask, rows = made_rollout().response_mask, made_rollout()
  for temperature in (1.0, 0.5):
    expected, _ = scored(params, rows, temperature)
    if np.allclose(logps[mask], expected[mask], atol=1e-4):
      return temperature
  raise AssertionError("no temperature fits the log-probs")


def old_logps_are(config):
  old = score(config)[0].old_logps
  drew = made_samples().logps
  return "sampler" if np.array_equal(old, drew) else "recompute"


def keeps_sampler_logps(config):
  return score(config)[0].sampler_logps is not None


def scored_experts(config):
  """Which experts a rollout holds: none, the policy's, the sampler's."""
  experts = score(config)[0].experts
  if experts is None:
    return None
  return "sampler's" if np.array_equal(experts, EXPERTS) else "policy's"


def instruments(config):
  """Whether score and update measure routers, and update ratios' histograms."""
  told, taught = score(config)[1], learn(config)[1]
  names = "moe/router_entropy", "moe/router_shift_ratio", "ratio/sequence_log"
  return [name in told | taught for name in names]


class Learnt(NamedTuple):
  before: Any
  metrics: dict
  after: Any


def learn(config, rows=None) -> Learnt:
  """One update on the made-up rollout, or on `rows`."""
  if rows is None:
    return _once_for(config, learn, made_rollout())
  made, params = built(config), bigram.params()
  with bigram.by_the_operation():
    before = made.begin(params)
    after, metrics = made.update(before, rows, jax.random.key(0))
  return Learnt(before, metrics, after)


def gradient(config):
  """Of the first optimizer step, by the unembedding."""
  moments = learn(config).after.opt_state[1][0]
  return np.asarray(moments.mu["head"] / (1 - config.optim.b1))


def slope(method, *, temperature=1.0, terms=None, routes=None, **how):
  """What `gradient` should be: of a public loss, put together by hand."""
  rows = made_rollout()
  routing = {} if routes is None else {"routes": routes, "replay": True}

  def total(head):
    own = bigram.params() | {"head": head}
    logps, entropy = scored(own, rows, temperature, **routing)
    extra = Terms(**terms(rows, logps, entropy)) if terms else Terms()
    return method(
      logps,
      rows.old_logps,
      rows.advantages,
      rows.response_mask,
      terms=extra,
      **how,
    )[0]

  with bigram.by_the_operation():
    return np.asarray(jax.grad(total)(bigram.params()["head"]))


def kl(coef, estimator):
  return lambda rows, logps, _: {
    "penalty": coef
    * losses.kl_penalty(
      logps, rows.reference_logps, rows.response_mask, estimator=estimator
    )
  }


def weights(method, unit, cap=2.0, floor=0.5):
  """Weights of the mismatch, by the textbook."""

  def terms(rows, *_):
    gap = jnp.where(
      rows.response_mask, rows.old_logps - rows.sampler_logps, 0.0
    )
    if unit == "sequence":
      gap = jnp.broadcast_to(
        gap.sum(1, keepdims=True) / LENGTHS[:, None], gap.shape
      )
    weight = jnp.exp(gap)
    kept = (weight <= cap) & (weight >= floor)
    tamed = {"tis": jnp.minimum(weight, cap), "mis": weight * kept}
    return {"weights": tamed[method]}

  return terms


def shifted(floor):
  def terms(rows, *_):
    with bigram.by_the_operation():
      found = model.encode(
        bigram.params(),
        None,
        rows.tokens,
        None,
        None,
        routes=rows.experts.swapaxes(0, 1),
      )
    new = found.routing.log_probs[:, :, S - 1 : -1].swapaxes(0, 1)
    moved = jnp.abs(new - rows.router_logps).mean((1, 3))
    return {"shift": jnp.log(jnp.maximum(jnp.exp(-moved), floor))}

  return terms


def reference_after(config):
  """The reference's place after an update: none, the old policy, the new."""
  learnt = learn(config)
  head = lambda state: np.asarray(state["head"])
  if learnt.after.reference is None:
    return None
  old = np.array_equal(head(learnt.after.reference), head(learnt.before.params))
  new = np.array_equal(head(learnt.after.reference), head(learnt.after.params))
  return {(True, False): "old", (False, True): "new"}[old, new]


REWARDS = np.float32(np.resize([1, 0, 3, 0, 2, 2, 0.5], B))


def assign(config) -> rollout.Rollout:
  """The made-up rollout with its advantages and returns."""
  rows = made_rollout()
  with bigram.by_the_operation():
    return built(config).assign(rows, REWARDS, made_samples().finish)


def advantages(config):
  return np.asarray(assign(config).advantages)


def returns(config):
  return np.asarray(assign(config).returns)


def group_advantages(group=G, *, std=True, kl_coef=0.0, whole=False):
  """What `advantages` should be."""
  rows, rewards = made_rollout(), REWARDS.reshape(-1, group)
  found = rewards - rewards.mean(1, keepdims=True)
  if std:
    found = found / (rewards.std(1, keepdims=True) + 1e-6)
  gap = np.where(rows.response_mask, rows.old_logps - rows.reference_logps, 0)
  fee = kl_coef * gap.sum(1).reshape(-1, group)
  found = (found - fee + fee.mean(1, keepdims=True)).ravel()
  return np.where(made_samples().finish, found, 0) if whole else found


def gae_returns(discount, trace_decay):
  """Of rewards at the last token, by the textbook."""
  values, found = np.asarray(made_rollout().values), np.zeros((B, R))
  for i, last in enumerate(LENGTHS - 1):
    advantage, following = 0.0, 0.0
    for t in range(last, -1, -1):
      reward = REWARDS[i] if t == last else 0.0
      delta = reward + discount * following - values[i, t]
      advantage = delta + discount * trace_decay * advantage
      following, found[i, t] = values[i, t], advantage + values[i, t]
  return found


def value_step(config):
  """How far the value head moves in the first step, at most."""
  learnt = learn(config)
  return float(jnp.abs(learnt.after.critic.params["value_head"]).max())


def value_loss(config):
  return float(learn(config).metrics["loss/value"].value())


def clipped_values(clip):
  """What `value_loss` should be: a fresh critic says 0."""
  rows = made_rollout()
  mask, old, target = map(
    np.asarray, (rows.response_mask, rows.values, rows.returns)
  )
  near = np.clip(0.0, old - clip, old + clip)
  return float(np.maximum(target**2, (near - target) ** 2)[mask].mean() / 2)


def learn_rows(config):
  """The rows of each micro-batch in their order, and an update's steps."""
  found = []

  def note(params, rows, **_):
    if not isinstance(rows.advantages, jax.core.Tracer):  # of eval_shape
      found.append(rows.advantages.astype(int).tolist())
    return losses.Mean(0 * params["head"].sum(), jnp.float32(1)), {}

  ids = jnp.arange(B) + 0.0
  rows = rollout.assemble(PROMPTS, made_samples().tokens, LENGTHS)
  rows = dataclasses.replace(rows, advantages=ids)
  with mock.patch.object(objective, "policy_loss", note):
    learnt = learn(config, rows)
  return found, int(learnt.after.opt_state[1][0].count)


def shuffled_together(config):
  """The smallest run of neighbours in the order in which rows are learnt."""
  order = np.concatenate(learn_rows(config)[0])
  ends = np.flatnonzero(np.diff(order) != 1)
  return int(np.diff([-1, *ends, B - 1]).min())


def steps_and_rows(config):
  """Optimizer steps of an update, and rows of a micro-batch."""
  found, steps = learn_rows(config)
  return steps, {len(rows) for rows in found}


def rows_at_once(config):
  """Rows of a forward pass: of score, appraise, update and imitation."""
  made, params, key = built(config), bigram.params(), jax.random.key(0)
  with bigram.by_the_operation():
    state = jax.eval_shape(made.begin, params)
    cold = jax.eval_shape(made.begin_imitation, params)

  def rows(f, *args):
    with _passes() as passes, bigram.by_the_operation():
      jax.eval_shape(lambda *args: f(*args), *args)
    return {rows for rows, _ in passes}

  return [
    rows(made.score, params, PROMPTS, made_samples()),
    rows(made.appraise, state, made_rollout()),
    rows(made.update, state, made_rollout(), key),
    rows(made.imitate, cold, DEMONSTRATED, key),
  ]


DEMONSTRATED = {
  "tokens": PROMPTS.tokens,
  "length": PROMPTS.lengths,
  "response": made_samples().tokens[:P],
  "response_length": LENGTHS[:P],
}


def step_size(config):
  """How far a weight moves in the first step, at most."""
  learnt = learn(config)
  return float(
    jnp.abs(learnt.after.params["head"] - learnt.before.params["head"]).max()
  )


def moments(config):
  """Both moments after a step, over the gradient and its square."""
  found = learn(config).after.opt_state[1][0]
  g = reference_gradient()
  at = np.unravel_index(np.abs(g).argmax(), g.shape)
  return float(found.mu["head"][at] / g[at]), float(
    found.nu["head"][at] / g[at] ** 2
  )


@functools.cache
def reference_gradient():
  return slope(losses.gspo_loss)


def shrinkage(config):
  """What no gradient reaches: by how much matrices and scales shrink."""
  rows = dataclasses.replace(made_rollout(), advantages=jnp.zeros(B))
  before, _, after = learn(config, rows)
  share = lambda a, b: float(1 - (b / a).mean())
  scale = lambda state: state.params["final_norm"]["scale"]
  return (
    share(before.params["head"], after.params["head"]),
    share(scale(before), scale(after)),
  )


def norm_of_step(config):
  """The global norm of the first step's gradient, once it is clipped."""
  found = learn(config).after.opt_state[1][0]
  return float(optax.tree.norm(found.mu) / (1 - config.optim.b1))


def imitation_step(config):
  """How far a weight moves in the first step, to two digits."""
  made, params = built(config), bigram.params()
  with bigram.by_the_operation():
    state = made.begin_imitation(params)
    after, _ = made.imitate(state, DEMONSTRATED, jax.random.key(0))
  moved = np.abs(after.params["head"] - params["head"])
  return float(f"{np.median(moved[moved > 0.5 * moved.max()]):.1e}")


# The table.

DIFFERS = object()  # another one at each value, and no more is known of it


class Row(NamedTuple):
  """What a key does.

  Attributes:
    key: of configs/common.py.
    observe: config -> what is seen.
    expected: by the key's value, what is seen then, or a function that makes
      it; or DIFFERS.
    given: other keys, beside those of `small`.
  """

  key: str
  observe: Callable[[ConfigDict], Any]
  expected: dict[Any, Any]
  given: dict[str, Any] = {}  # noqa: RUF012


def key_of(seed, use):
  """The raw key that a run derives from its seed."""
  keys = jax.random.split(jax.random.key(seed), 4)
  if use == "init":
    return np.asarray(jax.random.key_data(keys[0]))
  _, update = jax.random.split(jax.random.fold_in(keys[3], 1))
  return np.asarray(jax.random.key_data(update))


# Of the files of `files`: questions "A12?" and so on, of which "7" is right.
FILE_A, FILE_B = "jsonl:{files}/A.jsonl", "jsonl:{files}/B.jsonl"
OF_A = {"data.source": FILE_A, "data.eval_source": FILE_B}
COLD = {
  "cold_start.steps": 2,
  "cold_start.check_every": 1,
  "cold_start.gate": 0.0,
}
COLD_A = COLD | OF_A
BEFORE = {"num_steps": 0}  # the first evaluation, and no iteration
SHORT = {"sampler.max_new_tokens": 4}
PAGED = {"paging.slots": 8, "paging.page": 4, "paging.chunk": 8}
CONTINUED = PAGED | {"rollout.budget": 2, "rollout.spare": 8}
GRPO = {"objective.name": "grpo"}
KL = GRPO | {"objective.kl_coef": 0.3}
PPO = {"objective.name": "ppo"}
TIS = GRPO | {"objective.mismatch": "tis_token"}
PLAIN = functools.cache(lambda: slope(losses.grpo_loss))
over = lambda **sizes: dict.fromkeys(sharding.AXES, 1) | sizes
QUERIES, GATE_UP = (2, 64, 4, 16), (2, 8, 64, 128)

ROWS = (
  Row(
    "seed",
    initial_key,
    {n: functools.partial(key_of, n, "init") for n in (0, 1)},
  ),
  Row(
    "seed",
    update_key,
    {n: functools.partial(key_of, n, "update") for n in (0, 1)},
  ),
  Row("seed", chain_seed, {0: (0, 0), 1: (1, 1)}),
  Row("seed", questions, {0: DIFFERS, 1: DIFFERS}, OF_A),
  Row("seed", imitated_questions, {0: DIFFERS, 1: DIFFERS}, COLD_A),
  Row("num_steps", steps_run, {1: [0, 1], 2: [0, 1, 2]}),
  # model
  Row(
    "model.checkpoint",
    embedding,
    {"": (258, 64, 2), "{files}/hf": (258, 64, 1)},
  ),
  Row("model.checkpoint", first_weights, {"": "drawn", "{files}/hf": 0.125}),
  Row(
    "model.checkpoint",
    tokens_of_seven,
    {"": ([55], True), "{files}/hf": ([55], False)},
  ),
  Row(
    "model.variant", embedding, {"tiny": (258, 64, 2), "small": (2048, 128, 4)}
  ),
  Row(
    "model.dtype",
    types_of_products,
    {
      "float32": dict.fromkeys(("score", "update", "generate"), False),
      "bfloat16": dict.fromkeys(("score", "update", "generate"), True),
    },
    {"sampler.max_new_tokens": 4},
  ),
  Row(
    "model.remat",
    kept_names,
    {False: None, True: {"stream"}},
    {"model.keep": ("stream",)},
  ),
  Row(
    "model.keep",
    kept_names,
    {("stream",): {"stream"}, ("attention", "stream"): {"attention", "stream"}},
    {"model.remat": True},
  ),
  # mesh
  Row(
    "mesh.data",
    mesh_of_run,
    {
      8: (over(data=8), QUERIES, GATE_UP),
      4: (over(data=4, fsdp=2), (2, 32, 4, 16), (2, 4, 64, 128)),
    },
    BEFORE | {"mesh.data": 8, "mesh.fsdp": -1},
  ),
  Row(
    "mesh.fsdp",
    mesh_of_run,
    {
      1: (over(data=8), QUERIES, GATE_UP),
      4: (over(data=2, fsdp=4), (2, 16, 4, 16), (2, 2, 64, 128)),
    },
    BEFORE,
  ),
  Row(
    "mesh.expert",
    mesh_of_run,
    {
      1: (over(data=8), QUERIES, GATE_UP),
      4: (over(data=2, expert=4), QUERIES, (2, 2, 64, 128)),
    },
    BEFORE,
  ),
  Row(
    "mesh.tensor",
    mesh_of_run,
    {
      1: (over(data=8), QUERIES, GATE_UP),
      2: (over(data=4, tensor=2), (2, 64, 2, 16), (2, 4, 64, 128)),
    },
    BEFORE,
  ),
  # In the order of `sharding.AXES`.
  Row("sampler_mesh.expert", decoding_mesh, {0: (8, 1, 1, 1), 4: (2, 1, 4, 1)}),
  Row("sampler_mesh.tensor", decoding_mesh, {0: (8, 1, 1, 1), 2: (4, 1, 1, 2)}),
  # data
  Row(
    "data.source",
    learnt_kinds,
    {
      "chain": {"0": 8},
      FILE_A: {"A": 8},
      f"{FILE_A},{FILE_B}": {"A": 4, "B": 4},
    },
  ),
  Row(
    "data.weights",
    learnt_kinds,
    {(): {"A": 4, "B": 4}, (3.0, 1.0): {"A": 6, "B": 2}},
    {"data.source": f"{FILE_A},{FILE_B}"},
  ),
  Row(
    "data.eval_source",
    held_out_kinds,
    {"": {"A"}, FILE_B: {"B"}},
    {"data.source": FILE_A},
  ),
  Row(
    "data.question_field",
    learnt_kinds,
    {"question": {"A": 8}, "other": {"O": 8}},
    {"data.source": FILE_A},
  ),
  Row("data.answer_field", rewards_given, {"answer": 1.0, "result": 0.0}, OF_A),
  Row(
    "data.demonstration_field",
    demonstration_starts,
    {"": {"##"}, "worked": {"so"}},
    COLD_A,
  ),
  Row(
    "data.tfds_dir",
    tfds_folder,
    {"": "sums in ", "folder": "sums in folder"},
    {"data.source": "tfds:sums"},
  ),
  Row(
    "data.tokenizer",
    tokens_of_seven,
    {"": ([55], True), "{files}/hf": ([55], False)},
  ),
  Row(
    "data.tokenizer",
    tokens_of_seven,
    {"": ([55], False), "bytes": ([55], True)},
    {"model.checkpoint": "{files}/hf"},
  ),
  Row(
    "data.system_prompt",
    question_forms,
    {"": {"AN?"}, "Add: ": {"Add: AN?"}},
    OF_A | {"data.max_prompt_length": 10},
  ),
  Row(
    "data.instruction",
    question_forms,
    {"{question}": {"AN?"}, "Q: {question}!": {"Q: AN?!"}},
    OF_A | {"data.max_prompt_length": 10},
  ),
  Row("data.chain_steps", question_lengths, {(1,): {5}, (2,): {8}}),
  Row("data.prompts", asked_at_once, {8: (8, {8}), 16: (16, {8})}),
  Row(
    "data.refill_rounds",
    drawn_for_a_step,
    {1: 1, 3: 3},  # all answers of a group are alike
    {"num_steps": 1},
  ),
  Row(
    "data.history",
    known_again,
    {False: 2, True: 1},
    OF_A | {"data.source": "jsonl:{files}/half.jsonl", "num_steps": 4},
  ),
  Row(
    "data.stages", second_kinds, {(): {"A": 8}, ((2, FILE_B),): {"B": 8}}, OF_A
  ),
  Row("data.max_prompt_length", asked_at_once, {8: (8, {8}), 9: (8, {9})}),
  Row(
    "data.too_long",
    too_long,
    {"error": "question", "drop": ""},
    OF_A | {"data.source": "jsonl:{files}/long.jsonl"},
  ),
  # sampler: of generate, generate_eval and generate_greedy
  Row(
    "sampler.group_size",
    answers_drawn,
    {
      2: [(16, 12), (32, 12), (8, 12)],
      8: [(64, 12), (32, 12), (8, 12)],
    },
  ),
  Row(
    "sampler.group_size",
    advantages,
    {2: group_advantages, 4: lambda: group_advantages(4)},
  ),
  Row(
    "sampler.group_size",
    shuffled_together,
    {2: 2, 4: 4},
    {"learner.minibatches": 2, "learner.micro_rows": 8},
  ),
  Row(
    "sampler.max_new_tokens",
    answers_drawn,
    {
      12: [(16, 12), (32, 12), (8, 12)],
      8: [(16, 8), (32, 8), (8, 8)],
    },
  ),
  Row(
    "sampler.max_new_tokens",
    lambda config: imitated(config)["response"].shape,
    {12: (8, 12), 9: (8, 9)},
    COLD_A,
  ),
  Row(
    "sampler.temperature",
    temperature_of_draws,
    {1.0: [1.0, 1.0], 0.5: [0.5, 0.5]},
    SHORT,
  ),
  Row(
    "sampler.temperature",
    draws_the_likeliest,
    {1.0: [False, False], 0.01: [True, True]},
    SHORT,
  ),
  Row("sampler.temperature", temperature_of_score, {1.0: 1.0, 0.5: 0.5}),
  Row(
    "sampler.temperature", temperature_of_reference, {1.0: 1.0, 0.5: 0.5}, KL
  ),
  Row(
    "sampler.temperature",
    gradient,
    {1.0: PLAIN, 0.5: lambda: slope(losses.grpo_loss, temperature=0.5)},
    GRPO,
  ),
  Row(
    "sampler.top_k",
    draws_the_likeliest,
    {0: [False, False], 1: [True, True]},
    SHORT,
  ),
  Row(
    "sampler.top_p",
    draws_the_likeliest,
    {1.0: [False, False], 1e-6: [True, True]},
    SHORT,
  ),
  Row(
    "sampler.min_new_tokens",
    lengths_of_stoppers,
    {1: [{1}] * 3, 3: [{3}] * 3},
    SHORT,
  ),
  # paging: slots, pages, tokens of a page; segments, tokens of a prefill's pass
  Row(
    "paging.slots", pool, {0: None, 4: (4, 4 * 6, 4), 8: (8, 8 * 6, 4)}, PAGED
  ),
  Row("paging.page", pool, {4: (8, 8 * 6, 4), 8: (8, 8 * 4, 8)}, PAGED),
  Row("paging.pages", pool, {0: (8, 8 * 6, 4), 99: (8, 99, 4)}, PAGED),
  Row("paging.steps", segment, {2: ([2], 8), 12: ([12], 8)}, PAGED),
  Row("paging.chunk", segment, {4: ([32], 4), 8: ([32], 8)}, PAGED),
  # rollout
  Row("rollout.ahead", order_of_phases, {False: "gugu", True: "gguu"}),
  Row("rollout.budget", budget, {2: {2}, 3: {3}}, CONTINUED),
  Row("rollout.spare", asked_at_once, {8: (16, {8}), 16: (24, {8})}, CONTINUED),
  # reward: the answers are "#7", and that is right
  Row(
    "reward.names",
    rewards_given,
    {("final_answer",): 1.0, ("number",): 0.0},
    OF_A,
  ),
  Row("reward.weights", rewards_given, {(1.0,): 1.0, (0.25,): 0.25}, OF_A),
  Row("reward.workers", processes, {1: 1, 3: 3}),
  Row("reward.seconds", seconds_given, {5.0: 5.0, 9.0: 9.0}),
  # objective
  Row(
    "objective.name",
    gradient,
    {
      name: functools.partial(slope, getattr(losses, f"{name}_loss"))
      for name in settings.OBJECTIVES
      if name != "rspo"
    }
    | {"rspo": lambda: slope(losses.gmpo_loss, terms=shifted(0.8))},
  ),
  Row(
    "objective.name",
    advantages,
    {"gspo": group_advantages, "dr_grpo": lambda: group_advantages(std=False)},
  ),
  Row(
    "objective.clip_low",
    gradient,
    {
      low: functools.partial(slope, losses.gspo_loss, clip_low=low)
      for low in (0.05, 0.2)
    }
    | {-1.0: functools.partial(slope, losses.gspo_loss)},
  ),
  Row(
    "objective.clip_high",
    gradient,
    {
      high: functools.partial(slope, losses.gspo_loss, clip_high=high)
      for high in (0.05, 0.2)
    }
    | {-1.0: functools.partial(slope, losses.gspo_loss)},
  ),
  Row(
    "objective.cap",
    gradient,
    {
      -1.0: functools.partial(slope, losses.cispo_loss),
      0.9: functools.partial(slope, losses.cispo_loss, cap=0.9),
    },
    {"objective.name": "cispo"},
  ),
  *(
    Row(
      f"objective.{tau}",
      gradient,
      {
        -1.0: functools.partial(slope, losses.sapo_loss),
        4.0: functools.partial(slope, losses.sapo_loss, **{tau: 4.0}),
      },
      {"objective.name": "sapo"},
    )
    for tau in ("tau_positive", "tau_negative")
  ),
  Row(
    "objective.dual_clip",
    gradient,
    {
      0.0: PLAIN,
      1.1: lambda: slope(losses.grpo_loss, terms=lambda *_: {"dual_clip": 1.1}),
    },
    GRPO,
  ),
  Row(
    "objective.old_logps",
    old_logps_are,
    {"recompute": "recompute", "sampler": "sampler"},
  ),
  Row(
    "objective.kl_coef",
    gradient,
    {
      coef: functools.partial(slope, losses.grpo_loss, terms=kl(coef, "k3"))
      for coef in (0.0, 0.3, 0.6)
    },
    GRPO,
  ),
  Row("objective.kl_coef", reference_after, {0.0: None, 0.3: "old"}),
  Row(
    "objective.kl_coef",
    advantages,
    {
      coef: functools.partial(group_advantages, kl_coef=coef)
      for coef in (0.1, 0.3)
    },
    {"objective.kl_estimator": "k1"},
  ),
  Row(
    "objective.kl_estimator",
    gradient,
    {
      "k1": PLAIN,
      "k2": lambda: slope(losses.grpo_loss, terms=kl(0.3, "k2")),
      "k3": lambda: slope(losses.grpo_loss, terms=kl(0.3, "k3")),
    },
    KL,
  ),
  Row(
    "objective.kl_estimator",
    advantages,
    {"k1": lambda: group_advantages(kl_coef=0.3), "k3": group_advantages},
    KL,
  ),
  Row(
    "objective.reference_every",
    reference_after,
    {0: "old", 1: "new", 2: "old"},
    KL,
  ),
  Row(
    "objective.entropy_coef",
    gradient,
    {
      0.0: PLAIN,
      0.2: lambda: slope(
        losses.grpo_loss,
        terms=lambda _, __, entropy: {"penalty": -0.2 * entropy},
      ),
    },
    GRPO,
  ),
  Row(
    "objective.mismatch",
    gradient,
    {
      f"{method}_{unit}": functools.partial(
        slope, losses.grpo_loss, terms=weights(method, unit, 1.1, 0.9)
      )
      for method in ("tis", "mis")
      for unit in ("token", "sequence")
    }
    | {"none": PLAIN},
    GRPO | {"objective.mismatch_cap": 1.1, "objective.mismatch_floor": 0.9},
  ),
  Row(
    "objective.mismatch",
    keeps_sampler_logps,
    {"none": False, "tis_token": True},
  ),
  Row(
    "objective.mismatch_cap",
    gradient,
    {
      cap: functools.partial(
        slope, losses.grpo_loss, terms=weights("tis", "token", cap)
      )
      for cap in (1.0, 1.2)
    },
    TIS,
  ),
  Row(
    "objective.mismatch_floor",
    gradient,
    {
      floor: functools.partial(
        slope, losses.grpo_loss, terms=weights("mis", "token", 2.0, floor)
      )
      for floor in (0.5, 0.9)
    },
    GRPO | {"objective.mismatch": "mis_token"},
  ),
  Row(
    "objective.router_shift_floor",
    gradient,
    {
      -1.0: PLAIN,
      0.1: lambda: slope(losses.grpo_loss, terms=shifted(0.1)),
      0.7: lambda: slope(losses.grpo_loss, terms=shifted(0.7)),
    },
    GRPO,
  ),
  Row(
    "objective.replay",
    gradient,
    {
      "none": PLAIN,
      "r2": lambda: slope(losses.grpo_loss, routes=EXPERTS.swapaxes(0, 1)),
      "r3": lambda: slope(losses.grpo_loss, routes=EXPERTS.swapaxes(0, 1)),
    },
    GRPO,
  ),
  Row(
    "objective.replay",
    scored_experts,
    {"none": None, "r2": "policy's", "r3": "sampler's"},
    {"log.instruments": False},
  ),
  Row(
    "objective.replay",
    records_routing,
    {"r2": [False, False, False], "r3": [True, False, False]},
    SHORT,
  ),
  Row(
    "objective.zero_truncated",
    advantages,
    {False: group_advantages, True: lambda: group_advantages(whole=True)},
  ),
  # critic
  Row("critic.learning_rate", value_step, {1e-3: 1e-3, 5e-3: 5e-3}, PPO),
  Row(
    "critic.warmup_steps",
    value_step,
    {0: 1e-3, 4: 2.5e-4},
    PPO | {"critic.learning_rate": 1e-3},
  ),
  Row(
    "critic.clip",
    value_loss,
    {clip: functools.partial(clipped_values, clip) for clip in (0.1, 0.5)},
    PPO,
  ),
  Row(
    "critic.discount",
    returns,
    {n: functools.partial(gae_returns, n, 0.95) for n in (1.0, 0.5)},
    PPO,
  ),
  Row(
    "critic.trace_decay",
    returns,
    {n: functools.partial(gae_returns, 1.0, n) for n in (0.95, 0.5)},
    PPO,
  ),
  # learner: optimizer steps, and rows of a forward pass
  Row(
    "learner.minibatches",
    steps_and_rows,
    {1: (1, {4}), 4: (4, {4})},
    {"learner.micro_rows": 4},
  ),
  Row("learner.micro_rows", steps_and_rows, {16: (1, {16}), 4: (1, {4})}),
  Row(
    "learner.micro_rows",
    rows_at_once,
    {16: [{16}, {16}, {16}, {8}], 4: [{4}, {4}, {4}, {4}]},
    KL,
  ),
  # optim
  Row("optim.learning_rate", step_size, {1e-3: 1e-3, 5e-3: 5e-3}),
  Row(
    "optim.warmup_steps",
    step_size,
    {0: 1e-3, 4: 2.5e-4},
    {"optim.learning_rate": 1e-3},
  ),
  Row("optim.b1", moments, {0.9: (0.1, 0.05), 0.8: (0.2, 0.05)}),
  Row("optim.b2", moments, {0.95: (0.1, 0.05), 0.9: (0.1, 0.1)}),
  Row(
    "optim.weight_decay",
    shrinkage,
    {0.0: (0.0, 0.0), 0.5: (0.05, 0.0)},
    {"optim.learning_rate": 0.1},
  ),
  Row("optim.clip_norm", norm_of_step, {1e-3: 1e-3, 2e-3: 2e-3}),
  # cold_start
  Row("cold_start.steps", imitations, {0: 0, 1: 1, 3: 3}, COLD),
  Row(
    "cold_start.batch",
    lambda config: imitated(config)["tokens"].shape,
    {8: (8, 8), 16: (16, 8)},
    COLD,
  ),
  Row("cold_start.learning_rate", imitation_step, {1e-3: 1e-3, 5e-3: 5e-3}),
  Row(
    "cold_start.warmup_steps",
    imitation_step,
    {0: 1e-3, 4: 2.5e-4},
    {"cold_start.learning_rate": 1e-3},
  ),
  Row("cold_start.gate", imitations, {0.0: 2, 0.5: 1}, COLD_A),  # greedy is 1.0
  Row("cold_start.check_every", looks, {1: 2, 2: 1}, COLD),
  Row(
    "cold_start.chain_steps",
    demonstrated_steps,
    {(1,): {1}, (2,): {2}},
    COLD | {"sampler.max_new_tokens": 24, "data.max_prompt_length": 9},
  ),
  Row(
    "cold_start.chain_noise",
    wrong_demonstrations,
    {0.0: False, 1.0: True},
    COLD,
  ),
  Row(
    "cold_start.dir",
    cold_start_at,
    {"": (True, False), "{files}/cold": (False, True)},
    COLD,
  ),
  # eval
  Row("eval.every", evaluated_at, {1: [0, 1, 2], 10: [0, 2]}),
  Row("eval.prompts", questions_tested, {8: (8, 8), 16: (16, 16)}),
  Row(
    "eval.samples",
    answers_drawn,
    {
      4: [(16, 12), (32, 12), (8, 12)],
      3: [(16, 12), (24, 12), (8, 12)],
    },
  ),
  # checkpoint
  Row(
    "checkpoint.every",
    steps_kept,
    {1: [1, 2, 3], 2: [2, 3]},
    {"num_steps": 3, "checkpoint.keep": 9},
  ),
  Row(
    "checkpoint.keep",
    steps_kept,
    {1: [3], 2: [2, 3]},
    {"num_steps": 3, "checkpoint.every": 1},
  ),
  # log
  Row("log.instruments", instruments, {True: [True] * 3, False: [False] * 3}),
  Row("log.samples_every", sample_files, {1: [1, 2], 10: [2]}),
  Row("log.samples", samples_shown, {2: 2, 4: 4}),
)


@pytest.fixture(scope="module")
def files(_once):
  """Questions in files, and a checkpoint with a tokenizer, in a folder."""
  folder = _RUNS["folder"] / "files"
  folder.mkdir()
  right = {"answer": "#### 7", "result": "3", "worked": "so #### 7"}
  wrong = right | {"answer": "#### 8"}

  def write(name, rows):
    text = "\n".join(map(json.dumps, rows))
    (folder / f"{name}.jsonl").write_text(text)

  ask = lambda letter, n: {"question": f"{letter}{n:03}?", "other": f"O{n:03}?"}
  for letter in "AB":
    write(letter, [ask(letter, n) | right for n in range(200)])
  half = [ask("K", n) | (right if n < P else wrong) for n in range(2 * P)]
  write("half", half)
  write(
    "long",
    [ask("A", n) | right for n in range(2 * P)] + [ask("A", 10**9) | right],
  )
  _write_checkpoint(folder / "hf")
  return folder


def _write_checkpoint(folder):
  """A model of one layer whose first number is 0.125; bytes are its tokens."""
  cfg = model.variant("tiny", num_layers=1, dtype="float32")
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), cfg))
  weights = jax.tree.map(lambda x: np.full(x.shape, 0.125, x.dtype), shapes)
  hf.save_hf(weights, cfg, folder)
  tokenizer.Bytes().save(folder)


def fill(value, files):
  """A value with the folder's name in it."""
  if isinstance(value, tuple):
    return tuple(fill(part, files) for part in value)
  if isinstance(value, str):
    return value.replace("{files}", str(files))
  return value


def names(config, prefix=""):
  """The keys of a config, dotted."""
  for key, value in config.items():
    if isinstance(value, ConfigDict):
      yield from names(value, f"{prefix}{key}.")
    else:
      yield prefix + key


def test_every_key_has_a_row_and_every_row_a_key():
  assert {row.key for row in ROWS} == set(names(common.get_config()))


@pytest.mark.parametrize(
  "row", ROWS, ids=[f"{row.key} {row.observe.__name__}" for row in ROWS]
)
def test_a_key_does_what_its_row_says(row, files):
  seen = []
  for value, expected in row.expected.items():
    config = small()
    changes = {k: fill(v, files) for k, v in row.given.items()}
    config.update_from_flattened_dict(changes | {row.key: fill(value, files)})
    check(config, settings.OBJECTIVES, shards=1)
    found = row.observe(config)
    if expected is not DIFFERS:
      same(found, expected() if callable(expected) else expected)
    seen.append(found)
  assert any(apart(seen[0], other) for other in seen[1:])
