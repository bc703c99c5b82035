"""A config as a tree of frozen dataclasses, checked by `parse`.

A section is a dataclass of the wing that reads it. There each key has its
default, meaning and range. Only `parse` reads a ConfigDict.
`Config.check_training` has the checks that only training needs: a policy can be
evaluated on other devices. An error names a key as it is typed: `section.key`.
"""

import dataclasses
import json
import operator
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from gspo_jax.data.config import DataConfig
from gspo_jax.learner.cold_start import ColdStartConfig
from gspo_jax.learner.objective import ObjectiveConfig
from gspo_jax.learner.optimizer import OptimConfig
from gspo_jax.learner.packing import PackingConfig
from gspo_jax.model import PolicyConfig
from gspo_jax.program import config_keys
from gspo_jax.record.checkpoint import CheckpointConfig
from gspo_jax.record.identity import flatten
from gspo_jax.record.metric_writer import LogConfig
from gspo_jax.rewards.config import RewardConfig
from gspo_jax.rewards.pool import MODEL
from gspo_jax.rollout.config import RolloutConfig
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.key import (
  AT_LEAST_1,
  ZERO_OR_MORE,
  Range,
  as_dict,
  check,
  key,
  keys,
)
from gspo_jax.runtime.sharding import MeshConfig, SamplerMeshConfig
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import SamplerConfig


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """The held-out problems."""

  every: int = key(
    10,
    "iterations; also before the first and after the last. 0: no evaluation.",
    ZERO_OR_MORE,
  )
  prompts: int = key(256, "held-out problems", AT_LEAST_1)
  samples: int = key(
    8, "responses to each: the n of avg@n and pass@n", AT_LEAST_1
  )

  def __post_init__(self):
    check(self, "eval")


