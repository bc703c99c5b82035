"""Each function of a program, jitted with its shardings and donations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax import model, sampler
from gspo_jax.learner import (
  cold_start,
  credit,
  critic,
  packing,
  reference_pass,
  train_step,
)
from gspo_jax.learner.optimizer import STATE_AXES
from gspo_jax.learner.train_batch import PackedBatch
from gspo_jax.learner.train_step import TrainState
from gspo_jax.model import hf, rounding
from gspo_jax.runtime import sharding
from gspo_jax.runtime.sharding import MeshJit
from gspo_jax.sampler.functions import SeparateDevices
from gspo_jax.sampler.samples import empty_samples as make_empty_samples
from gspo_jax.sampler.samples import merge_groups as merge_sample_groups
from gspo_jax.sampler.samples import samples_sharding
from gspo_jax.sampler.samples import take_groups as take_sample_groups

# Chips whose collectives run on SparseCores, beside the matrix units, where it
# is asked for; those of tpu7x do so by default.
_SPARSE_CORES = ("TPU v5", "TPU v5p", "TPU v6 lite")
_OFFLOADED = (
  "all_gather",
  "reduce_scatter",
  "all_reduce",
  "2d_all_gather",
  "3d_all_gather",
  "nd_reduce_scatter",
)


def _training_options(mesh) -> dict:
  """Compiler options of what trains.

  They round as the sampler does, and hide large collectives behind matrix
  products.
  """
  if mesh.devices.flat[0].device_kind not in _SPARSE_CORES:
    return rounding.OPTIONS
  offload = "xla_tpu_enable_sparse_core_collective_offload_"
  return rounding.OPTIONS | {offload + kind: True for kind in _OFFLOADED}


def shardings(abstract):
  """The shardings of a tree of abstract arrays."""
  return jax.tree.map(lambda x: x.sharding, abstract)


def _sharded(shapes, mesh):
  """A tree of shapes with the sharding of each."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    sharding.state_shardings(shapes, mesh, STATE_AXES),
  )


@functools.cache
def abstract_params(cfg, mesh):
  """Shapes and shardings of the weights."""
  init = functools.partial(model.init, cfg=cfg)
  return _sharded(jax.eval_shape(init, jax.random.key(0)), mesh)


@functools.cache
def abstract_policy(cfg, mesh):
  """Shapes and shardings of `new_policy`'s result."""
  params = abstract_params(cfg, mesh)
  if cfg.lora is None:
    return params
  make = functools.partial(_with_adapters, cfg=cfg, seed=0)
  return _sharded(jax.eval_shape(make, params), mesh)


def new_policy(seed, cfg, mesh):
  """params -> policy: with adapters, weights in `cfg.dtype` below new ones."""
  if cfg.lora is None:
    return lambda params: params
  policy = shardings(abstract_policy(cfg, mesh))
  make = functools.partial(_with_adapters, cfg=cfg, seed=seed)
  return MeshJit(jax.jit(make, out_shardings=policy), mesh)


def _with_adapters(params, *, cfg, seed):
  adapters = model.lora.init(jax.random.key(seed), cfg)
  cast = lambda x: x.astype(cfg.dtype)
  return model.lora.join(jax.tree.map(cast, params), adapters)


def abstract_state(new_state, params, mesh) -> TrainState:
  """Shapes and shardings of a state; `new_state`: abstract params -> state."""
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  return _sharded(jax.eval_shape(new_state, jax.tree.map(shape, params)), mesh)


def init_params(folder: str, cfg, abstract, mesh):
  """key -> params: those of a Hugging Face folder, else random ones."""
  param_shardings = shardings(abstract)
  if folder:
    return functools.partial(_load_params, folder, cfg, param_shardings)
  init = functools.partial(model.init, cfg=cfg)
  return MeshJit(jax.jit(init, out_shardings=param_shardings), mesh)


def _load_params(folder, cfg, param_shardings, key):
  """The weights of a Hugging Face folder; the key is not used."""
  return hf.load_hf(folder, cfg, shardings=param_shardings)


def new_state(policy, *, learners, config, cfg) -> TrainState:
  """A state of this policy, with the reference and the critic it needs."""
  state = train_step.init_state(policy, optimizer=learners.policy.optimizer)
  reference = value = None
  if config.objective.has_reference:
    # In the dtype of the forward pass nothing is lost.
    reference = jax.tree.map(lambda x: x.astype(cfg.dtype), state.params)
    if cfg.lora and not config.objective.reference_every:
      reference = {}
  if learners.critic:
    value = train_step.init_state(
      critic.init(policy), optimizer=learners.critic.optimizer
    )
  return dataclasses.replace(state, reference=reference, critic=value)


