"""The objective that an update minimises, composed of `losses`.

Dimension key: B rows, R response tokens, L layers.
"""

import dataclasses
import inspect
import math

import jax
import jax.numpy as jnp

from gspo_jax import losses, model
from gspo_jax.learner import (
  old_policy_metrics,
  routing_metrics,
  train_batch,
  train_step,
)
from gspo_jax.learner.critic import CriticConfig
from gspo_jax.learner.train_batch import TrainBatch
from gspo_jax.logprobs import TokenLogprobs
from gspo_jax.losses import METHODS, Mean, Method, Metrics, Std, Terms
from gspo_jax.losses.advantages import ESTIMATORS
from gspo_jax.runtime import spec as specs
from gspo_jax.runtime.errors import UserError, nearest
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

# What `log.instruments` adds to the metrics of an update.
INSTRUMENTS = (
  "mismatch/sequence_gap",
  "mismatch/token_gap",
  "moe/layer_load_max",
  "moe/layer_router_entropy",
  "moe/router_entropy",
  "ratio/sequence_log",
  "ratio/token_log",
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
# Ranges of the numbers of methods.
_METHOD_RULES = {
  "clip_low": ZERO_OR_MORE,
  "clip_high": ZERO_OR_MORE,
  "cap": POSITIVE,
  "tau_positive": POSITIVE,
  "tau_negative": POSITIVE,
  "k_positive": POSITIVE,
  "lambda_positive": POSITIVE,
  "k_negative": POSITIVE,
  "lambda_negative": POSITIVE,
  "delta": POSITIVE,
  "dual_clip": Range("more than 1", lambda x: 1 < x < math.inf),
  "router_shift_floor": Range("more than 0, under 1", lambda x: 0 < x < 1),
} | {name: field.metadata["rule"] for name, field in _CRITIC.items()}


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
    "the method: gspo, gspo_token, grpo, dr_grpo, dapo, ppo, gmpo, rspo, "
    "cispo, sapo, luspo, vespo, dppo_tv, dppo_kl, ctpo, or "
    "package.module.function; its numbers follow: "
    "'gspo:clip_low=3e-4,clip_high=4e-4'",
  )
  old_logps: str = key(
    "recompute",
    '"recompute": by the forward pass of the update; "sampler": as sampled, '
    "with no further pass",
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
  replay: str = key(
    "none",
    'Routing Replay: the experts of the old policy ("r2") or of the sampler '
    '("r3")',
    Choice(("none", "r2", "r3")),
  )
  advantage_estimator: str = key(
    "grpo",
    "how rewards become advantages: grpo, rloo, reinforce_plus_plus, "
    "reinforce_plus_plus_baseline, max_rl, 'pass_at_k:k=4', gdpo",
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
    if "." not in self.name.partition(":")[0]:
      _ = self.numbers

  @property
  def method(self) -> Method:
    """The row of `METHODS`, or a user's own method."""
    name = self.name.partition(":")[0]
    if name in METHODS:
      return METHODS[name]
    typed = f"objective.name={self.name!r}"
    if "." not in name:
      raise UserError(f"{typed}: {nearest(name, METHODS)}")
    try:
      method = specs.imported(name, {}, "method")
    except UserError as error:
      raise UserError(f"{typed}: {error}") from error
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
    known = ("k",) if name == "pass_at_k" else ()
    numbers = _typed(
      "advantage_estimator", spec, known, "estimator", _ESTIMATOR_RULES
    )
    if numbers.keys() < {*known}:
      raise UserError(
        f"objective.advantage_estimator={spec!r}: expected k=..., which has no "
        "default, as in 'pass_at_k:k=4'"
      )
    return name, numbers

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
      or self.estimator[0] in ("reinforce_plus_plus", "gdpo")
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

  def check_training(self) -> None:
    """UserError for an unknown method, or keys that contradict each other."""
    _ = self.numbers
    if self.mismatch != "none" and self.has_sampler_logps:
      raise UserError(
        f"objective.mismatch={self.mismatch!r}: expected 'none' with "
        "objective.old_logps='sampler', whose weights would all be 1"
      )
    if self.reference_every and not self.has_reference:
      raise UserError(
        f"objective.reference_every={self.reference_every}: expected 0 with "
        "objective.kl_coef=0, where there is no reference to sync"
      )
    if self.advantage_estimator != "grpo":
      self._check_estimator()

  def _check_estimator(self) -> None:
    """UserError where other keys leave no choice of the estimator."""
    method, typed = self.method, self.advantage_estimator
    for other, wrong, why in (
      ("name", method.critic, "whose critic gives the advantages"),
      ("name", method.advantages, "which has its own advantages"),
      (
        "name",
        not method.normalize_std and typed != "rloo",
        "whose advantages are not divided by a std, or 'rloo'",
      ),
      ("credit", self.credit == "turn", "which compares turn with turn"),
      (
        "kl_estimator",
        self.has_kl_in_reward and typed == "reinforce_plus_plus",
        "whose penalty is compared with the group's",
      ),
    ):
      if wrong:
        raise UserError(
          f"objective.advantage_estimator={typed!r}: expected 'grpo' with "
          f"objective.{other}={getattr(self, other)!r}, {why}"
        )


def _typed(name, spec, known, kind, rules) -> dict:
  """The checked numbers after the colon of `objective.NAME=SPEC`."""
  first, colon, text = spec.partition(":")
  if not colon:
    return {}
  try:
    typed = specs.values(first, known, text, kind)
  except UserError as error:
    raise UserError(f"objective.{name}={spec!r}: {error}") from error
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


def policy_loss(
  params: model.Params,
  batch: TrainBatch,
  is_old_policy: jax.Array | bool = False,
  *,
  cfg: model.ModelConfig,
  objective: ObjectiveConfig,
  temperature: float,
  max_length: int,
  instruments: bool = True,
) -> train_step.LossOutput:
  """The objective on a micro-batch, a `train_step.Loss`.

  If the policy has not moved (`is_old_policy`, [] bool), this pass also gives
  the fields of the old policy, and the ratio is 1. `max_length` is the longest
  response allowed, in tokens. With `instruments` the metrics include
  `INSTRUMENTS`.
  """
  is_old_policy = jnp.asarray(is_old_policy)
  routes = None if batch.experts is None else batch.experts.swapaxes(0, 1)
  out = train_batch.response_logps(
    params,
    cfg,
    batch,
    temperature=temperature,
    routes=routes,
    replay=objective.replay != "none",
    use_own_experts=None if objective.replay == "r3" else is_old_policy,
    router_losses=objective.has_router_losses,
  )
  old_metrics = {}
  if batch.sampler_logps is not None:
    old_metrics = old_policy_metrics.old_policy_metrics(out, batch, cfg)
  gap, has_tokens = old_policy_metrics.sequence_log_ratio(
    out.logps, batch.old_logps, batch
  )
  first_gap = Std.about_zero(jnp.expm1(gap), has_tokens)

  fields = _old_policy_fields(out, batch, objective)
  old = {
    k: jnp.where(is_old_policy, x, getattr(batch, k)) for k, x in fields.items()
  }
  batch = dataclasses.replace(batch, **old)
  distilled = {}
  if batch.teacher_logps is not None:
    batch, distilled = _distilled(batch, objective.distillation)
  options, metrics = _options(out, batch, objective, max_length)
  metrics |= distilled
  total, method_metrics = objective.method.loss(
    out.logps,
    batch.old_logps,
    batch.advantages,
    batch.response_mask,
    normalizer=1.0,
    segment_ids=batch.response_segments,
    **options,
  )
  metrics |= method_metrics
  if objective.has_router_losses:
    router_total, router_metrics = _router_losses(out, batch, objective)
    total, metrics = total + router_total, metrics | router_metrics
  if instruments and batch.router_logps is not None:
    metrics |= _routing_metrics(out, batch, objective)
  if not instruments:
    metrics, old_metrics = (
      {name: x for name, x in each.items() if name not in INSTRUMENTS}
      for each in (metrics, old_metrics)
    )
  return train_step.LossOutput(
    Mean(total, metrics["loss/policy"].count),
    metrics,
    fields,
    old_metrics,
    jax.lax.stop_gradient(first_gap),
  )


def _old_policy_fields(
  out: TokenLogprobs, batch: TrainBatch, objective
) -> dict:
  """Fields of `TrainBatch` from this pass, without gradient."""
  fields = {} if objective.has_sampler_logps else {"old_logps": out.logps}
  if batch.experts is not None and objective.replay != "r3":
    fields["experts"] = _rows_first(out.experts)
  if batch.router_logps is not None:
    fields["router_logps"] = _rows_first(out.router_logps)
  return jax.lax.stop_gradient(fields)


def _distilled(
  batch: TrainBatch, c: DistillationConfig
) -> tuple[TrainBatch, Metrics]:
  """Adds `coef * (teacher_logps - old_logps)` to each token's advantage.

  The estimate k1 of the reverse KL, sampled at this token alone: later tokens
  do not count (a discount of 0).
  """
  mask = batch.response_mask
  gap = jnp.where(mask, batch.old_logps - batch.teacher_logps, 0.0)
  metrics = {"distill/reverse_kl": Mean.of(gap, mask)}
  if batch.teacher is not None:
    for i, name in enumerate(c.folders):
      own = Mean.of(gap, mask & (batch.teacher == i))
      metrics[f"distill/reverse_kl_{name}"] = own
  advantages = batch.advantages - c.coef * gap
  return dataclasses.replace(batch, advantages=advantages), metrics


def _options(
  out: TokenLogprobs, batch: TrainBatch, objective, max_length
) -> tuple[dict, Metrics]:
  """Keyword arguments of the loss; metrics of the reference and mismatch."""
  mask, metrics, numbers = batch.response_mask, {}, objective.numbers
  penalty = weights = shift = None
  if objective.has_reference and not objective.has_kl_in_reward:
    estimator = objective.kl_estimator
    penalty = objective.kl_coef * losses.kl_penalty(
      out.logps,
      batch.reference_logps,
      mask,
      estimator=estimator,
      old_logps=batch.old_logps,
    )
  if objective.entropy_coef:
    bonus = objective.entropy_coef * out.entropy
    penalty = -bonus if penalty is None else penalty - bonus
  if options := objective.mismatch_options:
    weights, metrics = losses.mismatch_weights(
      batch.old_logps,
      batch.sampler_logps,
      mask,
      segment_ids=batch.response_segments,
      **options,
    )
  if threshold := objective.off_policy_mask_threshold:
    kept, masked = losses.off_policy_mask(
      out.logps,
      batch.sampler_logps,
      batch.advantages,
      mask,
      threshold=threshold,
      segment_ids=batch.response_segments,
    )
    weights = kept if weights is None else weights * kept
    metrics |= masked
  if batch.reference_logps is not None:
    gap = losses.kl_penalty(out.logps, batch.reference_logps, mask)
    metrics["kl/reference"] = jax.lax.stop_gradient(Mean.of(gap, mask))
  arguments = objective.method.arguments
  options = objective.loss_numbers
  if "max_length" in arguments:  # a packed row is longer than a response
    options["max_length"] = max_length
  if objective.weighs_routers:
    moved = _router_shift(out, batch)
    if "router_shift" in arguments:
      options["router_shift"] = moved
    else:
      floor = numbers["router_shift_floor"]
      shift = losses.router_log_weight(moved, mask, floor=floor)
  options["terms"] = Terms(shift, weights, penalty, numbers.get("dual_clip"))
  return options, metrics


def _router_losses(
  out: TokenLogprobs, batch: TrainBatch, objective
) -> tuple[jax.Array, Metrics]:
  """The sum to add to the loss of a micro-batch, and the losses.

  Both are means over the layers, and over the tokens of prompts and responses
  of the whole minibatch: padding alone does not count, as in transformers, TRL
  and Megatron.

  Departures: (1) transformers averages `f` and `P` over the layers before it
  multiplies them; here each layer is balanced by itself, as in Switch. (2) TRL
  averages the losses of micro-batches; here tokens weigh the same. Only `f` is
  still of a micro-batch, so the load-balancing loss depends on their size.
  """
  real_BT = batch.segment_ids > 0
  balance, z = (x.mean(0) for x in (out.load_balance, out.z_loss))
  sums_BT = objective.router_aux_loss_coef * balance
  sums_BT += objective.router_z_loss_coef * z
  total = batch.loss_per_token[:, None] * jnp.where(real_BT, sums_BT, 0.0)
  metrics = {
    "loss/router_aux": Mean.of(balance, real_BT),
    "loss/router_z": Mean.of(z, real_BT),
  }
  return total.sum(), jax.lax.stop_gradient(metrics)


def loss_per_token(
  batch: TrainBatch, objective: ObjectiveConfig, max_length: int
) -> jax.Array:
  """[M, A, rows]: what makes a sum over tokens a mean, of each minibatch.

  `train_step.gradient` divides all sums of a minibatch by the count of its
  policy loss. Means over other tokens first take this count over theirs. It
  comes from the loss itself, which counts what the mask has.
  """
  options = objective.loss_numbers
  arguments = objective.method.arguments

  def count(batch):
    zeros = jnp.zeros(batch.response_mask.shape)
    own = {"max_length": max_length, "router_shift": zeros}
    _, metrics = objective.method.loss(
      zeros,
      zeros,
      zeros,
      batch.response_mask,
      normalizer=1.0,
      segment_ids=batch.response_segments,
      **options | {name: own[name] for name in own if name in arguments},
    )
    return metrics["loss/policy"].count

  counts_M = jax.vmap(jax.vmap(count))(batch).sum(1)
  tokens_M = (batch.segment_ids > 0).sum((1, 2, 3))
  per_token_M = counts_M / jnp.maximum(tokens_M, 1)
  return jnp.broadcast_to(
    per_token_M[:, None, None], batch.segment_ids.shape[:3]
  )


def _router_shift(out: TokenLogprobs, batch: TrainBatch) -> jax.Array:
  new = _rows_first(out.router_logps)
  return routing_metrics.shift(new, batch.router_logps)


def _rows_first(x: jax.Array) -> jax.Array:
  """[L, B, ...] -> [B, L, ...], as in a `TrainBatch`."""
  return x.swapaxes(0, 1)


def _routing_metrics(
  out: TokenLogprobs, batch: TrainBatch, objective
) -> Metrics:
  """How far the routers have moved since the old policy."""
  mask = batch.response_mask
  ratio = jnp.exp(-_router_shift(out, batch))
  metrics = {"moe/router_shift_ratio": Mean.of(ratio, mask)}
  if objective.replay == "none":  # a replay uses the old experts
    flips = routing_metrics.flips(_rows_first(out.experts), batch.experts, mask)
    metrics["moe/expert_flip_rate"] = routing_metrics.over_layers(flips)
    metrics["moe/layer_flip_rate"] = flips
  return metrics
