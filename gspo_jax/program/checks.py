"""What a config may not say, told before any work is done."""

import math
from collections.abc import Iterable

from gspo_jax.runtime.errors import UserError, nearest

# what is expected, whether a value is that, and the keys it holds for
_RANGES = (
  (
    "at least 1",
    lambda x: x >= 1,
    "data.max_prompt_length rollout.dynamic_sampling_rounds reward.workers eval.prompts "
    "eval.samples eval.every checkpoint.every checkpoint.keep "
    "log.samples_every cold_start.check_every",
  ),
  (
    "0 or more",
    lambda x: 0 <= x < math.inf,
    "num_steps log.samples cold_start.steps optim.warmup_steps "
    "cold_start.warmup_steps optim.weight_decay sampler_mesh.expert "
    "sampler_mesh.tensor objective.kl_coef objective.entropy_coef "
    "objective.reference_every critic.warmup_steps critic.clip "
    "optim.learning_rate critic.learning_rate "
    "rollout.max_tokens_per_iteration rollout.extra_prompts_in_flight",
  ),
  (
    "more than 0",
    lambda x: 0 < x < math.inf,
    "optim.clip_norm cold_start.learning_rate sampler.temperature "
    "reward.seconds",
  ),
  ("0 or more, under 2**32", lambda x: 0 <= x < 2**32, "seed"),
  (
    "0 to 1",
    lambda x: 0 <= x <= 1,
    "cold_start.gate critic.discount critic.trace_decay reward.max_failed",
  ),
  ("1 or more", lambda x: 1 <= x < math.inf, "objective.mismatch_cap"),
  (
    "more than 0, or -1 for the method's own",
    lambda x: x == -1 or 0 < x < math.inf,
    "objective.cap objective.tau_positive objective.tau_negative",
  ),
  (
    "0 for none, or more than 1",
    lambda x: x == 0 or 1 < x < math.inf,
    "objective.dual_clip",
  ),
  (
    "0 for none, under 1, or -1 for the method's own",
    lambda x: x == -1 or 0 <= x < 1,
    "objective.router_shift_floor",
  ),
  (
    "0 or more, under 1",
    lambda x: 0 <= x < 1,
    "optim.b1 optim.b2 objective.mismatch_floor",
  ),
  (
    "0 or more, or -1 for the method's own",
    lambda x: x == -1 or 0 <= x < math.inf,
    "objective.clip_low objective.clip_high",
  ),
)


_CHOICES = {
  "objective.old_logps": ("sampler", "recompute"),
  "objective.kl_estimator": ("k1", "k2", "k3"),
  "objective.mismatch": (
    "none",
    "tis_token",
    "tis_sequence",
    "mis_token",
    "mis_sequence",
  ),
  "objective.replay": ("none", "r2", "r3"),
}

# A key of the objective, whether it suits the others, and what would.
_NEEDS = (
  (
    "mismatch",
    lambda c: c.mismatch == "none" or c.old_logps == "recompute",
    "'none' with objective.old_logps='sampler', whose weights would all be 1",
  ),
  (
    "reference_every",
    lambda c: not c.reference_every or c.kl_coef > 0,
    "0 with objective.kl_coef=0, where there is no reference to sync",
  ),
  (
    "dual_clip",
    lambda c: (
      not c.dual_clip or c.name not in ("gmpo", "rspo", "cispo", "sapo")
    ),
    "0 with a method that does not clip a ratio against its advantage",
  ),
  (
    "router_shift_floor",
    lambda c: c.name != "rspo" or c.router_shift_floor != 0,
    "more than 0 with objective.name='rspo', which is 'gmpo' without",
  ),
)


def check(config, objectives: Iterable[str], *, shards: int) -> None:
  """UserError for what would fail later, or silently do something else.

  Args:
    config: all the keys of configs/common.py.
    objectives: the names there are.
    shards: devices that share the rows of a batch.
  """
  for key, choices in {"objective.name": tuple(objectives), **_CHOICES}.items():
    value = _get(config, key)
    if value not in choices:
      raise UserError(f"{key}={value!r}: {nearest(value, choices)}")
  for expected, good, keys in _RANGES:
    for key in keys.split():
      value = _get(config, key)
      if not good(value):
        raise UserError(f"{key}={value}: expected {expected}")
  _check_together(config)
  if config.rollout.group_size < 2 and config.objective.name != "ppo":
    raise UserError(
      f"rollout.group_size={config.rollout.group_size}: expected at least 2, "
      "since an advantage compares an answer with the others of its group"
    )
  _check_sizes(config, shards)


def _check_together(config):
  """What makes no sense beside another value."""
  c = config.objective
  for key, good, expected in _NEEDS:
    if not good(c):
      raise UserError(f"objective.{key}={c[key]!r}: expected {expected}")
  _check_rollout(config)
  if c.name == "ppo" and config.rollout.dynamic_sampling_rounds > 1:
    raise UserError(
      f"rollout.dynamic_sampling_rounds={config.rollout.dynamic_sampling_rounds}: expected 1 with "
      "objective.name='ppo', whose critic learns from equal rewards, too"
    )


def _check_rollout(config):
  """What waits for the next iteration goes with the rest."""
  c = config.rollout
  waits = "ahead" if c.ahead else "budget" if c.budget else ""
  if waits and config.rollout.dynamic_sampling_rounds > 1:
    raise UserError(
      f"rollout.{waits}={c[waits]}: expected {type(c[waits])()} with "
      f"rollout.dynamic_sampling_rounds={config.rollout.dynamic_sampling_rounds}, whose batches are "
      "drawn until one of them will do"
    )
  if c.budget and not config.continuous_batching.slots:
    raise UserError(
      f"rollout.max_tokens_per_iteration={c.budget}: expected 0 with continuous_batching.slots=0, for only "
      "refill continues an answer"
    )
  if c.budget and config.objective.replay == "r3":
    raise UserError(
      f"rollout.max_tokens_per_iteration={c.budget}: expected 0 with objective.replay='r3', for "
      "the experts of what was drawn before are not kept"
    )
  if bool(c.budget) != bool(c.spare):
    raise UserError(
      f"rollout.max_tokens_per_iteration={c.budget} and rollout.extra_prompts_in_flight={c.spare}: expected both "
      "or neither: answers that are cut wait beside those of a batch"
    )


def _get(config, key):
  section, _, name = key.rpartition(".")
  return config[section][name] if section else config[name]


def _check_sizes(config, shards):
  """Every cut of a batch comes out even."""
  prompts, batch = config.data.prompts, config.cold_start.batch
  minibatches, micro = (
    config.learner.minibatches,
    config.learner.micro_batch_size,
  )
  divides("data.prompts", prompts, "learner.minibatches", minibatches)
  rows = prompts * config.rollout.group_size // minibatches
  divides("the answers of a minibatch", rows, "learner.micro_batch_size", micro)
  sizes = {"data.prompts": prompts, "learner.micro_batch_size": micro}
  sizes["rollout.extra_prompts_in_flight"] = (
    config.rollout.extra_prompts_in_flight
  )
  if config.cold_start.steps:
    micro = min(micro, batch)
    divides("cold_start.batch", batch, "learner.micro_batch_size", micro)
    sizes["cold_start.batch"] = batch
  for name, size in sizes.items():
    multiple(name, size, "mesh.data x fsdp x expert", shards)


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
