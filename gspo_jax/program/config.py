"""A config as a tree of frozen dataclasses, checked by `parse`.

A section is a dataclass of the wing that reads it, where each key has its
default, its meaning and its range. `parse` is the only function that reads a
ConfigDict. What only training needs is in `Config.check_training`, so that a
policy can be evaluated on other devices. An error names a key as it is typed:
`section.key`.
"""

import dataclasses
import json
import math
import operator
from typing import Any

from ml_collections import ConfigDict

from gspo_jax.data.config import DataConfig
from gspo_jax.learner.cold_start import ColdStartConfig
from gspo_jax.learner.objective import METHODS
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
  SHARE,
  UNDER_1,
  ZERO_OR_MORE,
  Choice,
  Range,
  as_dict,
  check,
  key,
  keys,
)
from gspo_jax.runtime.sharding import MeshConfig, SamplerMeshConfig
from gspo_jax.sampler.continuous_config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import SamplerConfig

CAP = Range("1 or more", lambda x: 1 <= x < math.inf)
METHOD_CLIP = Range(
  "0 or more, or -1 for the method's own",
  lambda x: x == -1 or 0 <= x < math.inf,
)
METHOD_POSITIVE = Range(
  "more than 0, or -1 for the method's own",
  lambda x: x == -1 or 0 < x < math.inf,
)
METHOD_FLOOR = Range(
  "0 for none, under 1, or -1 for the method's own",
  lambda x: x == -1 or 0 <= x < 1,
)
DUAL_CLIP = Range(
  "0 for none, or more than 1", lambda x: x == 0 or 1 < x < math.inf
)


