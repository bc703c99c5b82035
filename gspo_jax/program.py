"""The program of a run: the jitted functions that a config and a mesh make.

Training, planning and benchmarks take them from here, so that what is planned
or timed is what runs. Below this file nothing knows of ConfigDict.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
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
from gspo_jax.cold_start import as_rollout, cross_entropy
from gspo_jax.errors import UserError
from gspo_jax.limits import check, multiple

OBJECTIVES = {
  "gspo": losses.gspo_loss,
  "gspo_token": losses.gspo_token_loss,
  "grpo": losses.grpo_loss,
  "dr_grpo": losses.dr_grpo_loss,
  "dapo": losses.dapo_loss,
}

# Collectives that run beside the matrix units on chips with SparseCores.
_SPARSE_CORES = ("TPU v5", "TPU v5p")
_OFFLOADED = (
  "all_gather",
  "reduce_scatter",
  "all_reduce",
  "2d_all_gather",
  "3d_all_gather",
  "nd_reduce_scatter",
)


@dataclasses.dataclass(frozen=True)
class OnMesh:
  """A jitted function that is traced and called in the context of a mesh."""

  jitted: Callable
  mesh: jax.sharding.Mesh

  def __call__(self, *args):
    with jax.set_mesh(self.mesh):
      return self.jitted(*args)

  def lower(self, *args):
    """For ahead-of-time compilation; arguments may be shapes."""
    with jax.set_mesh(self.mesh):
      return self.jitted.lower(*args)


@dataclasses.dataclass(frozen=True)
class Program:
  """Functions to call; compiled once each, arrays laid out over the mesh.

  Attributes:
    cfg: the model.
    mesh: of all devices.
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
    imitate: (state, arrays of demonstrations, key) -> (state, metrics);
      donates the state.
  """

  cfg: model.ModelConfig
  mesh: jax.sharding.Mesh
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
      if not isinstance(function, OnMesh):
        continue
      if (times := function.jitted._cache_size()) > 1:
        raise RuntimeError(
          f"{field.name} was compiled {times} times: the shapes, types or "
          "shardings of its arguments changed between calls"
        )


def build(config: ConfigDict, mesh: jax.sharding.Mesh) -> Program:
  """Checks a config and makes its program; compiles nothing yet.

  Raises:
    UserError: a value is unknown, or sizes do not divide.
  """
  check(config, OBJECTIVES, shards=mesh.size // mesh.shape["tensor"])
  cfg, draw = model_config(config), sampler_config(config)
  rl, imitation = _learners(config, cfg)
  abstract = _abstract_state(rl, mesh)
  abstract_imitation = _abstract_state(imitation, mesh)
  many = dataclasses.replace(draw, group_size=config.eval.samples)
  one = dataclasses.replace(draw, group_size=1, temperature=0.0)
  decoding = _decoding_mesh(config, mesh, abstract.params)
  jit_generate = functools.partial(
    _jit_generate, cfg, abstract=abstract, mesh=mesh, decoding=decoding
  )
  generate = jit_generate(draw)
  return Program(
    cfg=cfg,
    mesh=mesh,
    schedule=optim.schedule(_optim_config(config)),
    abstract=abstract,
    init=_jit_init(rl, abstract, mesh),
    generate=generate,
    generate_eval=generate if many == draw else jit_generate(many),
    generate_greedy=jit_generate(one),
    score=_jit_score(config, cfg, abstract, mesh),
    update=_jit_update(rl, abstract, mesh),
    abstract_imitation=abstract_imitation,
    init_imitation=_jit_init(imitation, abstract_imitation, mesh),
    imitate=_jit_update(imitation, abstract_imitation, mesh, as_rollout),
  )


def _decoding_mesh(config, mesh, params):
  """Where answers are drawn: no weight is gathered at every token there.

  Raises:
    UserError: the devices, the weights or the prompts cannot be split so.
  """
  asked = {k: v or mesh.shape[k] for k, v in config.sampler_mesh.items()}
  decoding = sharding.regroup(mesh, **asked)
  try:
    sharding.state_shardings(params, decoding)
  except UserError as error:
    raise UserError(f"on sampler_mesh: {error}") from error
  shards = decoding.size // decoding.shape["tensor"]
  multiple("data.prompts", config.data.prompts, "sampler_mesh", shards)
  return decoding


def _overlap(mesh) -> dict:
  """Compiler options that hide large collectives behind matrix products."""
  if mesh.devices.flat[0].device_kind not in _SPARSE_CORES:
    return {}
  offload = "xla_tpu_enable_sparse_core_collective_offload_"
  return {offload + kind: True for kind in _OFFLOADED}


def _jit_init(learner, abstract, mesh):
  init = functools.partial(train_step.init_state, learner=learner)
  return OnMesh(jax.jit(init, out_shardings=_shardings(abstract)), mesh)


def _jit_generate(cfg, draw, *, abstract, mesh, decoding):
  rows, everywhere = sharding.rows(mesh), sharding.everywhere(mesh)

  def generate(params, prompts, key):
    # Arrays of another mesh must be laid on this one before they meet it.
    prompts = sharding.constrain_rows(prompts, axis=0)
    key = sharding.constrain(key)
    return sampler.generate(params, cfg, prompts, key, sampler=draw)

  jitted = jax.jit(
    generate,
    in_shardings=(_shardings(abstract.params), rows, everywhere),
    out_shardings=sampler.Samples(rows, rows, rows, rows, steps=everywhere),
  )
  return OnMesh(jitted, decoding)


def _jit_score(config, cfg, abstract, mesh):
  rows, everywhere = sharding.rows(mesh), sharding.everywhere(mesh)

  def score(params, prompts, samples):
    return rollout.score(
      params,
      cfg,
      prompts,
      samples,
      use_sampler=config.objective.old_logps == "sampler",
      micro_rows=config.learner.micro_rows,
      temperature=config.sampler.temperature,
    )

  jitted = jax.jit(
    score,
    in_shardings=(_shardings(abstract.params), rows, None),
    out_shardings=(rows, everywhere),
    compiler_options=_overlap(mesh),
  )
  return OnMesh(jitted, mesh)


def _jit_update(learner, abstract, mesh, prepare=lambda batch: batch):
  """`prepare` makes a rollout of what the function is given."""
  state, everywhere = _shardings(abstract), sharding.everywhere(mesh)

  def update(state, batch, key):
    return train_step.update(state, prepare(batch), key, learner=learner)

  jitted = jax.jit(
    update,
    in_shardings=(state, sharding.rows(mesh), everywhere),
    out_shardings=(state, everywhere),
    donate_argnums=0,
    compiler_options=_overlap(mesh),
  )
  return OnMesh(jitted, mesh)


def model_config(config: ConfigDict) -> model.ModelConfig:
  """The policy a config names."""
  changes = {k: v for k, v in config.model.items() if k != "variant"}
  return model.variant(config.model.variant, **changes)


def sampler_config(config: ConfigDict) -> sampler.SamplerConfig:
  """How a config draws rollouts."""
  return sampler.SamplerConfig(
    stop_ids=(data.EOS,), pad_id=data.PAD, **config.sampler
  )


def clips(config: ConfigDict) -> dict[str, float]:
  """`clip_low` and `clip_high`: the config's, or the method's own."""
  own = OBJECTIVES[config.objective.name].__kwdefaults__
  asked = {k: config.objective[k] for k in ("clip_low", "clip_high")}
  return {k: own[k] if v == -1 else v for k, v in asked.items()}


def _optim_config(config: ConfigDict) -> optim.OptimConfig:
  total = config.num_steps * config.learner.minibatches
  return optim.OptimConfig(total_steps=max(total, 1), **config.optim)


def _learners(config, cfg):
  """How RL learns, and how the cold start does."""
  rl = train_step.Learner(
    cfg=cfg,
    objective=functools.partial(
      OBJECTIVES[config.objective.name], **clips(config)
    ),
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
