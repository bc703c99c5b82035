"""The frozen settings that a config gives each wing."""

import dataclasses
import functools
import json
from collections.abc import Sequence

import jax
from etils import epath

from gspo_jax import model
from gspo_jax.data import tokenizers
from gspo_jax.data.config import DataConfig
from gspo_jax.data.prompt_batch import PromptConfig
from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.learner import critic, optimizer
from gspo_jax.learner.optimizer import OptimConfig
from gspo_jax.learner.packing import PackingConfig
from gspo_jax.learner.policy_loss import policy_loss
from gspo_jax.learner.train_step import Learner
from gspo_jax.model import PolicyConfig, hf
from gspo_jax.model.exact_attention import align
from gspo_jax.program.config import Config, parse_model
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError, how_to_download, with_reason
from gspo_jax.sampler import stop_strings
from gspo_jax.sampler.samples import SamplerConfig

# Keys of `model` that decide in which dtypes it computes.
NUMERICS = ("dtype", "float32_head", "float32_router")


def make_meshes(
  config: Config, devices: Sequence[jax.Device] | None = None
) -> tuple[jax.sharding.Mesh, list[jax.Device]]:
  """The mesh of training, and the sampler's own devices; [] for none."""
  devices, own = sharding.split_devices(config.sampler_mesh.devices, devices)
  return sharding.make_mesh(devices, **dataclasses.asdict(config.mesh)), own


def model_config(c: PolicyConfig) -> model.ModelConfig:
  """The policy's sizes, from `model.checkpoint` or else `model.variant`."""
  # The model does not depend on where its adapters come from.
  lora = dataclasses.replace(c.lora, checkpoint="") if c.lora.rank else None
  if "classifier" in dict(c.sizes):
    raise UserError(
      "model.classifier: expected a policy; a reward model is named in "
      "reward.names=model:FOLDER"
    )
  changes = dict(c.sizes) | {"remat": c.remat, "lora": lora, "exact": c.exact}
  changes |= {name: getattr(c, name) for name in NUMERICS}
  if not c.checkpoint:
    return model.variant(c.variant, **changes)
  with with_reason(f"model.checkpoint={c.checkpoint!r}"):
    exists = epath.Path(c.checkpoint).is_dir()
  if not exists:
    raise UserError(
      f"model.checkpoint={c.checkpoint!r}: no such folder"
      f"{how_to_download(c.checkpoint)}"
    )
  return hf.config_from_hf(c.checkpoint, **changes)


def teacher_config(config: Config, folder: str) -> Config:
  """The config with a teacher's model and tokenizer.

  `folder` is a Hugging Face folder, whose model computes in the policy's
  dtypes; or a run's workdir or a step in it, whose model is as in its
  run_config.json. No teacher is exact: nothing is compared with it.
  """
  tokenizer = {"tokenizer": "", "template_args": ""}
  if (epath.Path(folder) / "config.json").exists():
    same = {key: getattr(config.model, key) for key in NUMERICS}
    policy = PolicyConfig(checkpoint=folder, **same)
    return config.replace(model=policy, data=tokenizer)
  path = run_and_step(folder)[0] / "run_config.json"
  if not path.exists():
    raise UserError(
      "expected a Hugging Face folder, with config.json, or the workdir of a "
      f"run, with run_config.json{how_to_download(folder)}"
    )
  saved = json.loads(path.read_text())
  tokenizer["tokenizer"] = saved["data"]["tokenizer"]
  policy = parse_model(saved["model"] | {"exact": False})
  return config.replace(model=policy, data=tokenizer)


def run_and_step(checkpoint: str) -> tuple[epath.Path, int | None]:
  """The workdir of a run, and the step of WORKDIR/checkpoints/STEP."""
  folder = epath.Path(checkpoint)
  if folder.name.isdecimal() and folder.parent.name == "checkpoints":
    return folder.parent.parent, int(folder.name)
  return folder, None


def length_warning(config: Config) -> str:
  """A warning if texts may be longer than `model.checkpoint` takes, or ""."""
  folder = config.model.checkpoint
  longest = hf.context_length(folder) if folder else None
  prompt = config.data.max_prompt_length
  response = config.sampler.max_new_tokens
  if longest is None or prompt + response <= longest:
    return ""
  return (
    f"data.max_prompt_length={prompt} and "
    f"sampler.max_new_tokens={response} allow {prompt + response} tokens, and "
    f"config.json in model.checkpoint={folder!r} {longest} "
    "(max_position_embeddings, rope_scaling): beyond them the model was not "
    "trained"
  )


def load_tokenizer(config: Config, cfg: model.ModelConfig) -> Tokenizer:
  """The tokenizer of `data.tokenizer`, of the checkpoint, or bytes."""
  tokenizer = tokenizers.load(
    config.data.tokenizer or config.model.checkpoint or "bytes",
    config.data.template_args,
  )
  if tokenizer.vocab_size > cfg.vocab_size:
    raise UserError(
      f"the tokenizer has {tokenizer.vocab_size} tokens and the model room for "
      f"{cfg.vocab_size}: expected data.tokenizer and the model to be a pair"
    )
  return tokenizer


