"""Functions of a config that observe the program built from it.

Some look at the settings of its parts. The others call its functions on a
policy of two tables (`bigram`), with made-up samples and rewards.
"""

import dataclasses
import functools
from unittest import mock

import bigram
import jax
import jax.numpy as jnp
import numpy as np
import unpacked

from gspo_jax.learner import packing, train_batch
from gspo_jax.learner.train_batch import PackedBatch, TrainBatch
from gspo_jax.learner.train_step import TrainState
from gspo_jax.program import settings
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.runtime.mesh_jit import MeshJit
from gspo_jax.sampler.samples import (
  STOPPED,
  TRUNCATED,
  Prompts,
  Samples,
)

KEY = jax.random.key(0)
P, G, S, R = 8, 2, 3, 4  # prompts, responses to each, tokens of both
B = P * G


def one_device():
  return sharding.make_mesh(jax.devices()[:1])


def tokens_of_seven(config):
  """The ids of "7", and whether the tokenizer is that of bytes."""
  made = built(config).tokenizer
  return made.encode("7"), made.fingerprint == "bytes"


def prompt_of_seven(config):
  tokenizer = built(config).tokenizer
  return tokenizer.decode(tokenizer.prompt("7"))


def embedding(config):
  made = built(config)
  return *made.abstract_params["embed"].shape, made.cfg.num_layers


def first_weights(config):
  """A number of the first weights; "random" if no file is read."""
  init = built(config).init_params
  if isinstance(init, MeshJit):
    return "random"
  return float(init(jax.random.key(0))["embed"][0, 0])


def each_once(observe):
  """Calls a function of a config once for each config."""
  made = {}

  @functools.wraps(observe)
  def observed(config):
    key = config.to_json_best_effort()
    if key not in made:
      made[key] = observe(config)
    return made[key]

  return observed


@each_once
def built(config):
  return build_program(parse(config), one_device())


def sequences_of_a_prompt(config) -> int:
  return built(config).learner.group_size


def of_samplers(config, field):
  """A field of the sampler of an iteration, and of that of evaluations."""
  sampler = built(config).sampler
  return [getattr(f.config, field) for f in (sampler.generate, sampler.respond)]


def numbers(*shape, seed=0, scale=0.3):
  return np.float32(np.random.default_rng(seed).normal(0, scale, shape))


PROMPTS = Prompts(
  np.random.default_rng(1).integers(0, 256, (P, S)).astype(np.int32),
  np.full(P, S, np.int32),
)
# A row for each response.
EACH_PROMPT = Prompts(PROMPTS.tokens.repeat(G, 0), PROMPTS.lengths.repeat(G, 0))
LENGTHS = np.resize([4, 2, 3, 1, 4], B).astype(np.int32)
EXPERTS = np.random.default_rng(2).permuted(
  np.broadcast_to(np.arange(bigram.E, dtype=np.uint8), (B, 2, S + R, bigram.E)),
  axis=3,
)[..., : bigram.K]


def made_samples() -> Samples:
  """Samples of random tokens."""
  tokens = np.random.default_rng(3).integers(0, 256, (B, R)).astype(np.int32)
  finish = np.where(np.arange(B) % 4, STOPPED, TRUNCATED)
  steps = np.int32(B * R)
  return Samples(tokens, numbers(B, R), LENGTHS, finish.astype(np.int8), steps)


@functools.cache
def made_batch() -> TrainBatch:
  """Those samples, one a row, with all fields; the old policy is another."""
  rows = train_batch.unpacked(PROMPTS, made_samples().tokens, LENGTHS)
  own, _ = logps_and_entropy(bigram.params(), rows)
  old = own + numbers(B, R, seed=4)
  return dataclasses.replace(
    rows,
    old_logps=old,
    advantages=of_tokens(numbers(B, seed=5, scale=1)),
    experts=EXPERTS,
    router_logps=-jnp.abs(numbers(B, 2, R, bigram.K, seed=6)),
    sampler_logps=old + numbers(B, R, seed=7),
    reference_logps=old + numbers(B, R, seed=8),
    values=jnp.asarray(numbers(B, R, seed=9, scale=1)),
    returns=jnp.asarray(numbers(B, R, seed=10, scale=1)),
  )


def of_tokens(advantages):
  """[B] -> [B, R]."""
  return jnp.repeat(jnp.asarray(advantages)[:, None], R, axis=1)


def cut(made, rows=None) -> PackedBatch:
  """Rows with one response each, in the minibatches of a program."""
  rows, cfg = made_batch() if rows is None else rows, made.learner.packing
  return unpacked.cut(rows, cfg.minibatches, cfg.micro_batch_size)


