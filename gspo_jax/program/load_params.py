"""The weights of a checkpoint, and what identifies them."""

import dataclasses
import functools
import json
from typing import Any

import jax
from etils import epath

from gspo_jax import model
from gspo_jax.model import PolicyConfig, hf
from gspo_jax.program import settings
from gspo_jax.program.abstract import shardings
from gspo_jax.program.config import Config
from gspo_jax.program.functions import Program
from gspo_jax.record.checkpoint import Checkpoints, checksums
from gspo_jax.record.identity import match
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError, how_to_download, prefixed

# The fields of a model in every saved run. Others, and later ones of layers and
# rotary scalings, are saved if they are not the default.
_FIRST_FIELDS = (
  *("vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads"),
  *("head_dim", "mlp_dim", "num_experts", "experts_per_token"),
  *("norm_topk_prob", "rope_theta", "rope_scaling", "attention_bias"),
  *("qk_norm", "qk_norm_over_heads", "norm_eps", "tie_embeddings", "dtype"),
)
_LATER_FIELDS = ("mixer", "mscale_all_dim", "rotary")
# They do not change the weights; a cold start comes before the adapters.
_OF_RUNS = ("remat", "unroll", "lora", "exact")


def identity(program: Program) -> dict:
  """What saved weights must agree with to fit this model and tokenizer."""
  cfg = {
    field.name: value
    for field in dataclasses.fields(program.cfg)
    if field.name not in _OF_RUNS
    and (
      (value := getattr(program.cfg, field.name)) != field.default
      or field.name in _FIRST_FIELDS
    )
  }
  cfg = json.loads(json.dumps(cfg, default=_fields))
  return {"model": cfg, "tokenizer": program.tokenizer.fingerprint}


def _fields(x) -> dict:
  return {
    field.name: value
    for field in dataclasses.fields(x)
    if (value := getattr(x, field.name)) != field.default
    or field.name not in _LATER_FIELDS
  }


def lora_identity(program: Program) -> dict[str, Any]:
  """What saved adapters must agree with to fit this program."""
  lora = program.cfg.lora
  return {"model.lora": dataclasses.asdict(lora) if lora else None}


def with_checkpoint(config: Config, checkpoint: str) -> Config:
  """The config; `checkpoint` is its model if it is a Hugging Face folder."""
  if (epath.Path(checkpoint) / "config.json").exists():
    return config.replace(model={"checkpoint": checkpoint})
  return config


def first_policy(
  c: PolicyConfig, program: Program, params: model.Params
) -> model.Params:
  """The policy before its first update: adapters are new, or from a folder."""
  policy = program.new_policy(params)
  if not (folder := c.lora.checkpoint):
    return policy
  _, adapters = model.lora.split(program.abstract_policy)
  read = hf.load_peft(folder, program.cfg, shardings(adapters))
  read = sharding.leaves_by_path(read)
  leaves = sharding.leaves_by_path(policy)
  if new := sorted({x for x in leaves if model.lora.is_adapter(x)} - set(read)):
    multihost.print_once(f"{folder}: no adapters of {', '.join(new)}: new ones")
  return sharding.tree_of_paths(leaves | read)


def save_base(base: model.Params, config: Config, workdir: epath.Path) -> None:
  """Saves the weights below the adapters if `model.checkpoint` lacks them."""
  if config.model.checkpoint and not config.cold_start.steps:
    return
  folder = workdir / "base"

  def remove():  # left by a run that stopped before its first checkpoint
    if multihost.is_primary() and folder.exists():
      folder.rmtree()

  multihost.run_on_all(remove)
  with Checkpoints(folder, keep=1) as checkpoints:
    checkpoints.save(0, {"base": base}, {})


def load_base(
  c: PolicyConfig, program: Program, workdir: epath.Path, saved: dict[str, int]
) -> model.Params:
  """A run's weights below its adapters; UserError unless they match `saved`."""
  folder = workdir / "base"
  if folder.exists():
    abstract, _ = model.lora.split(program.abstract_policy)
    with Checkpoints(folder) as checkpoints:
      restored = checkpoints.restore({"base": abstract}, lambda *_: None)
    source, base = str(folder), restored.state["base"] if restored else None
  else:
    source, base = f"model.checkpoint={c.checkpoint!r}", None
    if c.checkpoint:
      policy = program.new_policy(program.init_params(None))
      base, _ = model.lora.split(policy)
  if base is None or checksums(base) != saved:
    raise multihost.AgreedError(
      f"{source}: expected the weights below the adapters of the run in "
      f"{str(workdir)!r}, as they were at its start"
    )
  return base


def merged(program: Program, policy: model.Params) -> model.Params:
  """The float32 weights of a policy, with its adapters merged if it has any."""
  lora = program.cfg.lora
  if lora is None:
    return policy
  merge = functools.partial(model.lora.merge, lora=lora, dtype="float32")
  place = shardings(program.abstract_params)
  return jax.jit(merge, out_shardings=place)(policy)


def load(config: Config, program: Program, checkpoint: str) -> model.Params:
  """The weights of a Hugging Face folder or of a run, with adapters if any.

  With adapters the weights have the model's dtype, else float32. `config` is
  from `with_checkpoint`, and `program` is built from it. `checkpoint` is a
  Hugging Face folder; or a run's workdir, for its newest complete checkpoint;
  or one step of it, WORKDIR/checkpoints/STEP.

  Raises:
    UserError: there are no weights, or they are of another model.
  """
  if config.model.checkpoint == checkpoint:
    return first_policy(config.model, program, program.init_params(None))
  folder, step = settings.run_and_step(checkpoint)
  wanted = identity(program) | lora_identity(program)
  # These may differ without adapters: the weights are then float32.
  free = () if program.cfg.lora else settings.NUMERICS
  fixed = lambda keys: (
    keys | {"model": {k: v for k, v in keys["model"].items() if k not in free}}
  )

  def accept(_, saved):
    part = {k: saved["identity"].get(k) for k in wanted}
    match(
      fixed(wanted),
      {"identity": fixed(part)},
      f"checkpoint in {str(folder)!r}",
      "give the --config of that run, with its --config.* flags",
    )

  # Only the weights: the optimizer's moments are twice as large.
  _, adapters = model.lora.split(program.abstract_policy)
  params = {"params": adapters or program.abstract_params}
  with Checkpoints(folder / "checkpoints") as checkpoints:
    restored = checkpoints.restore(params, accept, only=step, part=True)
  if restored is None:
    raise UserError(
      f"--checkpoint={checkpoint}: no config.json of a Hugging Face folder, "
      f"and no checkpoints of a run{how_to_download(checkpoint)}"
    )
  params = restored.state["params"]
  if not adapters:
    return params
  base = load_base(config.model, program, folder, restored.metadata["base"])
  return model.lora.join(base, params)


def load_teachers(config: Config, program: Program) -> tuple[model.Params, ...]:
  """The weights of each teacher, read by `load`, in its model's dtype."""
  loaded = []
  folders = config.objective.distillation.folders.values()
  for folder, teacher in zip(folders, program.teachers, strict=True):
    with prefixed(f"objective.distillation.teachers={folder!r}"):
      params = load(settings.teacher_config(config, folder), teacher, folder)
    cast = functools.partial(model.parameters.cast, cfg=teacher.cfg)
    place = shardings(teacher.abstract_policy)
    loaded.append(jax.jit(cast, out_shardings=place, donate_argnums=0)(params))
  return tuple(loaded)
