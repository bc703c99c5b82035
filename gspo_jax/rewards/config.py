"""The section `reward` of a config."""

import dataclasses

from gspo_jax.runtime.key import AT_LEAST_1, FINITE, POSITIVE, SHARE, key


@dataclasses.dataclass(frozen=True)
class RewardConfig:
  """What responses are rewarded for; the pool checks names and weights."""

  names: tuple[str, ...] = key(
    ("final_answer",),
    "of gspo_jax/rewards/, package.module.function, or model:FOLDER, a reward "
    "model; evaluation is of the first one, and the reward is the weighted sum "
    "of all",
  )
  weights: tuple[float, ...] = key((1.0,), "one each")
  pass_threshold: float = key(
    0.5,
    "a response is correct if its first reward is at least this: in pass@k and "
    "majority@k, for `cold_start.gate` and for `data.drop_solved`",
    FINITE,
  )
  workers: int = key(
    2, "processes that compute rewards, on each host", AT_LEAST_1
  )
  concurrency: int = key(
    32, "calls of async rewards, at once in a process", AT_LEAST_1
  )
  seconds: float = key(
    5.0,
    "time for one call of a reward, on one response or on a group. After it "
    "each response has failed: its reward is the lowest in its group, at most "
    '0. "code" and "judge" need 35.',
    POSITIVE,
  )
  max_failed: float = key(
    0.5,
    "the run stops if a larger share of the responses of an iteration or of an "
    "evaluation could not be scored, or all. A judge may fail on a few in a "
    "hundred; a reward that fails on half of them is broken.",
    SHARE,
  )
