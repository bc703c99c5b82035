"""Says so when the numbers of a run mean other than they seem."""

import math

from gspo_jax.runtime import multihost

# Largest std of the ratio of a policy that has not moved: the passes agree bit
# for bit, where the kernels are deterministic.
_SAME = 1e-6


def require_finite(row: dict[str, float], step: int) -> None:
  """FloatingPointError naming the first number that is none, and the step."""
  for name, value in row.items():
    if not math.isfinite(value):
      raise FloatingPointError(
        f"{name} is {value} at step {step}; that step was not saved"
      )


class HealthChecks:
  """Prints a warning, once of each kind, when a step's scalars call for it.

  Args:
    updates: optimizer steps a rollout.
    clip_low: of the objective in use.
    recomputed: whether the trainer makes the old log-probs itself.
    compares: whether advantages compare the responses of a group; with a
      critic they do not.
    truncates: whether sampling leaves some tokens out.
  """

  def __init__(
    self,
    *,
    updates: int,
    clip_low: float,
    recomputed: bool,
    compares: bool,
    truncates: bool,
  ):
    self._recomputed = recomputed
    self._said: set[str] = set()  # kinds of warning given
    self._updates, self._clip, self._compares = updates, clip_low, compares
    if truncates:
      self._say(
        "truncated",
        "top-k, top-p or a minimum length is on: answers are drawn from a "
        "truncated distribution, and log-probs are of the whole one",
      )

  def __call__(self, row: dict[str, float]) -> None:
    moves = row["grad/norm"] > 0 and row["optim/learning_rate"] > 0
    moves = moves and self._updates > 1
    if moves and row["ratio/moved"] == 0:
      self._say(
        "ratio",
        f"the importance ratio is exactly 1 over {self._updates} updates: the "
        "old log-probs are not being used",
      )
    repeated = row["ratio/first_minibatch_std"]
    if self._recomputed and repeated > _SAME:
      self._say(
        "repeated",
        f"ratio/first_minibatch_std={repeated:.1e}: two passes of one program "
        "over the same weights differ, and clipping acts on the difference; on "
        "a GPU set XLA_FLAGS=--xla_gpu_deterministic_ops=true, or else "
        "--config.learner.minibatches=1",
      )
    if self._compares and row["reward/mixed_groups"] == 0:
      self._say(
        "signal",
        "no signal: in an iteration the rewards of no group differed "
        f"(reward/mixed_groups is 0, reward/mean {row['reward/mean']:.3g}) and "
        "gave no response an advantage; if this goes on, the problems are too "
        "hard or too easy, or the reward does not tell responses apart",
      )
    gap = row["mismatch/sequence_abs_mean"]
    if gap > self._clip:
      self._say(
        "gap",
        f"sampler and trainer differ by {gap:.1e} a sequence "
        f"(mismatch/sequence_abs_mean), more than clip_low={self._clip:.1e}: "
        "the sampler's log-probs would be noise as old ones",
      )

  def _say(self, kind: str, text: str) -> None:
    if kind not in self._said:
      multihost.print_once(f"warning: {text}")
    self._said.add(kind)
