"""Functions of a config that observe the settings of the program it makes."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp

from gspo_jax.learner import optimizer
from gspo_jax.program import learner_functions, settings
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.runtime.sharding import MeshJit


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


def row_widths(config):
  """Columns of a row, in an update and in a cold start."""
  made = built(config)
  return {made.learner.packing.width, made.cold_start.packing.width}


def rows_per_pass(config):
  """Rows of a forward pass, in an update and in a cold start."""
  made = built(config)
  parts = made.learner, made.cold_start
  return [part.packing.micro_batch_size for part in parts]


def given(function: MeshJit) -> dict:
  """The settings of a function of the learner."""
  return function.jitted.__wrapped__.keywords


def instruments(config):
  """Whether a batch has what they need, and an update measures them."""
  made = built(config)
  loss = settings.policy_learner(parse(config), made.cfg).loss
  kept = given(made.learner.make_train_batch)
  return [keywords["instruments"] for keywords in (kept, loss.keywords)]


def reference_temperature(config):
  learner = built(config).learner
  return given(learner.add_reference_and_values)["temperature"]


def reference_every(config):
  return given(built(config).learner.step)["reference_every"]


def step_size(config):
  learner = settings.policy_learner(parse(config), built(config).cfg)
  return first_step(learner.optimizer)


def critics_step(config):
  learner = settings.critic_learner(parse(config), built(config).cfg)
  return first_step(learner.optimizer)


def cold_start_step(config):
  made, parsed = built(config), parse(config)
  wrapped = mock.patch.object(optimizer, "optimizer", wraps=optimizer.optimizer)
  with wrapped as make:
    learner_functions.cold_start_functions(
      parsed, made.cfg, made.abstract_params, made.mesh
    )
  return first_step(optimizer.optimizer(*make.call_args.args))


def first_step(optimizer):
  """The change of a weight of 0 in the first step."""
  weights, gradient = {"head": jnp.zeros(2)}, {"head": jnp.ones(2)}
  change, _ = optimizer.update(gradient, optimizer.init(weights), weights)
  return float(-change["head"][0])
