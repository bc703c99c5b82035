"""A config as a tree of frozen dataclasses, checked by `parse`.

`parse` is the only function that reads a ConfigDict. A field has its range
beside it, a section the checks that need several of its fields. What only
training needs is in `Config.check_training`, so that a policy can be evaluated
on other devices. configs/common.py says what each key means, with its unit. An
error names a key as it is typed: `section.key`.
"""

import dataclasses
import json
import math

from ml_collections import ConfigDict

from gspo_jax.learner.objective import ObjectiveConfig
from gspo_jax.program import config_keys
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.key import (
  AT_LEAST_1,
  FINITE,
  POSITIVE,
  SHARE,
  UNDER_1,
  ZERO_OR_MORE,
  Range,
)

SEED = Range("0 or more, under 2**32", lambda x: 0 <= x < 2**32)
STRINGS = Range(
  "strings that are not empty, as in ('</answer>',)",
  lambda x: not isinstance(x, str) and all(isinstance(s, str) and s for s in x),
)
TEMPERATURE = Range(
  "more than 0, or 0 for a greedy evaluation", lambda x: 0 <= x < math.inf
)
ITERATIONS = Range(
  "() for none, or the first and the last iteration, such as (10, 12)",
  lambda x: (
    len(x) in (0, 2)
    and all(type(i) is int and i >= 1 for i in x)
    and list(x) == sorted(x)
  ),
)
TURNS = Range("1 to 32767", lambda x: 1 <= x < 2**15)


def checked(rule: Range):
  """A field of a section whose values are checked against `rule`."""
  return dataclasses.field(metadata={"rule": rule})


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters; `model.LoraConfig` checks the rest."""

  rank: int = checked(ZERO_OR_MORE)
  alpha: float
  targets: str
  checkpoint: str

  def __post_init__(self):
    if self.checkpoint and not self.rank:
      raise UserError(
        f"model.lora.checkpoint={self.checkpoint!r}: expected '' with "
        "model.lora.rank=0, where there are no adapters"
      )


@dataclasses.dataclass(frozen=True)
class Model:
  """The policy; `model.ModelConfig` checks these values.

  `sizes` has its other fields that a config file sets, with their names.
  """

  checkpoint: str
  variant: str
  dtype: str
  remat: bool
  keep: tuple[str, ...]
  lora: Lora
  sizes: tuple[tuple[str, object], ...]


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Devices along each axis; `sharding.make_mesh` checks these values."""

  data: int
  fsdp: int
  context: int
  expert: int
  tensor: int


@dataclasses.dataclass(frozen=True)
class SamplerMesh:
  """Devices of the sampler, 0: all; and along its axes, 0: as in `mesh`."""

  devices: int = checked(ZERO_OR_MORE)
  expert: int = checked(ZERO_OR_MORE)
  tensor: int = checked(ZERO_OR_MORE)


@dataclasses.dataclass(frozen=True)
class Data:
  """Problems, and how they become prompts; `PromptConfig` checks the rest."""

  source: str
  weights: tuple[float, ...]
  eval_source: str
  problem_field: str
  reference_field: str
  demonstration_field: str
  tfds_dir: str
  tokenizer: str
  system_prompt: str
  template_args: str
  instruction: str
  few_shot: int = checked(ZERO_OR_MORE)
  chain_steps: tuple[int, ...]
  prompts: int
  drop_solved: bool
  curriculum: tuple[tuple[int, str], ...]
  max_prompt_length: int = checked(AT_LEAST_1)
  too_long: str


@dataclasses.dataclass(frozen=True)
class Sampler:
  """How responses are sampled; `sampler.SamplerConfig` checks the rest."""

  max_new_tokens: int
  temperature: float = checked(TEMPERATURE)
  top_k: int
  top_p: float
  min_p: float
  min_new_tokens: int
  stop: tuple[str, ...] = checked(STRINGS)


@dataclasses.dataclass(frozen=True)
class ContinuousBatching:
  """Sizes, which `ContinuousBatchingConfig` of the sampler checks."""

  slots: int
  page_size: int
  num_pages: int
  segment_steps: int
  prefill_chunk: int


