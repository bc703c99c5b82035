"""Counts the decode steps of responses with given lengths, without a device.

The real continuous sampler schedules; its device functions only count.
"""

import dataclasses
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax.plan.iteration.lengths import Lengths
from gspo_jax.program.config import Config
from gspo_jax.sampler.continuous import ContinuousSampler
from gspo_jax.sampler.samples import UNFINISHED, Prompts, Samples

_PARTS = 10  # of the decode steps, for `slots_in_use`


class Decoding(NamedTuple):
  steps: int  # decode steps
  segments: int  # calls of the decoding program
  slots: int  # rows of a step, if all are computed
  rows: float  # mean rows that a step computes
  slot_steps: int  # computed rows, summed over steps
  cached: float  # cached tokens of active rows, summed over steps
  prefilled: int  # tokens of all prefills, padding included
  # [10]: mean share of the slots that sample, in each tenth of the steps
  slots_in_use: list[float]


class CountingSampler:
  """Counts in place of the device functions of `JittedSampler`."""

  def __init__(self, sampler: ContinuousSampler, lengths: np.ndarray):
    self._steps, self._lengths = sampler.sizes.segment_steps, lengths
    self._max_new_tokens = sampler.config.max_new_tokens
    self._slots = sampler.batching.slots
    # (steps, slots of a step, sampled tokens, cached tokens summed over steps)
    self.segments: list[tuple[int, int, int, float]] = []
    self.prefilled = 0

  def decode_params(self, params):
    return params

  def empty_samples(self, prompts):
    B = len(self._lengths)
    tokens = np.broadcast_to(np.int32(0), (B, self._max_new_tokens))
    zeros = np.zeros(B, np.int32)
    return Samples(tokens, None, zeros, np.full(B, UNFINISHED, np.int8), None)

  def share(self, facts):
    return facts

  def begin(self, samples, state):
    B = self._slots
    zeros, inactive = np.zeros(B, np.int32), np.zeros(B, bool)
    pages = SimpleNamespace(active=inactive)
    state = SimpleNamespace(num_tokens=zeros, pages=pages, response=zeros)
    return state, samples

  def prefill(self, params, state, tokens, *others):
    self.prefilled += tokens.size
    return state, None

  def decode(
    self, params, state, samples, plan, compute_slots, min_active, key
  ):
    plan = jax.tree.map(np.asarray, plan)
    if not self.segments:
      self._prefixes = np.zeros(self._slots)
    self._prefixes = np.where(plan.new, plan.num_cached, self._prefixes)
    num_tokens = np.where(plan.new, plan.num_tokens, state.num_tokens)
    response = np.where(plan.new, plan.response, state.response)
    active = plan.active
    left = np.where(active, self._lengths[response] - num_tokens, 0)
    # After s steps, slots with more than s tokens left are active.
    until = int(np.sort(left)[::-1][int(min_active)])
    steps = min(self._steps, until)
    sampled = np.minimum(left, steps)
    cached = (self._prefixes + num_tokens) * sampled + sampled**2 / 2
    computed = self._slots if compute_slots is None else compute_slots.size
    self.segments.append(
      (steps, computed, int(sampled.sum()), float(cached.sum()))
    )
    num_tokens, active = num_tokens + sampled.astype(np.int32), left > steps
    pages = SimpleNamespace(active=active)
    state = SimpleNamespace(
      num_tokens=num_tokens, pages=pages, response=response
    )
    return state, samples, (num_tokens, active, sampled.sum())

  def finalize(self, samples):
    return samples


def replay(sampler: ContinuousSampler, lengths: Lengths) -> Decoding:
  counting = CountingSampler(sampler, lengths.responses)
  cpu = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
  dry = dataclasses.replace(sampler, jitted=counting, batch_sharding=cpu)
  P = len(lengths.prompts)
  tokens = np.zeros((P, sampler.sizes.max_prompt_length), np.int32)
  dry(None, Prompts(tokens, lengths.prompts.astype(np.int32)), None)
  steps, computed, sampled, cached = np.array(counting.segments).T
  slots = sampler.batching.slots
  return Decoding(
    steps=int(steps.sum()),
    segments=len(steps),
    slots=slots,
    rows=float(steps @ computed / steps.sum()),
    slot_steps=int(steps @ computed),
    cached=float(cached.sum()),
    prefilled=counting.prefilled,
    slots_in_use=_over_time(steps, sampled, slots),
  )


def decode_together(lengths: Lengths, config: Config) -> Decoding:
  """The static sampler decodes all rows until the longest ends."""
  responses = lengths.responses
  B, longest = len(responses), int(responses.max())
  active = (responses[:, None] > np.arange(longest)).sum(0)
  P, S = config.data.prompts, config.data.max_prompt_length
  return Decoding(
    steps=longest - 1,  # the first token comes with the prefill
    segments=1,
    slots=B,
    rows=B,
    slot_steps=B * longest,
    # It also reads the cache of responses that ended.
    cached=(longest - 1) * (P * S + B * longest / 2),
    prefilled=P * S,
    slots_in_use=_over_time(np.ones(longest), active, B),
  )


def _over_time(steps, sampled, slots) -> list[float]:
  """Means over equal parts of the steps; a segment samples evenly."""
  ends = np.concatenate([[0], np.cumsum(steps)])
  total = np.concatenate([[0], np.cumsum(sampled)])
  at = np.linspace(0, ends[-1], _PARTS + 1)
  rates = np.diff(np.interp(at, ends, total)) / np.diff(at)
  return [round(float(rate / slots), 4) for rate in rates]
