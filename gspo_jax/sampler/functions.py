"""What samples responses, as the other wings call it."""

import dataclasses
from collections.abc import Callable

import jax

from gspo_jax import model
from gspo_jax.sampler.continuous import ContinuousSampler
from gspo_jax.sampler.samples import Samples
from gspo_jax.sampler.static import StaticSampler
from gspo_jax.sampler.stop_strings import StopStrings

# The two have the same interface, of which StaticSampler describes each method.
Sampler = StaticSampler | ContinuousSampler


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
