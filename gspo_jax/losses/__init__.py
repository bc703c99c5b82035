"""Policy losses: arrays in, (loss, metrics) out; no model, no config.

x, o: log-probs of the taken tokens under the new and the old policy; m: mask of
the response tokens; A: advantages; l, h: `clip_low`, `clip_high`. A loss is a
ratio, a surrogate of it and a mean, and every policy loss here shares:

  logps, old_logps: [B, T] float32. Only `logps` is differentiated.
  advantages: float32, [B], or [B, T] where a loss says so or rows are packed.
  mask: [B, T], bool or 0/1. What lies under a 0 is never read, be it NaN.
  normalizer: denominator in place of the loss's own. With 1.0, gradients and
    metrics of micro-batches add; divide by the summed `loss/policy` count.
  segment_ids: [B, T] ints in 0..T-1 that name the sequences of a packed row.
  terms: a `Terms`, what is shifted, weighed, added or clipped besides.
  Returns (loss, metrics): a scalar, and a dict of additive `Mean`, `Std` and
    `Histogram`. `loss/policy` leaves the penalty out; that is `loss/penalty`.
  Raises TypeError for another dtype than float32, ValueError for a wrong shape.

Departures from the papers: (1) a token's log-ratio is clamped at ±20, beyond
which it has no gradient; (2) sequences without a response token are not
counted.
"""

from gspo_jax.losses.kl import kl_penalty
from gspo_jax.losses.metrics import EDGES, Histogram, Mean, Metrics, Std
from gspo_jax.losses.mismatch import mismatch_weights
from gspo_jax.losses.sequence_level import (
  gmpo_loss,
  gspo_loss,
  gspo_token_loss,
  rspo_loss,
)
from gspo_jax.losses.terms import Terms, router_log_weight
from gspo_jax.losses.token_level import (
  cispo_loss,
  dapo_loss,
  dr_grpo_loss,
  grpo_loss,
  ppo_loss,
  sapo_loss,
)
from gspo_jax.losses.value import value_loss

__all__ = [
  "EDGES",
  "Histogram",
  "Mean",
  "Metrics",
  "Std",
  "Terms",
  "cispo_loss",
  "dapo_loss",
  "dr_grpo_loss",
  "gmpo_loss",
  "grpo_loss",
  "gspo_loss",
  "gspo_token_loss",
  "kl_penalty",
  "mismatch_weights",
  "ppo_loss",
  "router_log_weight",
  "rspo_loss",
  "sapo_loss",
  "value_loss",
]
