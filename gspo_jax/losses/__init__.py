"""Policy losses, the value loss and advantages; this wing needs only jax.

Every loss takes arrays and returns (loss, metrics); `gspo_loss` describes the
arguments of all. `METHODS` is the table of what a trainer must know of each.
Other wings take the names in `__all__` from here, and the advantages from
`losses.advantages`. A loss of your own is made of `checked_batch`, `Surrogate`,
`reduce` and a mean.

Conventions of all policy losses:
  1. Only `logps` is differentiated.
  2. Values under a 0 of the mask are never read, not even NaN.
  3. A metric is a `Mean`, a `Std` or a `Histogram`. Their fields are sums, so
     metrics of micro-batches add. With `normalizer=1.0` the losses and the
     gradients add, too: divide them by the summed count of `loss/policy`.
  4. `loss/policy` is the loss without `Terms.penalty`; that is `loss/penalty`.
  5. `logps[:, t]` is the log-prob of the token that `mask[:, t]` marks. Logits
     at position t are of the token at t + 1: shift them, or the mask, by one.
  6. A wrong dtype is a TypeError, a wrong shape or number a ValueError.
  7. Segment ids count from 0 within each row. Outside of jit a ValueError says
     where they do not, and where a mask is not 0 or 1; inside of jit wrong ids
     give a wrong loss.

Departures from the papers: (1) a token's log-ratio is clamped at ±20, beyond
which it has no gradient; (2) sequences without a response token are not
counted.
"""

from gspo_jax.losses.batch import (
  checked_batch,
  sequence_mean,
  sequence_sums,
  token_mean,
)
from gspo_jax.losses.kl import kl_penalty
from gspo_jax.losses.methods import METHODS, Method
from gspo_jax.losses.metrics import EDGES, Histogram, Mean, Metrics, Std
from gspo_jax.losses.mismatch import mismatch_weights
from gspo_jax.losses.policy import (
  cispo_loss,
  dapo_loss,
  dr_grpo_loss,
  gmpo_loss,
  grpo_loss,
  gspo_loss,
  gspo_token_loss,
  ppo_loss,
  rspo_loss,
  sapo_loss,
)
from gspo_jax.losses.surrogate import Surrogate, reduce
from gspo_jax.losses.terms import NO_TERMS, Terms, router_log_weight
from gspo_jax.losses.value import value_loss

__all__ = [
  "EDGES",
  "METHODS",
  "NO_TERMS",
  "Histogram",
  "Mean",
  "Method",
  "Metrics",
  "Std",
  "Surrogate",
  "Terms",
  "advantages",
  "checked_batch",
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
  "reduce",
  "router_log_weight",
  "rspo_loss",
  "sapo_loss",
  "sequence_mean",
  "sequence_sums",
  "token_mean",
  "value_loss",
]
