"""The program of a run: the jitted functions that a config and a mesh make.

Training, planning and benchmarks take them from here, so that what is planned
or timed is what runs. Below settings.py nothing knows of ConfigDict.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from gspo_jax import model, sampler
from gspo_jax.data import prompt_batch
from gspo_jax.data.tokenizers import base
from gspo_jax.learner import (
  credit,
  critic,
  experience,
  optimizer,
  train_batch,
  train_step,
)
from gspo_jax.learner.cold_start import as_rollout
from gspo_jax.model import hf, rounding
from gspo_jax.program import config as settings
from gspo_jax.program.checks import check, multiple
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.sharding import MeshJit
from gspo_jax.sampler import continuous
from gspo_jax.sampler.samples import (
  empty_samples,
  merge_groups,
  samples_sharding,
  take_groups,
)

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
class Program:
  """Functions to call; compiled once each, arrays laid out over the mesh.

  Attributes:
    cfg: the model.
    mesh: of all devices.
    prompting: how questions become tokens, and by which tokenizer.
    schedule: the learning rate at an optimizer step.
    abstract: shapes and shardings of the TrainState, for a restore.
    init: key -> params: those of `model.checkpoint`, else fresh ones.
    begin: params -> TrainState; donates the params.
    generate: (params, prompts, key) -> Samples, as the config draws: one
      jitted function, or with `continuous_batching.slots` a `PagedSampler`.
    generate_eval: the same with `eval.samples` answers a prompt.
    generate_greedy: the same with one greedy answer.
    merge: (samples, samples, index) -> samples, whole groups of both.
    choose: (samples, index) -> samples, the groups of an update.
    regroup: (samples, index) -> samples, the groups in flight.
    nothing: () -> samples, such as `generate` gives, of zeros.
    assemble: (prompts, samples) -> Rollout, with zeros for what is not known.
    scores: whether `score` comes before `update`.
    appraise: (state, rollout) -> rollout, with what the reference and the
      critic say of it; None where the objective has neither.
    assign: (rollout, rewards [B], finish [B]) -> rollout with advantages.
    step: (state, rollout, key, apply_updates) -> (state, rollout, metrics): one
      program for `score` and `update`; donates state and rollout.
    abstract_imitation: as `abstract`, of the cold start's.
    begin_imitation: as `begin`, of the cold start.
    imitate: (state, arrays of demonstrations, key) -> (state, metrics);
      donates the state.
  """

  cfg: model.ModelConfig
  mesh: jax.sharding.Mesh
  prompting: prompt_batch.PromptConfig
  schedule: Callable
  abstract: train_step.TrainState
  init: Callable
  begin: Callable
  generate: Callable
  generate_eval: Callable
  generate_greedy: Callable
  merge: Callable
  choose: Callable
  regroup: Callable
  nothing: Callable
  assemble: Callable
  scores: bool
  appraise: Callable | None
  assign: Callable
  step: Callable
  abstract_imitation: train_step.TrainState
  begin_imitation: Callable
  imitate: Callable

  @property
  def tokenizer(self) -> base.Tokenizer:
    """Between texts and the model's tokens."""
    return self.prompting.tokenizer

  def score(self, state, batch, key):
    """(state, rollout, metrics): the rollout as the old policy sees it.

    The first minibatch is left out, for `update` scores it, but for one
    micro-batch to compare the two. Donates the state, which comes back as it
    was, and the rollout.
    """
    return self.step(state, batch, key, np.bool_(False))

  def update(self, state, batch, key):
    """(state, rollout, metrics): the policy after learning; donates both.

    The metrics add to those of `score`, which took the same key.
    """
    return self.step(state, batch, key, np.bool_(True))

  def check_compiled_once(self) -> None:
    """RuntimeError if a function was compiled for a second set of shapes.

    Or, of refill's segments and prefills, for more than it says at the start.
    """
    for field in dataclasses.fields(self):
      function = getattr(self, field.name)
      if isinstance(function, MeshJit):
        _check_compiled(field.name, function)
      if isinstance(function, continuous.ContinuousSampler):
        for name, most in function.compilations().items():
          part = getattr(function.jitted, name)
          _check_compiled(f"{field.name}.{name}", part, most)


def _check_compiled(name, function, most=1):
  if (times := function.jitted._cache_size()) > most:
    raise RuntimeError(
      f"{name} was compiled {times} times: the shapes, types or shardings of "
      "its arguments changed between calls"
    )


