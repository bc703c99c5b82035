"""What samples responses, as the other wings call it."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax

from gspo_jax import model
from gspo_jax.record.progress import Progress
from gspo_jax.runtime.sharding import MeshJit
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import OnFinished, Prompts, SamplerConfig, Samples
from gspo_jax.sampler.stop_strings import StopStrings


class Sampler(Protocol):
  """What samples responses: a StaticSampler or a ContinuousSampler."""

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
    """G responses to each of P prompts, with weights of `SamplerFunctions`.

    `on_finished` is called with this host's responses, each once, as early as
    the sampler can. `progress` counts the responses.
    """

  def lower(
    self,
    params: model.Params,
    prompts: Prompts,
    key: jax.Array,
    *,
    continues: bool = False,
  ) -> dict[str, jax.stages.Lowered]:
    """The functions, lowered for abstract arguments; `generate` decodes.

    `continues` is whether unfinished responses are continued, which only
    continuous batching can.
    """

  def compilations(self) -> dict[str, tuple[MeshJit, int]]:
    """The jitted functions, and the most programs of each, by name."""

  def describe(self, *, continues: bool) -> str:
    """A line for the log on the programs, "" if there is one."""


@dataclasses.dataclass(frozen=True)
class SeparateDevices:
  """Moves arrays between the trainer's devices and the sampler's own."""

  weights: model.Params  # shapes and shardings of the sampler's copy
  # Abstract copy of the weights that the trainer's devices hold while they are
  # sent; `plan` counts its memory.
  in_transit: model.Params
  # policy -> a copy for the sampler, in the dtype of the model
  sync_weights: Callable[[model.Params], model.Params]
  to_trainer: Callable[[Samples], Samples]
  to_sampler: Callable[[Samples], Samples]


@dataclasses.dataclass(frozen=True)
class SamplerFunctions:
  """What samples responses; merge and take as in `samples`."""

  generate: Sampler  # `rollout.group_size` responses a prompt
  generate_eval: Sampler  # `eval.samples` to each of `eval_prompts`
  generate_greedy: Sampler  # one to each of `eval_prompts`
  eval_prompts: int  # of a batch of the held-out problems
  merge_groups: Callable[[Samples, Samples, jax.Array], Samples]
  take_batch: Callable[[Samples, jax.Array], Samples]  # of an update
  take_pending: Callable[[Samples, jax.Array], Samples]  # that stay in flight
  empty_samples: Callable[[], Samples]  # in the shape of `generate`'s
  stop: StopStrings | None  # of all samplers
  mesh: jax.sharding.Mesh  # of prompts and samples
  separate: SeparateDevices | None  # for a sampler with devices of its own

  def weights(self, policy: model.Params) -> model.Params:
    """The trainer's policy, where the sampler's functions take it."""
    return self.separate.sync_weights(policy) if self.separate else policy
