"""What samples responses, as the other wings call it.

Dimension key: P prompts, G responses a prompt.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax

from gspo_jax import model
from gspo_jax.sampler.samples import Prompts, Samples
from gspo_jax.sampler.stop_strings import StopStrings


class Generate(Protocol):
  """Samples responses: a jitted function, or a `ContinuousSampler`."""

  def __call__(
    self, params: model.Params, prompts: Prompts, key: jax.Array
  ) -> Samples:
    """Responses to P prompts, G each: P * G rows, a group side by side."""


class MergeGroups(Protocol):
  """Picks whole groups from two batches."""

  def __call__(self, a: Samples, b: Samples, index: jax.Array) -> Samples:
    """Groups `index`, [P] integers below 2 P, of the 2 P groups of both."""


class TakeGroups(Protocol):
  """Picks whole groups from a batch."""

  def __call__(self, samples: Samples, index: jax.Array) -> Samples:
    """Groups `index`, [N] integers; an empty group for -1."""


class EmptySamples(Protocol):
  """Makes a batch of samples without tokens."""

  def __call__(self) -> Samples:
    """Samples of the shape that `generate` gives."""


@dataclasses.dataclass(frozen=True)
class SeparateDevices:
  """Moves arrays between the trainer's devices and the sampler's own.

  Attributes:
    weights: shapes and shardings of the sampler's copy of the policy.
    in_transit: shapes, and shardings with as large shards as those of the copy
      that the trainer's devices hold meanwhile.
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
    merge_groups: the groups of two batches that dynamic sampling keeps.
    take_batch: the groups of an update, from those in flight.
    take_pending: the groups that stay in flight.
    empty_samples: a batch without tokens.
    stop: the stop strings of all samplers; None: there are none.
    mesh: of prompts and samples.
    separate: for a sampler with devices of its own; else None.
  """

  generate: Generate
  generate_eval: Generate
  generate_greedy: Generate
  eval_prompts: int
  merge_groups: MergeGroups
  take_batch: TakeGroups
  take_pending: TakeGroups
  empty_samples: EmptySamples
  stop: StopStrings | None
  mesh: jax.sharding.Mesh
  separate: SeparateDevices | None

  def weights(self, policy: model.Params) -> model.Params:
    """The trainer's policy, where the sampler's functions take it."""
    return self.separate.sync_weights(policy) if self.separate else policy
