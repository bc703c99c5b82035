"""Partial rollouts: long responses are sampled over several iterations.

Kimi k1.5 (arXiv 2501.12599, sec. 2.6.2): a response adds a limited number of
tokens in an iteration and continues in the next one. More prompts are in flight
than an update needs, so that long responses do not delay a batch.
"""

from collections.abc import Callable

import numpy as np

from gspo_jax import model
from gspo_jax.data.prompt_batch import PromptBatch, join
from gspo_jax.record.progress import Progress
from gspo_jax.rollout.batch import (
  RolloutBatch,
  RolloutCost,
  group_rows,
  prompts_on_device,
)
from gspo_jax.rollout.context import RolloutContext, iteration_keys
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.functions import SamplerFunctions
from gspo_jax.sampler.samples import UNFINISHED, Samples


class PartialRollouts:
  """Resumes the responses in flight; returns the first P finished groups.

  If fewer than P groups have finished, the oldest others are sampled to their
  end. Batches keep the order of the data. Departures:
    1. A group is scored when its batch is returned, not while others are
       sampled.
    2. The prompt and the earlier tokens of a resumed response are prefilled
       again, because the weights have changed.

  `empty_samples` gets a number of prompts. An iteration adds at most
  `max_tokens` to a response. `extra_prompts` are in flight in addition to the P
  of a batch; the oldest come first.
  """

  def __init__(
    self,
    context: RolloutContext,
    empty_samples: Callable[[int], Samples],
    functions: SamplerFunctions,
    *,
    max_tokens: int,
    extra_prompts: int,
  ):
    self._context, self._functions = context, functions
    self._max_tokens = max_tokens
    self._in_flight = context.prompts + extra_prompts
    responses = self._in_flight * context.group_size
    self._batch: PromptBatch | None = None
    self.pending = empty_samples(self._in_flight)
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
    rows = group_rows(chosen, self._context.group_size)
    scored = self._context.start_scoring(
      batch.pick(chosen),
      self._functions.take_batch(samples, chosen),
    )
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
    """Adds up to `max_tokens` to each response; also returns the slot steps.

    If fewer than P groups are then finished, samples the oldest to their end.
    """
    context, G = self._context, self._context.group_size
    prompts = prompts_on_device(batch, context.batch_sharding)
    key = sharding.key_beside(
      context.batch_sharding, iteration_keys(context.rng, step).sample
    )
    limit = self.pending.tokens.shape[1]

    def sample(samples, stop_at, waits):
      label = f"rollout of iteration {step}"
      with Progress(label, int(waits.sum()), "responses") as progress:
        return context.generate(  # type: ignore[call-arg]  # continuous
          params,
          prompts,
          key,
          resume_from=samples,
          stop_at=stop_at,
          progress=progress,
        )

    stop_at = np.minimum(lengths + self._max_tokens, limit)
    waits = ~_finished(self.pending) & (lengths < stop_at)
    samples = sample(self.pending, stop_at, waits)
    slot_steps = int(samples.slot_steps)
    ended = _finished(samples)
    finished = ended.reshape(self._in_flight, -1).all(1)
    missing = context.prompts - finished.sum()
    if missing > 0:
      oldest = np.flatnonzero(~finished)[:missing]
      to_the_end = np.isin(np.arange(self._in_flight), oldest).repeat(G)
      stop_at = np.where(to_the_end, limit, 0)
      samples = sample(samples, stop_at, to_the_end & ~ended)
      slot_steps += int(samples.slot_steps)
    return samples, slot_steps

  def _keep(self, batch, samples, left):
    """Keeps the groups `left` as the first ones; empties the others."""
    index = np.full(self._in_flight, -1, np.int32)
    index[: len(left)] = left
    self.pending = self._functions.take_pending(samples, index)
    self._batch = batch.pick(left) if len(left) else None
    rows = group_rows(index, self._context.group_size)
    stays = np.repeat(index >= 0, self._context.group_size)
    self._step_sums = np.where(stays, self._step_sums[rows], 0)
    self._iterations = np.where(stays, self._iterations[rows], 0)


def _finished(samples: Samples) -> np.ndarray:
  return multihost.to_host(samples.finish) != UNFINISHED
