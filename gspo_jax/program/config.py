"""A config as a tree of frozen dataclasses, checked by `parse`.

A section is a dataclass of the wing that reads it. There each key has its
default, meaning and range. Only `parse` reads a ConfigDict.
An error names a key as it is typed: `section.key`. `rules` has the keys that do
not go together.
"""

import dataclasses
import json
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
  every: int = key(
    10,
    "iterations; also before the first and after the last. 0: no evaluation.",
    ZERO_OR_MORE,
  )
  prompts: int = key(256, "held-out problems", AT_LEAST_1)
  samples: int = key(
    8, "responses to each: the n of avg@n and pass@n", AT_LEAST_1
  )


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
  def is_exact(self) -> bool:
    """Whether the sampler's log-probs equal those of the weights to update."""
    c = self.rollout
    stale = c.max_staleness or c.max_tokens_per_iteration
    return self.model.exact and not stale

  def with_exact_logps(self) -> "Config":
    """The config that takes the sampler's log-probs where it is exact."""
    return self.replace(
      objective={"old_logps": "sampler"} if self.is_exact else {}
    )

  def as_json(self) -> dict:
    """The keys as nested dicts of JSON's types, for a checkpoint."""
    tree = as_dict(self)
    tree["model"] |= dict(self.model.sizes)
    return json.loads(json.dumps(tree))

  def replace(self, **changes: Any) -> "Config":
    """A copy; `replace(seed=1, data={"prompts": 8})` changes two keys."""
    sections = {
      name: dataclasses.replace(getattr(self, name), **value)
      if isinstance(value, dict)
      else value
      for name, value in changes.items()
    }
    return dataclasses.replace(self, **sections)


def parse(config: ConfigDict) -> Config:
  """The checked config of a file of configs/; UserError for any mistake."""
  return _section(Config(), config, "")


def _section(default, values, prefix: str):
  names = keys(default)
  parsed: dict[str, Any] = {}
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


def parse_model(values: dict[str, Any]) -> PolicyConfig:
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
