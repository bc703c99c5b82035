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
  """Samples of the prompts `index`; rows from `new` on are padding."""

  index: np.ndarray
  new: int
  samples: Samples


def equal_batches(count: int, limit: int, multiple: int = 1) -> int:
  """The size of the fewest equal batches that hold `count` rows.

  It is at most `limit`, then rounded up to a `multiple`.
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
  """Samples responses to any number of prompts, `batch_size` at a time.

  `prompts` are numpy arrays, the same on every process. The first prompts pad
  the last batch, so all batches run the same compiled function. Batch i is
  sampled with `fold_in(key, i)`. `progress` advances when the next batch is
  requested.
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
