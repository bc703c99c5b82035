"""The jitted functions that a config and a mesh make, in three groups.

Training, planning, evaluation and benchmarks share them, so that what is
planned or timed is what runs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from gspo_jax import model
from gspo_jax.data.prompt_batch import PromptConfig
from gspo_jax.data.tokenizers.base import UNKNOWN, Tokenizer
from gspo_jax.learner.cold_start import ColdStartFunctions
from gspo_jax.model import hf
from gspo_jax.model.exact_attention import PAGE
from gspo_jax.program import abstract, rules, settings
from gspo_jax.program.config import Config
from gspo_jax.program.learner_functions import (
  LearnerFunctions,
  cold_start_functions,
  learner_functions,
)
from gspo_jax.program.sampler_functions import sampler_functions
from gspo_jax.runtime import mesh_jit, sharding, tpus
from gspo_jax.runtime.errors import UserError, prefixed
from gspo_jax.runtime.mesh_jit import MeshJit
from gspo_jax.sampler.functions import SamplerFunctions


@dataclasses.dataclass(frozen=True)
class Program:
  """Jitted functions, compiled once each, with arrays sharded over a mesh."""

  cfg: model.ModelConfig
  mesh: jax.sharding.Mesh  # of all devices, or of the trainer's
  prompt_config: PromptConfig
  abstract_params: model.Params  # shapes and shardings
  # key -> random weights; those of `model.checkpoint` need no key
  init_params: Callable[[jax.Array | None], model.Params]
  abstract_policy: model.Params  # shapes and shardings
  # params -> the initial policy: with LoRA, the base in `cfg.dtype` plus fresh
  # adapters
  new_policy: Callable[[model.Params], model.Params]
  sampler: SamplerFunctions | None  # None without sampling
  learner: LearnerFunctions | None  # None without training
  # The models of the teachers, without functions to sample or to train.
  teachers: tuple["Program", ...]
  cold_start: ColdStartFunctions | None  # None without training

  @property
  def tokenizer(self) -> Tokenizer:
    return self.prompt_config.tokenizer

  def check_compiled_once(self) -> None:
    """RuntimeError if a function has more programs than its shapes explain."""
    groups: list[Any] = [self, self.sampler, self.learner, self.cold_start]
    if self.sampler:
      for sampler in (self.sampler.generate, self.sampler.respond):
        groups += [sampler, sampler.jitted]
    for group in filter(None, groups):
      for name, jit in vars(group).items():
        if isinstance(jit, MeshJit) and jit.num_programs > jit.most:
          raise RuntimeError(
            f"{name} has {jit.num_programs} programs, expected at most "
            f"{jit.most}: the shapes of its arguments change between calls"
          )


def build_program(
  config: Config,
  mesh: jax.sharding.Mesh,
  *,
  training: bool = True,
  sampling: bool = True,
  sampler_devices: Sequence[jax.Device] = (),
) -> Program:
  """Makes the functions of a config, or raises UserError; compiles nothing yet.

  Without `training`, the learner's keys are not checked and its functions not
  made, and without `sampling` not the sampler's. `sampler_devices` come from
  `sharding.split_devices`; without them the sampler uses the devices of `mesh`.
  """
  config = config.with_exact_logps()
  if training:
    shards = sharding.batch_shards(mesh)
    rules.check_training(config, shards, mesh.shape["context"])
    if config.objective.has_own_method:
      mesh_jit.keep_none()
  cfg = settings.model_config(config.model)
  check_heads(cfg, mesh)
  _check_dtype(cfg, mesh)
  _check_exact(cfg, mesh, config.continuous_batching.page_size)
  tokenizer = settings.load_tokenizer(config, cfg)
  params, policy = abstract.params(cfg, mesh), abstract.policy(cfg, mesh)
  learner = cold_start = None
  teachers: tuple[Program, ...] = ()
  if training:
    if not cfg.num_experts:
      rules.check(config, rules.DENSE)
    teachers = tuple(
      _teacher(config, folder, mesh, cfg, tokenizer)
      for folder in config.objective.distillation.folders.values()
    )
    learner = learner_functions(
      config,
      cfg,
      policy,
      mesh,
      [(teacher.cfg, teacher.abstract_policy) for teacher in teachers],
    )
    cold_start = cold_start_functions(config, cfg, params, mesh)
  return Program(
    cfg=cfg,
    mesh=mesh,
    prompt_config=settings.prompt_config(config.data, tokenizer),
    abstract_params=params,
    init_params=_init_params(config.model.checkpoint, cfg, params, mesh),
    abstract_policy=policy,
    new_policy=_new_policy(config.seed, cfg, policy, mesh),
    sampler=sampler_functions(
      config, cfg, tokenizer, policy, mesh, sampler_devices
    )
    if sampling
    else None,
    learner=learner,
    teachers=teachers,
    cold_start=cold_start,
  )


def _teacher(config, folder, mesh, cfg, tokenizer) -> Program:
  """The model of a teacher; UserError if its token ids mean something else."""
  with prefixed(f"objective.distillation.teachers={folder!r}"):
    teacher = build_program(
      settings.teacher_config(config, folder),
      mesh,
      training=False,
      sampling=False,
    )
    if teacher.cfg.vocab_size < cfg.vocab_size:
      raise UserError(
        f"its model has {teacher.cfg.vocab_size} token ids, the policy's "
        f"{cfg.vocab_size}: expected at least as many"
      )
    other = teacher.tokenizer
    if other.fingerprint != tokenizer.fingerprint:
      # Chat templates may differ; ids may not.
      if other.vocab_size != tokenizer.vocab_size:
        raise UserError(
          f"its tokenizer has {other.vocab_size} tokens, the policy's "
          f"{tokenizer.vocab_size}: expected the same"
        )
      pairs = zip(other.token_bytes(), tokenizer.token_bytes(), strict=True)
      for i, (theirs, ours) in enumerate(pairs):
        if theirs != ours and UNKNOWN.encode() not in (theirs, ours):
          raise UserError(
            f"token {i} of its tokenizer is {theirs!r}, of the policy's "
            f"{ours!r}: expected the same tokens"
          )
  return teacher


def _init_params(folder: str, cfg, params, mesh):
  """Draws weights with a key; or reads them from `folder`, ignoring the key."""
  places = abstract.shardings(params)
  if folder:
    return lambda key: hf.load_hf(folder, cfg, shardings=places)
  init, options = functools.partial(model.init, cfg=cfg), {}
  if mesh.devices.flat[0].platform == "cpu":
    # The default, 3, compiles the many random numbers for twice as long.
    options = {"xla_backend_optimization_level": 1}
  return MeshJit(init, mesh, out_shardings=places, compiler_options=options)


def _new_policy(seed: int, cfg, policy, mesh):
  if cfg.lora is None:
    return lambda params: params
  make = functools.partial(abstract.with_adapters, cfg=cfg, seed=seed)
  return MeshJit(make, mesh, out_shardings=abstract.shardings(policy))


def _check_dtype(cfg, mesh):
  """UserError if the GPUs have no bfloat16: XLA would emulate it."""
  device = mesh.devices.flat[0]
  old_gpu = device.platform == "gpu" and float(device.compute_capability) < 8
  if old_gpu and cfg.dtype == "bfloat16":
    raise UserError(
      f"model.dtype=bfloat16: {device.device_kind} has compute capability "
      f"{device.compute_capability}, and bfloat16 needs 8.0; expected float32 "
      "(float16 would need scaled losses)"
    )


def _check_exact(cfg, mesh, page_size):
  """UserError where log-probs are not known to be exact."""
  device, tensor = mesh.devices.flat[0], mesh.shape["tensor"]
  has_mla = any(layer.mixer == "mla" for layer in cfg.layers)
  expected = "model.exact=True: expected False"
  if not cfg.exact:
    return
  on_cpu = device.platform == "cpu"
  if not (on_cpu or tpus.of_kind(device.device_kind).chooses_tiles):
    raise UserError(
      f"{expected} on a {device.device_kind}: sampler and trainer are known to "
      "add in one order on CPUs, and on TPU v5e and v5p"
    )
  if not on_cpu:
    _check_kernels(cfg, page_size, expected)
  if has_mla and tensor > 1:
    raise UserError(
      f"{expected}, or mesh.tensor=1 (it is {tensor}): with MLA the sampler "
      "multiplies for all heads together"
    )


def _check_kernels(cfg, page_size, expected):
  """UserError for a model whose sums TPU kernels do not take all."""
  widths = {"head_dim": cfg.head_dim}
  if cfg.num_experts:
    widths |= {"embed_dim": cfg.embed_dim, "mlp_dim": cfg.mlp_dim}
  lacking = {
    "model.dtype=bfloat16": cfg.dtype == "bfloat16",
    f"continuous_batching.page_size={PAGE}": page_size == PAGE,
    "model.lora.rank=0": cfg.lora is None,
    "a norm of each head": not cfg.qk_norm_over_heads,
    "layers of attention alone": {x.mixer for x in cfg.layers} == {"attention"},
  } | {f"model.{k}: a multiple of 128": v % 128 == 0 for k, v in widths.items()}
  for what, holds in lacking.items():
    if not holds:
      raise UserError(f"{expected} on a TPU, or {what}")


def check_heads(cfg: model.ModelConfig, mesh: jax.sharding.Mesh) -> None:
  """UserError unless all layers can split their heads over `context`."""
  context, tensor = mesh.shape["context"], mesh.shape["tensor"]
  counts = dict.fromkeys(
    ("attention", "mla"), (cfg.num_heads, cfg.num_kv_heads)
  )
  counts["delta_net"] = cfg.linear_num_value_heads, cfg.linear_num_key_heads
  for mixer in sorted({layer.mixer for layer in cfg.layers}):
    heads, key_heads = (count // tensor for count in counts[mixer])
    works = lambda n, h=heads, k=key_heads: h % math.lcm(k, n) == 0
    if key_heads and not works(context):
      sizes = [n for n in range(1, heads + 1) if works(n)]
      raise UserError(
        f"mesh.context={context}: expected one of {sizes}, which split the "
        f"{heads} heads of a device's {mixer}"
      )