@dataclasses.dataclass(frozen=True)
class Config:
  """All keys of a config; a section is a key whose default is a dataclass."""

  seed: int = key(
    0,
    "of weights, data order, sampling and shuffles",
    Range("0 or more, under 2**32", lambda x: 0 <= x < 2**32),
  )
  num_steps: int = key(
    30, "RL iterations: rollout, then `minibatches` updates", ZERO_OR_MORE
  )
  model: PolicyConfig = key(PolicyConfig(), "the policy")
  mesh: MeshConfig = key(
    MeshConfig(), "devices along each axis; -1: those left over"
  )
  sampler_mesh: SamplerMeshConfig = key(
    SamplerMeshConfig(), "0: as in `mesh`; the rest hold other rows"
  )
  data: DataConfig = key(DataConfig(), "problems, and the prompts made of them")
  sampler: SamplerConfig = key(SamplerConfig(), "how responses are sampled")
  continuous_batching: ContinuousBatchingConfig = key(
    ContinuousBatchingConfig(),
    "continuous batching over a paged KV cache: a response that ends makes "
    "room for the next one",
  )
  rollout: RolloutConfig = key(
    RolloutConfig(), "where the responses of an iteration come from"
  )
  reward: RewardConfig = key(RewardConfig(), "what responses are rewarded for")
  objective: ObjectiveConfig = key(
    ObjectiveConfig(), "the method, and what is added to its loss"
  )
  learner: PackingConfig = key(
    PackingConfig(), "how a batch is cut into updates"
  )
  optim: OptimConfig = key(OptimConfig(), "the optimizer")
  cold_start: ColdStartConfig = key(
    ColdStartConfig(), "supervised fine-tuning before RL"
  )
  eval: EvalConfig = key(EvalConfig(), "held-out problems")
  checkpoint: CheckpointConfig = key(CheckpointConfig(), "when a run is saved")
  log: LogConfig = key(LogConfig(), "what a run writes besides its scalars")

  def __post_init__(self):
    check(self, "")

  @property
  def prompts_in_flight(self) -> int:
    """Prompts of an iteration, plus prompts with partial responses."""
    partial = self.rollout.max_tokens_per_iteration > 0
    return self.data.prompts * (2 if partial else 1)

  def as_json(self) -> dict:
    """The keys as nested dicts of JSON's types, for a checkpoint."""
    tree = as_dict(self)
    tree["model"] |= dict(self.model.sizes)
    return json.loads(json.dumps(tree))

  def replace(self, **changes) -> "Config":
    """A copy; `replace(seed=1, data={"prompts": 8})` changes two keys."""
    sections = {
      name: dataclasses.replace(getattr(self, name), **value)
      if isinstance(value, dict)
      else value
      for name, value in changes.items()
    }
    return dataclasses.replace(self, **sections)

  def check_training(self, shards: int, context: int = 1) -> None:
    """UserError unless the sections agree on what training needs.

    `shards` devices split a batch; `context` devices split each row of an
    update.
    """
    self.objective.check_training()
    self.rollout.check_training()
    partial = self.rollout.max_tokens_per_iteration > 0
    rounds = self.rollout.dynamic_sampling_rounds
    estimator, numbers = self.objective.estimator
    has_critic = self.objective.method.critic
    if self.model.lora.rank:
      self._check_lora()
    self._refuse(
      ("sampler.temperature", self.sampler.temperature == 0, "more than 0"),
      (
        "continuous_batching.speculation",
        self.continuous_batching.speculation
        and not self.continuous_batching.slots,
        "0 with continuous_batching.slots=0, for only continuous batching "
        "speculates",
      ),
      (
        "rollout.max_tokens_per_iteration",
        partial and not self.continuous_batching.slots,
        "0 with continuous_batching.slots=0, for only continuous batching "
        "continues a response",
      ),
    )
    if self.rollout.environment:
      self._check_environment()
    else:
      self._refuse(
        (
          "rollout.max_sequences",
          self.rollout.max_sequences > 1,
          "1 without rollout.environment",
        ),
      )
    if self.objective.credit == "turn":
      self._check_turns()
    rewarded = True
    if self.objective.distillation.teachers:
      self._check_teachers()
      rewarded = self.objective.distillation.reward_weight > 0
    self._refuse(
      (
        "rollout.dynamic_sampling_rounds",
        has_critic and rounds > 1,
        f"1 with objective.name={self.objective.name!r}, whose critic learns "
        "from equal rewards, too",
      ),
      (
        "rollout.dynamic_sampling_rounds",
        rounds > 1
        and self.sampler_mesh.devices
        and any(name.startswith(MODEL) for name in self.reward.names),
        f"1 with sampler_mesh.devices={self.sampler_mesh.devices}, for the "
        "reward model runs on the trainer's devices",
      ),
      (
        "rollout.group_size",
        self.rollout.group_size < 2
        and rewarded
        and not has_critic
        and estimator != "reinforce_plus_plus",
        "at least 2, since an advantage compares a response with the others of "
        "its group",
      ),
      (
        "rollout.dynamic_sampling_rounds",
        rounds > 1 and estimator in ("reinforce_plus_plus", "gdpo"),
        f"1 with objective.advantage_estimator={estimator!r}, which may learn "
        "from a group whose total rewards are equal",
      ),
      (
        "objective.advantage_estimator",
        numbers.get("k", 1) > self.rollout.group_size,
        f"k up to rollout.group_size={self.rollout.group_size}",
      ),
      (
        "reward.names",
        estimator in ("pass_at_k", "max_rl") and len(self.reward.names) > 1,
        f"one with objective.advantage_estimator={estimator!r}, which is made "
        "for right and wrong",
      ),
      (
        "log.profile",
        self.log.profile and self.log.profile[1] > self.num_steps,
        f"iterations up to num_steps={self.num_steps}",
      ),
      (
        "data.drop_solved",
        self.data.drop_solved
        and self.sampler_mesh.devices
        and self.rollout.max_staleness,
        f"False with sampler_mesh.devices={self.sampler_mesh.devices} and "
        f"rollout.max_staleness={self.rollout.max_staleness}: which prompts "
        "come next would go by the clock",
      ),
    )
    self._check_sizes(shards, context)

  def _refuse(self, *rules: tuple[str, Any, str], because: str = "") -> None:
    """UserError for the first wrong key of (key, is it wrong, expectation)."""
    for name, wrong, expected in rules:
      if wrong:
        value = lambda key: f"{key}={operator.attrgetter(key)(self)!r}"
        end = because and f" ({value(because)})"
        raise UserError(f"{value(name)}: expected {expected}{end}")

  def _check_environment(self):
    self._refuse(
      (
        "continuous_batching.slots",
        not self.continuous_batching.slots,
        "1 or more, for only continuous batching continues a conversation",
      ),
      (
        "reward.names",
        self.reward.names,
        "(), for the environment gives the reward",
      ),
      (
        "reward.weights",
        self.reward.weights not in ((), (1.0,)),
        "(1.0,), for the environment gives the reward",
      ),
      (
        "objective.advantage_estimator",
        self.objective.estimator[0] == "gdpo",
        "another one, for the environment gives one reward",
      ),
      (
        "rollout.max_tokens_per_iteration",
        self.rollout.max_tokens_per_iteration,
        "0, for a conversation ends in the iteration in which it begins",
      ),
      because="rollout.environment",
    )

  def _check_turns(self):
    method = self.objective.method
    self._refuse(
      (
        "rollout.environment",
        not self.rollout.environment,
        "one, for there are no turns without it",
      ),
      (
        "rollout.dynamic_sampling_rounds",
        self.rollout.dynamic_sampling_rounds > 1,
        "1, for it keeps groups by the rewards of whole conversations",
      ),
      (
        "objective.name",
        method.one_advantage or method.critic or method.advantages,
        "'gspo_token' or another method with an advantage for each token",
      ),
      (
        "objective.kl_estimator",
        self.objective.has_kl_in_reward,
        "'k2' or 'k3', for k1 is a penalty of whole responses",
      ),
      because="objective.credit",
    )

  def _check_teachers(self):
    c = self.objective.distillation
    by_source = len(c.teachers) > 1 and not c.teacher_key
    sources = self.data.source.split(",")
    self._refuse(
      (
        "objective.name",
        self.objective.method.one_advantage,
        "'gspo_token' or another method with an advantage for each token",
      ),
      (
        "objective.kl_estimator",
        self.objective.has_kl_in_reward,
        "'k2' or 'k3', for k1 is a part of the reward",
      ),
      (
        "rollout.dynamic_sampling_rounds",
        self.rollout.dynamic_sampling_rounds > 1 and not c.reward_weight,
        "1 with objective.distillation.reward_weight=0, for it keeps groups by "
        "rewards",
      ),
      (
        "data.curriculum",
        by_source and self.data.curriculum,
        "() without objective.distillation.teacher_key",
      ),
      (
        "data.source",
        by_source and len(sources) != len(c.teachers),
        "as many sources as teachers without objective.distillation."
        "teacher_key",
      ),
      because="objective.distillation.teachers",
    )

  def _check_lora(self):
    self._refuse(
      (
        "objective.name",
        self.objective.method.critic,
        "another method, for all weights of its critic would be trained",
      ),
      (
        "optim.name",
        not self.optim.name.startswith("adamw"),
        "'adamw', for Muon is made for whole matrices",
      ),
      (
        "optim.freeze_moe_router",
        self.optim.freeze_moe_router,
        "False, for only adapters are trained",
      ),
      (
        "model.lora.checkpoint",
        self.model.lora.checkpoint and self.cold_start.steps,
        "'' with a cold start, which changes the weights below the adapters",
      ),
      because="model.lora.rank",
    )

  def _check_sizes(self, shards, context):
    """UserError unless each split of a batch gives equal parts."""
    prompts, micro = self.data.prompts, self.learner.micro_batch_size
    divides(
      "data.prompts", prompts, "learner.minibatches", self.learner.minibatches
    )
    rows = prompts * self.rollout.group_size // self.learner.minibatches
    divides(
      "the responses of a minibatch", rows, "learner.micro_batch_size", micro
    )
    sizes = {"data.prompts": prompts}
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
  """The checked config of a file of configs/; UserError for any mistake."""
  return _section(Config(), config, "")


