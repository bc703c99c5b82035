"""Counts the decode steps of responses with given lengths, without a device.

The real continuous sampler schedules; its device functions only count.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax.plan.iteration.lengths import Lengths
from gspo_jax.program.config import Config
from gspo_jax.sampler.continuous import ContinuousSampler
from gspo_jax.sampler.continuous.paged_decode import SegmentResults
from gspo_jax.sampler.samples import UNFINISHED, Prompts, Samples


class Steps(NamedTuple):
  """Sums over decode steps that compute equally many rows."""

  steps: int = 0
  blocks: float = 0.0  # read of the cache of a shard, a mean over shards
  most_blocks: float = 0.0  # of the fullest shard of each step


class Decoding(NamedTuple):
  steps: int  # decode steps
  slot_steps: int  # computed rows, summed over steps
  prefilled: int  # tokens of all prefills, padding included
  by_rows: dict[int, Steps]  # by the rows of a step
  moves: int = 0  # calls that move pages between shards


class CountingSampler:
  """A stand-in for the device functions of a sampler, which counts.

  `block` tokens of a row are read at a time. The state is in attributes.
  """

  def __init__(
    self,
    sampler: ContinuousSampler,
    responses: np.ndarray,
    block: int,
    tokens_a_step: float,
  ):
    self._sizes, self._config = sampler.sizes, sampler.config
    self._slots, self._shards = sampler.batching.slots, sampler.shards
    self._block, self._tokens_a_step = block, tokens_a_step
    self._lengths = responses  # at their end
    self._segments: list[tuple[int, int]] = []  # steps, and rows of a step
    self._by_rows: dict[int, Steps] = {}
    self._prefilled = self._moves = 0
    # Of each slot: its response, its tokens, and those before them.
    self._response, self._num_tokens, self._before = np.zeros(
      (3, self._slots), np.int32
    )

  def sums(self) -> Decoding:
    steps, computed = np.array(self._segments).T
    return Decoding(
      steps=int(steps.sum()),
      slot_steps=int(steps @ computed),
      prefilled=self._prefilled,
      by_rows=self._by_rows,
      moves=self._moves,
    )

  def empty_samples(self, prompts):
    B = prompts * self._config.group_size
    finish = np.full(B, UNFINISHED, np.int8)
    return Samples(None, None, np.zeros(B, np.int32), finish, np.int32(0))

  def begin(self, samples):
    return None, samples

  def prefill(self, params, state, tokens, *others):
    self._prefilled += tokens.size
    return state, None

  def decode(
    self, params, state, samples, plan, compute_slots, min_active, key, drafts
  ):
    start = lambda new, old: np.where(plan.new, new, old)
    self._before = start(plan.num_cached - plan.num_tokens, self._before)
    num_tokens = start(plan.num_tokens, self._num_tokens)
    self._response = start(plan.response, self._response)
    left = self._lengths[self._response] - num_tokens
    left = np.where(plan.active, left, 0)
    pace = self._tokens_a_step if drafts else 1.0
    # After s steps, slots with more than s * pace tokens left are active.
    until = np.sort(left)[::-1][int(min_active)] / pace
    steps = min(self._sizes.segment_steps, math.ceil(until))
    sampled = np.minimum(left, int(steps * pace))
    rows = slice(None) if compute_slots is None else compute_slots
    self._read((self._before + num_tokens)[rows], left[rows], steps, pace)
    self._segments.append((steps, len(left[rows])))
    self._num_tokens = num_tokens + sampled.astype(np.int32)
    results = SegmentResults(
      num_tokens=self._num_tokens,
      active=left > sampled,
      response=self._response,
      stop_at=np.full_like(self._response, self._sizes.max_new_tokens),
      num_cached=self._before + self._num_tokens,
      num_sampled=sampled.sum(),
      drafts=None,
    )
    return state, samples, results

  def _read(self, before, left, steps, pace):
    """Adds the blocks that each step reads; an idle row reads none."""
    new = (np.arange(steps) * pace).astype(int)
    tokens = np.where(new < left[:, None], before[:, None] + new + 1, 0)
    blocks = -(-tokens // self._block)
    of_shards = np.stack([x.sum(0) for x in np.split(blocks, self._shards)])
    total = self._by_rows.get(len(left), Steps())
    self._by_rows[len(left)] = Steps(
      total.steps + steps,
      total.blocks + float(of_shards.mean(0).sum()),
      total.most_blocks + float(of_shards.max(0).sum()),
    )

  def move_pages(self, state, moves):
    self._moves += 1
    return state

  def move_slots(self, state, moves, rows):
    M = self._slots // self._shards
    sent, source, target = (x.reshape(self._shards, -1) for x in moves)
    first = M * np.arange(self._shards)[:, None]
    stored, place = target < M, first + target
    slot = (first + sent).ravel()[source]
    of_slots = np.stack([self._response, self._num_tokens, self._before])
    of_slots[:, place[stored]] = of_slots[:, slot[stored]]
    self._response, self._num_tokens, self._before = of_slots
    return state

  decode_params = share = finalize = staticmethod(lambda x: x)
  move_rows = staticmethod(lambda samples, moves: samples)


def replay(
  sampler: ContinuousSampler,
  lengths: Lengths,
  block: int,
  tokens_a_step: float = 1.0,
) -> Decoding:
  """Counts what `sampler` does for responses of these lengths.

  `block` tokens of a row's cache are read at a time. A step that drafts adds
  `tokens_a_step` to a response, on average.
  """
  counts = CountingSampler(sampler, lengths.responses, block, tokens_a_step)
  cpu = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
  dry = dataclasses.replace(sampler, jitted=counts, batch_sharding=cpu)
  P = len(lengths.prompts)
  tokens = np.zeros((P, sampler.sizes.max_prompt_length), np.int32)
  dry(None, Prompts(tokens, lengths.prompts.astype(np.int32)), None)
  return counts.sums()


def decode_together(lengths: Lengths, config: Config, shards: int) -> Decoding:
  """The static sampler decodes all rows until the longest ends."""
  responses = lengths.responses
  B, longest = len(responses), int(responses.max())
  P, S = config.data.prompts, config.data.max_prompt_length
  steps = longest - 1  # the first token comes with the prefill
  # It also reads the cache of responses that ended.
  cached = steps * (P * S + B * longest / 2)
  return Decoding(
    steps=steps,
    slot_steps=B * longest,
    prefilled=P * S,
    by_rows={B: Steps(steps, cached / shards, cached / shards)},
  )
