"""Advantages: rewards in, float32 advantages out.

P prompts have a group of G responses each, and a response may have N rewards.
A function of [P, G] compares responses with their group, and some also with
the batch: give them the responses of all hosts, before the batch is split into
minibatches.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp


def group_relative_advantages(
  rewards: jax.Array,
  *,
  normalize_std: bool = True,
  ddof: int = 0,
  eps: float = 1e-6,
) -> jax.Array:
  """[P, G]: A_i = (r_i - mean) / (std + eps), over the responses to a prompt.

  Shao et al. 2024, arXiv 2402.03300, sec. 4.1.2; Zheng et al. 2025,
  arXiv 2507.18071, sec. 4.1. With `normalize_std=False` there is no division,
  as in Dr. GRPO, Liu et al. 2025, arXiv 2503.20783, sec. 3.2.

  With `ddof=0` the rewards 1, 0, 1, 0 give +1, -1, +1, -1 (up to `eps`), as in
  the papers' examples. The PyTorch trainers use `ddof=1`, which makes A smaller
  by the factor sqrt((G - 1) / G). A group of equal rewards gives exact zeros.

  Args:
    rewards: [P, G], of any real dtype; G >= 2, G > ddof.
    ddof: subtracted from G in the denominator of the variance.
    eps: added to the standard deviation, in units of reward.
  """
  rewards = jnp.asarray(rewards, jnp.float32)
  if rewards.ndim != 2 or rewards.shape[1] < max(2, ddof + 1):
    raise ValueError(
      f"expected rewards [P, G], G >= {max(2, ddof + 1)}, got {rewards.shape=}"
    )
  every = jnp.ones(rewards.shape, bool)
  return _relative(
    rewards, every, normalize_std=normalize_std, ddof=ddof, eps=eps
  )


def rloo_advantages(rewards: jax.Array) -> jax.Array:
  """[P, G]: A_i = r_i - mean of the other rewards of the group.

  RLOO, Ahmadian et al. 2024, arXiv 2402.14740. The baseline does not depend on
  the response, so the policy gradient has no bias. A_i is G / (G - 1) times
  r_i - mean of all: equal rewards give exact zeros, and a group's mean is 0.

  Args:
    rewards: [P, G], of any real dtype; G >= 2.
  """
  centered = group_relative_advantages(rewards, normalize_std=False)
  return centered * (centered.shape[1] / (centered.shape[1] - 1))


def reinforce_plus_plus_advantages(
  rewards: jax.Array, *, baseline: bool = False, eps: float = 1e-6
) -> jax.Array:
  """[P, G]: A = (a - mean) / (std + eps), over the whole batch.

  REINFORCE++, Hu et al. 2025, arXiv 2501.03262. Without `baseline` a is the
  reward (sec. 3.1, eq. 5), with it the reward minus the mean of its group
  (REINFORCE++ w/ baseline, sec. 3.2, eq. 6 and 7).

  Departures: (1) mean and std are over responses, not over tokens, so that a
  long response does not count more than a short one; (2) the KL penalty is not
  a part of a (eq. 4).

  Args:
    rewards: [P, G], of any real dtype; G >= 2 with `baseline`.
    eps: added to the standard deviation (ddof 0), in units of reward.

  Returns:
    [P, G] float32 with mean 0. Exact zeros if all rewards are equal; with
    `baseline`, in each group of equal rewards.
  """
  if baseline:
    centered = group_relative_advantages(rewards, normalize_std=False)
    return _over_batch_std(centered, eps)
  return whiten(jnp.asarray(rewards), jnp.ones(rewards.shape, bool), eps=eps)


def max_rl_advantages(rewards: jax.Array) -> jax.Array:
  """[P, G]: A_i = (r_i - mean) / mean, over the group.

  MaxRL, Tajwar et al. 2026, arXiv 2602.02710, algorithm 1. With K right of G
  responses, a right one gets G / K - 1 and a wrong one -1: a hard problem
  counts more. Let p be the probability of a right response. In expectation the
  policy gradient, averaged over the group, is the gradient of the first G - 1
  terms of log p = -sum_k (1 - p)^k / k; rewards minus their mean give the first
  term alone.

  Args:
    rewards: [P, G], 0 or 1, or other numbers of 0 or more; G >= 2.

  Returns:
    [P, G] float32 from -1 to G - 1, with mean 0 in a group. Exact zeros where
    the rewards are equal, and where one is negative.
  """
  centered = group_relative_advantages(rewards, normalize_std=False)
  rewards = jnp.asarray(rewards, jnp.float32)
  mean = rewards.mean(axis=1, keepdims=True)
  is_defined = (mean > 0) & (rewards.min(axis=1, keepdims=True) >= 0)
  return jnp.where(is_defined, centered / jnp.where(mean > 0, mean, 1.0), 0.0)


def pass_at_k_advantages(rewards: jax.Array, *, k: int) -> jax.Array:
  """[P, G]: the advantage of pass@k, over all subsets of k responses.

  The reward of a subset is 1 if one of its responses is right; a response gets
  the mean, over the subsets with it, of (reward - mean) / std. With W wrong of
  G responses, f = C(W, k) / C(G, k) the share of subsets that fail and
  s = sqrt(f (1 - f)):

    right: f / s          wrong: (f - C(W - 1, k - 1) / C(G - 1, k - 1)) / s

  Chen et al. 2025, arXiv 2508.10751, sec. 2.4. `grpo_passk` of verl is another
  estimator: there only the best response of a group has an advantage.

  Args:
    rewards: [P, G], of any real dtype; above 0: the response is right. G >= 2.
    k: size of the subsets, from 1 to G. With 1 the advantages are those of
      `group_relative_advantages`.

  Returns:
    [P, G] float32 with mean 0 in a group. Exact zeros where no or all responses
    are right, and where fewer than k are wrong.
  """
  rewards = jnp.asarray(rewards)
  if rewards.ndim != 2 or not 1 <= k <= rewards.shape[1]:
    raise ValueError(
      f"expected rewards [P, G], k up to G, got {rewards.shape=}, {k=}"
    )
  right, size = rewards > 0, rewards.shape[1]
  wrong = (size - right.sum(1, keepdims=True)).astype(jnp.float32)
  # Of the subsets with a wrong response, those that fail.
  others_fail = jnp.ones_like(wrong)
  for i in range(1, k):
    others_fail *= jnp.maximum(wrong - i, 0.0) / (size - i)
  fail = wrong / size * others_fail
  std = jnp.sqrt(fail * (1 - fail))
  advantages = jnp.where(right, fail, fail - others_fail)
  return jnp.where(std > 0, advantages / jnp.where(std > 0, std, 1.0), 0.0)


def gdpo_advantages(
  rewards: jax.Array, weights: jax.Array, *, eps: float = 1e-6
) -> jax.Array:
  """[P, G]: A = a / (std + eps), with a_i = sum_n w_n A_in.

  A_in = (r_in - mean) / (std + eps) compares reward n of response i with the
  same reward of its group; the other std is of a, over the whole batch. GDPO,
  Liu et al. 2026, arXiv 2601.05242, sec. 3.1 and 3.2, eq. 4, 6 and 7: two
  rewards keep their weights even if one varies more than the other. a has the
  mean 0, which eq. 6 subtracts. Departure: NaN is a reward that a response does
  not have, and stays out of mean, std and sum.

  Args:
    rewards: [P, G, N] float32; NaN: left out.
    weights: [N], of each reward.
    eps: added to both standard deviations (ddof 0).

  Returns:
    [P, G] float32; exact zeros in groups in which each reward is equal.
  """
  rewards, weights = jnp.asarray(rewards), jnp.asarray(weights, jnp.float32)
  if rewards.ndim != 3 or weights.shape != rewards.shape[2:]:
    raise ValueError(
      f"expected rewards [P, G, N] and weights [N], got {rewards.shape=}, "
      f"{weights.shape=}"
    )
  apart = _relative(rewards, ~jnp.isnan(rewards), eps=eps)
  return _over_batch_std((apart * weights).sum(-1), eps)


def _over_batch_std(advantages, eps):
  """A / (std + eps) over the batch, for advantages with the mean 0."""
  std = jnp.sqrt((advantages**2).mean())
  return advantages / jnp.where(std > 0, std + eps, 1.0)


def turn_advantages(
  rewards: jax.Array, *, normalize_std: bool = True, eps: float = 1e-6
) -> jax.Array:
  """A_ik = (R_ik - mean) / (std + eps), for turn k of conversation i.

  R_ik = sum_{j >= k} r_ij is the reward from turn k on. Mean and std are over
  the conversations of the group that have a turn k. A turn is a step of GRPO's
  process supervision, Shao et al. 2024, arXiv 2402.03300, sec. 4.1.3.
  Departures:
    1. Rewards are summed before they are normalized, so that a turn without a
       reward does not count against long conversations.
    2. A turn is compared with the same turn of the other conversations, as in
       MT-GRPO, Zeng et al. 2025, arXiv 2505.11821, and not with all turns.
  With one turn per conversation the result is `group_relative_advantages`.

  Args:
    rewards: [P, G, K] float32, one per turn; NaN from the first turn on that a
      conversation does not have.
    eps: added to the standard deviation (ddof 0), in units of reward.

  Returns:
    [P, G, K] float32. It is 0 for missing turns, and where all R_ik of a turn
    are equal. So a turn that only one conversation reaches has no advantage.
  """
  has_turn = ~jnp.isnan(rewards)
  rewards = jnp.where(has_turn, rewards, 0.0)
  to_go = jnp.cumsum(rewards[..., ::-1], axis=-1)[..., ::-1]
  return _relative(to_go, has_turn, normalize_std=normalize_std, eps=eps)


def _relative(x, has, *, axis=1, normalize_std=True, ddof=0, eps):
  """(x - mean) / (std + eps) over an axis or all, of what `has`; else 0."""
  over = {"axis": axis, "keepdims": True}
  count, x_or_0 = jnp.maximum(has.sum(**over), 1), jnp.where(has, x, 0.0)
  mean = x_or_0.sum(**over) / count
  lowest = jnp.where(has, x, jnp.inf).min(**over)
  highest = jnp.where(has, x, -jnp.inf).max(**over)
  # The mean of equal rewards may be off by a rounding error, and the std is
  # then as small as this error. So rewards are compared, not subtracted.
  equal = lowest >= highest
  centered = jnp.where(has & ~equal, x_or_0 - mean, 0.0)
  if not normalize_std:
    return centered
  std = jnp.sqrt((centered**2).sum(**over) / jnp.maximum(count - ddof, 1))
  return centered / (std + jnp.where(equal, 1.0, eps))


def generalized_advantages(
  rewards: jax.Array,
  values: jax.Array,
  mask: jax.Array,
  *,
  discount: float = 1.0,
  trace_decay: float = 0.95,
  segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """GAE: A_t = d_t + g l A_t+1, with d_t = r_t + g V_t+1 - V_t.

  Schulman et al. 2016, arXiv 1506.02438, sec. 3; g is gamma, l is lambda. t + 1
  is the next response token: masked positions are skipped, in the sum and in
  the discount. V and A are 0 after the last response token, so a truncated
  response is treated as one that ended.

  With g = l = 1 and one reward, on the last token, A_t is that reward - V_t.

  Args:
    rewards: [B, T], of any real dtype: the reward of each token.
    values: [B, T] V_t, the critic's estimate before token t is sampled.
    mask: as in `gspo_loss`.
    discount: g, in [0, 1].
    trace_decay: l, in [0, 1].
    segment_ids: as in `gspo_loss`.

  Returns:
    (advantages, returns): [B, T] float32 without gradient; 0 where the mask is
    0. The returns are A_t + V_t, the targets of `value_loss`.
  """
  rewards, values = (jnp.asarray(x, jnp.float32) for x in (rewards, values))
  mask = jnp.asarray(mask, bool)
  if segment_ids is None:
    segment_ids = jnp.zeros(mask.shape, jnp.int32)
  shapes = {x.shape for x in (rewards, values, mask, segment_ids)}
  if mask.ndim != 2 or len(shapes) > 1:
    raise ValueError(
      f"expected one shape [B, T], got {rewards.shape=}, {values.shape=},"
      f" {mask.shape=}, {segment_ids.shape=}"
    )
  rewards, values = (jnp.where(mask, x, 0.0) for x in (rewards, values))

  def step(carry, token):
    reward, value, is_response, segment = token
    next_segment, following = carry
    following = jnp.where(segment == next_segment, following, 0.0)
    next_advantage, next_value = following
    delta = reward + discount * next_value - value
    advantage = delta + discount * trace_decay * next_advantage
    current = jnp.stack([advantage, value])
    return (
      (segment, jnp.where(is_response, current, following)),
      jnp.where(is_response, advantage, 0.0),
    )

  _, advantages = jax.lax.scan(
    step,
    (segment_ids[:, -1], jnp.zeros((2, len(mask)), jnp.float32)),
    (rewards.T, values.T, mask.T, segment_ids.T),
    reverse=True,
  )
  advantages = advantages.T
  return jax.lax.stop_gradient((advantages, advantages + values))


def whiten(
  advantages: jax.Array, mask: jax.Array, *, eps: float = 1e-6
) -> jax.Array:
  """(A - mean) / (std + eps) over all response tokens; 0 where the mask is 0.

  Common in PPO code, though not in its paper: Huang et al. 2024,
  arXiv 2403.17031. Mean and std are over the whole batch: call this before the
  batch is split into minibatches.

  Args:
    advantages: [B, T], of any real dtype.
    mask: as in `gspo_loss`.
    eps: added to the standard deviation (ddof 0), in units of reward.

  Returns:
    [B, T] float32; exact zeros if all advantages are equal.
  """
  if advantages.shape != mask.shape:
    raise ValueError(f"expected {mask.shape=}, got {advantages.shape=}")
  advantages = jnp.asarray(advantages, jnp.float32)
  return _relative(advantages, jnp.asarray(mask, bool), axis=None, eps=eps)


@dataclasses.dataclass(frozen=True)
class Estimator:
  """An advantage estimator, and what a trainer must know about it."""

  # Rewards [P, G] and `numbers` -> advantages [P, G]; with rewards="each"
  # rewards [P, G, N], `weights` and `numbers`.
  advantages: Callable[..., jax.Array]
  # Arguments without a default, each with an example.
  numbers: dict[str, int] = dataclasses.field(default_factory=dict)
  # What a response brings: the "total" of its rewards, "each" of them, or
  # whether it is "right".
  rewards: str = "total"
  one_reward: bool = False  # whether it is made for right and wrong
  compares_group: bool = True  # whether a response is compared with its group
  method_scales: bool = False  # whether `Method.normalize_std` is an argument
  unscaled: bool = False  # whether it never divides by a std or a mean

  @property
  def equal_totals_teach(self) -> bool:
    """Whether a group of equal total rewards may have advantages."""
    return self.rewards == "each" or not self.compares_group


# Keys are values of `objective.advantage_estimator`.
ESTIMATORS = {
  "grpo": Estimator(group_relative_advantages, method_scales=True),
  "rloo": Estimator(rloo_advantages, unscaled=True),
  "reinforce_plus_plus": Estimator(
    reinforce_plus_plus_advantages, compares_group=False
  ),
  "reinforce_plus_plus_baseline": Estimator(
    functools.partial(reinforce_plus_plus_advantages, baseline=True)
  ),
  "max_rl": Estimator(max_rl_advantages, one_reward=True),
  "pass_at_k": Estimator(
    pass_at_k_advantages, {"k": 4}, rewards="right", one_reward=True
  ),
  "gdpo": Estimator(gdpo_advantages, rewards="each"),
}
