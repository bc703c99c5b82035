"""Policy losses, the value loss and advantages; this wing needs only jax.

Every loss takes arrays and returns (loss, metrics). `gspo_loss` describes the
arguments of all policy losses. `METHODS` lists what a trainer must know about
each. To write a loss, combine `checked_batch`, `Surrogate`, `reduce` and a
mean.

Conventions of all policy losses:
  1. Only `logps` is differentiated.
  2. Values where the mask is 0 are never read, not even NaN.
  3. A metric is a `Mean`, a `Std` or a `Histogram`. Its fields are sums, so
     metrics of micro-batches add. With `normalizer=1.0` losses and gradients
     also add: divide their sums by the summed count of `loss/policy`.
  4. `loss/policy` excludes `Terms.penalty`; `loss/penalty` is its metric.
  5. `logps[:, t]` is the log-prob of the token that `mask[:, t]` marks. Logits
     at position t predict the token at t + 1: shift them, or the mask, by one.
  6. A wrong dtype raises TypeError, a wrong shape or number ValueError.
  7. Segment ids count from 0 within each row. Outside jit, wrong ids raise
     ValueError, as does a mask other than 0 or 1. Inside jit, wrong ids give a
     wrong loss.

Departures from the papers: (1) a token's log-ratio is clamped at ±20, beyond
which it has no gradient; (2) sequences without a response token are not
counted.
"""

from gspo_jax.losses import advantages, policy
from gspo_jax.losses.batch import (
  checked_batch,
  sequence_mean,
  sequence_sums,
  token_mean,
)
from gspo_jax.losses.kl import kl_penalty
from gspo_jax.losses.methods import METHODS, Method, Surrogate, reduce
from gspo_jax.losses.metrics import EDGES, Histogram, Mean, Metric, Metrics, Std
from gspo_jax.losses.mismatch import mismatch_weights, off_policy_mask
from gspo_jax.losses.policy import *  # noqa: F403
from gspo_jax.losses.score_centering import score_centering
from gspo_jax.losses.terms import NO_TERMS, Terms, router_log_weight
from gspo_jax.losses.value import value_loss

__all__ = [
  "EDGES",
  "METHODS",
  "NO_TERMS",
  "Histogram",
  "Mean",
  "Method",
  "Metric",
  "Metrics",
  "Std",
  "Surrogate",
  "Terms",
  "advantages",
  "checked_batch",
  "kl_penalty",
  "mismatch_weights",
  "off_policy_mask",
  "reduce",
  "router_log_weight",
  "score_centering",
  "sequence_mean",
  "sequence_sums",
  "token_mean",
  "value_loss",
]
__all__ += policy.__all__
