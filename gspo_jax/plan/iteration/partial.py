"""An iteration of partial rollouts, counted without a device.

The real `PartialRollouts` resume, choose and keep responses of the real
scheduler. The groups of the given lengths follow one another, again and again.
The iteration that is counted comes after so many others that the longest
responses had the time to end.
"""

import itertools
from types import SimpleNamespace

import jax
import numpy as np

from gspo_jax.data.prompt_batch import PromptBatch
from gspo_jax.plan.iteration import decoding
from gspo_jax.plan.iteration.decoding import Decoding
from gspo_jax.plan.iteration.lengths import Lengths
from gspo_jax.program.config import Config
from gspo_jax.rollout.batch import group_rows
from gspo_jax.rollout.partial import PartialRollouts
from gspo_jax.sampler.continuous import ContinuousSampler
from gspo_jax.sampler.samples import UNFINISHED


class _Groups:
  """A curriculum whose prompts are numbers of groups."""

  epochs = 0.0

  def __init__(self, prompt_lengths: np.ndarray, width: int):
    self._lengths, self._width = prompt_lengths, width
    self._numbers = itertools.cycle(range(len(prompt_lengths)))

  def next_batch(self, step: int, count: int) -> PromptBatch:
    number = np.fromiter(itertools.islice(self._numbers, count), np.int32)
    tokens = np.zeros((count, self._width), np.int32)
    tokens[:, -1] = number
    lengths = self._lengths[number].astype(np.int32)
    return PromptBatch([None] * count, tokens, lengths, number, number)


def replay(
  sampler: ContinuousSampler,
  lengths: Lengths,
  block: int,
  tokens_a_step: float,
  config: Config,
) -> tuple[Decoding, Lengths, int]:
  """What is decoded, the lengths of the batch, and the sampled tokens."""
  P, most = len(lengths.prompts), config.rollout.max_tokens_per_iteration
  of_group = lengths.responses.reshape(P, -1)
  counting, dry = decoding.counting(sampler, block, tokens_a_step)

  def generate(params, prompts, key, *, resume_from, stop_at, **_):
    number = np.asarray(prompts.tokens)[:, -1]
    counting.lengths = of_group[number].ravel()
    return dry(params, prompts, key, resume_from=resume_from, stop_at=stop_at)

  def take(samples, index):
    rows = group_rows(np.asarray(index), of_group.shape[1])
    empty = np.repeat(np.asarray(index) < 0, of_group.shape[1])
    taken = counting.empty_samples(len(index))
    taken.lengths[:] = np.where(empty, 0, samples.lengths[rows])
    taken.finish[:] = np.where(empty, UNFINISHED, samples.finish[rows])
    return taken

  context = SimpleNamespace(
    curriculum=_Groups(lengths.prompts, sampler.sizes.max_prompt_length),
    generate=generate,
    batch_sharding=dry.batch_sharding,
    rng=jax.random.key(0),
    prompts=P,
    group_size=of_group.shape[1],
    start_scoring=lambda batch, samples: SimpleNamespace(
      prompts=batch, rewards=None, samples=samples
    ),
  )
  rollouts = PartialRollouts(
    context,
    counting.empty_samples,
    SimpleNamespace(take_batch=take, take_pending=take),
    max_tokens=most,
    shards=sampler.shards,
    extra_prompts=P,
  )
  for step in range(2 * -(-sampler.sizes.max_new_tokens // most) + 2):
    counting.reset()
    batch = rollouts(None, step)
  scored = batch.samples
  return (
    counting.sums(),
    Lengths(scored.prompts.lengths.astype(int), scored.samples.lengths),
    batch.sampled_tokens,
  )
