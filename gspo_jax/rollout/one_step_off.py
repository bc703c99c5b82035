"""One step off-policy."""

from gspo_jax.rollout.batch import (
  RolloutBatch,
  RolloutContext,
  RolloutCost,
  places,
)
from gspo_jax.sampler.samples import Samples


class OneStepOffPolicy:
  """Gives the batch that was drawn in the last iteration, and draws the next.

  After the last iteration none is drawn: a run that is then made longer draws
  its next batch with the policy that learns from it.

  Args:
    inner: draws.
    sampling: that `inner` draws with.
    nothing: Samples of a batch, to stand in a checkpoint where none wait.
    last: the last iteration.
  """

  def __init__(
    self, inner, sampling: RolloutContext, nothing: Samples, *, last: int
  ):
    self._inner, self._sampling = inner, sampling
    self._nothing, self._last, self._ready = nothing, last, None

  def __call__(self, params, step: int) -> RolloutBatch:
    ready, spent = self._ready, 0
    if ready is None:
      ready = self._inner(params, step)
      spent = ready.spent
    self._ready = None
    if step < self._last:
      self._ready = self._inner(params, step + 1, now=step)
      spent += self._ready.spent
    return ready._replace(spent=spent)

  @property
  def arrays(self) -> dict:
    """Answers that wait."""
    ready = self._ready.kept.samples if self._ready else self._nothing
    return {"ready": ready, "inner": self._inner.arrays}

  def get_state(self) -> dict:
    """JSON."""
    state = {"inner": self._inner.get_state(), "places": []}
    if self._ready:
      state["places"] = places(self._ready.kept.batch)
      state["tokens"] = int(self._ready.costs[0].tokens)
      state["slot_steps"] = int(self._ready.costs[0].slot_steps)
      state["drawn_at"] = self._ready.drawn_at
      state["continued"] = self._ready.continued
    return state

  def set_state(self, arrays: dict, state: dict) -> None:
    """Goes to where `arrays` and `get_state` were; verifies anew."""
    self._inner.set_state(arrays["inner"], state["inner"])
    self._ready = None
    if state["places"]:
      batch = self._sampling.curriculum.recall(state["places"])
      kept = self._sampling.judged(batch, arrays["ready"])
      spent = state["tokens"], state["slot_steps"]
      cost = RolloutCost(kept.batch, kept.marks, *spent)
      how = state["drawn_at"], state["continued"]
      self._ready = RolloutBatch(kept, [cost], 0, *how)
