"""Warnings about a run's metrics, and a stop where one is not finite."""

import math
from collections.abc import Mapping

from gspo_jax.learner.objective import METHODS
from gspo_jax.losses import CLIP_LOGS, CLIPPED
from gspo_jax.runtime import multihost

# Two passes of one program over the same weights agree bit for bit where the
# kernels are deterministic; a larger std of their ratio means they differ.
_MAX_UNMOVED_STD = 1e-6
# A clip range so many times the method's own is one of another kind of ratio.
_FAR = 40
_UNCLIPPED_ITERATIONS = 10  # before the warning that nothing was clipped


def require_finite(metrics: Mapping[str, float], step: int) -> None:
  """Raises FloatingPointError for the first metric that is not finite."""
  for name, value in metrics.items():
    if not math.isfinite(value):
      raise FloatingPointError(
        f"{name} is {value} at step {step}; that step was not saved"
      )


def clip_range_warnings(
  method: str, settings: Mapping[str, float]
) -> list[str]:
  """What is wrong with a clip range, as one taken over from another method.

  Args:
    method: `objective.name`.
    settings: its numbers, with `clip_low`, `clip_high`, `cap` if it has them.

  Returns:
    A line for each fault.
  """
  if settings.get("cap", math.inf) < 1:
    own = METHODS[method].__kwdefaults__["cap"]
    return [
      f"objective.cap={settings['cap']:g}: it scales nearly every token, for "
      "the ratio of a policy that has not moved is 1; expected at least 1, and "
      f"the method's own (-1) is {own:g}"
    ]
  if method not in CLIPPED:
    return []
  unit = {"sequence": "response", "token": "token"}[CLIPPED[method]]
  own, keys = METHODS[method].__kwdefaults__, ("clip_low", "clip_high")
  lines = []
  for effect, far in (
    ("hardly anything", [k for k in keys if settings[k] > _FAR * own[k]]),
    ("nearly all", [k for k in keys if settings[k] < own[k] / _FAR]),
  ):
    if far:
      typed = ", ".join(f"objective.{key}={settings[key]:g}" for key in far)
      lines.append(
        f"{typed}: {effect} will be clipped, for objective.name={method!r} "
        f"clips the ratio of each {unit}, and its own range (-1) is "
        f"{own['clip_low']:g}, {own['clip_high']:g}"
      )
  low = settings["clip_low"]
  if low >= 1 and method not in CLIP_LOGS and low <= _FAR * own["clip_low"]:
    lines.append(
      f"objective.clip_low={low:g}: nothing will be clipped from below, for a "
      f"ratio is above 0; expected under 1, and the method's own (-1) is "
      f"{own['clip_low']:g}"
    )
  return lines


class HealthChecks:
  """Warns where a step's metrics show a fault; once for each kind of fault.

  Args:
    method: `objective.name`.
    settings: its numbers, with `clip_low` and `clip_high` if it has them.
    minibatches: optimizer steps an iteration.
    off_policy: whether an earlier policy sampled the responses. The gap between
      sampler and trainer is then also how far the policy has moved.
    recomputed_old_logps: whether the trainer computes the old log-probs.
    compares_groups: whether only rewards that differ inside a group teach;
      with a critic equal ones teach, too.
    truncated_sampling: whether the sampler never samples some of the tokens.
  """

  def __init__(
    self,
    *,
    method: str,
    settings: Mapping[str, float],
    minibatches: int,
    off_policy: bool,
    recomputed_old_logps: bool,
    compares_groups: bool,
    truncated_sampling: bool,
  ):
    self._method, self._settings = method, settings
    self._minibatches, self._off_policy = minibatches, off_policy
    # Iterations until the first clipping; None after it.
    self._unclipped: int | None = 0 if method in CLIPPED else None
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
    self._check_clipping(metrics)
    gap = metrics["mismatch/sequence_abs_mean"]
    clip_low = self._settings.get("clip_low", math.inf)
    if gap > clip_low and not self._off_policy:
      self._warn(
        "gap",
        f"sampler and trainer differ by {gap:.1e} a sequence "
        f"(mismatch/sequence_abs_mean), more than clip_low="
        f"{clip_low:.1e}: the sampler's log-probs would be noise as old "
        "ones",
      )

  def _check_clipping(self, metrics: Mapping[str, float]) -> None:
    """Warns where ratios move, and none of them ever leaves the clip range."""
    could_clip = metrics["grad/norm"] > 0 and metrics["ratio/moved"] > 0
    if self._unclipped is None or not could_clip:
      return
    if metrics["clip_frac/token"] > 0:
      self._unclipped = None
      return
    self._unclipped += 1
    if self._unclipped == _UNCLIPPED_ITERATIONS:
      std = f"ratio/{CLIPPED[self._method]}_std"
      self._warn(
        "unclipped",
        f"nothing was clipped in {_UNCLIPPED_ITERATIONS} iterations "
        f"(clip_frac/token is 0): {std} is {metrics[std]:.1e}, and the clip "
        f"range is {self._settings['clip_low']:g}, "
        f"{self._settings['clip_high']:g}; at this learning rate "
        "objective.clip_low and objective.clip_high have no effect",
      )

  def _warn(self, kind: str, text: str) -> None:
    if kind not in self._printed:
      multihost.print_once(f"warning: {text}")
    self._printed.add(kind)
