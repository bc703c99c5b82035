"""Score centering: the mean score of what the sampler would have sampled."""

import jax
import jax.numpy as jnp

from gspo_jax.losses.metrics import Mean, Metrics


def score_centering(
  head_logps: jax.Array,
  sampler_head_logps: jax.Array,
  mask: jax.Array,
  *,
  method: str = "none",
  cap: float = 2.0,
  floor: float = 0.5,
) -> tuple[jax.Array, Metrics]:
  """C = sum_v sg(q_v f(p_v / q_v)) log p_v: A C centers the scores of a loss.

  Tokens come from q, the sampler, and the loss has the gradient -A f grad log p
  of the policy p. The mean of the score grad log p under q is 0 only if q = p;
  else A times this mean moves p towards or away from q, at every step. C has
  the mean as its gradient: A C, added to the loss, takes it out. Marek and
  Ryabinin 2026, arXiv 2609.20807, eq. 12 to 14; the head is from app. A.

  Only a head of H likely ids is known. Outside of it q is taken as rho p, with
  rho = (1 - sum_H q) / (1 - sum_H p), each at least 1e-6. So C = sum_H sg(m_v -
  a p_v) log p_v with m = q f(p / q) and a = rho f(1 / rho). f is 1, or the
  weight that `method` gives a token in `mismatch_weights`: min(r, cap) for
  "tis"; r between floor and cap, else 0, for "mis". C is of every token, also
  of one with weight 0.

  f is taken at the policy of now, and the loss's own ratio to the old policy
  and its clip are left out: C is the mean of what the loss does until the
  policy has moved, and nearly so within a clip range.

  Args:
    head_logps: log p_v, [B, H, T] float32, of the whole distribution, not of
      the head alone. The only differentiated argument.
    sampler_head_logps: log q_v of the same ids, [B, H, T] float32; -inf: no id.
    mask: as in `gspo_loss`.
    method: "none", "tis" or "mis".
    cap, floor: as in `mismatch_weights`.

  Returns:
    (C, metrics): [B, T] float32, 0 where the mask is 0, for `Terms.penalty`
    times A; and `mismatch/centered`, the mean over tokens of sum_H |g|, with g
    the gradient of C by the logits: sum |q - p| of a head of all ids.

  Raises:
    ValueError: another method, or shapes that differ.
  """
  if method not in ("none", "tis", "mis"):
    raise ValueError(f"expected 'none', 'tis' or 'mis', got {method=}")
  shapes = head_logps.shape, sampler_head_logps.shape
  if shapes[0] != shapes[1] or shapes[0][::2] != mask.shape:
    raise ValueError(f"expected [B, H, T] twice, and [B, T], got {shapes}")
  mask = jnp.asarray(mask, bool)
  is_id = mask[:, None] & (sampler_head_logps > -jnp.inf)
  logps = jnp.where(is_id, head_logps, 0.0)
  p, q = (
    jnp.exp(jnp.where(is_id, jax.lax.stop_gradient(x), -jnp.inf))
    for x in (head_logps, sampler_head_logps)
  )
  tail = lambda x: jnp.maximum(1 - x.sum(1, keepdims=True), 1e-6)
  rho = tail(q) / tail(p)
  if method == "tis":
    m, a = jnp.minimum(p, cap * q), jnp.minimum(1.0, cap * rho)
  elif method == "mis":
    inside = lambda p, q: (floor * q <= p) & (p <= cap * q)
    m, a = jnp.where(inside(p, q), p, 0.0), jnp.where(inside(1.0, rho), 1.0, 0)
  else:
    m, a = q, rho
  surplus = m - a * p
  moved = jnp.abs(surplus - p * surplus.sum(1, keepdims=True)).sum(1)
  metrics: Metrics = {"mismatch/centered": Mean.of(moved, mask)}
  return (surplus * logps).sum(1), metrics