def sampler_config(config: Config, tokenizer: Tokenizer) -> SamplerConfig:
  strings = config.sampler.stop
  return dataclasses.replace(
    config.sampler,
    group_size=config.rollout.group_size,
    stop=stop_strings.build(strings, tokenizer) if strings else None,
    stop_ids=tokenizer.stop_ids,
    pad_id=tokenizer.pad_id,
    record_routing=config.objective.replay == "r3",
    # Then a sampler without truncation is the one of evaluations, too.
    kept_ids=config.sampler.kept_ids if config.sampler.truncates else 0,
    speculation=config.continuous_batching.speculation,
    head_ids=config.objective.score_centering,
  )


def prompt_config(c: DataConfig, tokenizer: Tokenizer) -> PromptConfig:
  return PromptConfig(
    tokenizer=tokenizer,
    width=c.max_prompt_length,
    system=c.system_prompt,
    instruction=c.instruction,
    too_long=c.too_long,
  )


def compares_routers(config: Config) -> bool:
  """Whether a run measures how far the routers moved.

  Not where the old log-probs are exact: this alone would take a scoring pass.
  """
  spared = config.is_exact and config.objective.has_sampler_logps
  return config.log.instruments and not spared


def needs_old_logps(config: Config, cfg: model.ModelConfig) -> bool:
  """Whether a forward pass of the old policy comes before an update."""
  objective, instruments = config.objective, compares_routers(config)
  lacks_logps = not objective.has_sampler_logps
  unknown = lacks_logps or objective.reads_old_experts(cfg, instruments)
  # An update computes the old log-probs of its first minibatch. Without a pass
  # before it, the metrics of the old policy (`mismatch/*`, `policy/entropy`,
  # `moe/*`) cover only this minibatch.
  several = config.learner.minibatches > 1
  return objective.recompute_first_minibatch or (several and unknown)


def packing(config: Config, mesh: jax.sharding.Mesh) -> PackingConfig:
  """The rows of an update: each has room for the longest response."""
  width = config.data.max_prompt_length + config.sampler.max_new_tokens
  platform = mesh.devices.flat[0].platform
  multiple = align(platform) if config.model.exact else 1
  return dataclasses.replace(
    config.learner,
    width=-(-width // multiple) * multiple,
    shards=sharding.row_shards(mesh),
    multiple=multiple,
  )


def optim_config(config: Config) -> OptimConfig:
  """The policy's optimizer; its schedule ends with the run."""
  total = config.num_steps * config.learner.minibatches
  return dataclasses.replace(config.optim, total_steps=max(total, 1))


def changed_decay(config: Config, saved: dict, step: int) -> str:
  """A line if the config changes a resumed run's learning rate, else "".

  `saved` is `Config.as_json` of the earlier run, `step` its last iteration.
  """
  keys = ("learning_rate", "warmup_steps", "decay")
  optim = saved.get("optim", {})
  end = saved["num_steps"]
  old = config.replace(
    num_steps=end, optim={key: optim[key] for key in keys if key in optim}
  )
  before, now = (
    float(optimizer.schedule(optim_config(c))(step * c.learner.minibatches))
    for c in (old, config)
  )
  parts, decay = [], config.optim.decay
  if "constant" not in (old.optim.decay, decay) and end != config.num_steps:
    now_at = f"num_steps={config.num_steps}"
    parts.append(f"optim.decay={decay!r} now ends at {now_at}, not {end}")
  if now != before:  # else the run is in its warm-up
    rate = f"{now:.3g}, not {before:.3g}"
    parts.append(f"the learning rate goes on at {rate}")
  return ": ".join(parts)


def policy_learner(config: Config, cfg: model.ModelConfig) -> Learner:
  in_advance = needs_old_logps(config, cfg)
  return Learner(
    loss=functools.partial(
      policy_loss,
      cfg=cfg,
      objective=config.objective,
      temperature=config.sampler.temperature,
      max_length=config.sampler.max_new_tokens,
      instruments=config.log.instruments,
    ),
    optimizer=optimizer.optimizer(optim_config(config)),
    has_old_logps=in_advance or config.objective.has_sampler_logps,
    recompute_first_minibatch=config.objective.recompute_first_minibatch,
  )


def critic_learner(config: Config, cfg: model.ModelConfig) -> Learner | None:
  """The learner of PPO's critic; None without one."""
  c = config.objective.critic
  if c is None:
    return None
  optim = dataclasses.replace(
    optim_config(config),
    name=config.optim.name.replace("muon", "adamw"),
    learning_rate=c.learning_rate,
    warmup_steps=c.warmup_steps,
    freeze_moe_router=False,
  )
  return policy_learner(config, cfg)._replace(
    loss=functools.partial(critic.loss, cfg=cfg, clip=c.clip),
    optimizer=optimizer.optimizer(optim),
  )
