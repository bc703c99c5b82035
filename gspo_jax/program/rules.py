"""Tables of rules: which keys of a config go together.

A rule is an error and a function, which says whether a config is wrong; None:
whether the error's first key is not false. In an error {section.key} stands for
section.key=value. Only training needs the rules:
a policy can be evaluated on other devices.
"""

import operator
import re
from collections.abc import Callable
from typing import Any

from gspo_jax.program.config import Config
from gspo_jax.rewards.pool import MODEL
from gspo_jax.runtime.errors import UserError

Rules = dict[str, Callable[[Config], Any] | None]

_has_critic = lambda c: c.objective.method.critic
_has_one_advantage = lambda c: c.objective.method.one_advantage
_has_kl_in_reward = lambda c: c.objective.has_kl_in_reward
_takes_router_shift = lambda c: "router_shift" in c.objective.method.arguments
_estimator = lambda c: c.objective.estimator_row
_has_rounds = lambda c: c.rollout.dynamic_sampling_rounds > 1
_has_no_slots = lambda c: not c.continuous_batching.slots
_maps_sources_to_teachers = lambda c: (
  len(c.objective.distillation.teachers) > 1
  and not c.objective.distillation.teacher_key
)


def _where(
  holds: Callable[[Config], Any], rules: Rules, because: str = ""
) -> Rules:
  """The rules of a config where `holds`; their errors end with `because`."""
  both = lambda *rule: lambda c: holds(c) and _broken(c, *rule)
  return {error + because: both(error, rules[error]) for error in rules}


def _broken(config: Config, error: str, wrong: Callable | None) -> bool:
  key = error[1 : error.index("}")]
  return (wrong or operator.attrgetter(key))(config)


_ESTIMATOR = "{objective.advantage_estimator}: expected 'grpo' with "
_FULL_GROUPS = (
  ": expected 0 with {rollout.dynamic_sampling_rounds}, which samples until a "
  "batch is full of groups whose rewards differ"
)
_TOKEN_METHOD = (
  "{objective.name}: expected 'gspo_token' or another method with an advantage "
  "for each token"
)

_OBJECTIVE = {
  "{objective.mismatch}: expected 'none' with {objective.old_logps}, whose "
  "weights would all be 1": lambda c: (
    c.objective.mismatch != "none" and c.objective.has_sampler_logps
  ),
  "{objective.reference_every}: expected 0 with objective.kl_coef=0, where "
  "there is no reference to sync": lambda c: (
    c.objective.reference_every and not c.objective.has_reference
  ),
  "{objective.score_centering}: expected 0 with {objective.old_logps}, whose "
  "ratios already weigh by policy / sampler": lambda c: (
    c.objective.score_centering and c.objective.has_sampler_logps
  ),
  "{sampler.kept_ids}: expected 1 or more with {objective.score_centering}, "
  "for a head is of the ids that were sampled among": lambda c: (
    c.objective.score_centering
    and c.sampler.truncates
    and not c.sampler.keeps_ids
  ),
} | _where(
  lambda c: c.objective.advantage_estimator != "grpo",
  {
    _ESTIMATOR
    + "{objective.name}, whose critic gives the advantages": _has_critic,
    _ESTIMATOR + "{objective.name}, which has its own advantages": lambda c: (
      c.objective.method.advantages
    ),
    _ESTIMATOR + "{objective.name}, whose advantages are not divided by a std, "
    "or 'rloo'": lambda c: (
      not c.objective.method.normalize_std and not _estimator(c).unscaled
    ),
    _ESTIMATOR
    + "{objective.credit}, which compares turn with turn": lambda c: (
      c.objective.credit == "turn"
    ),
    _ESTIMATOR + "{objective.kl_estimator}, whose penalty is compared with the "
    "group's": lambda c: (
      _has_kl_in_reward(c) and not _estimator(c).compares_group
    ),
  },
)

_LORA = _where(
  lambda c: c.model.lora.rank,
  {
    "{objective.name}: expected another method, for all weights of its critic "
    "would be trained": _has_critic,
    "{optim.name}: expected 'adamw', for Muon is made for whole matrices": (
      lambda c: not c.optim.name.startswith("adamw")
    ),
    "{optim.freeze_moe_router}: expected False, for only adapters are "
    "trained": None,
    "{model.lora.checkpoint}: expected '' with a cold start, which changes the "
    "weights below the adapters": lambda c: (
      c.model.lora.checkpoint and c.cold_start.steps
    ),
  },
  " ({model.lora.rank})",
)