def build_program(config: ConfigDict, mesh: jax.sharding.Mesh) -> Program:
  """Checks a config and makes its program; compiles nothing yet.

  Raises:
    UserError: a value is unknown, or sizes do not divide.
  """
  check(config, settings.OBJECTIVES, shards=sharding.batch_shards(mesh))
  cfg, texts = settings.model_config(config), settings.load_tokenizer(config)
  settings.require_experts(config, cfg)
  settings.require_fit(texts, cfg)
  draw = settings.sampler_config(config, texts)
  rl, judge, imitation = settings.learners(config, cfg)
  start = functools.partial(_begin, rl=rl, judge=judge, config=config, cfg=cfg)
  start_imitation = functools.partial(
    train_step.init_state, optimizer=imitation.optimizer
  )
  abstract = _abstract_state(start, cfg, mesh)
  abstract_imitation = _abstract_state(start_imitation, cfg, mesh)
  tested = dataclasses.replace(draw, record_routing=False)
  many = dataclasses.replace(tested, group_size=config.eval.samples)
  one = dataclasses.replace(tested, group_size=1, temperature=0.0)
  decoding = _decoding_mesh(config, mesh, abstract.params)
  jit_generate = functools.partial(
    _jit_generate, cfg, abstract=abstract, mesh=mesh, decoding=decoding
  )
  if paging := settings.paging(config):
    jit_generate = functools.partial(
      continuous.build_continuous_sampler,
      cfg,
      paging=paging,
      prompt=config.data.max_prompt_length,
      params=_shardings(abstract.params),
      mesh=mesh,
      decoding=decoding,
    )
  generate = jit_generate(draw)
  # More questions are in flight than an evaluation asks at one time.
  shared = many == draw and not config.rollout.extra_prompts_in_flight
  return Program(
    cfg=cfg,
    mesh=mesh,
    prompting=settings.prompting(config, texts),
    schedule=optimizer.schedule(settings.optim_config(config)),
    abstract=abstract,
    init=_init(config, cfg, abstract.params, mesh),
    begin=_jit_begin(start, abstract, mesh),
    generate=generate,
    merge=_jit_merge(draw, mesh),
    choose=_jit_take(cfg, draw, mesh),
    regroup=_jit_take(cfg, draw, mesh),
    nothing=_nothing(config, cfg, draw, mesh),
    generate_eval=generate if shared else jit_generate(many),
    generate_greedy=jit_generate(one),
    assemble=_jit_assemble(config, cfg, mesh),
    scores=settings.scores(config, cfg),
    appraise=_jit_appraise(config, cfg, abstract, mesh),
    assign=_jit_assign(config, mesh),
    step=_jit_step(_step(config, rl, judge), abstract, mesh),
    abstract_imitation=abstract_imitation,
    begin_imitation=_jit_begin(start_imitation, abstract_imitation, mesh),
    imitate=_jit_imitate(_imitate(imitation), abstract_imitation, mesh),
  )


def _decoding_mesh(config, mesh, params):
  """Where answers are drawn: no weight is gathered at every token there.

  Raises:
    UserError: the devices, the weights or the prompts cannot be split so.
  """
  asked = {k: v or mesh.shape[k] for k, v in config.sampler_mesh.items()}
  decoding = sharding.reshape_mesh(mesh, **asked)
  try:
    sharding.state_shardings(params, decoding)
  except UserError as error:
    raise UserError(f"on sampler_mesh: {error}") from error
  shards = sharding.batch_shards(decoding)
  multiple("data.prompts", config.data.prompts, "sampler_mesh", shards)
  multiple(
    "rollout.extra_prompts_in_flight",
    config.rollout.extra_prompts_in_flight,
    "sampler_mesh",
    shards,
  )
  return decoding


def _options(mesh) -> dict:
  """Compiler options of what trains.

  They round as the sampler does, and hide large collectives behind matrix
  products.
  """
  if mesh.devices.flat[0].device_kind not in _SPARSE_CORES:
    return rounding.OPTIONS
  offload = "xla_tpu_enable_sparse_core_collective_offload_"
  return rounding.OPTIONS | {offload + kind: True for kind in _OFFLOADED}


def _init(config, cfg, abstract, mesh):
  shardings, folder = _shardings(abstract), config.model.checkpoint
  if folder:
    return lambda key: hf.load_hf(folder, cfg, shardings=shardings)
  init = functools.partial(model.init, cfg=cfg)
  return MeshJit(jax.jit(init, out_shardings=shardings), mesh)


def _begin(params, *, rl, judge, config, cfg):
  """A state of these weights, with the reference and the critic it needs."""
  state = train_step.init_state(params, optimizer=rl.optimizer)
  reference = value = None
  if config.objective.kl_coef:
    # In the dtype of the forward pass nothing is lost.
    reference = jax.tree.map(lambda x: x.astype(cfg.dtype), params)
  if judge:
    value = train_step.init_state(
      critic.init(params), optimizer=judge.optimizer
    )
  return dataclasses.replace(state, reference=reference, critic=value)


def _jit_begin(begin, abstract, mesh):
  jitted = jax.jit(
    begin,
    in_shardings=(_shardings(abstract.params),),
    out_shardings=_shardings(abstract),
    donate_argnums=0,
  )
  return MeshJit(jitted, mesh)


def _jit_generate(cfg, draw, *, abstract, mesh, decoding):
  rows, everywhere = sharding.batch_sharding(mesh), sharding.replicated(mesh)

  def generate(params, prompts, key):
    # Arrays of another mesh must be laid on this one before they meet it.
    prompts = sharding.constrain_batch(prompts, axis=0)
    key = sharding.constrain(key)
    return sampler.generate(params, cfg, prompts, key, sampler=draw)

  jitted = jax.jit(
    generate,
    in_shardings=(_shardings(abstract.params), rows, everywhere),
    out_shardings=samples_sharding(draw, mesh),
    compiler_options=rounding.OPTIONS,
  )
  return MeshJit(jitted, decoding)