def _section(default, values, prefix: str):
  names, parsed = keys(default), {}
  for name in values:
    if name in names:
      continue
    if prefix != "model.":
      hint = config_keys.hint(f"{prefix}{name}", all_keys())
      raise UserError(f"{prefix}{name}: no such key; {hint}")
    parsed.setdefault("sizes", []).append((name, _frozen(values[name])))
  for name in names:
    if name not in values:
      raise UserError(
        f"{prefix}{name} is missing: expected all keys of configs/common.py"
      )
    section = getattr(default, name)
    parsed[name] = (
      _section(section, values[name], f"{prefix}{name}.")
      if dataclasses.is_dataclass(section)
      else _frozen(values[name])
    )
  if "sizes" in parsed:
    parsed["sizes"] = tuple(sorted(parsed["sizes"]))
  return type(default)(**parsed)


def parse_model(values: Mapping[str, Any]) -> PolicyConfig:
  """The section `model` of `Config.as_json`, also of an earlier release."""
  default = as_dict(PolicyConfig())
  values = default | values | {"lora": default["lora"] | values["lora"]}
  return _section(PolicyConfig(), values, "model.")


def all_keys() -> list[str]:
  """The dotted names of all keys of a config file."""
  return list(flatten(as_dict(Config())))


def _frozen(value):
  """Lists as tuples."""
  if isinstance(value, list | tuple):
    return tuple(map(_frozen, value))
  return value


def multiple(name: str, size: int, axes: str, devices: int) -> None:
  """UserError unless `size` is a multiple of `devices`, naming the nearest."""
  if size % devices:
    low = size // devices * devices
    near = f"{low} and {low + devices}" if low else f"{devices}"
    raise UserError(
      f"{name} = {size} is not a multiple of the devices that share rows = "
      f"{devices} ({axes}); nearest: {near}"
    )


def divides(name: str, size: int, by: str, divisor: int) -> None:
  """UserError unless `divisor` divides `size`, naming the nearest that does."""
  if size < 1:
    raise UserError(f"{name} = {size}: expected at least 1")
  if divisor >= 1 and size % divisor == 0:
    return
  choices = [n for n in range(1, size + 1) if size % n == 0]
  close = min(choices, key=lambda n: abs(n - divisor))
  raise UserError(
    f"{name} = {size} is not divisible by {by} = {divisor}; the nearest "
    f"divisor is {close}"
  )
