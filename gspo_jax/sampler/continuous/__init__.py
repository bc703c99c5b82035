"""Continuous batching: a finished response's slot gets the next response.

`engine` is the host's loop, `sampler` its call for a batch, `scheduler` assigns
slots and pages, `programs` and `jit` compile the functions of `paged_decode`,
`config` has the sizes.

Dimension letters, in addition to docs/architecture.md: B = P * G
responses, M slots, m of them that a segment computes, W pages of a slot, Q
prefixes of one prefill or call, T tokens of a prefix, C its pages.
"""

from gspo_jax.sampler.continuous.sampler import (
  ContinuousSampler,
  build_continuous_sampler,
)

__all__ = ["ContinuousSampler", "build_continuous_sampler"]
