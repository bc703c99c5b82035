"""The two samplers, and the sampler's functions."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.runtime.sharding import Array
from gspo_jax.sampler.continuous import ContinuousSampler
from gspo_jax.sampler.samples import Samples
from gspo_jax.sampler.static import StaticSampler
from gspo_jax.sampler.stop_strings import StopStrings

Sampler = StaticSampler | ContinuousSampler


@dataclasses.dataclass(frozen=True)
class SeparateDevices:
  weights: model.Params  # shapes and shardings of the sampler's copy
  # Abstract copy of the weights that the trainer's devices hold while they are
  # sent; `plan` counts its memory.
  in_transit: model.Params
  # policy -> a copy on the sampler's devices, in the model's dtype
  sync_weights: Callable[[model.Params], model.Params]
  to_trainer: Callable[[Samples], Samples]
  to_sampler: Callable[[Samples], Samples]


@dataclasses.dataclass(frozen=True)
class SamplerFunctions:
  """The samplers, and operations on their samples; see `samples`."""

  generate: Sampler  # `rollout.group_size` responses a prompt
  # Any number of responses, each with its SamplingParams; for evaluations.
  respond: ContinuousSampler
  shards_of_rows: int  # a call has a multiple of so many prompts
  merge_groups: Callable[[Samples, Samples, Array], Samples]
  # For an update, and those that stay in flight.
  take_groups: Callable[[Samples, Array], Samples]
  empty_samples: Callable[[], Samples]  # shaped as the result of `generate`
  stop: StopStrings | None  # of all samplers
  mesh: jax.sharding.Mesh  # of prompts and samples
  separate: SeparateDevices | None  # None: trainer and sampler share devices

  def padded(self, count: int) -> np.ndarray:
    """Indices of so many prompts; the first ones again, to fill all shards."""
    n = self.shards_of_rows
    return np.arange(-(-count // n) * n) % count

  def weights(self, policy: model.Params) -> model.Params:
    """The policy's weights on the sampler's devices, which samplers take."""
    return self.separate.sync_weights(policy) if self.separate else policy
