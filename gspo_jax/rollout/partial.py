"""Partial rollouts: long responses are sampled over several iterations.

Kimi k1.5 (arXiv 2501.12599, sec. 2.6.2): a response adds a limited number of
tokens in an iteration and continues in the next one. More prompts are in flight
than an update needs, so that long responses do not delay a batch.
"""

from typing import Any

import numpy as np

from gspo_jax import model
from gspo_jax.data.prompt_batch import PromptBatch, join
from gspo_jax.record.progress import Progress
from gspo_jax.rollout.batch import RolloutBatch, RolloutCost, group_rows
from gspo_jax.rollout.context import RolloutContext, iteration_keys
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.samples import UNFINISHED, Prompts, Samples


class PartialRollouts:
  """Resumes the responses in flight; returns the first P finished groups.

  If fewer than P groups have finished, the oldest others are sampled to their
  end. Batches keep the order of the data. Departures:
    1. A group is scored when its batch is returned, not while others are
       sampled.
    2. The prompt and the earlier tokens of a resumed response are prefilled
       again, because the weights have changed.

  The prompts in flight are twice those of a batch; the oldest come first.
  """

  def __init__(self, context: RolloutContext):
    self._context = context
    self._group_size = context.rollout.group_size
    self._in_flight = 2 * context.prompts
    responses = self._in_flight * self._group_size
    self._batch: PromptBatch | None = None
    empty: Any = context.sampler.generate.jitted  # of a continuous sampler
    self.pending: Samples = empty.empty_samples(self._in_flight)
    # Of each response: the sum over its tokens of the iteration that sampled
    # them, and the number of iterations that added tokens.
    self._step_sums = np.zeros(responses)
    self._iterations = np.zeros(responses, int)

  def __call__(
    self, params: model.Params, step: int, policy_step: int | None = None
  ) -> RolloutBatch:
    batch, before = self._fill(step), multihost.to_host(self.pending.lengths)
    samples, slot_steps = self._resume(params, step, batch, before)
    lengths = multihost.to_host(samples.lengths)
    finished = _finished(samples).reshape(self._in_flight, -1).all(1)
    sampled_at = float(step if policy_step is None else policy_step)
    self._step_sums += (lengths - before) * sampled_at
    self._iterations += lengths > before
    chosen = np.flatnonzero(finished)[: self._context.prompts].astype(np.int32)
    rows = group_rows(chosen, self._group_size)
    taken = self._context.sampler.take_groups(samples, chosen)
    scored = self._context.scored(batch.pick(chosen), taken)
    tokens = int((lengths - before).sum())
    result = RolloutBatch(
      scored,
      [RolloutCost(scored.prompts, scored.rewards, tokens, slot_steps)],
      tokens,
      float(self._step_sums[rows].sum() / lengths[rows].sum()),
      float((self._iterations[rows] > 1).mean()),
      self._context.curriculum.epochs,
    )
    stays = ~np.isin(np.arange(self._in_flight), chosen)
    self._keep(batch, samples, np.flatnonzero(stays))
    return result

  def get_state(self) -> dict:
    """JSON: the problems in flight, and which policies sampled their tokens."""
    return {
      "positions": self._batch.positions.tolist() if self._batch else [],
      "steps": self._batch.steps.tolist() if self._batch else [],
      "step_sums": self._step_sums.tolist(),
      "iterations": self._iterations.tolist(),
    }

  def set_state(self, pending: Samples, state: dict) -> None:
    order = state.get("order", [])  # of prompts by age, in older checkpoints
    if order != sorted(order):
      raise UserError(
        "an older checkpoint, with partial responses by shard: resume with the "
        "release that wrote it, or use another --workdir"
      )
    at, curriculum = state["positions"], self._context.curriculum
    self._batch = (
      curriculum.prompts_at(at, state.get("steps", 0)) if at else None
    )
    self.pending = pending
    self._step_sums = np.array(state["step_sums"])
    self._iterations = np.array(state["iterations"])

  def _fill(self, step) -> PromptBatch:
    """Adds new prompts as the youngest; returns all in flight as a batch."""
    old = [self._batch] if self._batch else []
    count = self._in_flight - sum(map(len, old))
    new = self._context.curriculum.next_batch(step, count)
    return join([*old, new])

  def _resume(self, params, step, batch, lengths) -> tuple[Samples, int]:
    """Adds tokens to each response; also returns the slot steps.

    If fewer than P groups are then finished, samples the oldest to their end.
    """
    context, prompts = self._context, Prompts(batch.tokens, batch.lengths)
    rows = sharding.batch_sharding(context.sampler.mesh)
    key = sharding.key_beside(rows, iteration_keys(context.rng, step).sample)
    limit = self.pending.tokens.shape[1]

    def sample(samples, stop_at, waits):
      label = f"rollout of iteration {step}"
      with Progress(label, int(waits.sum()), "responses") as progress:
        return context.sampler.generate(  # type: ignore[call-arg]  # continuous
          params,
          prompts,
          key,
          resume_from=samples,
          stop_at=stop_at,
          progress=progress,
        )

    most = context.rollout.max_tokens_per_iteration
    stop_at = np.minimum(lengths + most, limit)
    waits = ~_finished(self.pending) & (lengths < stop_at)
    samples = sample(self.pending, stop_at, waits)
    slot_steps = int(samples.slot_steps)
    ended = _finished(samples)
    finished = ended.reshape(self._in_flight, -1).all(1)
    missing = context.prompts - finished.sum()
    if missing > 0:
      oldest = np.flatnonzero(~finished)[:missing]
      to_the_end = np.isin(np.arange(self._in_flight), oldest)
      to_the_end = to_the_end.repeat(self._group_size)
      stop_at = np.where(to_the_end, limit, 0)
      samples = sample(samples, stop_at, to_the_end & ~ended)
      slot_steps += int(samples.slot_steps)
    return samples, slot_steps

  def _keep(self, batch, samples, left):
    """Keeps the groups `left` as the first ones; empties the others."""
    index = np.full(self._in_flight, -1, np.int32)
    index[: len(left)] = left
    self.pending = self._context.sampler.take_groups(samples, index)
    self._batch = batch.pick(left) if len(left) else None
    rows = group_rows(index, self._group_size)
    stays = np.repeat(index >= 0, self._group_size)
    self._step_sums = np.where(stays, self._step_sums[rows], 0)
    self._iterations = np.where(stays, self._iterations[rows], 0)


def _finished(samples: Samples) -> np.ndarray:
  return multihost.to_host(samples.finish) != UNFINISHED
