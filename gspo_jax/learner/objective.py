"""The config of the objective: a method, and what is added to its loss."""

import dataclasses
import inspect
import math

from gspo_jax import model
from gspo_jax.learner.critic import CriticConfig
from gspo_jax.losses import METHODS, Method
from gspo_jax.losses.advantages import ESTIMATORS, Estimator
from gspo_jax.runtime import spec as specs
from gspo_jax.runtime.errors import UserError, nearest, prefixed
from gspo_jax.runtime.key import (
  FINITE,
  POSITIVE,
  UNDER_1,
  ZERO_OR_MORE,
  Choice,
  Range,
  check,
  key,
)

# The numbers of a mismatch correction, by its name.
_MISMATCH = {
  "none": (),
  "tis_token": ("cap",),
  "tis_sequence": ("cap",),
  "mis_token": ("cap", "floor"),
  "mis_sequence": ("cap", "floor"),
  "icepop": ("cap", "floor"),
}
_MISMATCH_RULES = {
  "cap": Range("1 or more", lambda x: 1 <= x < math.inf),
  "floor": UNDER_1,
}
_ESTIMATOR_RULES = {
  "k": Range(
    "a whole number, 1 or more", lambda x: isinstance(x, int) and x >= 1
  )
}
_CRITIC = {f"critic_{f.name}": f for f in dataclasses.fields(CriticConfig)}
# Ranges of the numbers of methods: more than 0 unless a row says otherwise.
_METHOD_RULES = {
  **{name: POSITIVE for row in METHODS.values() for name in row.numbers},
  "clip_low": ZERO_OR_MORE,
  "clip_high": ZERO_OR_MORE,
  "dual_clip": Range("more than 1", lambda x: 1 < x < math.inf),
  "router_shift_floor": Range("more than 0, under 1", lambda x: 0 < x < 1),
  **{name: field.metadata["rule"] for name, field in _CRITIC.items()},
}


def _example(estimator: str) -> str:
  """An `advantage_estimator` of this name, with its numbers."""
  numbers = ESTIMATORS[estimator].numbers.items()
  typed = ",".join(f"{number}={value}" for number, value in numbers)
  return f"'{estimator}:{typed}'" if typed else estimator


