"""Warnings about a run's metrics, and a stop where one is not finite."""

import math
from collections.abc import Mapping

from gspo_jax.runtime import multihost

# Two passes of one program over the same weights agree bit for bit where the
# kernels are deterministic; a larger std of their ratio means they differ.
_MAX_UNMOVED_STD = 1e-6


def require_finite(metrics: Mapping[str, float], step: int) -> None:
  """Raises FloatingPointError for the first metric that is not finite."""
  for name, value in metrics.items():
    if not math.isfinite(value):
      raise FloatingPointError(
        f"{name} is {value} at step {step}; that step was not saved"
      )


class HealthChecks:
  """Warns where a step's metrics show a fault; once for each kind of fault.

  Args:
    minibatches: optimizer steps an iteration.
    clip_low: of the method; infinite where the gap between sampler and trainer
      is no fault.
    recomputed_old_logps: whether the trainer computes the old log-probs.
    compares_groups: whether only rewards that differ inside a group teach;
      with a critic equal ones teach, too.
    truncated_sampling: whether the sampler never samples some of the tokens.
  """

  def __init__(
    self,
    *,
    minibatches: int,
    clip_low: float,
    recomputed_old_logps: bool,
    compares_groups: bool,
    truncated_sampling: bool,
  ):
    self._minibatches, self._clip_low = minibatches, clip_low
    self._recomputed_old_logps = recomputed_old_logps
    self._compares_groups = compares_groups
    self._printed: set[str] = set()  # kinds of warnings
    if truncated_sampling:
      self._warn(
        "truncated sampling",
        "top-k, top-p, min-p or a minimum length is on: responses are sampled "
        "from a truncated distribution, and log-probs are of the whole one",
      )

  def __call__(self, metrics: Mapping[str, float]) -> None:
    """Checks the metrics of a step."""
    moves = metrics["grad/norm"] > 0 and metrics["optim/learning_rate"] > 0
    moves = moves and self._minibatches > 1
    if moves and metrics["ratio/moved"] == 0:
      self._warn(
        "ratio",
        f"the importance ratio is exactly 1 over {self._minibatches} updates: "
        "the old log-probs are not being used",
      )
    unmoved_std = metrics["ratio/first_minibatch_std"]
    if self._recomputed_old_logps and unmoved_std > _MAX_UNMOVED_STD:
      self._warn(
        "unmoved ratio",
        f"ratio/first_minibatch_std={unmoved_std:.1e}: two passes of one "
        "program over the same weights differ, and clipping acts on the "
        "difference; on a GPU set "
        "XLA_FLAGS=--xla_gpu_deterministic_ops=true, or else "
        "--config.learner.minibatches=1",
      )
    if self._compares_groups and metrics["reward/mixed_groups"] == 0:
      self._warn(
        "no signal",
        "no signal: in an iteration the rewards of no group differed "
        "(reward/mixed_groups is 0, reward/mean "
        f"{metrics['reward/mean']:.3g}) and gave no response an advantage; if "
        "this goes on, the problems are too hard or too easy, or the reward "
        "does not tell responses apart",
      )
    gap = metrics["mismatch/sequence_abs_mean"]
    if gap > self._clip_low:
      self._warn(
        "gap",
        f"sampler and trainer differ by {gap:.1e} a sequence "
        f"(mismatch/sequence_abs_mean), more than clip_low="
        f"{self._clip_low:.1e}: the sampler's log-probs would be noise as old "
        "ones",
      )

  def _warn(self, kind: str, text: str) -> None:
    if kind not in self._printed:
      multihost.print_once(f"warning: {text}")
    self._printed.add(kind)
