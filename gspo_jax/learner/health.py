"""Warnings about a run's metrics, and a stop where one is not finite."""

import math
from collections.abc import Callable, Mapping

from gspo_jax.learner.objective import ObjectiveConfig
from gspo_jax.runtime import multihost

# Two passes of one program over the same weights agree bit for bit if the
# kernels are deterministic. A larger std of their ratio means they differ.
_MAX_UNMOVED_STD = 1e-6
# A clip range that differs by this factor from the method's default is meant
# for another kind of ratio.
_FAR = 40
# Nats a token between sampler and trainer. With the sampler's log-probs as old
# ones GSPO and GRPO collapsed at .02 (studies/mismatch).
_MAX_GAP = 0.01
_UNCLIPPED_ITERATIONS = 10  # before the warning that nothing was clipped


def require_finite(metrics: Mapping[str, float], step: int) -> None:
  """Raises FloatingPointError for the first metric that is not finite."""
  for name, value in metrics.items():
    if not math.isfinite(value):
      raise FloatingPointError(
        f"{name} is {value} at step {step}; that step was not saved"
      )


def require_exact(
  metrics: Mapping[str, float], step: int, find: Callable[[], str]
) -> None:
  """ArithmeticError if a sampler of the same weights differs; `find` where."""
  # Absent if the first minibatch has no token to learn from.
  differ = metrics.get("mismatch/exact_tokens_differ", 0.0)
  if differ:
    gap = metrics["mismatch/token_abs_mean"]
    try:
      where = find()
    except Exception as error:  # the finding is not lost
      where = f"the layer was not found ({error})"
    raise ArithmeticError(
      f"model.exact=True: at step {step} the log-probs of {differ:.1%} of the "
      f"tokens differ between sampler and trainer, on average by {gap:.1e} "
      f"nats; {where}. That step was not saved. Expected none: please report "
      "it, and go on with --config.model.exact=False"
    )


def require_responses(
  objective: ObjectiveConfig, truncated: float, step: int
) -> None:
  """UserError if overlong filtering leaves no response to learn from."""
  if objective.truncated == "mask" and truncated == 1:
    raise multihost.AgreedError(
      f"objective.truncated='mask': all responses of step {step} were "
      "truncated: expected longer ones (sampler.max_new_tokens or "
      "rollout.max_turns), or 'train' or 'zero_advantage'"
    )


def clip_range_warnings(objective: ObjectiveConfig) -> list[str]:
  """Warnings about a clip range that seems made for another method."""
  method, numbers = objective.method, objective.numbers
  typed, default = f"objective.name={objective.name!r}", method.numbers
  name = objective.name.partition(":")[0]
  if numbers.get("cap", math.inf) < 1:
    own, more = default["cap"], ""
    if isinstance(own, int | float):
      more = f", and the method's own is {own:g}"
    return [
      f"{typed}: a cap of {numbers['cap']:g} scales nearly every token, for "
      "the ratio of a policy that has not moved is 1; expected at least "
      f"1{more}"
    ]
  if not method.clips:
    return []
  unit = {"sequence": "response", "token": "token"}[method.unit]
  keys, lines = ("clip_low", "clip_high"), []
  for effect, far in (
    ("hardly anything", [k for k in keys if numbers[k] > _FAR * default[k]]),
    ("nearly all", [k for k in keys if numbers[k] < default[k] / _FAR]),
  ):
    if far:
      bounds = ", ".join(f"{key}={numbers[key]:g}" for key in far)
      lines.append(
        f"{typed}: {effect} will be clipped at {bounds}, for {name} clips the "
        f"ratio of each {unit}, and its own range is "
        f"{default['clip_low']:g}, {default['clip_high']:g}"
      )
  low = numbers["clip_low"]
  is_ratio = method.clips == "ratio"
  if is_ratio and 1 <= low <= _FAR * default["clip_low"]:
    lines.append(
      f"{typed}: nothing will be clipped from below at clip_low={low:g}, for a "
      f"ratio is above 0; expected under 1, and the method's own is "
      f"{default['clip_low']:g}"
    )
  return lines