@dataclasses.dataclass(frozen=True)
class DistillationConfig:
  """On-policy distillation: frozen teachers score the responses."""

  teachers: tuple[str, ...] = key(
    (),
    "each a Hugging Face folder, a run's workdir (its newest checkpoint) or "
    "WORKDIR/checkpoints/STEP, with the policy's vocabulary; (): no "
    "distillation. One teaches all problems; several: one for each source of "
    "data.source, in its order",
  )
  teacher_key: str = key(
    "",
    "the column of the problems that names their teacher; teachers are then "
    '"NAME=FOLDER"',
  )
  coef: float = key(
    1.0, "of a token's teacher log-prob minus old log-prob", ZERO_OR_MORE
  )
  reward_weight: float = key(
    0.0,
    "of the advantages of rewards; 0: rewards are logged, not learned from",
    ZERO_OR_MORE,
  )

  def __post_init__(self):
    check(self, "objective.distillation")
    if len({*self.folders}) < len(self.teachers):
      raise UserError(
        f"objective.distillation.teachers={self.teachers}: expected each NAME "
        "once"
      )

  @property
  def folders(self) -> dict[str, str]:
    """The folder of each teacher by its name: 0, 1, ... without a key."""
    if not self.teacher_key:
      return {str(i): folder for i, folder in enumerate(self.teachers)}
    pairs = [teacher.partition("=") for teacher in self.teachers]
    for teacher, (name, _, folder) in zip(self.teachers, pairs, strict=True):
      if not (name and folder):
        raise UserError(
          f"objective.distillation.teachers={teacher!r}: expected NAME=FOLDER "
          f"with objective.distillation.teacher_key={self.teacher_key!r}"
        )
    return {name: folder for name, _, folder in pairs}


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
  """The method, and what is added to its loss; static under jit."""

  name: str = key(
    "gspo",
    f"the method: {', '.join(METHODS)}, or package.module.function; its "
    "numbers follow: "
    "'gspo:clip_low=3e-4,clip_high=4e-4'",
  )
  old_logps: str = key(
    "recompute",
    '"recompute": by the forward pass of the update; "sampler": as sampled, '
    "with no further pass. With model.exact both are the same numbers if all "
    "responses are of the newest weights: then no pass runs",
    Choice(("sampler", "recompute")),
  )
  kl_coef: float = key(
    0.0, "of the KL to a reference policy; 0: no reference", ZERO_OR_MORE
  )
  kl_estimator: str = key(
    "k3",
    '"k2", "k3", "k3_unbiased": in the loss; "k1": in the reward',
    Choice(("k1", "k2", "k3", "k3_unbiased")),
  )
  reference_every: int = key(
    0, "iterations between syncs of the reference; 0: frozen", ZERO_OR_MORE
  )
  entropy_coef: float = key(0.0, "of the entropy bonus", ZERO_OR_MORE)
  router_aux_loss_coef: float = key(
    0.0, "of the routers' load-balancing loss; 0: none", ZERO_OR_MORE
  )
  router_z_loss_coef: float = key(
    0.0, "of the routers' z-loss; 0: none", ZERO_OR_MORE
  )
  mismatch: str = key(
    "none",
    "importance weights between sampler and trainer: 'tis_token:cap=2', "
    "tis_sequence, 'mis_token:cap=2,floor=0.5', mis_sequence, "
    "'icepop:cap=5,floor=0.5'",
  )
  off_policy_mask_threshold: float = key(
    0.0,
    "mean log-ratio of a response, from the policy to the sampler, above which "
    "a negative advantage does not count; 0: none",
    ZERO_OR_MORE,
  )
  score_centering: int = key(
    0,
    "score centering by so many of a token's likeliest ids, such as 64, whose "
    "log-probs the sampler records; 0: none",
    ZERO_OR_MORE,
  )
  replay: str = key(
    "none",
    'Routing Replay: the experts of the old policy ("r2") or of the sampler '
    '("r3")',
    Choice(("none", "r2", "r3")),
  )
  advantage_estimator: str = key(
    "grpo",
    f"how rewards become advantages: {', '.join(map(_example, ESTIMATORS))}",
  )
  truncated: str = key(
    "train",
    'what a response that was cut counts for: "train": as any other; '
    '"zero_advantage": it has no advantage, but counts in the mean; "mask": '
    "overlong filtering, it has no part in the loss. Its reward always counts "
    "in the mean of its group",
    Choice(("train", "zero_advantage", "mask")),
  )
  credit: str = key(
    "response",
    '"response": one advantage, of the whole conversation; "turn": one for '
    "each turn",
    Choice(("response", "turn")),
  )
  distillation: DistillationConfig = key(
    DistillationConfig(), "on-policy distillation from frozen teachers"
  )

  def __post_init__(self):
    check(self, "objective")
    _ = self.mismatch_options, self.estimator
    # A policy can be evaluated without the module of a user's own method.
    if not self.has_own_method:
      _ = self.numbers

  @property
  def has_own_method(self) -> bool:
    """Whether `name` is a function of the user's."""
    return "." in self.name.partition(":")[0]

  @property
  def method(self) -> Method:
    """The row of `METHODS`, or a user's own method."""
    name = self.name.partition(":")[0]
    if name in METHODS:
      return METHODS[name]
    typed = f"objective.name={self.name!r}"
    if not self.has_own_method:
      raise UserError(f"{typed}: {nearest(name, METHODS)}")
    with prefixed(typed):
      method = specs.imported(name, {}, "method")
    if not isinstance(method, Method):
      method = Method(method)
    arguments = method.arguments.keys()
    if lacking := {"normalizer", "segment_ids", "terms"} - arguments:
      raise UserError(
        f"{typed}: {name} has no keyword-only argument {min(lacking)!r}: "
        "expected the arguments of gspo_loss"
      )
    # `terms` carries both; a loss with router_shift may take the floor itself.
    taken = {"dual_clip"} & arguments
    if "router_shift" not in arguments:
      taken |= {"router_shift_floor"} & arguments
    if taken:
      raise UserError(
        f"{typed}: {name} has an argument {min(taken)!r}, which `terms` "
        "already has: expected another name"
      )
    return method

  @property
  def numbers(self) -> dict:
    """All numbers of the method: given in `name`, or its defaults."""
    method = self.method
    defaults = {"router_shift_floor": None} | method.numbers
    if method.clips == "ratio":
      defaults["dual_clip"] = None
    if method.critic:
      defaults |= {name: field.default for name, field in _CRITIC.items()}
    numbers = defaults | _typed(
      "name", self.name, defaults, "method", _METHOD_RULES
    )
    for name, value in numbers.items():
      if value is inspect.Parameter.empty:
        raise UserError(
          f"objective.name={self.name!r}: expected {name}=..., which has no "
          "default"
        )
    return numbers

  @property
  def loss_numbers(self) -> dict:
    """The numbers that are arguments of the loss."""
    numbers = self.numbers
    return {name: numbers[name] for name in self.method.numbers}

  @property
  def critic(self) -> CriticConfig | None:
    if not self.method.critic:
      return None
    numbers = self.numbers
    return CriticConfig(**{f.name: numbers[n] for n, f in _CRITIC.items()})

  @property
  def mismatch_options(self) -> dict | None:
    """Arguments of `mismatch_weights`; None without a correction."""
    name = self.mismatch.partition(":")[0]
    if name not in _MISMATCH:
      hint = nearest(name, _MISMATCH)
      raise UserError(f"objective.mismatch={self.mismatch!r}: {hint}")
    typed = _typed(
      "mismatch", self.mismatch, _MISMATCH[name], "correction", _MISMATCH_RULES
    )
    if name == "none":
      return None
    if name == "icepop":  # arXiv 2510.18855, sec. 2.3.4
      defaults = {"method": "mis", "unit": "token", "cap": 5.0, "floor": 0.5}
      return defaults | typed
    method, unit = name.split("_")
    return {"method": method, "unit": unit} | typed

  @property
  def estimator(self) -> tuple[str, dict]:
    """The name of the advantage estimator, and its numbers."""
    spec = self.advantage_estimator
    name = spec.partition(":")[0]
    if name not in ESTIMATORS:
      hint = nearest(name, ESTIMATORS)
      raise UserError(f"objective.advantage_estimator={spec!r}: {hint}")
    known = tuple(ESTIMATORS[name].numbers)
    numbers = _typed(
      "advantage_estimator", spec, known, "estimator", _ESTIMATOR_RULES
    )
    for number in known:
      if number not in numbers:
        raise UserError(
          f"objective.advantage_estimator={spec!r}: expected {number}=..., "
          f"which has no default, as in {_example(name)}"
        )
    return name, numbers

  @property
  def estimator_row(self) -> Estimator:
    """The row of `ESTIMATORS`."""
    return ESTIMATORS[self.estimator[0]]

  @property
  def has_reference(self) -> bool:
    return self.kl_coef > 0

  @property
  def has_kl_in_reward(self) -> bool:
    """Whether the KL penalty is in the reward (k1), not in the loss."""
    return self.has_reference and self.kl_estimator == "k1"

  @property
  def has_router_losses(self) -> bool:
    return self.router_aux_loss_coef > 0 or self.router_z_loss_coef > 0

  @property
  def has_sampler_logps(self) -> bool:
    """Whether the sampler's log-probs are used as the old ones."""
    return self.old_logps == "sampler"

  @property
  def recompute_first_minibatch(self) -> bool:
    """Whether rewards need the old log-probs of every response (k1)."""
    return self.has_kl_in_reward and not self.has_sampler_logps

  @property
  def compares_groups(self) -> bool:
    """Whether a group of equal rewards gives no gradient."""
    return not (
      self.method.critic
      or self.has_kl_in_reward
      or self.distillation.teachers
      or self.estimator_row.equal_totals_teach
    )

  @property
  def weighs_routers(self) -> bool:
    """Whether tokens are weighted by how far their routers moved."""
    method, numbers = self.method, self.numbers
    return (
      "router_shift" in method.arguments
      or numbers["router_shift_floor"] is not None
    )

  def reads_old_routers(
    self, cfg: model.ModelConfig, instruments: bool
  ) -> bool:
    """Whether an update compares the routers with the old policy's."""
    return cfg.num_experts > 0 and (instruments or self.weighs_routers)

  def reads_old_experts(
    self, cfg: model.ModelConfig, instruments: bool
  ) -> bool:
    """Whether an update reads the experts that the old policy chose."""
    replays = cfg.num_experts > 0 and self.replay == "r2"
    return replays or self.reads_old_routers(cfg, instruments)


def _typed(name, spec, known, kind, rules) -> dict:
  """The checked numbers after the colon of `objective.NAME=SPEC`."""
  first, colon, text = spec.partition(":")
  if not colon:
    return {}
  with prefixed(f"objective.{name}={spec!r}"):
    typed = specs.values(first, known, text, kind)
  defaults = known if isinstance(known, dict) else {}
  for number, value in typed.items():
    rule = rules.get(number)
    if type(defaults.get(number)) in (int, float):
      rule = rule or FINITE
    if rule and (type(value) not in (int, float) or not rule.holds(value)):
      raise UserError(
        f"objective.{name}={spec!r}: {number}={value}: expected {rule.expected}"
      )
  return typed