_EXACT = _where(
  lambda c: c.model.exact,
  {
    "{continuous_batching.slots}: expected 1 or more, for the static sampler "
    "is not exact": _has_no_slots,
    "{continuous_batching.page_size}: expected a power of two": lambda c: (
      c.continuous_batching.page_size.bit_count() > 1
    ),
    "{objective.mismatch}: expected 'none', for there is no mismatch": (
      lambda c: c.is_exact and c.objective.mismatch != "none"
    ),
    "{objective.score_centering}: expected 0, for heads are not exact": None,
    "{sampler_mesh.tensor}: expected 0 or {mesh.tensor}, for sampler and "
    "trainer sum over as many devices": lambda c: (
      c.sampler_mesh.tensor not in (0, c.mesh.tensor)
    ),
    "{mesh.context}: expected 1, for all tokens of a sequence must be on one "
    "device": lambda c: c.mesh.context != 1,
  },
  " ({model.exact})",
)

_ENVIRONMENT = _where(
  lambda c: c.rollout.environment,
  {
    "{continuous_batching.slots}: expected 1 or more, for only continuous "
    "batching continues a conversation": _has_no_slots,
    "{reward.names}: expected (), for the environment gives the reward": None,
    "{reward.weights}: expected (1.0,), for the environment gives the "
    "reward": lambda c: c.reward.weights not in ((), (1.0,)),
    "{objective.advantage_estimator}: expected another one, for the "
    "environment gives one reward": lambda c: _estimator(c).rewards == "each",
    "{rollout.max_tokens_per_iteration}: expected 0, for a conversation ends "
    "in the iteration in which it begins": None,
  },
  " ({rollout.environment})",
)

_TURNS = _where(
  lambda c: c.objective.credit == "turn",
  {
    "{rollout.environment}: expected one, for there are no turns without it": (
      lambda c: not c.rollout.environment
    ),
    "{rollout.dynamic_sampling_rounds}: expected 1, for it keeps groups by the "
    "rewards of whole conversations": _has_rounds,
    _TOKEN_METHOD: lambda c: (
      _has_one_advantage(c) or _has_critic(c) or c.objective.method.advantages
    ),
    "{objective.kl_estimator}: expected 'k2' or 'k3', for k1 is a penalty of "
    "whole responses": _has_kl_in_reward,
  },
  " ({objective.credit})",
)

_TEACHERS = _where(
  lambda c: c.objective.distillation.teachers,
  {
    _TOKEN_METHOD: _has_one_advantage,
    "{objective.kl_estimator}: expected 'k2' or 'k3', for k1 is a part of the "
    "reward": _has_kl_in_reward,
    "{rollout.dynamic_sampling_rounds}: expected 1 with "
    "objective.distillation.reward_weight=0, for it keeps groups by "
    "rewards": lambda c: (
      _has_rounds(c) and not c.objective.distillation.reward_weight
    ),
    "{data.curriculum}: expected () without "
    "objective.distillation.teacher_key": lambda c: (
      _maps_sources_to_teachers(c) and c.data.curriculum
    ),
    "{data.source}: expected as many sources as teachers without "
    "objective.distillation.teacher_key": lambda c: (
      _maps_sources_to_teachers(c)
      and c.data.source.count(",") + 1 != len(c.objective.distillation.teachers)
    ),
  },
  " ({objective.distillation.teachers})",
)

_ADVANTAGES = {
  "{rollout.dynamic_sampling_rounds}: expected 1 with {objective.name}, whose "
  "critic learns from equal rewards, too": lambda c: (
    _has_rounds(c) and _has_critic(c)
  ),
  "{rollout.dynamic_sampling_rounds}: expected 1 with {sampler_mesh.devices}, "
  "for the reward model runs on the trainer's devices": lambda c: (
    _has_rounds(c)
    and c.sampler_mesh.devices
    and any(name.startswith(MODEL) for name in c.reward.names)
  ),
  "{rollout.group_size}: expected at least 2, since an advantage compares a "
  "response with the others of its group": lambda c: (
    c.rollout.group_size < 2
    and not _has_critic(c)
    and _estimator(c).compares_group
    and (
      not c.objective.distillation.teachers
      or c.objective.distillation.reward_weight
    )
  ),
  "{rollout.dynamic_sampling_rounds}: expected 1 with "
  "{objective.advantage_estimator}, which may learn from a group whose total "
  "rewards are equal": lambda c: (
    _has_rounds(c) and _estimator(c).equal_totals_teach
  ),
  "{objective.advantage_estimator}: expected k up to {rollout.group_size}": (
    lambda c: c.objective.estimator[1].get("k", 1) > c.rollout.group_size
  ),
  "{reward.names}: expected one with {objective.advantage_estimator}, which is "
  "made for right and wrong": lambda c: (
    _estimator(c).one_reward and len(c.reward.names) > 1
  ),
}

