"""The program of a run: the jitted functions that a config and a mesh make.

Training, planning and benchmarks take them from here, so that what is planned
or timed is what runs. Below this file nothing knows of ConfigDict.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from gspo_jax import (
  data,
  losses,
  model,
  optim,
  rollout,
  sampler,
  sharding,
  train_step,
)
from gspo_jax.cold_start import cross_entropy
from gspo_jax.errors import UserError, nearest

OBJECTIVES = {
  "gspo": losses.gspo_loss,
  "gspo_token": losses.gspo_token_loss,
  "grpo": losses.grpo_loss,
  "dr_grpo": losses.dr_grpo_loss,
  "dapo": losses.dapo_loss,
}
OLD_LOGPS = ("sampler", "recompute")


@dataclasses.dataclass(frozen=True)
class Program:
  """Jitted functions, their arrays laid out over the mesh.

  Attributes:
    cfg: the model.
    mesh: of all devices.
    rows: the sharding of batches.
    schedule: the learning rate at an optimizer step.
    abstract: shapes and shardings of the TrainState, for a restore.
    init: key -> TrainState.
    generate: (params, prompts, key) -> Samples, as the config draws.
    generate_eval: the same with `eval.samples` answers a prompt.
    generate_greedy: the same with one greedy answer.
    score: (params, prompts, samples) -> (Rollout, metrics).
    update: (state, rollout, key) -> (state, metrics); donates the state.
    abstract_imitation: as `abstract`, of the cold start's.
    init_imitation: key -> TrainState of the cold start.
    imitate: (state, rollout, key) -> (state, metrics); donates the state.
  """

  cfg: model.ModelConfig
  mesh: jax.sharding.Mesh
  rows: NamedSharding
  schedule: Callable
  abstract: train_step.TrainState
  init: Callable
  generate: Callable
  generate_eval: Callable
  generate_greedy: Callable
  score: Callable
  update: Callable
  abstract_imitation: train_step.TrainState
  init_imitation: Callable
  imitate: Callable

  def check_compiled_once(self) -> None:
    """RuntimeError if a function was compiled for a second set of shapes."""
    for field in dataclasses.fields(self):
      function = getattr(self, field.name)
      if hasattr(function, "_cache_size") and function._cache_size() > 1:
        raise RuntimeError(
          f"{field.name} was compiled {function._cache_size()} times: the "
          "shapes, types or shardings of its arguments changed between calls"
        )


def build(config: ConfigDict, mesh: jax.sharding.Mesh) -> Program:
  """Checks a config and makes its program; compiles nothing yet.

  Raises:
    UserError: a value is unknown, or sizes do not divide.
  """
  check(config, mesh)
  cfg = model_config(config)
  draw = sampler_config(config)
  rl, imitation = _learners(config, cfg)
  everywhere = NamedSharding(mesh, PartitionSpec())
  rows = sharding.rows(mesh)
  states = [_abstract_state(learner, mesh) for learner in (rl, imitation)]
  params = _shardings(states[0].params)

  def generator(draw: sampler.SamplerConfig):
    def generate(params, prompts, key):
      return sampler.generate(params, cfg, prompts, key, sampler=draw)

    return jax.jit(
      generate,
      in_shardings=(params, rows, everywhere),
      out_shardings=sampler.Samples(rows, rows, rows, rows, steps=everywhere),
    )

  def score(params, prompts, samples):
    return rollout.score(
      params,
      cfg,
      prompts,
      samples,
      use_sampler=config.objective.old_logps == "sampler",
      micro_rows=config.learner.micro_rows,
      temperature=draw.temperature,
    )

  def updater(learner, state):
    state = _shardings(state)
    return jax.jit(
      functools.partial(train_step.update, learner=learner),
      in_shardings=(state, rows, everywhere),
      out_shardings=(state, everywhere),
      donate_argnums=0,
    )

  def initializer(learner, state):
    init = functools.partial(train_step.init_state, learner=learner)
    return jax.jit(init, out_shardings=_shardings(state))

  many = dataclasses.replace(draw, group_size=config.eval.samples)
  one = dataclasses.replace(draw, group_size=1, temperature=0.0)
  generate = generator(draw)
  return Program(
    cfg=cfg,
    mesh=mesh,
    rows=rows,
    schedule=optim.schedule(_optim_config(config)),
    abstract=states[0],
    init=initializer(rl, states[0]),
    generate=generate,
    generate_eval=generate if many == draw else generator(many),
    generate_greedy=generator(one),
    score=jax.jit(
      score,
      in_shardings=(params, rows, None),
      out_shardings=(rows, everywhere),
    ),
    update=updater(rl, states[0]),
    abstract_imitation=states[1],
    init_imitation=initializer(imitation, states[1]),
    imitate=updater(imitation, states[1]),
  )


def model_config(config: ConfigDict) -> model.ModelConfig:
  """The policy a config names."""
  changes = {k: v for k, v in config.model.items() if k != "variant"}
  return model.variant(config.model.variant, **changes)


def sampler_config(config: ConfigDict) -> sampler.SamplerConfig:
  """How a config draws rollouts."""
  return sampler.SamplerConfig(
    stop_ids=(data.EOS,), pad_id=data.PAD, **config.sampler
  )


def _optim_config(config: ConfigDict) -> optim.OptimConfig:
  total = config.num_steps * config.learner.minibatches
  return optim.OptimConfig(total_steps=max(total, 1), **config.optim)


def _learners(config, cfg):
  """How RL learns, and how the cold start does."""
  clips = {
    name: config.objective[name]
    for name in ("clip_low", "clip_high")
    if config.objective[name] >= 0
  }
  rl = train_step.Learner(
    cfg=cfg,
    objective=functools.partial(OBJECTIVES[config.objective.name], **clips),
    optimizer=optim.optimizer(_optim_config(config)),
    minibatches=config.learner.minibatches,
    micro_rows=config.learner.micro_rows,
    group=config.sampler.group_size,
    temperature=config.sampler.temperature,
  )
  cold = config.cold_start
  schedule = optim.OptimConfig(
    learning_rate=cold.learning_rate,
    warmup_steps=cold.warmup_steps,
    total_steps=max(cold.steps, 1),
    decay="cosine",
    b2=0.98,
    weight_decay=0.01,
  )
  imitation = rl._replace(
    objective=cross_entropy,
    optimizer=optim.optimizer(schedule),
    minibatches=1,
    micro_rows=min(config.learner.micro_rows, cold.batch),
    group=1,
    temperature=1.0,
  )
  return rl, imitation


def _abstract_state(learner, mesh):
  init = functools.partial(train_step.init_state, learner=learner)
  shapes = jax.eval_shape(init, jax.random.key(0))
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    sharding.state_shardings(shapes, mesh),
  )


def _shardings(abstract):
  return jax.tree.map(lambda x: x.sharding, abstract)


def check(config: ConfigDict, mesh: jax.sharding.Mesh) -> None:
  """UserError for what would fail later, or silently do something else."""
  c = config
  for key, value, choices in (
    ("objective.name", c.objective.name, OBJECTIVES),
    ("objective.old_logps", c.objective.old_logps, OLD_LOGPS),
    ("data.source", c.data.source, ("chain", "jsonl")),
  ):
    if value not in choices:
      raise UserError(f"{key}={value!r}: {nearest(value, choices)}")
  for key in (
    "eval.prompts",
    "eval.samples",
    "eval.every",
    "log.samples_every",
  ):
    group, name = key.split(".")
    if c[group][name] < 1:
      raise UserError(f"{key}={c[group][name]}: expected at least 1")
  if c.sampler.group_size < 2:
    raise UserError(
      f"sampler.group_size={c.sampler.group_size}: expected at least 2, since "
      "an advantage compares an answer with the others of its group"
    )
  if c.sampler.temperature <= 0:
    raise UserError(
      f"sampler.temperature={c.sampler.temperature}: expected more than 0, "
      "since greedy answers to one question are all the same"
    )
  _check_sizes(config, shards=mesh.size // mesh.shape["tensor"])


def _check_sizes(config, shards):
  """Every cut of a batch comes out even."""
  prompts, batch = config.data.prompts, config.cold_start.batch
  minibatches, micro = config.learner.minibatches, config.learner.micro_rows
  divides("data.prompts", prompts, "learner.minibatches", minibatches)
  rows = prompts * config.sampler.group_size // minibatches
  divides("the answers of a minibatch", rows, "learner.micro_rows", micro)
  sizes = {"data.prompts": prompts, "learner.micro_rows": micro}
  if config.cold_start.steps:
    micro = min(micro, batch)
    divides("cold_start.batch", batch, "learner.micro_rows", micro)
    sizes["cold_start.batch"] = batch
  for name, size in sizes.items():
    divides(name, size, "the devices that share rows", shards)


def divides(what: str, size: int, by: str, divisor: int) -> None:
  """UserError unless `divisor` divides `size`, naming the nearest that does."""
  if size < 1:
    raise UserError(f"{what} = {size}: expected at least 1")
  if divisor >= 1 and size % divisor == 0:
    return
  choices = [n for n in range(1, size + 1) if size % n == 0]
  close = min(choices, key=lambda n: abs(n - divisor))
  raise UserError(
    f"{what} = {size} is not divisible by {by} = {divisor}; the nearest "
    f"divisor is {close}"
  )