class HealthChecks:
  """Warns once for each kind of fault that a step's metrics show."""

  def __init__(
    self,
    objective: ObjectiveConfig,
    *,
    minibatches: int,
    off_policy: bool,
    truncated_sampling: bool,
  ):
    self._objective, self._numbers = objective, objective.numbers
    self._minibatches, self._off_policy = minibatches, off_policy
    # Iterations until the first clipping; None after it.
    self._unclipped: int | None = 0 if objective.method.clips else None
    self._printed: set[str] = set()  # kinds of warnings
    if truncated_sampling:
      self._warn(
        "truncated sampling",
        "top_k, top_p or min_p is on and sampler.kept_ids=0: responses are "
        "sampled from a truncated distribution, and log-probs are of the whole "
        "one",
      )

  def __call__(self, metrics: Mapping[str, float]) -> None:
    moves = metrics["grad/norm"] > 0 and metrics["optim/learning_rate"] > 0
    moves = moves and self._minibatches > 1
    # A user's own loss may have no such metric.
    if moves and metrics.get("ratio/moved") == 0:
      self._warn(
        "ratio",
        f"the importance ratio is exactly 1 over {self._minibatches} updates: "
        "the old log-probs are not being used",
      )
    unmoved_std = metrics.get("ratio/first_minibatch_std", 0.0)
    if not self._objective.has_sampler_logps and unmoved_std > _MAX_UNMOVED_STD:
      self._warn(
        "unmoved ratio",
        f"ratio/first_minibatch_std={unmoved_std:.1e}: two passes of one "
        "program over the same weights differ, and clipping acts on the "
        "difference; on a GPU set "
        "XLA_FLAGS=--xla_gpu_deterministic_ops=true, or else "
        "--config.learner.minibatches=1",
      )
    if self._objective.compares_groups and metrics["reward/mixed_groups"] == 0:
      self._warn(
        "no signal",
        "no signal: in an iteration the rewards of no group differed "
        "(reward/mixed_groups is 0, reward/mean "
        f"{metrics['reward/mean']:.3g}) and gave no response an advantage; if "
        "this goes on, the problems are too hard or too easy, or the reward "
        "does not tell responses apart",
      )
    self._check_clipping(metrics)
    # An earlier policy's samples also differ by the updates since then.
    if not self._off_policy:
      self._check_gap(metrics)

  def _check_gap(self, metrics: Mapping[str, float]) -> None:
    """Warns if sampler and trainer differ by much."""
    of_token = metrics.get("mismatch/token_abs_mean", 0.0)
    gap = metrics.get("mismatch/sequence_abs_mean", 0.0)
    clip_low = self._numbers.get("clip_low", math.inf)
    if self._objective.has_sampler_logps and of_token > _MAX_GAP:
      self._warn(
        "gap",
        f"sampler and trainer differ by {of_token:.2g} nats a token "
        f"(mismatch/token_abs_mean), more than {_MAX_GAP:g}: with "
        "objective.old_logps='sampler' most methods collapse at such a gap; "
        "set --config.objective.old_logps=recompute",
      )
    elif gap > clip_low:
      self._warn(
        "gap",
        f"sampler and trainer differ by {gap:.1e} a sequence "
        f"(mismatch/sequence_abs_mean), more than clip_low="
        f"{clip_low:.1e}: the sampler's log-probs would be noise as old "
        "ones",
      )

  def _check_clipping(self, metrics: Mapping[str, float]) -> None:
    """Warns if ratios move for several iterations and none is clipped."""
    # A user's own loss may have neither of these metrics.
    if self._unclipped is None or "clip_frac/token" not in metrics:
      return
    if not (metrics["grad/norm"] > 0 and metrics.get("ratio/moved", 1) > 0):
      return
    if metrics["clip_frac/token"] > 0:
      self._unclipped = None
      return
    self._unclipped += 1
    if self._unclipped == _UNCLIPPED_ITERATIONS:
      std = f"ratio/{self._objective.method.unit}_std"
      spread = f": {std} is {metrics[std]:.1e}" if std in metrics else ""
      self._warn(
        "unclipped",
        f"nothing was clipped in {_UNCLIPPED_ITERATIONS} iterations "
        f"(clip_frac/token is 0){spread}, and the clip range is "
        f"{self._numbers['clip_low']:g}, {self._numbers['clip_high']:g}; at "
        "this learning rate clip_low and clip_high of objective.name have no "
        "effect",
      )

  def _warn(self, kind: str, text: str) -> None:
    if kind not in self._printed:
      multihost.print_once(f"warning: {text}")
    self._printed.add(kind)
