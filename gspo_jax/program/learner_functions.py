"""What learns, each function jitted beside its shardings and donations."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax import model
from gspo_jax.learner import (
  cold_start,
  credit,
  critic,
  optimizer,
  packing,
  reference_pass,
  train_step,
)
from gspo_jax.learner.cold_start import ColdStartFunctions
from gspo_jax.learner.packing import Packing, PackingConfig, RowTokens
from gspo_jax.learner.train_batch import PackedBatch
from gspo_jax.learner.train_step import InitState, TrainState
from gspo_jax.losses import Metrics
from gspo_jax.model import rounding
from gspo_jax.program import abstract, settings
from gspo_jax.program.config import Config
from gspo_jax.runtime import sharding
from gspo_jax.runtime.sharding import mesh_jit
from gspo_jax.sampler.samples import Prompts, Samples

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


@dataclasses.dataclass(frozen=True)
class LearnerFunctions:
  """What learns from scored responses; B rows, in M minibatches.

  Attributes:
    abstract: shapes and shardings of the state, for a restore.
    init_state: policy, donated -> the first state.
    learning_rate: the schedule, at an optimizer step from 0.
    packing: the rows of a batch.
    make_train_batch: (prompts, samples, packing) -> the batch, with zeros in
      the fields that are filled in later.
    needs_old_logps: whether `compute_old_logps` comes before `update`.
    recompute_first_minibatch: whether that pass also covers minibatch 0, whose
      old log-probs `update` computes itself; the rewards need them (k1).
    add_reference_and_values: (state, batch, donated) -> the batch with
      `reference_logps` and `values`; None if the objective has neither.
    assign_advantages: (batch, donated, rewards [B], finish [B]) -> the batch
      with advantages.
    step: (state, batch, apply_updates) -> (state, batch, metrics), one program
      for `compute_old_logps` and `update`; donates state and batch.
  """

  abstract: TrainState
  init_state: InitState
  learning_rate: optax.Schedule
  packing: PackingConfig
  make_train_batch: Callable[[Prompts, Samples, Packing], PackedBatch]
  needs_old_logps: bool
  recompute_first_minibatch: bool
  add_reference_and_values: (
    Callable[[TrainState, PackedBatch], PackedBatch] | None
  )
  assign_advantages: Callable[[PackedBatch, jax.Array, jax.Array], PackedBatch]
  step: Callable[
    [TrainState, PackedBatch, np.bool_],
    tuple[TrainState, PackedBatch, Metrics],
  ]

  def pack(
    self, prompt_lengths: np.ndarray, lengths: np.ndarray, key: jax.Array
  ) -> Packing:
    """Where each response goes, with whole groups shuffled by `key`.

    Takes the lengths of prompts [P] and of responses [B]; an empty response has
    no place.
    """
    P, B = len(prompt_lengths), len(lengths)
    return packing.pack(
      _sequence_lengths(prompt_lengths, lengths),
      packing.shuffled_groups(key, P, B // P),
      self.packing,
    )

  def row_tokens(
    self, prompt_lengths: np.ndarray, lengths: np.ndarray, packed: Packing
  ) -> dict[str, RowTokens]:
    """The tokens of `update`, `old_logps` and `reference_and_values`, by name.

    Those that run; each counts once, with one model or several. `packed` is of
    `pack` with the same lengths.
    """
    sequences = _sequence_lengths(prompt_lengths, lengths)
    all_rows = packing.row_tokens(sequences, packed, self.packing)
    tokens = {"update": all_rows}
    if self.needs_old_logps:
      first = np.zeros(self.packing.minibatches, int)
      if not self.recompute_first_minibatch:
        first[0] = max(packed.num_micro_batches[0] - 1, 0)
      tokens["old_logps"] = packing.row_tokens(
        sequences, packed, self.packing, first
      )
    if self.add_reference_and_values:
      tokens["reference_and_values"] = all_rows
    return tokens

  def compute_old_logps(
    self, state: TrainState, batch: PackedBatch
  ) -> tuple[TrainState, PackedBatch, Metrics]:
    """The same state, the batch with the fields of the old policy, and metrics.

    `update` fills in those of the first minibatch itself. So only one of its
    micro-batches runs here, to compare the two passes, unless
    `recompute_first_minibatch`. Donates both arguments.
    """
    return self.step(state, batch, np.bool_(False))

  def update(
    self, state: TrainState, batch: PackedBatch
  ) -> tuple[TrainState, PackedBatch, Metrics]:
    """The state after `learner.minibatches` optimizer steps, batch, metrics.

    The metrics add to those of `compute_old_logps`. Donates both arguments.
    """
    return self.step(state, batch, np.bool_(True))


def _sequence_lengths(prompt_lengths, lengths) -> np.ndarray:
  """[B], tokens of each prompt with its response; 0 for an empty response."""
  prompts = np.repeat(prompt_lengths, len(lengths) // len(prompt_lengths))
  return np.where(lengths > 0, prompts + lengths, 0)


def learner_functions(
  config: Config,
  cfg: model.ModelConfig,
  policy: model.Params,
  mesh: jax.sharding.Mesh,
) -> LearnerFunctions:
  """What learns, from an abstract policy; compiles nothing yet."""
  learners = settings.learners(config, cfg)
  make_state = functools.partial(new_state, learners, config, cfg)
  state, init_state = _init_state(make_state, policy, mesh)
  states = abstract.shardings(state)
  rows = settings.packing(config, sharding.row_shards(mesh))
  replicated = sharding.replicated(mesh)
  # The rows of a micro-batch are split.
  packed = PackedBatch(
    NamedSharding(mesh, PartitionSpec(None, None, *sharding.ROWS)), replicated
  )

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

  has_either = state.reference is not None or state.critic is not None
  return LearnerFunctions(
    abstract=state,
    init_state=init_state,
    learning_rate=optimizer.schedule(settings.optim_config(config)),
    packing=rows,
    needs_old_logps=settings.needs_old_logps(config, cfg),
    recompute_first_minibatch=learners.policy.recompute_first_minibatch,
    make_train_batch=mesh_jit(
      functools.partial(
        packing.train_batch_from_samples,
        cfg=cfg,
        objective=config.objective,
        instruments=config.log.instruments,
        packing_config=rows,
      ),
      mesh,
      in_shardings=(sharding.batch_sharding(mesh), None, replicated),
      out_shardings=packed,
    ),
    add_reference_and_values=mesh_jit(
      reference_and_values,
      mesh,
      in_shardings=(states, packed),
      out_shardings=packed,
      donate_argnums=1,
      compiler_options=training_options(mesh),
    )
    if has_either
    else None,
    assign_advantages=mesh_jit(
      functools.partial(
        credit.assign_advantages,
        objective=config.objective,
        group_size=config.rollout.group_size,
      ),
      mesh,
      out_shardings=packed,
      donate_argnums=0,
    ),
    step=mesh_jit(
      functools.partial(
        _update,
        learners=learners,
        reference_every=config.objective.reference_every,
      ),
      mesh,
      in_shardings=(states, packed, replicated),
      out_shardings=(states, packed, replicated),
      donate_argnums=(0, 1),
      compiler_options=training_options(mesh),
    ),
  )


def cold_start_functions(
  config: Config,
  cfg: model.ModelConfig,
  params: model.Params,
  mesh: jax.sharding.Mesh,
) -> ColdStartFunctions:
  """Supervised fine-tuning, from abstract weights; compiles nothing yet."""
  learner = settings.learners(config, cfg).cold_start
  rows = settings.cold_start_packing(config, sharding.row_shards(mesh))
  make_state = functools.partial(
    train_step.init_state, optimizer=learner.optimizer
  )
  state, init_state = _init_state(make_state, params, mesh)
  states, replicated = abstract.shardings(state), sharding.replicated(mesh)

  def cold_start_update(state, *demonstrations_and_packing):
    batch = cold_start.demonstration_batch(*demonstrations_and_packing, rows)
    state, _, metrics = train_step.update(state, batch, learner=learner)
    return state, metrics

  return ColdStartFunctions(
    abstract=state,
    init_state=init_state,
    packing=rows,
    update=mesh_jit(
      cold_start_update,
      mesh,
      in_shardings=(
        states,
        *(sharding.batch_sharding(mesh),) * 4,
        replicated,
      ),
      out_shardings=(states, replicated),
      donate_argnums=0,
      compiler_options=training_options(mesh),
    ),
  )


def _init_state(make_state, policy, mesh) -> tuple[TrainState, InitState]:
  """The abstract state, and the function that makes it of a donated policy."""
  shapes = jax.eval_shape(make_state, abstract.without_shardings(policy))
  state = abstract.sharded(shapes, mesh)
  init_state = mesh_jit(
    make_state,
    mesh,
    in_shardings=(abstract.shardings(state.policy),),
    out_shardings=abstract.shardings(state),
    donate_argnums=0,
  )
  return state, init_state


def new_state(learners, config, cfg, policy) -> TrainState:
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


def training_options(mesh: jax.sharding.Mesh) -> dict:
  """Compiler options of what trains.

  They round as the sampler does, and hide large collectives behind matrix
  products.
  """
  if mesh.devices.flat[0].device_kind not in _SPARSE_CORES:
    return rounding.OPTIONS
  offload = "xla_tpu_enable_sparse_core_collective_offload_"
  return rounding.OPTIONS | {offload + kind: True for kind in _OFFLOADED}
