"""Advantages: rewards in, float32 advantages out."""

import jax
import jax.numpy as jnp


def group_relative_advantages(
  rewards: jax.Array,
  *,
  normalize_std: bool = True,
  ddof: int = 0,
  eps: float = 1e-6,
) -> jax.Array:
  """A_i = (r_i - mean) / (std + eps), over the G answers to one prompt.

  Shao et al. 2024, arXiv 2402.03300, sec. 4.1.2; Zheng et al. 2025, arXiv
  2507.18071, sec. 4.1. Without the division, `normalize_std=False`, it is the
  advantage of Dr. GRPO: Liu et al. 2025, arXiv 2503.20783, sec. 3.2.

  With `ddof=0` the rewards 1, 0, 1, 0 give +1, -1, +1, -1 (up to `eps`), as in
  the papers' examples; the PyTorch trainers take `ddof=1`, which is smaller by
  sqrt((G - 1) / G). A group of equal rewards gives exact zeros.

  Args:
    rewards: [P, G], prompts by answers, of any real dtype.
    normalize_std: whether to divide by the group's standard deviation.
    ddof: what the variance subtracts from G in its denominator.
    eps: added to the standard deviation, in units of reward.

  Returns:
    [P, G] float32.

  Raises:
    ValueError: `rewards` is not [P, G] with G >= 2 and G > `ddof`.
  """
  rewards = jnp.asarray(rewards, jnp.float32)
  if rewards.ndim != 2 or rewards.shape[1] < max(2, ddof + 1):
    raise ValueError(
      f"expected rewards [P, G], G >= {max(2, ddof + 1)}, got {rewards.shape=}"
    )
  centered = rewards - rewards.mean(axis=1, keepdims=True)
  # Compared, not subtracted: the mean of equal rewards may round off them, and
  # dividing by a std of that size would make advantages of the rounding.
  equal = jnp.all(rewards == rewards[:, :1], axis=1, keepdims=True)
  centered = jnp.where(equal, 0.0, centered)
  if not normalize_std:
    return centered
  variance = jnp.sum(centered**2, 1, keepdims=True) / (rewards.shape[1] - ddof)
  return centered / (jnp.sqrt(variance) + jnp.where(equal, 1.0, eps))


def generalized_advantages(
  rewards: jax.Array,
  values: jax.Array,
  mask: jax.Array,
  *,
  discount: float = 1.0,
  trace_decay: float = 0.95,
) -> tuple[jax.Array, jax.Array]:
  """GAE: A_t = d_t + g l A_t+1, with d_t = r_t + g V_t+1 - V_t.

  Schulman et al. 2016, arXiv 1506.02438, sec. 3; g and l its gamma and lambda.
  t + 1 is the next token of the response: what lies under a 0 of the mask takes
  no step, neither in the sum nor in the discount. After a row's last token V
  and A are 0, so an answer that was cut off counts as one that ended.

  Without discount (g = l = 1) and with one reward, on the last token, this is
  that reward less V_t.

  Args:
    rewards: [B, T], of any real dtype, on the tokens that earned them.
    values: [B, T] V_t, the critic's estimate before the token t is chosen.
    mask: [B, T], bool or 0/1; a row is one sequence. Where 0, nothing is read.
    discount, trace_decay: g and l, in [0, 1].

  Returns:
    (advantages, returns): [B, T] float32, 0 under the mask, no gradient; the
    returns are A_t + V_t, the targets of `value_loss`.

  Raises:
    ValueError: shapes that differ or are not [B, T].
  """
  rewards, values = (jnp.asarray(x, jnp.float32) for x in (rewards, values))
  mask = jnp.asarray(mask, bool)
  if mask.ndim != 2 or not rewards.shape == values.shape == mask.shape:
    raise ValueError(
      f"expected one shape [B, T], got {rewards.shape=}, {values.shape=},"
      f" {mask.shape=}"
    )
  wiped = [jnp.where(mask, x, 0.0) for x in (rewards, values)]

  def step(later, now):
    reward, value, is_token = now
    next_advantage, next_value = later
    delta = reward + discount * next_value - value
    advantage = delta + discount * trace_decay * next_advantage
    kept = jnp.where(is_token, jnp.stack([advantage, value]), later)
    return kept, jnp.where(is_token, advantage, 0.0)

  _, advantages = jax.lax.scan(
    step,
    jnp.zeros((2, len(mask)), jnp.float32),
    tuple(x.T for x in (*wiped, mask)),
    reverse=True,
  )
  advantages = advantages.T
  return jax.lax.stop_gradient((advantages, advantages + wiped[1]))


def whiten(
  advantages: jax.Array, mask: jax.Array, *, eps: float = 1e-6
) -> jax.Array:
  """(A - mean) / (std + eps) over all tokens of the batch, 0 under the mask.

  Usual with PPO, not part of its paper: Huang et al. 2024, arXiv 2403.17031.
  Of the whole batch: whiten before it is cut into minibatches.

  Args:
    advantages: [B, T], of any real dtype.
    mask: [B, T], bool or 0/1. What lies under a 0 is never read.
    eps: added to the standard deviation (ddof 0), in units of reward.

  Returns:
    [B, T] float32; exact zeros where all advantages are equal.

  Raises:
    ValueError: shapes that differ.
  """
  if advantages.shape != mask.shape:
    raise ValueError(f"expected {mask.shape=}, got {advantages.shape=}")
  mask = jnp.asarray(mask, bool)
  tokens = jnp.where(mask, jnp.asarray(advantages, jnp.float32), 0.0)
  count = jnp.maximum(mask.sum(), 1)
  centered = jnp.where(mask, tokens - tokens.sum() / count, 0.0)
  # As above: rounding is no spread.
  lowest = jnp.min(jnp.where(mask, tokens, jnp.inf))
  equal = lowest >= jnp.max(jnp.where(mask, tokens, -jnp.inf))
  std = jnp.sqrt((centered**2).sum() / count)
  return jnp.where(equal, 0.0, centered) / (std + jnp.where(equal, 1.0, eps))
