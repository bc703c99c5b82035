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
  tokenizer,
  train_step,
)
from gspo_jax.cold_start import as_rollout, cross_entropy
from gspo_jax.errors import UserError
from gspo_jax.limits import check, multiple
from gspo_jax.model import hf

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
    prompting: how questions become tokens, and by which tokenizer.
    schedule: the learning rate at an optimizer step.
    abstract: shapes and shardings of the TrainState, for a restore.
    init: key -> params: those of `model.checkpoint`, else fresh ones.
    begin: params -> TrainState; donates the params.
    generate: (params, prompts, key) -> Samples, as the config draws.
    generate_eval: the same with `eval.samples` answers a prompt.
    generate_greedy: the same with one greedy answer.
    score: (params, prompts, samples) -> (Rollout, metrics).
    update: (state, rollout, key) -> (state, metrics); donates the state.
    abstract_imitation: as `abstract`, of the cold start's.
    begin_imitation: as `begin`, of the cold start.
    imitate: (state, arrays of demonstrations, key) -> (state, metrics);
      donates the state.
  """

  cfg: model.ModelConfig
  mesh: jax.sharding.Mesh
  prompting: data.PromptConfig
  schedule: Callable
  abstract: train_step.TrainState
  init: Callable
  begin: Callable
  generate: Callable
  generate_eval: Callable
  generate_greedy: Callable
  score: Callable
  update: Callable
  abstract_imitation: train_step.TrainState
  begin_imitation: Callable
  imitate: Callable

  @property
  def tokenizer(self) -> tokenizer.Tokenizer:
    """Between texts and the model's tokens."""
    return self.prompting.tokenizer

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
  cfg, texts = model_config(config), load_tokenizer(config)
  _require_fit(texts, cfg)
  draw = sampler_config(config, texts)
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
    prompting=_prompting(config, texts),
    schedule=optim.schedule(_optim_config(config)),
    abstract=abstract,
    init=_init(config, cfg, abstract.params, mesh),
    begin=_jit_begin(rl, abstract, mesh),
    generate=generate,
    generate_eval=generate if many == draw else jit_generate(many),
    generate_greedy=jit_generate(one),
    score=_jit_score(config, cfg, abstract, mesh),
    update=_jit_update(rl, abstract, mesh),
    abstract_imitation=abstract_imitation,
    begin_imitation=_jit_begin(imitation, abstract_imitation, mesh),
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


def _init(config, cfg, abstract, mesh):
  shardings, folder = _shardings(abstract), config.model.checkpoint
  if folder:
    return lambda key: hf.load_hf(folder, cfg, shardings=shardings)
  init = functools.partial(model.init, cfg=cfg)
  return OnMesh(jax.jit(init, out_shardings=shardings), mesh)


def _jit_begin(learner, abstract, mesh):
  jitted = jax.jit(
    functools.partial(train_step.begin, optimizer=learner.optimizer),
    in_shardings=(_shardings(abstract.params),),
    out_shardings=_shardings(abstract),
    donate_argnums=0,
  )
  return OnMesh(jitted, mesh)


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
  """The policy a config names, or that of its Hugging Face folder."""
  changes = dict(config.model)
  name, folder = changes.pop("variant"), changes.pop("checkpoint")
  if folder:
    return hf.config_from_hf(folder, **changes)
  return model.variant(name, **changes)


def load_tokenizer(config: ConfigDict) -> tokenizer.Tokenizer:
  """That of a config, else of its Hugging Face folder, else bytes."""
  return tokenizer.load(
    config.data.tokenizer or config.model.checkpoint or "bytes"
  )


def _require_fit(texts, cfg):
  if texts.vocab_size > cfg.vocab_size:
    raise UserError(
      f"the tokenizer has {texts.vocab_size} tokens and the model room for "
      f"{cfg.vocab_size}: expected data.tokenizer and the model to be a pair"
    )


def sampler_config(
  config: ConfigDict, texts: tokenizer.Tokenizer
) -> sampler.SamplerConfig:
  """How a config draws rollouts."""
  return sampler.SamplerConfig(
    stop_ids=texts.stop_ids, pad_id=texts.pad_id, **config.sampler
  )


def _prompting(config, texts) -> data.PromptConfig:
  c = config.data
  return data.PromptConfig(
    tokenizer=texts,
    width=c.max_prompt_length,
    system=c.system_prompt,
    instruction=c.instruction,
    too_long=c.too_long,
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
  def fresh(key):
    params = model.init(key, learner.cfg)
    return train_step.begin(params, optimizer=learner.optimizer)

  shapes = jax.eval_shape(fresh, jax.random.key(0))
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    sharding.state_shardings(shapes, mesh),
  )


def _shardings(abstract):
  return jax.tree.map(lambda x: x.sharding, abstract)
