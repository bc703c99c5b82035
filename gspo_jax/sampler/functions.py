"""What samples responses, as the other wings call it."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax

from gspo_jax import model
from gspo_jax.record.progress import Progress
from gspo_jax.runtime.sharding import MeshJit
from gspo_jax.sampler.continuous_config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import (
  OnFinished,
  Prompts,
  SamplerConfig,
  Samples,
)
from gspo_jax.sampler.stop_strings import StopStrings


class Sampler(Protocol):
  """Samples responses: a `StaticSampler` or a `ContinuousSampler`.

  Attributes:
    config: the sampling parameters.
    batching: slots and pages; None with static batching.
    mesh: the mesh that decodes.
  """

  config: SamplerConfig
  batching: ContinuousBatchingConfig | None
  mesh: jax.sharding.Mesh

  def __call__(
    self,
    params: model.Params,
    prompts: Prompts,
    key: jax.Array,
    *,
    on_finished: OnFinished | None = None,
    progress: Progress | None = None,
  ) -> Samples:
    """G responses to each of P prompts.

    Args:
      params: the policy, from `SamplerFunctions.weights`.
      prompts: P of them, on the sampler's devices.
      key: a typed PRNG key.
      on_finished: called with this host's responses, each once, as early as the
        sampler can.
      progress: counts the responses.
    """

  def lower(
    self,
    params: model.Params,
    prompts: Prompts,
    key: jax.Array,
    *,
    continues: bool = False,
  ) -> dict[str, jax.stages.Lowered]:
    """Its functions, lowered for abstract arguments; `generate` decodes."""

  def compilations(self) -> dict[str, tuple[MeshJit, int]]:
    """Its jitted functions, and the most programs of each, by name."""

  def describe(self, *, continues: bool) -> str:
    """A line for the log on its programs, "" if there is one.

    `continues`: whether unfinished responses are continued.
    """


@dataclasses.dataclass(frozen=True)
class SeparateDevices:
  """Moves arrays between the trainer's devices and the sampler's own.

  Attributes:
    weights: shapes and shardings of the sampler's copy of the policy.
    in_transit: abstract copy of the weights that the trainer's devices hold
      while they are sent; `plan` counts its memory.
    sync_weights: policy -> a copy for the sampler, in the dtype of the model.
    to_trainer: samples -> the same on the trainer's devices.
    to_sampler: the way back.
  """

  weights: model.Params
  in_transit: model.Params
  sync_weights: Callable[[model.Params], model.Params]
  to_trainer: Callable[[Samples], Samples]
  to_sampler: Callable[[Samples], Samples]


@dataclasses.dataclass(frozen=True)
class SamplerFunctions:
  """What samples responses.

  Attributes:
    generate: `rollout.group_size` responses a prompt, as the config samples.
    generate_eval: `eval.samples` responses to each of `eval_prompts`.
    generate_greedy: one greedy response to each of `eval_prompts`.
    eval_prompts: prompts of a batch of the held-out problems.
    merge_groups: (samples, samples, index [P] below 2 P) -> those of the 2 P
      groups of both, for dynamic sampling.
    take_batch: (samples, index [P]) -> the groups of an update, from those in
      flight.
    take_pending: (samples, index) -> the groups that stay in flight; an empty
      group for -1.
    empty_samples: () -> samples without tokens, in the shape of `generate`'s.
    stop: the stop strings of all samplers; None: there are none.
    mesh: of prompts and samples.
    separate: for a sampler with devices of its own; else None.
  """

  generate: Sampler
  generate_eval: Sampler
  generate_greedy: Sampler
  eval_prompts: int
  merge_groups: Callable[[Samples, Samples, jax.Array], Samples]
  take_batch: Callable[[Samples, jax.Array], Samples]
  take_pending: Callable[[Samples, jax.Array], Samples]
  empty_samples: Callable[[], Samples]
  stop: StopStrings | None
  mesh: jax.sharding.Mesh
  separate: SeparateDevices | None

  def weights(self, policy: model.Params) -> model.Params:
    """The trainer's policy, where the sampler's functions take it."""
    return self.separate.sync_weights(policy) if self.separate else policy
