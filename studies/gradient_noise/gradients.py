"""Gradients of groups of responses, under several losses and at ratio 1.

Dimension key: N pairs of groups, G responses a group, R response slots, K
parts.
"""

import functools
import math

import jax
import jax.numpy as jnp

from gspo_jax import losses, model
from gspo_jax.learner.train_batch import TrainBatch, response_logps

_NO_CLIP = {"clip_low": math.inf, "clip_high": math.inf}
# GSPO-token is GSPO here: a response has one advantage.
METHODS = {
  "grpo": losses.grpo_loss,
  "gspo": losses.gspo_loss,
  "grpo unclipped": functools.partial(losses.grpo_loss, **_NO_CLIP),
  "gspo unclipped": functools.partial(losses.gspo_loss, **_NO_CLIP),
}


def parts(name: str) -> tuple[list[float], list[float]]:
  """What a method's gradient is made of, and what its ratios add to it.

  Of the K = 1 + len(METHODS) parts in `grams`: the gradient at ratio 1, then
  for each method its own less that one.
  """
  added = [float(name == part) for part in (None, *METHODS)]
  return [1.0, *added[1:]], added


def grams(
  params: model.Params,
  pairs: TrainBatch,
  *,
  cfg: model.ModelConfig,
  temperature: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Inner products of the parts of gradients, pair by pair.

  A backward pass is linear, so it is given a method's d loss / d log-prob less
  that at ratio 1: the difference of two gradients would be rounding where
  ratios are within 1e-4 of 1.

  Args:
    params: the new policy; what is differentiated.
    pairs: leaves [N, 2, G, ...]; old_logps are the old policy's.
    cfg: the model; static.
    temperature: the sampler's; static.

  Returns:
    [N, 2, K, 2, K], and each method's clipped share of the tokens, [N, 2].
  """

  def of_group(rows: TrainBatch):
    x, pull = jax.vjp(
      lambda p: response_logps(p, cfg, rows, temperature=temperature).logps,
      params,
    )
    slopes, clipped = _slopes(x, rows)
    (gradients,) = jax.lax.map(pull, slopes)
    return gradients, clipped

  def of_pair(pair):
    gradients, clipped = jax.lax.map(of_group, pair)
    return sum(map(_gram, jax.tree.leaves(gradients))), clipped

  return jax.lax.map(of_pair, pairs)


def _slopes(x, rows: TrainBatch):
  """[K, G, R]: d loss / d x at ratio 1, and what each method adds; clipping."""

  def slope(loss, old):
    advantages = rows.advantages[:, 0]  # one a response
    return jax.grad(
      lambda x: loss(x, old, advantages, rows.response_mask), has_aux=True
    )(x)

  at_one, _ = slope(losses.grpo_loss, jax.lax.stop_gradient(x))
  slopes, clipped = [at_one], {}
  for name, loss in METHODS.items():
    own, metrics = slope(loss, rows.old_logps)
    slopes.append(own - at_one)
    share = metrics["clip_frac/token"]
    clipped[name] = share.total / share.count
  return jnp.stack(slopes), clipped


def _gram(x):
  """[2, K, ...] -> [2, K, 2, K]."""
  flat = x.reshape(x.shape[0] * x.shape[1], -1)
  products = jnp.matmul(flat, flat.T, precision=jax.lax.Precision.HIGHEST)
  return products.reshape(x.shape[:2] * 2)
