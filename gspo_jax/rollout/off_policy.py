"""Off-policy rollouts: batches are sampled some iterations before their use."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax

from gspo_jax import model
from gspo_jax.rollout.batch import RolloutBatch, RolloutCost
from gspo_jax.rollout.context import RolloutContext
from gspo_jax.rollout.on_policy import OnPolicy
from gspo_jax.rollout.partial import PartialRollouts
from gspo_jax.sampler.samples import Samples


class OffPolicy:
  """Samples each batch `max_staleness` iterations before it is used.

  The policy of iteration n, before its update, samples the batch of iteration n
  + `max_staleness`; the first policy also samples all earlier batches. The
  schedule counts iterations and ignores the clock. Nothing is sampled for
  iterations after `last_step`; if a later run has more steps, the policy that
  learns from the next batch also samples it.

  Rewards are computed while updates run. With a sampler on separate devices a
  thread also samples while updates run; the run ends if a batch takes over
  `timeout` seconds. A checkpoint always stores `max_staleness` batches, padded
  with empty ones.
  """

  def __init__(
    self,
    source: OnPolicy | PartialRollouts,
    context: RolloutContext,
    *,
    last_step: int,
    timeout: float = 3600.0,
  ):
    self._source, self._context = source, context
    self._max_staleness = context.rollout.max_staleness
    self._last_step, self._timeout = last_step, timeout
    self._separate, self._empty = context.sampler.separate, None
    if self._max_staleness:
      self._empty = self._on_trainer(context.sampler.empty_samples())
    self._batches: deque[Future[RolloutBatch]] = deque()
    self._idle = threading.Event()  # set at the end of the newest thread
    self._idle.set()

  def __call__(self, params: model.Params, step: int) -> RolloutBatch:
    newest = min(step + self._max_staleness, self._last_step)
    targets = range(step + len(self._batches), newest + 1)
    if self._separate and targets:
      params = self._separate.sync_weights(params)
    started = [self._start(params, target, step) for target in targets]
    self._batches.extend(started)
    batch = self._result(self._batches[0])
    self._batches.popleft()
    if self._separate:
      return batch
    # All were sampled in this iteration.
    tokens = sum(each.result().sampled_tokens for each in started)
    return batch._replace(sampled_tokens=tokens)

  def _on_trainer(self, samples: Samples | None) -> Samples | None:
    if self._separate is None or samples is None:
      return samples
    return self._separate.to_trainer(samples)

  def _start(self, params, target: int, step: int) -> Future[RolloutBatch]:
    if self._separate:
      return self._submit(lambda: self._sample(params, target, step))
    return _done(self._source(params, target, policy_step=step))

  def _submit(self, function: Callable[[], RolloutBatch]) -> Future:
    """Runs it in a daemon thread, which does not block the process's exit.

    Each thread waits for the one before it: JAX does not order the collectives
    of two threads. It sets the sampler's mesh, so that `multihost` runs its
    collectives on the sampler's devices.
    """
    future: Future[RolloutBatch] = Future()
    before, self._idle = self._idle, (after := threading.Event())

    def run():
      before.wait()
      try:
        if future.set_running_or_notify_cancel():
          with jax.set_mesh(self._context.sampler.mesh):
            future.set_result(function())
      except BaseException as error:
        future.set_exception(error)
      finally:
        after.set()

    threading.Thread(target=run, name="sampler", daemon=True).start()
    return future

  def _sample(self, params, target, step) -> RolloutBatch:
    began = time.monotonic()
    batch = self._source(params, target, policy_step=step)
    # In this thread, because it may run a program on the sampler's devices.
    samples = jax.block_until_ready(self._on_trainer(batch.samples.samples))
    return batch._replace(
      samples=batch.samples._replace(samples=samples),
      seconds=time.monotonic() - began,
    )

  def wait(self) -> list[RolloutBatch]:
    return [self._result(each) for each in self._batches]

  def _result(self, batch: Future[RolloutBatch]) -> RolloutBatch:
    try:
      return batch.result(self._timeout)
    except TimeoutError as error:
      if batch.done():  # raised by the sampler itself
        raise
      raise TimeoutError(
        f"the sampler has not finished a batch in {self._timeout:g} seconds; "
        "the same command resumes from the last checkpoint"
      ) from error

  def close(self) -> None:
    """Drops the batches that have not begun."""
    for batch in self._batches:
      batch.cancel()

  @property
  def pending(self) -> dict | Samples | None:
    """Pending samples, and the source's, on the trainer's devices.

    With `max_staleness` 0 only the source's, which any devices can resume.
    """
    batches = self.wait()
    of_source = self._on_trainer(self._source.pending)
    if not self._max_staleness:
      return of_source
    samples: list[Samples | None] = [x.samples.samples for x in batches]
    samples += [self._empty] * (self._max_staleness - len(samples))
    return {"next": samples, "source": of_source}

  def get_state(self) -> dict:
    """JSON: the data positions of the pending problems, and their cost."""
    if not self._max_staleness:
      return self._source.get_state()
    batches = [self._saved(batch) for batch in self.wait()]
    return {"source": self._source.get_state(), "next": batches}

  def _saved(self, batch: RolloutBatch) -> dict:
    saved, player = batch._asdict(), self._context.conversations
    scored, (cost,) = saved.pop("samples"), saved.pop("costs")
    return {
      "positions": scored.prompts.positions.tolist(),
      "steps": scored.prompts.steps.tolist(),
      "tokens": int(cost.tokens),
      "slot_steps": int(cost.slot_steps),
      **saved,
      "conversations": player.state(scored) if player else {},
    }

  def set_state(self, pending: Any, state: dict) -> None:
    """Restores the state; scores responses of one turn again."""
    ahead = self._max_staleness > 0
    of_source = pending["source"] if ahead else pending
    if self._separate and of_source is not None:
      of_source = self._separate.to_sampler(of_source)
    self._source.set_state(of_source, state["source"] if ahead else state)
    self._batches.clear()
    if not ahead:
      return
    for samples, saved in zip(pending["next"], state["next"], strict=False):
      prompts = self._context.curriculum.prompts_at(
        saved["positions"], saved.get("steps", 0)
      )
      if player := self._context.conversations:
        scored = player.restore(prompts, samples, saved["conversations"])
      else:
        scored = self._context.scored(prompts, samples)
      cost = RolloutCost(
        prompts, scored.rewards, saved["tokens"], saved["slot_steps"]
      )
      names = saved.keys() & RolloutBatch._fields
      numbers = {name: saved[name] for name in names}
      self._batches.append(_done(RolloutBatch(scored, [cost], **numbers)))


def _done(batch: RolloutBatch) -> Future[RolloutBatch]:
  future: Future[RolloutBatch] = Future()
  future.set_result(batch)
  return future
