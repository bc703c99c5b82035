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