@dataclasses.dataclass(frozen=True)
class Rollout:
  """Where the responses of an iteration come from."""

  group_size: int
  dynamic_sampling_rounds: int = checked(AT_LEAST_1)
  max_staleness: int = checked(ZERO_OR_MORE)
  timeout: float = checked(ZERO_OR_MORE)
  max_tokens_per_iteration: int = checked(ZERO_OR_MORE)
  extra_prompts_in_flight: int = checked(ZERO_OR_MORE)
  environment: str
  max_turns: int = checked(TURNS)

  @property
  def continues(self) -> bool:
    """Whether a response goes on in a later call of the sampler."""
    return self.max_tokens_per_iteration > 0 or bool(self.environment)

  @property
  def is_off_policy(self) -> bool:
    """Whether responses of one iteration are learnt from in a later one."""
    return self.max_staleness > 0 or self.max_tokens_per_iteration > 0

  def check_training(self) -> None:
    """UserError where two keys do not go together."""
    limit, extra = self.max_tokens_per_iteration, self.extra_prompts_in_flight
    if bool(limit) != bool(extra):
      raise UserError(
        f"rollout.max_tokens_per_iteration={limit} and "
        f"rollout.extra_prompts_in_flight={extra}: expected both or neither: "
        "responses that continue later wait beside those of a batch"
      )
    if self.is_off_policy and self.dynamic_sampling_rounds > 1:
      key = (
        "max_staleness" if self.max_staleness else "max_tokens_per_iteration"
      )
      raise UserError(
        f"rollout.{key}={getattr(self, key)}: expected 0 with "
        f"rollout.dynamic_sampling_rounds={self.dynamic_sampling_rounds}, "
        "which samples until a batch is full of groups whose rewards differ"
      )


@dataclasses.dataclass(frozen=True)
class Reward:
  """What responses are rewarded for; the reward pool checks the names."""

  names: tuple[str, ...]
  weights: tuple[float, ...]
  workers: int = checked(AT_LEAST_1)
  concurrency: int = checked(AT_LEAST_1)
  pass_threshold: float = checked(FINITE)
  seconds: float = checked(POSITIVE)
  max_failed: float = checked(SHARE)


@dataclasses.dataclass(frozen=True)
class Learner:
  """How a batch is cut."""

  minibatches: int
  micro_batch_size: int


@dataclasses.dataclass(frozen=True)
class Optim:
  """The optimizer; `learner.OptimConfig` checks the rest."""

  name: str
  learning_rate: float = checked(ZERO_OR_MORE)
  warmup_steps: int = checked(ZERO_OR_MORE)
  decay: str
  min_lr_ratio: float = checked(SHARE)
  b1: float = checked(UNDER_1)
  b2: float = checked(UNDER_1)
  weight_decay: float = checked(ZERO_OR_MORE)
  clip_norm: float = checked(POSITIVE)


@dataclasses.dataclass(frozen=True)
class ColdStart:
  """Supervised fine-tuning before RL."""

  steps: int = checked(ZERO_OR_MORE)
  batch: int
  learning_rate: float = checked(POSITIVE)
  warmup_steps: int = checked(ZERO_OR_MORE)
  gate: float = checked(SHARE)
  check_every: int = checked(AT_LEAST_1)
  chain_steps: tuple[int, ...]
  chain_noise: float
  dir: str


@dataclasses.dataclass(frozen=True)
class Eval:
  """The held-out problems."""

  every: int = checked(ZERO_OR_MORE)
  prompts: int = checked(AT_LEAST_1)
  samples: int = checked(AT_LEAST_1)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """When a run is saved."""

  every: int = checked(AT_LEAST_1)
  keep: int = checked(AT_LEAST_1)


@dataclasses.dataclass(frozen=True)
class Log:
  """What a run writes besides its scalars."""

  instruments: bool
  samples_every: int = checked(AT_LEAST_1)
  samples: int = checked(ZERO_OR_MORE)
  wandb: str
  profile: tuple[int, ...] = checked(ITERATIONS)