def logps_and_entropy(params, rows, temperature=1.0, **options):
  """Log-probs of the responses and entropies [B, R], by the textbook."""
  logits = bigram.logits(params, rows.tokens, **options)[:, S - 1 : -1]
  logps = jax.nn.log_softmax(logits / temperature)
  picked = jnp.take_along_axis(logps, rows.tokens[:, S:, None], 2)[..., 0]
  return picked, -(jnp.exp(logps) * logps).sum(-1)


def row_widths(config):
  """Columns of a row, in an update and in a cold start."""
  made = built(config)
  return {made.learner.packing.width, made.cold_start.packing.width}


def batch_fields(config):
  """The optional fields of `TrainBatch` that a batch has."""
  fields = dataclasses.fields(TrainBatch)
  always = "response_index"
  optional = [f for f in fields if f.default is None and f.name != always]
  learner = built(config).learner
  with bigram.by_the_operation():
    where = learner.pack(PROMPTS.lengths, LENGTHS, KEY)
    rows = learner.make_train_batch(PROMPTS, made_samples(), where).rows
  return {f.name for f in optional if getattr(rows, f.name) is not None}


def reference_temperature(config):
  made = built(config)
  with bigram.by_the_operation():
    state = made.learner.init_state(bigram.params(7))
    batch = made.learner.add_reference_and_values(state, cut(made))
  logps, rows = unpacked.join(batch).reference_logps, made_batch()
  mask = rows.response_mask
  for temperature in (1.0, 0.5):
    expected, _ = logps_and_entropy(bigram.params(7), rows, temperature)
    if np.allclose(logps[mask], expected[mask], atol=1e-4):
      return temperature
  raise AssertionError("no temperature fits the log-probs")


def instruments(config):
  """Whether an update measures routers, and histograms of ratios."""
  _, metrics = updated(config)
  names = "moe/router_entropy", "moe/router_shift_ratio", "ratio/sequence_log"
  return [name in metrics for name in names]


@each_once
def updated(config) -> tuple[TrainState, dict]:
  """The state after one update on the made-up batch, and the metrics."""
  made = built(config)
  with bigram.by_the_operation():
    state = made.learner.init_state(bigram.params())
    after, _, metrics = made.learner.update(state, cut(made))
  return after, metrics


def reference_after(config):
  """What the reference is after an update: the old policy, or the new."""
  after, _ = updated(config)
  head = after.reference["head"]
  old = np.array_equal(head, bigram.params()["head"])
  new = np.array_equal(head, after.params["head"])
  return {(True, False): "old", (False, True): "new"}[old, new]


def rows_per_pass(config):
  """Rows of a forward pass: reference, update and cold start."""
  made, params = built(config), bigram.params()
  with bigram.by_the_operation():
    state = jax.eval_shape(made.learner.init_state, params)
    cold = jax.eval_shape(made.cold_start.init_state, params)

  def rows(f, *args):
    patched = mock.patch.object(
      bigram, "hidden_states", wraps=bigram.hidden_states
    )
    with patched as passes, bigram.by_the_operation():
      jax.eval_shape(lambda *args: f(*args), *args)
    return {len(call.args[2]) for call in passes.call_args_list}

  return [
    rows(made.learner.add_reference_and_values, state, cut(made)),
    rows(made.learner.update, state, cut(made)),
    rows(made.cold_start.update, cold, *DEMONSTRATED, demonstrated(made)),
  ]


DEMONSTRATED = EACH_PROMPT, made_samples().tokens, LENGTHS, None


def demonstrated(made) -> packing.Packing:
  """Where those demonstrations go."""
  return packing.pack(S + LENGTHS, np.arange(B), made.cold_start.packing)


def step_size(config):
  learner = settings.policy_learner(parse(config), built(config).cfg)
  return first_step(learner.optimizer)


def critics_step(config):
  learner = settings.critic_learner(parse(config), built(config).cfg)
  return first_step(learner.optimizer)


def cold_start_step(config):
  """The usual change of a weight in the first step, to two digits."""
  made, params = built(config), bigram.params()
  with bigram.by_the_operation():
    state = made.cold_start.init_state(params)
    after, _ = made.cold_start.update(state, *DEMONSTRATED, demonstrated(made))
  moved = np.abs(after.params["head"] - params["head"])
  return float(f"{np.median(moved[moved > 0.5 * moved.max()]):.1e}")


def first_step(optimizer):
  """The change of a weight of 0 in the first step."""
  weights, gradient = {"head": jnp.zeros(2)}, {"head": jnp.ones(2)}
  change, _ = optimizer.update(gradient, optimizer.init(weights), weights)
  return float(-change["head"][0])