def new_cold_start_state(params, *, learners) -> TrainState:
  """A state of these weights for supervised fine-tuning."""
  return train_step.init_state(params, optimizer=learners.cold_start.optimizer)


def init_state(new_state, abstract, mesh) -> MeshJit:
  """policy -> state; donates the policy."""
  jitted = jax.jit(
    new_state,
    in_shardings=(shardings(abstract.policy),),
    out_shardings=shardings(abstract),
    donate_argnums=0,
  )
  return MeshJit(jitted, mesh)


def generate(cfg, sampling, *, params, mesh, sampler_mesh) -> MeshJit:
  """(params, prompts, key) -> samples, by the static sampler."""
  batch, replicated = sharding.batch_sharding(mesh), sharding.replicated(mesh)

  def generate(params, prompts, key):
    # Arrays of another mesh must be moved to this one before they are used.
    prompts = sharding.constrain_batch(prompts, axis=0)
    key = sharding.constrain(key)
    return sampler.generate(params, cfg, prompts, key, sampler=sampling)

  jitted = jax.jit(
    generate,
    in_shardings=(shardings(params), batch, replicated),
    out_shardings=samples_sharding(sampling, mesh),
    compiler_options=rounding.OPTIONS,
  )
  return MeshJit(jitted, sampler_mesh)


def placed(abstract, mesh):
  """Shapes of these arrays, sharded over another mesh."""
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  return _sharded(jax.tree.map(shape, abstract), mesh)


def separate_devices(
  policy, params, cfg, sampling, *, mesh, sampler_mesh, turns: bool
) -> SeparateDevices:
  """Between the trainer's mesh and the sampler's; `params`: abstract, there.

  Weights are cast before they are sent.
  """
  cast = lambda policy: jax.tree.map(lambda x: x.astype(cfg.dtype), policy)
  same = lambda samples: samples
  here, there = (
    samples_sharding(sampling, m, turns=turns) for m in (mesh, sampler_mesh)
  )
  weights = placed(jax.eval_shape(cast, params), sampler_mesh)
  return SeparateDevices(
    weights=weights,
    in_transit=weights
    if mesh.size == sampler_mesh.size
    else placed(jax.eval_shape(cast, policy), mesh),
    sync_weights=_move(cast, mesh, sampler_mesh, shardings(params)),
    to_trainer=_move(same, sampler_mesh, mesh, here),
    to_sampler=_move(same, mesh, sampler_mesh, there),
  )


