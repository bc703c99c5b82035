"""The jitted functions that a config and a mesh make, in three groups.

Training, planning, evaluation and benchmarks take them from here, so that what
is planned or timed is what runs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import numpy as np
import optax

from gspo_jax import model
from gspo_jax.data.prompt_batch import PromptConfig
from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.learner import optimizer, packing
from gspo_jax.learner.cold_start import ColdStartFunctions
from gspo_jax.learner.packing import Packing, PackingConfig, RowTokens
from gspo_jax.learner.train_batch import PackedBatch
from gspo_jax.learner.train_step import InitState, TrainState
from gspo_jax.losses import Metrics
from gspo_jax.program import jitted, settings
from gspo_jax.program.config import Config, multiple
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.sharding import MeshJit
from gspo_jax.sampler import continuous
from gspo_jax.sampler.continuous import ContinuousSampler
from gspo_jax.sampler.functions import SamplerFunctions
from gspo_jax.sampler.many_prompts import equal_batches
from gspo_jax.sampler.samples import Prompts, Samples


class InitParams(Protocol):
  """Makes the first weights."""

  def __call__(self, key: jax.Array) -> model.Params:
    """The weights of `model.checkpoint`, else random ones of this key."""


class MakeTrainBatch(Protocol):
  """Packs responses behind their prompts."""

  def __call__(
    self, prompts: Prompts, samples: Samples, packing: Packing
  ) -> PackedBatch:
    """The batch, with zeros in the fields that are filled in later."""


class AddReferenceAndValues(Protocol):
  """Runs the reference policy and the critic over a batch."""

  def __call__(self, state: TrainState, batch: PackedBatch) -> PackedBatch:
    """The batch, donated, with `reference_logps` and `values`."""


class AssignAdvantages(Protocol):
  """Turns rewards into advantages."""

  def __call__(
    self, batch: PackedBatch, rewards: jax.Array, finish: jax.Array
  ) -> PackedBatch:
    """The batch, donated, with advantages of rewards [B] and `finish` [B]."""


class Step(Protocol):
  """One program for old log-probs and for updates; `jitted` has it."""

  def __call__(
    self,
    state: TrainState,
    batch: PackedBatch,
    apply_updates: np.bool_,
  ) -> tuple[TrainState, PackedBatch, Metrics]:
    """Donates the state and the batch."""


@dataclasses.dataclass(frozen=True)
class LearnerFunctions:
  """What learns from scored responses.

  Attributes:
    abstract: shapes and shardings of the state, for a restore.
    init_state: the first state.
    learning_rate: the schedule, at an optimizer step from 0.
    packing: the rows of a batch.
    make_train_batch: samples become a batch.
    needs_old_logprobs: whether `compute_old_logprobs` comes before `update`.
    add_reference_and_values: None if the objective has neither.
    assign_advantages: rewards become advantages.
    step: for `compute_old_logprobs` and `update`.
    old_logps_of_every_minibatch: whether `compute_old_logprobs` includes the
      first minibatch.
  """

  abstract: TrainState
  init_state: InitState
  learning_rate: optax.Schedule
  packing: PackingConfig
  make_train_batch: MakeTrainBatch
  needs_old_logprobs: bool
  add_reference_and_values: AddReferenceAndValues | None
  assign_advantages: AssignAdvantages
  step: Step
  old_logps_of_every_minibatch: bool

  def pack(
    self, prompt_lengths: np.ndarray, lengths: np.ndarray, key: jax.Array
  ) -> Packing:
    """Where each response goes, with whole groups shuffled.

    Args:
      prompt_lengths: [P].
      lengths: [B] of the responses; an empty one has no place.
      key: of the shuffle.
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
    """The tokens of the functions that run over a packed batch, by their names.

    A function counts once, with one model or several: `update`, and where there
    are such, `old_logprobs` and `reference_and_values`.

    Args:
      prompt_lengths: [P].
      lengths: [B] of the responses.
      packed: of these lengths, from `pack`.
    """
    whole = _sequence_lengths(prompt_lengths, lengths)
    every = packing.row_tokens(whole, packed, self.packing)
    found = {"update": every}
    if self.needs_old_logprobs:
      first = np.zeros(self.packing.minibatches, int)
      if not self.old_logps_of_every_minibatch:
        first[0] = max(packed.num_micro_batches[0] - 1, 0)
      found["old_logprobs"] = packing.row_tokens(
        whole, packed, self.packing, first
      )
    if self.add_reference_and_values:
      found["reference_and_values"] = every
    return found

  def compute_old_logprobs(
    self, state: TrainState, batch: PackedBatch
  ) -> tuple[TrainState, PackedBatch, Metrics]:
    """The batch with the fields of the old policy.

    `update` fills in those of the first minibatch itself. So only one of its
    micro-batches runs here, to compare the two passes, unless the rewards need
    the old log-probs of every response (k1).

    Returns:
      The same state, which is donated; the batch, donated; and metrics.
    """
    return self.step(state, batch, np.bool_(False))

  def update(
    self, state: TrainState, batch: PackedBatch
  ) -> tuple[TrainState, PackedBatch, Metrics]:
    """The policy after `learner.minibatches` optimizer steps.

    Args:
      state: donated.
      batch: donated.

    Returns:
      The new state, the batch, and metrics, which add to those of
      `compute_old_logprobs`.
    """
    return self.step(state, batch, np.bool_(True))


