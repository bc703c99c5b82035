"""One step off-policy: the next batch is sampled before the update."""

from gspo_jax.rollout.batch import (
  RolloutBatch,
  RolloutContext,
  RolloutCost,
  positions,
)
from gspo_jax.sampler.samples import Samples


class OneStepOffPolicy:
  """Returns the batch sampled one iteration before, and samples the next one.

  The rewards of a batch are computed while an update runs. In the last
  iteration nothing is sampled: if the run is made longer later, the policy that
  learns from the next batch samples it.

  Args:
    source: samples the batches.
    context: of `source`.
    empty: empty samples of a batch, for a checkpoint without pending ones.
    last_step: the last iteration.
  """

  def __init__(
    self, source, context: RolloutContext, empty: Samples, *, last_step: int
  ):
    self._source, self._context = source, context
    self._empty, self._last_step, self._next = empty, last_step, None

  def __call__(self, params, step: int) -> RolloutBatch:
    """The batch that iteration `step` learns from."""
    batch, tokens = self._next, 0
    if batch is None:
      batch = self._source(params, step)
      tokens = batch.sampled_tokens
    self._next = None
    if step < self._last_step:
      self._next = self._source(params, step + 1, policy_step=step)
      tokens += self._next.sampled_tokens
    return batch._replace(sampled_tokens=tokens)

  @property
  def pending(self) -> dict:
    """Samples for the next iteration."""
    samples = self._next.samples.samples if self._next else self._empty
    return {"next": samples, "source": self._source.pending}

  def get_state(self) -> dict:
    """JSON: where the pending problems stand in the data, and their cost."""
    state = {"source": self._source.get_state(), "positions": []}
    if self._next:
      state["positions"] = positions(self._next.samples.prompts)
      state["tokens"] = int(self._next.costs[0].tokens)
      state["slot_steps"] = int(self._next.costs[0].slot_steps)
      state["policy_step"] = self._next.policy_step
      state["resumed_fraction"] = self._next.resumed_fraction
    return state

  def set_state(self, pending: dict, state: dict) -> None:
    """Restores `pending` and `get_state`; scores the responses again."""
    self._source.set_state(pending["source"], state["source"])
    self._next = None
    if state["positions"]:
      batch = self._context.curriculum.prompts_at(state["positions"])
      scored = self._context.start_scoring(batch, pending["next"])
      cost = RolloutCost(
        batch, scored.rewards, state["tokens"], state["slot_steps"]
      )
      self._next = RolloutBatch(
        scored, [cost], 0, state["policy_step"], state["resumed_fraction"]
      )