@dataclasses.dataclass(frozen=True)
class Config:
  """All keys of configs/common.py."""

  seed: int = checked(SEED)
  num_steps: int = checked(ZERO_OR_MORE)
  model: Model
  mesh: Mesh
  sampler_mesh: SamplerMesh
  data: Data
  sampler: Sampler
  continuous_batching: ContinuousBatching
  rollout: Rollout
  reward: Reward
  objective: ObjectiveConfig
  learner: Learner
  optim: Optim
  cold_start: ColdStart
  eval: Eval
  checkpoint: Checkpoint
  log: Log

  def as_json(self) -> dict:
    """The keys as nested dicts, as JSON gives them back, for a checkpoint."""
    tree = dataclasses.asdict(self)
    tree["model"] |= dict(tree["model"].pop("sizes"))
    return json.loads(json.dumps(tree))

  def replace(self, **keys) -> "Config":
    """A copy with other values; a section takes a dict of its keys.

    `config.replace(seed=1, data={"prompts": 8})`
    """
    sections = {
      name: dataclasses.replace(getattr(self, name), **value)
      if isinstance(value, dict)
      else value
      for name, value in keys.items()
    }
    return dataclasses.replace(self, **sections)

  def check_training(self, shards: int, context: int = 1) -> None:
    """Checks what several sections must agree on for training.

    Args:
      shards: devices that share a batch of samples.
      context: of them, devices that share each row of an update.

    Raises:
      UserError: naming the keys, and what is expected.
    """
    if self.sampler.temperature == 0:
      raise UserError("sampler.temperature=0: expected more than 0")
    self.objective.check_training()
    if self.model.lora.rank:
      self._check_lora()
    self.rollout.check_training()
    limit = self.rollout.max_tokens_per_iteration
    if limit and not self.continuous_batching.slots:
      raise UserError(
        f"rollout.max_tokens_per_iteration={limit}: expected 0 with "
        "continuous_batching.slots=0, for only continuous batching continues a "
        "response"
      )
    if limit and self.objective.replay == "r3":
      raise UserError(
        f"rollout.max_tokens_per_iteration={limit}: expected 0 with "
        "objective.replay='r3', for the experts of earlier tokens are not kept"
      )
    if self.rollout.environment:
      self._check_environment()
    if self.objective.credit == "turn":
      self._check_turns()
    rounds = self.rollout.dynamic_sampling_rounds
    if self.objective.method.critic and rounds > 1:
      raise UserError(
        f"rollout.dynamic_sampling_rounds={rounds}: expected 1 with "
        f"objective.name={self.objective.name!r}, whose critic learns from "
        "equal rewards, too"
      )
    if self.rollout.group_size < 2 and not self.objective.method.critic:
      raise UserError(
        f"rollout.group_size={self.rollout.group_size}: expected at least 2, "
        "since an advantage compares a response with the others of its group"
      )
    if self.log.profile and self.log.profile[1] > self.num_steps:
      raise UserError(
        f"log.profile={self.log.profile}: expected iterations up to "
        f"num_steps={self.num_steps}"
      )
    if (
      self.sampler_mesh.devices
      and self.rollout.max_staleness
      and self.data.drop_solved
    ):
      raise UserError(
        "data.drop_solved=True: expected False with "
        f"sampler_mesh.devices={self.sampler_mesh.devices} and "
        f"rollout.max_staleness={self.rollout.max_staleness}: which prompts "
        "come next would go by the clock"
      )
    self._check_sizes(shards, context)

  def _check_environment(self):
    """UserError where a key does not go with an environment."""
    for key, value, wrong, expected in (
      (
        "continuous_batching.slots",
        self.continuous_batching.slots,
        not self.continuous_batching.slots,
        "1 or more, for only continuous batching continues a conversation",
      ),
      (
        "reward.names",
        self.reward.names,
        self.reward.names,
        "(), for the environment gives the reward",
      ),
      (
        "reward.weights",
        self.reward.weights,
        self.reward.weights not in ((), (1.0,)),
        "(1.0,), for the environment gives the reward",
      ),
      (
        "objective.replay",
        self.objective.replay,
        self.objective.replay == "r3",
        "'none' or 'r2', for the experts of earlier turns are not kept",
      ),
      (
        "rollout.max_tokens_per_iteration",
        self.rollout.max_tokens_per_iteration,
        self.rollout.max_tokens_per_iteration,
        "0, for a conversation ends in the iteration in which it begins",
      ),
    ):
      if wrong:
        raise UserError(
          f"{key}={value!r}: expected {expected} "
          f"(rollout.environment={self.rollout.environment!r})"
        )

  def _check_turns(self):
    """UserError where a key does not go with advantages of turns."""
    name, method = self.objective.name, self.objective.method
    one_advantage = method.one_advantage or method.critic or method.advantages
    for key, value, wrong, expected in (
      (
        "rollout.environment",
        self.rollout.environment,
        not self.rollout.environment,
        "one, for there are no turns without it",
      ),
      (
        "rollout.dynamic_sampling_rounds",
        self.rollout.dynamic_sampling_rounds,
        self.rollout.dynamic_sampling_rounds > 1,
        "1, for it keeps groups by the rewards of whole conversations",
      ),
      (
        "objective.name",
        name,
        one_advantage,
        "'gspo_token' or another method with an advantage for each token",
      ),
      (
        "objective.kl_estimator",
        self.objective.kl_estimator,
        self.objective.has_kl_in_reward,
        "'k2' or 'k3', for k1 is a penalty of whole responses",
      ),
    ):
      if wrong:
        raise UserError(
          f"{key}={value!r}: expected {expected} (objective.credit='turn')"
        )

  def _check_lora(self):
    """UserError where a key does not go with adapters."""
    for key, value, wrong, expected in (
      (
        "objective.name",
        self.objective.name,
        self.objective.method.critic,
        "another method, for all weights of its critic would be trained",
      ),
      (
        "optim.name",
        self.optim.name,
        self.optim.name != "adamw",
        "'adamw', for Muon is made for whole matrices",
      ),
      (
        "model.lora.checkpoint",
        self.model.lora.checkpoint,
        self.model.lora.checkpoint and self.cold_start.steps,
        "'' with a cold start, which changes the weights below the adapters",
      ),
    ):
      if wrong:
        raise UserError(
          f"{key}={value!r}: expected {expected} "
          f"(model.lora.rank={self.model.lora.rank})"
        )

  def _check_sizes(self, shards, context):
    """UserError unless every cut of a batch comes out even."""
    prompts, micro = self.data.prompts, self.learner.micro_batch_size
    divides(
      "data.prompts", prompts, "learner.minibatches", self.learner.minibatches
    )
    rows = prompts * self.rollout.group_size // self.learner.minibatches
    divides(
      "the responses of a minibatch", rows, "learner.micro_batch_size", micro
    )
    sizes = {
      "data.prompts": prompts,
      "rollout.extra_prompts_in_flight": self.rollout.extra_prompts_in_flight,
    }
    if self.cold_start.steps:
      batch = self.cold_start.batch
      micro = min(micro, batch)
      divides("cold_start.batch", batch, "learner.micro_batch_size", micro)
      sizes["cold_start.batch"] = batch
    for name, size in sizes.items():
      multiple(name, size, "mesh.data x fsdp x context x expert", shards)
    rows, name = shards // context, "learner.micro_batch_size"
    micro = self.learner.micro_batch_size
    multiple(name, micro, "mesh.data x fsdp x expert", rows)
    width = self.data.max_prompt_length + self.sampler.max_new_tokens
    name = "data.max_prompt_length + sampler.max_new_tokens"
    multiple(name, width, "mesh.context", context)


