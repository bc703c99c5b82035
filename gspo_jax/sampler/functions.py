"""The interface of both samplers, and the sampler's functions."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.record.progress import Progress
from gspo_jax.runtime.sharding import MeshJit
from gspo_jax.sampler.continuous import ContinuousSampler
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import OnFinished, Prompts, SamplerConfig, Samples
from gspo_jax.sampler.stop_strings import StopStrings


class Sampler(Protocol):
  config: SamplerConfig
  batching: ContinuousBatchingConfig | None  # None: static

  @property
  def mesh(self) -> jax.sharding.Mesh: ...

  def __call__(
    self,
    params: model.Params,
    prompts: Prompts,
    key: jax.Array,
    *,
    on_finished: OnFinished | None = None,
    progress: Progress | None = None,
  ) -> Samples:
    """Samples G responses to each of P prompts.

    `params` come from `SamplerFunctions.weights`. `on_finished` gets this
    host's responses, each once, as early as possible. `progress` counts
    responses.
    """

  def lower(
    self,
    params: model.Params,
    prompts: Prompts,
    key: jax.Array,
    *,
    continues: bool = False,
  ) -> dict[str, jax.stages.Lowered]:
    """Lowers the functions for abstract arguments; `generate` decodes.

    `continues`: unfinished responses are continued; continuous batching only.
    """

  def compilations(self) -> dict[str, tuple[MeshJit, int]]:
    """Each jitted function, and how many programs it may compile, by name."""

  def describe(self, *, continues: bool) -> str:
    """A log line about the programs; "" if there is only one."""


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
  merge_groups: Callable[[Samples, Samples, jax.Array], Samples]
  take_batch: Callable[[Samples, jax.Array], Samples]  # for an update
  take_pending: Callable[[Samples, jax.Array], Samples]  # stay in flight
  empty_samples: Callable[[], Samples]  # shaped as the result of `generate`
  stop: StopStrings | None  # of all samplers
  mesh: jax.sharding.Mesh  # of prompts and samples
  separate: SeparateDevices | None  # None: trainer and sampler share devices

  def padded(self, count: int) -> np.ndarray:
    """Indices of so many prompts; the first ones again, to fill all shards."""
    n = self.shards_of_rows
    return np.arange(-(-count // n) * n) % count

  def weights(self, policy: model.Params) -> model.Params:
    """The policy's weights on the sampler's devices."""
    return self.separate.sync_weights(policy) if self.separate else policy
