"""Partial rollouts: long responses are sampled over several iterations.

Kimi k1.5 (arXiv 2501.12599, sec. 2.6.2): a response adds a limited number of
tokens in an iteration, and continues in the next one. More prompts are in
flight than an update takes, so that long responses do not hold up a batch.
"""

import numpy as np

from gspo_jax.data import prompt_batch
from gspo_jax.rollout.batch import (
  RolloutBatch,
  RolloutContext,
  RolloutCost,
  group_rows,
  places,
  prompts_on_device,
)
from gspo_jax.runtime import multihost
from gspo_jax.sampler.samples import UNFINISHED, Samples


class PartialRollouts:
  """Continues the responses in flight; gives the first P finished groups.

  If fewer than P groups have finished, the oldest of the others are sampled to
  their end. Problems stay in the order of the data. Departures:
    1. A group is scored when it is given, not while others are sampled.
    2. The prompt and the earlier tokens of a response that continues are
       prefilled again, for the weights have changed.
    3. What is sampled depends on the number of shards: a key belongs to a place
       in the batch.

  Args:
    context: what sampling takes; `generate` is a `ContinuousSampler`.
    empty_samples: number of prompts -> samples without tokens.
    functions: `take_batch` and `take_pending` are used.
    max_tokens: that a response may add in an iteration.
    shards: parts of the devices that have prompts of their own.
    extra_prompts: in flight, beside the P of a batch.
  """

  def __init__(
    self,
    context: RolloutContext,
    empty_samples,
    functions,
    *,
    max_tokens: int,
    shards: int,
    extra_prompts: int,
  ):
    self._context, self._functions = context, functions
    self._max_tokens = max_tokens
    self._in_flight = context.prompts + extra_prompts
    # The place of each prompt by age, oldest first. Neighbours in age are on
    # different shards, so that no shard has all the prompts that finish soon.
    by_shard = np.arange(self._in_flight).reshape(shards, -1)
    self._places = by_shard.T.ravel().astype(np.int32)
    responses = self._in_flight * context.group_size
    self._batch, self.pending = None, empty_samples(self._in_flight)
    # Of each response: the iterations of its tokens, summed; and its calls.
    self._step_sums = np.zeros(responses)
    self._calls = np.zeros(responses, int)

  def __call__(
    self, params, step: int, policy_step: int | None = None
  ) -> RolloutBatch:
    """A batch for iteration `step`.

    Args:
      params: of the policy that samples.
      step: the iteration that learns from the batch.
      policy_step: the iteration whose policy this is; None: `step`.
    """
    batch, before = self._fill(step), multihost.to_host(self.pending.lengths)
    samples, slot_steps = self._continue(params, step, batch, before)
    lengths, finished = multihost.to_host(samples.lengths), _finished(samples)
    finished = finished.reshape(self._in_flight, -1).all(1)
    now = float(step if policy_step is None else policy_step)
    self._step_sums += (lengths - before) * now
    self._calls += lengths > before
    chosen = self._oldest(finished)[: self._context.prompts]
    rows = group_rows(chosen, self._context.group_size)
    scored = self._context.start_scoring(
      prompt_batch.pick(batch, chosen),
      self._functions.take_batch(samples, chosen),
    )
    tokens = int((lengths - before).sum())
    result = RolloutBatch(
      scored,
      [RolloutCost(scored.prompts, scored.rewards, tokens, slot_steps)],
      tokens,
      float(self._step_sums[rows].sum() / lengths[rows].sum()),
      float((self._calls[rows] > 1).mean()),
    )
    stays = ~np.isin(np.arange(self._in_flight), chosen)
    self._keep(batch, samples, self._oldest(stays))
    return result

  def get_state(self) -> dict:
    """JSON: the problems in flight, and which policies sampled their tokens."""
    return {
      "places": places(self._batch),
      "order": self._places.tolist(),
      "step_sums": self._step_sums.tolist(),
      "calls": self._calls.tolist(),
    }

  def set_state(self, pending: Samples, state: dict) -> None:
    """Restores `pending` and `get_state`, on any number of shards."""
    at, curriculum = state["places"], self._context.curriculum
    self._batch = curriculum.recall(at) if at else None
    index = np.zeros(self._in_flight, np.int32)
    index[self._places] = state["order"]
    self.pending = self._functions.take_pending(pending, index)
    rows = group_rows(index, self._context.group_size)
    self._step_sums = np.array(state["step_sums"])[rows]
    self._calls = np.array(state["calls"])[rows]

  def _fill(self, step) -> dict:
    """The prompts in flight, in their places; new ones are the youngest."""
    old = [self._batch] if self._batch else []
    count = self._in_flight - sum(len(b["problems"]) for b in old)
    new = self._context.curriculum.draw(step, count)
    by_age = prompt_batch.join([*old, new])
    return prompt_batch.pick(by_age, np.argsort(self._places))

  def _continue(self, params, step, batch, lengths) -> tuple[Samples, int]:
    """The samples after this iteration, and the slot steps that it took."""
    context, G = self._context, self._context.group_size
    prompts = prompts_on_device(batch, context.batch_sharding)
    key, limit = context.keys(step).sample, self.pending.tokens.shape[1]
    sample = lambda samples, stop_at: context.generate(
      params, prompts, key, resume_from=samples, stop_at=stop_at
    )
    stop_at = np.minimum(lengths + self._max_tokens, limit)
    samples = sample(self.pending, stop_at)
    slot_steps = int(samples.slot_steps)
    finished = _finished(samples).reshape(self._in_flight, -1).all(1)
    missing = context.prompts - finished.sum()
    if missing > 0:
      oldest = self._oldest(~finished)[:missing]
      to_the_end = np.isin(np.arange(self._in_flight), oldest).repeat(G)
      samples = sample(samples, np.where(to_the_end, limit, 0))
      slot_steps += int(samples.slot_steps)
    return samples, slot_steps

  def _oldest(self, which_Q) -> np.ndarray:
    """The places of those prompts, oldest first."""
    return self._places[which_Q[self._places]]

  def _keep(self, batch, samples, left):
    """Keeps those groups, as the oldest; the other places become free."""
    index = np.full(self._in_flight, -1, np.int32)
    index[self._places[: len(left)]] = left
    self.pending = self._functions.take_pending(samples, index)
    self._batch = prompt_batch.pick(batch, left) if len(left) else None
    rows = group_rows(index, self._context.group_size)
    stays = np.repeat(index >= 0, self._context.group_size)
    self._step_sums = np.where(stays, self._step_sums[rows], 0)
    self._calls = np.where(stays, self._calls[rows], 0)


def _finished(samples: Samples) -> np.ndarray:
  """[B] bool."""
  return multihost.to_host(samples.finish) != UNFINISHED