@dataclasses.dataclass(frozen=True)
class Objective:
  """The method, and what is added to its loss."""

  name: str = key(
    "gspo",
    "gspo, gspo_token, grpo, dr_grpo, dapo, ppo, gmpo, rspo, cispo, sapo",
    Choice(tuple(METHODS)),
  )
  clip_low: float = key(
    -1.0, "-1: the method's own, see gspo_jax/losses/", METHOD_CLIP
  )
  clip_high: float = key(-1.0, "-1: the method's own", METHOD_CLIP)
  cap: float = key(-1.0, "largest ratio of cispo; -1: its own", METHOD_POSITIVE)
  tau_positive: float = key(
    -1.0, "of sapo's gate where A > 0; -1: its own", METHOD_POSITIVE
  )
  tau_negative: float = key(
    -1.0, "of sapo's gate where A < 0; -1: its own", METHOD_POSITIVE
  )
  dual_clip: float = key(
    0.0, "largest ratio against A < 0, about 3; 0: any", DUAL_CLIP
  )
  old_logps: str = key(
    "recompute",
    '"recompute": by the forward pass of the update; "sampler": as sampled, '
    "with rounding that in bfloat16 can exceed GSPO's clip range. With "
    'off-policy rollouts, "recompute" is the policy that learns, "sampler" '
    "the one that sampled.",
    Choice(("sampler", "recompute")),
  )
  kl_coef: float = key(
    0.0, "of the KL to a reference policy; 0: no reference", ZERO_OR_MORE
  )
  kl_estimator: str = key(
    "k3",
    '"k2", "k3": in the loss; "k1": the reward',
    Choice(("k1", "k2", "k3")),
  )
  reference_every: int = key(
    0, "iterations between syncs; 0: frozen", ZERO_OR_MORE
  )
  entropy_coef: float = key(0.0, "of the entropy bonus", ZERO_OR_MORE)
  mismatch: str = key(
    "none",
    "importance weights between sampler and trainer: tis_token, tis_sequence "
    "(truncated), mis_token, mis_sequence (masked)",
    Choice(("none", "tis_token", "tis_sequence", "mis_token", "mis_sequence")),
  )
  mismatch_cap: float = key(2.0, "largest weight", CAP)
  mismatch_floor: float = key(0.5, 'smallest weight that "mis" keeps', UNDER_1)
  router_shift_floor: float = key(
    -1.0,
    "smallest weight of a token whose router moved; -1: 0.8 in rspo, else 0: "
    "off",
    METHOD_FLOOR,
  )
  replay: str = key(
    "none",
    'Routing Replay: the old policy\'s experts ("r2") or the sampler\'s ("r3")',
    Choice(("none", "r2", "r3")),
  )
  zero_truncated: bool = key(False, "no advantage for truncated responses")
  credit: str = key(
    "response",
    '"response": one advantage, of the whole conversation. "turn": one for '
    "each turn, of the rewards from there on; for methods with an advantage a "
    "token.",
    Choice(("response", "turn")),
  )

  def __post_init__(self):
    check(self, "objective")

  @property
  def has_critic(self) -> bool:
    """Whether a critic gives the advantages."""
    return self.name == "ppo"

  @property
  def has_kl_in_reward(self) -> bool:
    """Whether the reward, and not the loss, has the KL penalty (k1)."""
    return self.kl_coef > 0 and self.kl_estimator == "k1"

  def method_settings(self) -> dict[str, float]:
    """Keyword arguments of the loss: this config's, else its defaults (-1).

    Raises:
      UserError: a number is set that the method does not have.
    """
    numbers = "clip_low", "clip_high", "cap", "tau_positive", "tau_negative"
    defaults = METHODS[self.name].__kwdefaults__
    settings = {}
    for name in numbers:
      value = getattr(self, name)
      if name in defaults:
        settings[name] = defaults[name] if value == -1 else value
      elif value != -1:
        raise UserError(
          f"objective.{name}={value}: expected -1, since "
          f"objective.name={self.name!r} has only "
          f"{', '.join(n for n in numbers if n in defaults)}"
        )
    return settings

  def check_training(self) -> None:
    """UserError where two keys do not go together."""
    no_ratio_clip = self.name in ("gmpo", "rspo", "cispo", "sapo")
    for name, wrong, expected in (
      (
        "mismatch",
        self.mismatch != "none" and self.old_logps == "sampler",
        "'none' with objective.old_logps='sampler', whose weights would all "
        "be 1",
      ),
      (
        "reference_every",
        self.reference_every and not self.kl_coef,
        "0 with objective.kl_coef=0, where there is no reference to sync",
      ),
      (
        "dual_clip",
        self.dual_clip and no_ratio_clip,
        "0 with a method that does not clip a ratio against its advantage",
      ),
      (
        "router_shift_floor",
        self.name == "rspo" and self.router_shift_floor == 0,
        "more than 0 with objective.name='rspo', which is 'gmpo' without",
      ),
    ):
      if wrong:
        raise UserError(
          f"objective.{name}={getattr(self, name)!r}: expected {expected}"
        )


