"""Where the answers of an iteration come from, and what waits for the next.

  Fresh: all to new questions, by the policy that is to learn from them. DAPO's
    dynamic sampling, if asked for, is in `refill`.
  Partial: an answer draws so many tokens an iteration, and goes on in the next
    one (Kimi k1.5, arXiv 2501.12599, sec. 2.6.2). More questions are in flight
    than are learnt from, so that long answers do not hold a batch.
  Ahead: one step off-policy. The next batch is drawn before this one is learnt
    from, while its answers are verified.

Each is called with the policy and the iteration that is to learn from the
answers; the first two also with the iteration that it is now, if that is
another. What waits is in `arrays` and `get_state`, for a checkpoint.
"""

import jax

from gspo_jax.rollout import dynamic_sampling
from gspo_jax.rollout.batch import (
  RolloutBatch,
  RolloutContext,
  ScoredSamples,
  sampled_tokens,
)
from gspo_jax.rollout.scoring import ResponseDecoder, StreamingScorer


class OnPolicy:
  """Draws a batch of answers to new questions.

  Args:
    sampling: what drawing takes.
    merge: `groups.merge`, jitted.
    rounds: `rollout.dynamic_sampling_rounds`.
  """

  arrays = None

  def __init__(self, sampling: RolloutContext, merge, *, rounds: int):
    self._sampling, self._merge, self._rounds = sampling, merge, rounds

  def __call__(self, params, step: int, now: int | None = None) -> RolloutBatch:
    s, key = self._sampling, self._sampling.key(step)

    def draw(number):
      batch = s.curriculum.draw(step)
      own = s.asked(batch), jax.random.fold_in(key, number)
      if not s.tells:
        return s.judged(batch, s.generate(params, *own))
      reader = ResponseDecoder(batch, s.tokenizer, s.group)
      stream = StreamingScorer(s.scorer, reader)
      samples = s.generate(params, *own, on_finished=stream.tell)
      marks = stream.marks(s.group, samples.lengths)
      return ScoredSamples(batch, samples, stream.answers, marks)

    kept, costs = dynamic_sampling.sample_until_mixed(
      draw, self._merge, rounds=self._rounds
    )
    drawn_at = step if now is None else now
    return RolloutBatch(kept, costs, sampled_tokens(costs), float(drawn_at))

  def get_state(self) -> dict:
    """Nothing waits."""
    return {}

  def set_state(self, arrays, state: dict) -> None:
    """Nothing waits."""
