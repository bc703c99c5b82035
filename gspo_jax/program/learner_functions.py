"""The learner's functions, each jitted beside its shardings and donations."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from gspo_jax import model
from gspo_jax.learner import (
  credit,
  critic,
  optimizer,
  packing,
  reference_pass,
  train_step,
)
from gspo_jax.learner.cold_start import ColdStartFunctions, cross_entropy
from gspo_jax.learner.packing import Packing, PackingConfig, RowTokens
from gspo_jax.learner.train_batch import PackedBatch
from gspo_jax.learner.train_step import InitState, Learner, TrainState
from gspo_jax.losses import Metrics
from gspo_jax.model import rounding
from gspo_jax.program import abstract, settings
from gspo_jax.program.config import Config
from gspo_jax.runtime import sharding, tpus
from gspo_jax.runtime.mesh_jit import MeshJit
from gspo_jax.sampler.samples import Prompts, Samples

# Collectives that can run on SparseCores.
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
  """Functions that learn; they donate batches, and `step` also the state."""

  abstract: TrainState  # shapes and shardings, for a restore
  init_state: InitState  # donates the policy
  learning_rate: optax.Schedule  # at an optimizer step from 0
  packing: PackingConfig
  # Sequences of the responses to one prompt, of one minibatch.
  group_size: int
  # The batch, with zeros in the fields that are filled in later.
  make_train_batch: Callable[[Prompts, Samples, Packing], PackedBatch]
  needs_old_logps: bool  # whether `compute_old_logps` comes before `update`
  # Whether `compute_old_logps` also covers minibatch 0, which `update` can do
  # itself; the rewards need it (k1).
  recompute_first_minibatch: bool
  # Adds `reference_logps`, `teacher_logps` and `values`; None if the objective
  # has none of them. (state, batch) -> batch; with teachers two more arguments,
  # their weights and, of several, [B] int32.
  add_reference_and_values: Callable[..., PackedBatch] | None
  # (batch, rewards, finish [B]) -> batch; see `credit.assign_advantages`
  assign_advantages: Callable[[PackedBatch, jax.Array, jax.Array], PackedBatch]
  # One program for `compute_old_logps` and `update`, which applies the updates.
  step: Callable[
    [TrainState, PackedBatch, np.bool_],
    tuple[TrainState, PackedBatch, Metrics],
  ]
  # Shapes and shardings of the weights of the teachers.
  teachers: tuple[model.Params, ...] = ()

  def pack(
    self, prompt_lengths: np.ndarray, lengths: np.ndarray, key: jax.Array
  ) -> Packing:
    """The place of each response, after `key` shuffles whole groups."""
    groups = len(lengths) // self.group_size
    return packing.pack(
      _sequence_lengths(prompt_lengths, lengths),
      packing.shuffled_groups(key, groups, self.group_size),
      self.packing,
    )

  def row_tokens(
    self, prompt_lengths: np.ndarray, lengths: np.ndarray, packed: Packing
  ) -> dict[str, RowTokens]:
    """The tokens of each pass that runs, by name; `packed` is from `pack`."""
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
    if self.add_reference_and_values:  # counts once, however many models
      tokens["reference_and_values"] = all_rows
    return tokens

  def compute_old_logps(
    self, state: TrainState, batch: PackedBatch
  ) -> tuple[TrainState, PackedBatch, Metrics]:
    """The same state, the batch with the old policy's fields, and metrics.

    Of the first minibatch one micro-batch runs, to compare it with `update`,
    unless `recompute_first_minibatch`.
    """
    return self.step(state, batch, np.bool_(False))

  def update(
    self, state: TrainState, batch: PackedBatch
  ) -> tuple[TrainState, PackedBatch, Metrics]:
    """The new state, the batch, and metrics to add to `compute_old_logps`'s."""
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
  teachers: Sequence[tuple[model.ModelConfig, model.Params]] = (),
) -> LearnerFunctions:
  """The learner's functions, for abstract weights; compiles nothing yet."""
  learner = settings.policy_learner(config, cfg)
  value_learner = settings.critic_learner(config, cfg)
  make_state = functools.partial(
    _new_state, learner, value_learner, config, cfg
  )
  state, init_state = _init_state(make_state, policy, mesh)
  weights = tuple(
    abstract.sharded(
      jax.eval_shape(functools.partial(model.parameters.cast, cfg=cfg), params),
      mesh,
    )
    for cfg, params in teachers
  )
  taught = [abstract.shardings(weights), sharding.batch_sharding(mesh)]
  states = abstract.shardings(state)
  rows = settings.packing(config, mesh)
  replicated = sharding.replicated(mesh)
  # The rows of a micro-batch are split.
  by_row = NamedSharding(mesh, PartitionSpec(None, None, *sharding.ROWS))
  packed = PackedBatch(by_row, replicated)  # type: ignore[arg-type]  # of shardings

  return LearnerFunctions(
    abstract=state,
    init_state=init_state,
    learning_rate=optimizer.schedule(settings.optim_config(config)),
    packing=rows,
    group_size=config.rollout.group_size * config.rollout.max_sequences,
    needs_old_logps=settings.needs_old_logps(config, cfg),
    recompute_first_minibatch=learner.recompute_first_minibatch,
    make_train_batch=MeshJit(
      functools.partial(
        packing.train_batch_from_samples,
        cfg=cfg,
        objective=config.objective,
        instruments=settings.compares_routers(config),
        packing_config=rows,
      ),
      mesh,
      in_shardings=(sharding.batch_sharding(mesh), None, replicated),
      out_shardings=packed,
    ),
    add_reference_and_values=MeshJit(
      functools.partial(
        reference_pass.add_reference_and_values,
        cfg=cfg,
        temperature=config.sampler.temperature,
        teacher_models=tuple(cfg for cfg, _ in teachers),
      ),
      mesh,
      in_shardings=(states, packed, *(taught if teachers else ())),
      out_shardings=packed,
      donate_argnums=1,
      compiler_options=_training_options(mesh),
    )
    if teachers or state.reference is not None or state.critic is not None
    else None,
    assign_advantages=MeshJit(
      functools.partial(
        credit.assign_advantages,
        objective=config.objective,
        group_size=config.rollout.group_size,
        reward_weights=config.reward.weights,
      ),
      mesh,
      out_shardings=packed,
      donate_argnums=0,
    ),
    step=MeshJit(
      functools.partial(
        _update,
        learner=learner,
        value_learner=value_learner,
        reference_every=config.objective.reference_every,
      ),
      mesh,
      in_shardings=(states, packed, replicated),
      out_shardings=(states, packed, replicated),
      donate_argnums=(0, 1),
      compiler_options=_training_options(mesh),
    ),
    teachers=weights,
  )


