"""Any number of prompts, in batches of one size."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.record.progress import Progress
from gspo_jax.runtime import multihost, sharding
from gspo_jax.sampler.functions import Sampler
from gspo_jax.sampler.samples import Prompts, Samples


class SampledBatch(NamedTuple):
  """Samples of the prompts `index` [batch_size], of which the first are new.

  The prompts behind the first `new` ones are padding.
  """

  index: np.ndarray
  new: int
  samples: Samples


def equal_batches(count: int, limit: int, multiple: int = 1) -> int:
  """The rows of a batch: as few batches as can be, equally large.

  Args:
    count: rows in all, 1 or more.
    limit: the most rows of a batch, before its size is rounded up.
    multiple: the size is rounded up to a multiple of this.
  """
  batches = -(-count // limit)
  return -(-count // (batches * multiple)) * multiple


def sample_many(
  generate: Sampler,
  params: model.Params,
  prompts: Prompts,
  key: jax.Array,
  *,
  batch_size: int,
  batch_sharding: jax.sharding.Sharding,
  progress: Progress | None = None,
) -> Iterator[SampledBatch]:
  """Samples responses to N prompts, `batch_size` at a time.

  The last batch is padded with the first prompts, so that all batches run the
  same compiled function.

  Args:
    generate: samples a batch.
    params: the policy, where the sampler takes it.
    prompts: N prompts, numpy arrays, the same on every process.
    key: batch i is sampled with `fold_in(key, i)`.
    batch_size: prompts a batch.
    batch_sharding: the sharding of arrays of rows.
    progress: counts the responses of a batch once the next one is asked for.
  """
  count = len(prompts.lengths)
  for i, start in enumerate(range(0, count, batch_size)):
    index = np.arange(start, start + batch_size) % count
    batch = Prompts(prompts.tokens[index], prompts.lengths[index])
    batch = multihost.to_global(batch, batch_sharding)
    batch_key = sharding.key_beside(batch_sharding, jax.random.fold_in(key, i))
    samples = generate(params, batch, batch_key)
    new = min(batch_size, count - start)
    yield SampledBatch(index, new, samples)
    if progress:
      progress.advance(new * len(samples.lengths) // batch_size)