@dataclasses.dataclass(frozen=True)
class Critic:
  """PPO's critic."""

  learning_rate: float = key(1e-5, "its peak", ZERO_OR_MORE)
  warmup_steps: int = key(0, "optimizer steps", ZERO_OR_MORE)
  clip: float = key(
    0.2, "largest change of a value in an iteration", ZERO_OR_MORE
  )
  discount: float = key(1.0, "of the reward, per token", SHARE)
  trace_decay: float = key(0.95, "lambda of GAE", SHARE)

  def __post_init__(self):
    check(self, "critic")


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
  """All keys of a config; a key whose default is a dataclass is a section."""

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
  objective: Objective = key(
    Objective(), "the method, and what is added to its loss"
  )
  critic: Critic = key(Critic(), "of ppo; AdamW, the rest of it as in `optim`")
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
    """Prompts of an iteration, and as many that wait for partial responses."""
    partial = self.rollout.max_tokens_per_iteration > 0
    return self.data.prompts * (2 if partial else 1)

  def as_json(self) -> dict:
    """The keys as nested dicts, as JSON gives them back, for a checkpoint."""
    tree = as_dict(self)
    tree["model"] |= dict(self.model.sizes)
    return json.loads(json.dumps(tree))

  def replace(self, **changes) -> "Config":
    """A copy with other values; a section takes a dict of its keys.

    `config.replace(seed=1, data={"prompts": 8})`
    """
    sections = {
      name: dataclasses.replace(getattr(self, name), **value)
      if isinstance(value, dict)
      else value
      for name, value in changes.items()
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
    self.objective.check_training()
    self.rollout.check_training()
    partial = self.rollout.max_tokens_per_iteration > 0
    rounds = self.rollout.dynamic_sampling_rounds
    has_critic = self.objective.has_critic
    if self.model.lora.rank:
      self._check_lora()
    self._refuse(
      ("sampler.temperature", self.sampler.temperature == 0, "more than 0"),
      (
        "rollout.max_tokens_per_iteration",
        partial and not self.continuous_batching.slots,
        "0 with continuous_batching.slots=0, for only continuous batching "
        "continues a response",
      ),
      (
        "rollout.max_tokens_per_iteration",
        partial and self.objective.replay == "r3",
        "0 with objective.replay='r3', for the experts of earlier tokens are "
        "not kept",
      ),
    )
    if self.rollout.environment:
      self._check_environment()
    if self.objective.credit == "turn":
      self._check_turns()
    self._refuse(
      (
        "rollout.dynamic_sampling_rounds",
        has_critic and rounds > 1,
        "1 with objective.name='ppo', whose critic learns from equal rewards, "
        "too",
      ),
      (
        "rollout.group_size",
        self.rollout.group_size < 2 and not has_critic,
        "at least 2, since an advantage compares a response with the others of "
        "its group",
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

  def _refuse(self, *rules: tuple[str, Any, str], where: str = "") -> None:
    """UserError for the first of (key, whether it is wrong, what is expected).

    Args:
      where: the key that makes it wrong, for the end of the error.
    """
    for name, wrong, expected in rules:
      if wrong:
        value = operator.attrgetter(name)(self)
        end = where and f" ({where}={operator.attrgetter(where)(self)!r})"
        raise UserError(f"{name}={value!r}: expected {expected}{end}")

  def _check_environment(self):
    """UserError where a key does not go with an environment."""
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
        "objective.replay",
        self.objective.replay == "r3",
        "'none' or 'r2', for the experts of earlier turns are not kept",
      ),
      (
        "rollout.max_tokens_per_iteration",
        self.rollout.max_tokens_per_iteration,
        "0, for a conversation ends in the iteration in which it begins",
      ),
      where="rollout.environment",
    )

  def _check_turns(self):
    """UserError where a key does not go with advantages of turns."""
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
        self.objective.name in ("gspo", "gmpo", "rspo", "ppo"),
        "'gspo_token' or another method with an advantage for each token",
      ),
      (
        "objective.kl_estimator",
        self.objective.has_kl_in_reward,
        "'k2' or 'k3', for k1 is a penalty of whole responses",
      ),
      where="objective.credit",
    )

  def _check_lora(self):
    """UserError where a key does not go with adapters."""
    self._refuse(
      (
        "objective.name",
        self.objective.has_critic,
        "another method, for all weights of its critic would be trained",
      ),
      (
        "optim.name",
        not self.optim.name.startswith("adamw"),
        "'adamw', for Muon is made for whole matrices",
      ),
      (
        "model.lora.checkpoint",
        self.model.lora.checkpoint and self.cold_start.steps,
        "'' with a cold start, which changes the weights below the adapters",
      ),
      where="model.lora.rank",
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
  """The config that a file of configs/ makes, checked.

  Raises:
    UserError: a key is missing or unknown, a value lies outside its range, or
      it does not go with the value of another key.
  """
  return _section(Config(), config, "")


def _section(default, values, prefix: str):
  """The section with these values; `default` is one of its type."""
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