def cold_start_functions(
  config: Config,
  cfg: model.ModelConfig,
  params: model.Params,
  mesh: jax.sharding.Mesh,
) -> ColdStartFunctions:
  """The cold start's functions, for abstract weights; compiles nothing yet."""
  learner = Learner(
    loss=functools.partial(cross_entropy, cfg=cfg),
    optimizer=optimizer.optimizer(config.cold_start.optim),
  )
  rows = settings.packing(config, mesh)
  micro = min(rows.micro_batch_size, config.cold_start.batch)
  rows = dataclasses.replace(rows, minibatches=1, micro_batch_size=micro)
  make_state = functools.partial(
    train_step.init_state, optimizer=learner.optimizer
  )
  state, init_state = _init_state(make_state, params, mesh)
  states, replicated = abstract.shardings(state), sharding.replicated(mesh)

  def cold_start_update(state, prompts, responses, lengths, turns, packed):
    batch = packing.pack_responses(
      prompts, responses, lengths, packed, rows, turns=turns
    )
    state, _, metrics = train_step.update(state, batch, learner=learner)
    return state, metrics

  return ColdStartFunctions(
    abstract=state,
    init_state=init_state,
    packing=rows,
    update=MeshJit(
      cold_start_update,
      mesh,
      in_shardings=(
        states,
        *(sharding.batch_sharding(mesh),) * 4,
        replicated,
      ),
      out_shardings=(states, replicated),
      donate_argnums=0,
      compiler_options=_training_options(mesh),
    ),
  )


def _init_state(make_state, policy, mesh) -> tuple[TrainState, InitState]:
  state = abstract.sharded(jax.eval_shape(make_state, policy), mesh)
  init_state = MeshJit(
    make_state,
    mesh,
    in_shardings=(abstract.shardings(state.policy),),
    out_shardings=abstract.shardings(state),
    donate_argnums=0,
  )
  return state, init_state


def _new_state(learner, value_learner, config, cfg, policy) -> TrainState:
  """The first state of a policy, with a reference and a critic if needed."""
  state = train_step.init_state(policy, optimizer=learner.optimizer)
  reference = value = None
  if config.objective.has_reference:
    # The forward pass would cast to this dtype anyway.
    reference = model.parameters.cast(state.params, cfg)
    if cfg.lora and not config.objective.reference_every:
      reference = {}
  if value_learner:
    value = train_step.init_state(
      critic.init(policy), optimizer=value_learner.optimizer
    )
  return dataclasses.replace(state, reference=reference, critic=value)


def _update(
  state, batch, apply_updates, *, learner, value_learner, reference_every
):
  """Computes old log-probs, or updates policy, critic and reference."""
  new, batch, metrics = train_step.update(
    state, batch, learner=learner, apply_updates=apply_updates
  )
  if value_learner:

    def learn():
      value, _, metrics = train_step.update(
        state.critic, batch, learner=value_learner
      )
      metrics["critic/grad_norm"] = metrics.pop("grad/norm")
      return value, metrics

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


def _training_options(mesh: jax.sharding.Mesh) -> dict:
  """Rounding as in the sampler; collectives run beside matrix products."""
  tpu = tpus.of_kind(mesh.devices.flat[0].device_kind)
  if not tpu.asks_for_sparse_cores:
    return rounding.OPTIONS
  offload = "xla_tpu_enable_sparse_core_collective_offload_"
  return rounding.OPTIONS | {offload + kind: True for kind in _OFFLOADED}