def _sequence_lengths(prompt_lengths, lengths) -> np.ndarray:
  """[B], tokens of each prompt with its response; 0 for an empty response."""
  whole = np.repeat(prompt_lengths, len(lengths) // len(prompt_lengths))
  return np.where(lengths > 0, whole + lengths, 0)


@dataclasses.dataclass(frozen=True)
class Program:
  """Jitted functions, compiled once each, with arrays sharded over a mesh.

  Attributes:
    cfg: the model.
    mesh: of all devices.
    prompt_config: how problems become prompts.
    abstract_params: shapes and shardings of the weights.
    init_params: the first weights.
    abstract_policy: shapes and shardings of `new_policy`'s result.
    new_policy: weights -> what is run and trained first: they themselves, or
      with adapters the weights in `cfg.dtype`, and new adapters.
    sampler: what samples responses.
    learner: what learns; None without training.
    cold_start: supervised fine-tuning; None without training.
  """

  cfg: model.ModelConfig
  mesh: jax.sharding.Mesh
  prompt_config: PromptConfig
  abstract_params: model.Params
  init_params: InitParams
  abstract_policy: model.Params
  new_policy: Callable[[model.Params], model.Params]
  sampler: SamplerFunctions
  learner: LearnerFunctions | None
  cold_start: ColdStartFunctions | None

  @property
  def tokenizer(self) -> Tokenizer:
    """Between text and the model's tokens."""
    return self.prompt_config.tokenizer

  def check_compiled_once(self) -> None:
    """RuntimeError if a function was compiled for a second set of shapes.

    The parts of a continuous sampler may be compiled as often as it printed
    at the start.
    """
    for group in (self, self.sampler, self.learner, self.cold_start):
      for name, function in vars(group).items() if group else ():
        if isinstance(function, MeshJit):
          _require_compilations(name, function, 1)
        if isinstance(function, ContinuousSampler):
          for part, most in function.compilations().items():
            jitted_part = getattr(function.jitted, part)
            _require_compilations(f"{name}.{part}", jitted_part, most)


def _require_compilations(name, function, most):
  if (times := function.jitted._cache_size()) > most:
    raise RuntimeError(
      f"{name} was compiled {times} times: the shapes, types or shardings of "
      "its arguments changed between calls"
    )


def build_program(
  config: Config,
  mesh: jax.sharding.Mesh,
  *,
  training: bool = True,
  sampler_devices: Sequence[jax.Device] = (),
) -> Program:
  """Makes the functions of a config; compiles nothing yet.

  Args:
    config: from `config.parse`.
    mesh: of all devices, or of those that train.
    training: whether to check and make what learns.
    sampler_devices: of `sharding.split_devices`; none: those of `mesh`.

  Raises:
    UserError: keys do not go together, or sizes do not divide.
  """
  if training:
    config.check_training(sharding.batch_shards(mesh), mesh.shape["context"])
  cfg = settings.model_config(config.model)
  _check_heads(cfg, mesh)
  tokenizer = settings.load_tokenizer(config, cfg)
  params = jitted.abstract_params(cfg, mesh)
  policy = jitted.abstract_policy(cfg, mesh)
  learner = cold_start = None
  if training:
    settings.require_experts(config, cfg)
    learner, cold_start = _learners(config, cfg, params, policy, mesh)
  return Program(
    cfg=cfg,
    mesh=mesh,
    prompt_config=settings.prompt_config(config.data, tokenizer),
    abstract_params=params,
    init_params=jitted.init_params(config.model.checkpoint, cfg, params, mesh),
    abstract_policy=policy,
    new_policy=jitted.new_policy(config.seed, cfg, mesh),
    sampler=_sampler(config, cfg, tokenizer, policy, mesh, sampler_devices),
    learner=learner,
    cold_start=cold_start,
  )


def _check_heads(cfg, mesh):
  """UserError unless attention can split its heads over `context`."""
  context, tensor = mesh.shape["context"], mesh.shape["tensor"]
  heads, key_heads = cfg.num_heads // tensor, cfg.num_kv_heads // tensor
  works = lambda size: heads % math.lcm(key_heads, size) == 0
  if key_heads and not works(context):
    sizes = [n for n in range(1, heads + 1) if works(n)]
    raise UserError(
      f"mesh.context={context}: expected one of {sizes}, which split the "
      f"{heads} heads of a device's attention"
    )


def _sampler(config, cfg, tokenizer, policy, mesh, devices) -> SamplerFunctions:
  sampling = settings.sampler_config(config, tokenizer)
  evaluation = dataclasses.replace(
    sampling, record_routing=False, group_size=config.eval.samples
  )
  greedy = dataclasses.replace(evaluation, group_size=1, temperature=0.0)
  sampler_mesh = _sampler_mesh(config, mesh, policy, devices)
  eval_prompts = equal_batches(
    config.eval.prompts,
    config.data.prompts,
    shards_of_rows(config, mesh, devices),
  )
  separate, params = None, policy
  turns = bool(config.rollout.environment)
  if devices:
    params = jitted.placed(policy, sampler_mesh)
    separate = jitted.separate_devices(
      policy,
      params,
      cfg,
      sampling,
      mesh=mesh,
      sampler_mesh=sampler_mesh,
      turns=turns,
    )
    mesh = sampler_mesh
  batching = config.continuous_batching

  def make(sampling, batching=batching):
    if not batching.slots:
      return jitted.generate(
        cfg, sampling, params=params, mesh=mesh, sampler_mesh=sampler_mesh
      )
    return continuous.build_continuous_sampler(
      cfg,
      sampling,
      batching=batching,
      max_prompt_length=config.data.max_prompt_length,
      params_sharding=jitted.shardings(params),
      mesh=mesh,
      sampler_mesh=sampler_mesh,
    )

  def make_eval(sampling):
    responses = eval_prompts * sampling.group_size
    return make(sampling, batching.with_slots_for(responses))

  generate = make(sampling)
  # With extra prompts in flight, a batch of an iteration has another size.
  same = evaluation == sampling and eval_prompts == config.data.prompts
  same &= config.prompts_in_flight == config.data.prompts
  return SamplerFunctions(
    generate=generate,
    generate_eval=generate if same else make_eval(evaluation),
    generate_greedy=make_eval(greedy),
    eval_prompts=eval_prompts,
    merge_groups=jitted.merge_groups(sampling, mesh, turns=turns),
    take_batch=jitted.take_groups(cfg, sampling, mesh),
    take_pending=jitted.take_groups(cfg, sampling, mesh),
    empty_samples=jitted.empty_samples(
      config.data.prompts,
      config.data.max_prompt_length,
      cfg,
      sampling,
      mesh,
      turns=turns,
    ),
    stop=sampling.stop,
    mesh=mesh,
    separate=separate,
  )


def shards_of_rows(
  config: Config, mesh: jax.sharding.Mesh, devices: Sequence[jax.Device] = ()
) -> int:
  """The least number of rows that training and decoding can split."""
  meshes = mesh, _decoding_mesh(config, mesh, devices)
  return math.lcm(*map(sharding.batch_shards, meshes))


def _decoding_mesh(config, mesh, devices=()):
  c = config.sampler_mesh
  sizes = {
    axis: size or mesh.shape[axis]
    for axis, size in (("expert", c.expert), ("tensor", c.tensor))
  }
  if len(devices) == mesh.size:
    mesh = sharding.beside(mesh, devices)
  elif devices:
    mesh = sharding.make_mesh(devices, data=-1)
  return sharding.reshape_mesh(mesh, **sizes)


def _sampler_mesh(config, mesh, params, devices):
  """The mesh of decoding, on which no weight is gathered at every token.

  Raises:
    UserError: the devices, the weights or the prompts cannot be split so.
  """
  sampler_mesh = _decoding_mesh(config, mesh, devices)
  try:
    model.shardings(params, sampler_mesh)
  except UserError as error:
    raise UserError(f"on sampler_mesh: {error}") from error
  shards = sharding.batch_shards(sampler_mesh)
  multiple("data.prompts", config.data.prompts, "sampler_mesh", shards)
  return sampler_mesh


def _learners(
  config, cfg, params, policy, mesh
) -> tuple[LearnerFunctions, ColdStartFunctions]:
  learners = settings.learners(config, cfg)
  shards = sharding.row_shards(mesh)
  rows = settings.packing(config, shards)
  new_state = functools.partial(
    jitted.new_state, learners=learners, config=config, cfg=cfg
  )
  abstract = jitted.abstract_state(new_state, policy, mesh)
  learner = LearnerFunctions(
    abstract=abstract,
    init_state=jitted.init_state(new_state, abstract, mesh),
    learning_rate=optimizer.schedule(settings.optim_config(config)),
    packing=rows,
    make_train_batch=jitted.make_train_batch(config, cfg, rows, mesh),
    needs_old_logprobs=settings.needs_old_logps(config, cfg),
    old_logps_of_every_minibatch=learners.policy.recompute_first_minibatch,
    add_reference_and_values=jitted.add_reference_and_values(
      config, cfg, abstract, mesh
    ),
    assign_advantages=jitted.assign_advantages(config, mesh),
    step=jitted.step(
      learners, config.objective.reference_every, abstract, mesh
    ),
  )
  rows = settings.cold_start_packing(config, shards)
  new_state = functools.partial(jitted.new_cold_start_state, learners=learners)
  abstract = jitted.abstract_state(new_state, params, mesh)
  cold_start = ColdStartFunctions(
    abstract=abstract,
    init_state=jitted.init_state(new_state, abstract, mesh),
    packing=rows,
    update=jitted.cold_start_update(learners.cold_start, rows, abstract, mesh),
  )
  return learner, cold_start