def parse(config: ConfigDict) -> Config:
  """The config that a file of configs/ makes, checked.

  Raises:
    UserError: a key is missing or unknown, a value lies outside its range, or
      it does not go with that of another key.
  """
  return _section(Config, config, "")


def _section(kind, values, prefix: str):
  if kind is Model:
    values = _with_sizes(values)
  fields = {field.name: field for field in dataclasses.fields(kind)}
  _require_keys(fields, values, prefix)
  parsed = {}
  for name, field in fields.items():
    value = values[name]
    if dataclasses.is_dataclass(field.type):
      parsed[name] = _section(field.type, value, f"{prefix}{name}.")
      continue
    if rule := field.metadata.get("rule"):
      rule.check(f"{prefix}{name}", value)
    parsed[name] = _frozen(value)
  return kind(**parsed)


def _with_sizes(values) -> dict:
  """The section `model`, with the keys that `Model` lacks in `sizes`."""
  names = {field.name for field in dataclasses.fields(Model)} - {"sizes"}
  sizes = sorted((k, v) for k, v in values.items() if k not in names)
  return {k: v for k, v in values.items() if k in names} | {"sizes": sizes}


def _require_keys(fields, values, prefix):
  for name in values:
    if name not in fields:
      hint = config_keys.hint(f"{prefix}{name}", all_keys())
      raise UserError(f"{prefix}{name}: no such key; {hint}")
  for name in fields:
    if name not in values:
      raise UserError(
        f"{prefix}{name} is missing: expected all keys of configs/common.py"
      )


def all_keys(kind=Config, prefix: str = "") -> list[str]:
  """The dotted names of all keys of a config file."""
  keys = []
  for field in dataclasses.fields(kind):
    name = f"{prefix}{field.name}"
    if dataclasses.is_dataclass(field.type):
      keys += all_keys(field.type, f"{name}.")
    elif name != "model.sizes":  # holds keys, and is none
      keys.append(name)
  return keys


def _frozen(value):
  """Lists as tuples."""
  if isinstance(value, list | tuple):
    return tuple(map(_frozen, value))
  return value


def multiple(what: str, size: int, of: str, devices: int) -> None:
  """UserError unless `size` is a multiple of `devices`, naming the nearest."""
  if size % devices:
    low = size // devices * devices
    near = f"{low} and {low + devices}" if low else f"{devices}"
    raise UserError(
      f"{what} = {size} is not a multiple of the devices that share rows = "
      f"{devices} ({of}); nearest: {near}"
    )


def divides(what: str, size: int, by: str, divisor: int) -> None:
  """UserError unless `divisor` divides `size`, naming the nearest that does."""
  if size < 1:
    raise UserError(f"{what} = {size}: expected at least 1")
  if divisor >= 1 and size % divisor == 0:
    return
  choices = [n for n in range(1, size + 1) if size % n == 0]
  close = min(choices, key=lambda n: abs(n - divisor))
  raise UserError(
    f"{what} = {size} is not divisible by {by} = {divisor}; the nearest "
    f"divisor is {close}"
  )