def _jit_merge(draw, mesh):
  lay = samples_sharding(draw, mesh)
  jitted = jax.jit(
    merge_groups,
    in_shardings=(lay, lay, sharding.replicated(mesh)),
    out_shardings=lay,
  )
  return MeshJit(jitted, mesh)


def _jit_take(cfg, draw, mesh):
  jitted = jax.jit(
    functools.partial(take_groups, cfg=cfg, sampler=draw),
    in_shardings=(samples_sharding(draw, mesh), sharding.replicated(mesh)),
    out_shardings=samples_sharding(draw, mesh),
  )
  return MeshJit(jitted, mesh)


def _nothing(config, cfg, draw, mesh):
  """As much room as the answers of a batch take."""
  sizes = config.data.prompts, config.data.max_prompt_length
  empty = functools.partial(empty_samples, *sizes, cfg, draw)
  return MeshJit(
    jax.jit(empty, out_shardings=samples_sharding(draw, mesh)), mesh
  )


def _jit_assemble(config, cfg, mesh):
  rows = sharding.batch_sharding(mesh)
  assemble = functools.partial(
    train_batch.train_batch_from_samples,
    cfg=cfg,
    fields=settings.fields(config, cfg),
  )
  jitted = jax.jit(assemble, in_shardings=(rows, None), out_shardings=rows)
  return MeshJit(jitted, mesh)


def _jit_appraise(config, cfg, abstract, mesh):
  if abstract.reference is None and abstract.critic is None:
    return None
  rows = sharding.batch_sharding(mesh)

  def appraise(state, batch):
    return experience.add_reference_and_values(
      batch,
      cfg,
      reference=state.reference,
      values=state.critic
      and functools.partial(critic.values, state.critic.params, cfg),
      micro_batch_size=config.learner.micro_batch_size,
      temperature=config.sampler.temperature,
    )

  jitted = jax.jit(
    appraise,
    in_shardings=(_shardings(abstract), rows),
    out_shardings=rows,
    donate_argnums=1,
    compiler_options=_options(mesh),
  )
  return MeshJit(jitted, mesh)


def _jit_assign(config, mesh):
  rows = sharding.batch_sharding(mesh)
  assign = functools.partial(
    credit.assign_advantages, credit=settings.credit_of(config)
  )
  jitted = jax.jit(assign, out_shardings=rows, donate_argnums=0)
  return MeshJit(jitted, mesh)


def _step(config, rl, judge):
  """Scores a rollout, or updates policy, critic and reference."""
  every = config.objective.reference_every

  def step(state, batch, key, apply_updates):
    new, batch, metrics = train_step.update(
      state, batch, key, learner=rl, apply_updates=apply_updates
    )
    if judge:
      learn = functools.partial(_learn_values, state.critic, batch, key, judge)
      shapes = jax.eval_shape(learn)[1]
      zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
      value, judged = train_step.where(
        apply_updates, learn, (state.critic, zeros)
      )
      new = dataclasses.replace(new, critic=value)
      metrics |= judged
    if every:
      due = apply_updates & (new.step % every == 0)
      follow = lambda old, x: jnp.where(due, x.astype(old.dtype), old)
      reference = jax.tree.map(follow, state.reference, new.params)
      new = dataclasses.replace(new, reference=reference)
    return new, batch, metrics

  return step


def _learn_values(critic_state, batch, key, judge):
  """The critic after an update, and its metrics."""
  value, _, metrics = train_step.update(critic_state, batch, key, learner=judge)
  metrics["critic/grad_norm"] = metrics.pop("grad/norm")
  return value, metrics


def _jit_step(step, abstract, mesh):
  state, everywhere = _shardings(abstract), sharding.replicated(mesh)
  rows = sharding.batch_sharding(mesh)
  jitted = jax.jit(
    step,
    in_shardings=(state, rows, everywhere, everywhere),
    out_shardings=(state, rows, everywhere),
    donate_argnums=(0, 1),
    compiler_options=_options(mesh),
  )
  return MeshJit(jitted, mesh)


def _imitate(learner):
  def imitate(state, batch, key):
    batch = as_rollout(batch)
    state, _, metrics = train_step.update(state, batch, key, learner=learner)
    return state, metrics

  return imitate


def _jit_imitate(imitate, abstract, mesh):
  state, everywhere = _shardings(abstract), sharding.replicated(mesh)
  jitted = jax.jit(
    imitate,
    in_shardings=(state, sharding.batch_sharding(mesh), everywhere),
    out_shardings=(state, everywhere),
    donate_argnums=0,
    compiler_options=_options(mesh),
  )
  return MeshJit(jitted, mesh)


def _abstract_state(begin, cfg, mesh):
  fresh = lambda key: begin(model.init(key, cfg))
  shapes = jax.eval_shape(fresh, jax.random.key(0))
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    sharding.state_shardings(shapes, mesh),
  )


def _shardings(abstract):
  return jax.tree.map(lambda x: x.sharding, abstract)