def _move(prepare, source_mesh, mesh, target):
  """Arrays of `source_mesh` -> `prepare` of them, in shardings of `mesh`.

  Between as many devices they are first laid out on the source's as on the
  target's; then each device sends its part to the one in its place, of the same
  process. `jax.device_put` moves them between any devices of one process.
  """
  if mesh.size != source_mesh.size:
    prepare = MeshJit(jax.jit(prepare), source_mesh)
    return lambda arrays: jax.device_put(prepare(arrays), target)
  beside = sharding.beside(mesh, source_mesh.devices.flat)
  pairs = dict(zip(beside.devices.flat, mesh.devices.flat, strict=True))
  laid_out = jax.tree.map(lambda s: NamedSharding(beside, s.spec), target)
  prepare = MeshJit(jax.jit(prepare, out_shardings=laid_out), source_mesh)

  def send(x, sharding):
    parts = [
      jax.device_put(shard.data, pairs[shard.device])
      for shard in x.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

  return lambda arrays: jax.tree.map(send, prepare(arrays), target)


def merge_groups(sampling, mesh, *, turns: bool) -> MeshJit:
  """(samples, samples, index) -> samples."""
  samples_sharding_ = samples_sharding(sampling, mesh, turns=turns)
  jitted = jax.jit(
    merge_sample_groups,
    in_shardings=(
      samples_sharding_,
      samples_sharding_,
      sharding.replicated(mesh),
    ),
    out_shardings=samples_sharding_,
  )
  return MeshJit(jitted, mesh)


def take_groups(cfg, sampling, mesh) -> MeshJit:
  """(samples, index) -> samples."""
  samples_sharding_ = samples_sharding(sampling, mesh)
  jitted = jax.jit(
    functools.partial(take_sample_groups, cfg=cfg, sampler=sampling),
    in_shardings=(samples_sharding_, sharding.replicated(mesh)),
    out_shardings=samples_sharding_,
  )
  return MeshJit(jitted, mesh)


def empty_samples(
  prompts, width, cfg, sampling, mesh, *, turns: bool
) -> MeshJit:
  """() -> samples without tokens, to as many prompts of that width."""

  def make():
    samples = make_empty_samples(prompts, width, cfg, sampling)
    if not turns:
      return samples
    none = jnp.zeros(samples.tokens.shape, jnp.int16)
    return dataclasses.replace(samples, turns=none)

  samples_sharding_ = samples_sharding(sampling, mesh, turns=turns)
  return MeshJit(jax.jit(make, out_shardings=samples_sharding_), mesh)


def packed_sharding(mesh) -> PackedBatch:
  """The shardings of a packed batch: the rows of a micro-batch are split."""
  rows = PartitionSpec(None, None, *sharding.ROWS)
  return PackedBatch(NamedSharding(mesh, rows), sharding.replicated(mesh))


def make_train_batch(config, cfg, packing_config, mesh) -> MeshJit:
  """(prompts, samples, packing) -> batch."""
  make = functools.partial(
    packing.train_batch_from_samples,
    cfg=cfg,
    objective=config.objective,
    instruments=config.log.instruments,
    packing_config=packing_config,
  )
  jitted = jax.jit(
    make,
    in_shardings=(
      sharding.batch_sharding(mesh),
      None,
      sharding.replicated(mesh),
    ),
    out_shardings=packed_sharding(mesh),
  )
  return MeshJit(jitted, mesh)


def add_reference_and_values(config, cfg, abstract, mesh) -> MeshJit | None:
  """(state, batch) -> batch; None without a reference and a critic."""
  if abstract.reference is None and abstract.critic is None:
    return None
  packed = packed_sharding(mesh)

  def reference_and_values(state, batch):
    return reference_pass.add_reference_and_values(
      batch,
      cfg,
      reference=None
      if state.reference is None
      else train_step.with_base(state.base, state.reference),
      critic_params=state.critic and state.critic.params,
      temperature=config.sampler.temperature,
    )

  jitted = jax.jit(
    reference_and_values,
    in_shardings=(shardings(abstract), packed),
    out_shardings=packed,
    donate_argnums=1,
    compiler_options=_training_options(mesh),
  )
  return MeshJit(jitted, mesh)


def assign_advantages(config, mesh) -> MeshJit:
  """(batch, rewards [B], finish [B]) -> batch."""
  assign = functools.partial(
    credit.assign_advantages,
    objective=config.objective,
    group_size=config.rollout.group_size,
  )
  jitted = jax.jit(
    assign, out_shardings=packed_sharding(mesh), donate_argnums=0
  )
  return MeshJit(jitted, mesh)


def step(learners, reference_every: int, abstract, mesh) -> MeshJit:
  """(state, batch, apply_updates) -> (state, batch, metrics)."""
  state_sharding, batch = shardings(abstract), packed_sharding(mesh)
  replicated = sharding.replicated(mesh)
  jitted = jax.jit(
    functools.partial(
      _update, learners=learners, reference_every=reference_every
    ),
    in_shardings=(state_sharding, batch, replicated),
    out_shardings=(state_sharding, batch, replicated),
    donate_argnums=(0, 1),
    compiler_options=_training_options(mesh),
  )
  return MeshJit(jitted, mesh)


def _update(state, batch, apply_updates, *, learners, reference_every):
  """Computes old log-probs, or updates policy, critic and reference."""
  new, batch, metrics = train_step.update(
    state, batch, learner=learners.policy, apply_updates=apply_updates
  )
  if learners.critic:
    learn = functools.partial(
      _update_critic, state.critic, batch, learners.critic
    )
    shapes = jax.eval_shape(learn)[1]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    value, critic_metrics = train_step.run_if(
      apply_updates, learn, (state.critic, zeros)
    )
    new = dataclasses.replace(new, critic=value)
    metrics |= critic_metrics
  if reference_every:
    due = apply_updates & (new.step % reference_every == 0)
    follow = lambda old, x: jnp.where(due, x.astype(old.dtype), old)
    reference = jax.tree.map(follow, state.reference, new.params)
    new = dataclasses.replace(new, reference=reference)
  return new, batch, metrics


def _update_critic(state, batch, learner):
  """The critic after an update, and its metrics."""
  value, _, metrics = train_step.update(state, batch, learner=learner)
  metrics["critic/grad_norm"] = metrics.pop("grad/norm")
  return value, metrics


def cold_start_update(learner, packing_config, abstract, mesh) -> MeshJit:
  """(state, *arrays of demonstrations, packing) -> (state, metrics)."""
  state_sharding = shardings(abstract)
  replicated = sharding.replicated(mesh)

  def cold_start_update(state, *demonstrations_and_packing):
    batch = cold_start.demonstration_batch(
      *demonstrations_and_packing, packing_config
    )
    state, _, metrics = train_step.update(state, batch, learner=learner)
    return state, metrics

  jitted = jax.jit(
    cold_start_update,
    in_shardings=(
      state_sharding,
      *(sharding.batch_sharding(mesh),) * 4,
      replicated,
    ),
    out_shardings=(state_sharding, replicated),
    donate_argnums=0,
    compiler_options=_training_options(mesh),
  )
  return MeshJit(jitted, mesh)