# In this order: the first broken rule is the error.
TRAINING: Rules = {
  **_EXACT,
  **_OBJECTIVE,
  **_where(
    _has_rounds,
    {
      "{rollout.max_staleness}" + _FULL_GROUPS: None,
      "{rollout.max_tokens_per_iteration}" + _FULL_GROUPS: None,
    },
  ),
  **_LORA,
  "{sampler.temperature}: expected more than 0": lambda c: (
    c.sampler.temperature == 0
  ),
  "{continuous_batching.speculation}: expected 0 with "
  "{continuous_batching.slots}, for only continuous batching "
  "speculates": lambda c: (
    c.continuous_batching.speculation and _has_no_slots(c)
  ),
  "{rollout.max_tokens_per_iteration}: expected 0 with "
  "{continuous_batching.slots}, for only continuous batching continues a "
  "response": lambda c: c.rollout.max_tokens_per_iteration and _has_no_slots(c),
  **_ENVIRONMENT,
  "{rollout.max_sequences}: expected 1 without rollout.environment": (
    lambda c: c.rollout.max_sequences > 1 and not c.rollout.environment
  ),
  **_TURNS,
  **_TEACHERS,
  **_ADVANTAGES,
  "{log.profile}: expected iterations up to {num_steps}": lambda c: (
    c.log.profile and c.log.profile[1] > c.num_steps
  ),
  "{data.drop_solved}: expected False with {sampler_mesh.devices} and "
  "{rollout.max_staleness}: which prompts come next would go by the "
  "clock": lambda c: (
    c.data.drop_solved and c.sampler_mesh.devices and c.rollout.max_staleness
  ),
}

_NO_ROUTER = ", for the model is dense and has no router"
DENSE: Rules = {  # of a model without experts
  "{model.float32_router}: expected False" + _NO_ROUTER: None,
  "{optim.freeze_moe_router}: expected False" + _NO_ROUTER: None,
  "{objective.replay}: expected 'none'" + _NO_ROUTER: lambda c: (
    c.objective.replay != "none"
  ),
  "{objective.router_aux_loss_coef}: expected 0" + _NO_ROUTER: None,
  "{objective.router_z_loss_coef}: expected 0" + _NO_ROUTER: None,
  "{objective.name} weighs tokens by how far the router moved, and the model "
  "is dense; of the methods here, 'gmpo' is 'rspo' without "
  "it": _takes_router_shift,
  "{objective.name}: expected no router_shift_floor" + _NO_ROUTER: lambda c: (
    c.objective.numbers["router_shift_floor"] is not None
  ),
}


def check(config: Config, rules: Rules) -> None:
  """UserError for the first rule that the config breaks."""
  typed = lambda key: f"{key[1]}={operator.attrgetter(key[1])(config)!r}"
  for error, wrong in rules.items():
    if _broken(config, error, wrong):
      raise UserError(re.sub(r"{(.*?)}", typed, error))


def check_training(config: Config, shards: int, context: int = 1) -> None:
  """UserError unless the keys agree on what training needs.

  `shards` devices split a batch; `context` devices split each row of an update.
  """
  _ = config.objective.numbers  # of a user's own method
  check(config, TRAINING)
  # Each split of a batch gives equal parts.
  prompts, micro = config.data.prompts, config.learner.micro_batch_size
  divides(
    "data.prompts", prompts, "learner.minibatches", config.learner.minibatches
  )
  rows = prompts * config.rollout.group_size // config.learner.minibatches
  divides(
    "the responses of a minibatch", rows, "learner.micro_batch_size", micro
  )
  sizes = {"data.prompts": prompts}
  if config.cold_start.steps:
    batch = config.cold_start.batch
    micro = min(micro, batch)
    divides("cold_start.batch", batch, "learner.micro_batch_size", micro)
    sizes["cold_start.batch"] = batch
  for name, size in sizes.items():
    multiple(name, size, "mesh.data x fsdp x context x expert", shards)
  rows, name = shards // context, "learner.micro_batch_size"
  micro = config.learner.micro_batch_size
  multiple(name, micro, "mesh.data x fsdp x expert", rows)
  width = config.data.max_prompt_length + config.sampler.max_new_tokens
  name = "data.max_prompt_length + sampler.max_new_tokens"
  multiple(name, width, "mesh.context", context)


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
