"""The sampler of continuous batching: all requests of an engine at once."""

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.model.cache import has_states
from gspo_jax.record.progress import Progress
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.continuous import jit
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.continuous.engine import Engine
from gspo_jax.sampler.continuous.programs import Programs
from gspo_jax.sampler.continuous.scheduler import Request
from gspo_jax.sampler.samples import (
  UNFINISHED,
  OnFinished,
  Prompts,
  SamplerConfig,
  Samples,
  SamplingParams,
)
from gspo_jax.sampler.stop_strings import StopStrings


class ContinuousSampler(Programs):
  """Samples with continuous batching; it can also continue responses."""

  def open(self, params: model.Params, key: jax.Array, rows: int) -> Engine:
    """An engine with so many empty rows, a multiple of G."""
    key = sharding.key_beside(self.batch_sharding, key)
    samples = self.jitted.empty_samples(rows // self.config.group_size)
    return Engine(self, params, key, samples)

  def __call__(
    self,
    params: model.Params,
    prompts: Prompts,
    key: jax.Array,
    *,
    group_size: int = 0,
    sampling: SamplingParams | None = None,
    resume_from: Samples | None = None,
    stop_at: np.ndarray | None = None,
    on_finished: OnFinished | None = None,
    progress: Progress | None = None,
  ) -> Samples:
    """Generates all G responses to each of P prompts.

    The key of token t of response b is made of (key, b, t). So a response that
    pauses and resumes with the same key and weights equals one without a pause.

    Args:
      params: as `model.init` returns them.
      prompts: P is a multiple of the shards.
      key: a typed PRNG key.
      group_size: G; 0: the sampler's.
      sampling: of all responses, with `by_row`; None: the sampler's.
      resume_from: samples whose UNFINISHED responses are continued; donated.
      stop_at: [B] int, tokens at which a response pauses and stays UNFINISHED.
      on_finished: called with responses of an earlier segment while a later one
        decodes.
      progress: counts responses that finish or pause.

    Raises:
      UserError: the prompts have another shape.
    """
    tokens, lengths = multihost.to_host((prompts.tokens, prompts.lengths))
    width = self.sizes.max_prompt_length
    if tokens.shape[1] != width or len(tokens) % self.shards:
      raise UserError(
        f"prompts {tokens.shape}: expected [P, {width}], with P a multiple of "
        f"the {self.shards} shards"
      )
    samples = resume_from
    if samples is None:
      G = self.config.group_size
      samples = self.jitted.empty_samples(len(tokens) * (group_size or G) // G)
    so_far, finish = multihost.to_host((samples.lengths, samples.finish))
    R = self.sizes.max_new_tokens
    stop_at = np.full(len(so_far), R) if stop_at is None else stop_at
    stop_at = np.where(finish == UNFINISHED, np.minimum(stop_at, R), 0)
    engine = Engine(self, params, key, samples, keeps=False)
    sampled = {}
    if so_far.any():
      sampled = multihost.addressable_rows(engine.samples.tokens)
    size = len(so_far) // len(tokens)

    def request_of(response: int) -> Request:
      """An earlier call fed, and so recorded, all it has but the last token."""
      count, p = int(so_far[response]), response // size
      prefix = tokens[p, width - lengths[p] :]
      stop_state = 0
      if count:
        prefix = np.concatenate([prefix, sampled[response][:count]])
        if isinstance(self.config.stop, StopStrings):
          stop_state = self.config.stop.state(prefix[-count:])
      return Request(
        prefix.astype(np.int32),
        row=0,
        stop_at=int(stop_at[response]),
        response=response,
        num_tokens=count,
        num_recorded=len(prefix) - 1 if count else 0,
        stop_state=stop_state,
        params=sampling,
      )

    queued = (so_far < stop_at).reshape(self.shards, -1)
    queues = [
      (np.flatnonzero(row) + shard * len(row)).tolist()
      for shard, row in enumerate(queued)
    ]
    # Another host does not have the tokens of a response that goes on.
    engine.queue(queues, request_of, lends=not so_far.any())
    engine.run(on_finished=on_finished, progress=progress)
    return engine.finalize()


def build_continuous_sampler(
  cfg: model.ModelConfig,
  sampler: SamplerConfig,
  *,
  batching: ContinuousBatchingConfig,
  max_prompt_length: int,
  params_sharding: model.Params,
  mesh: jax.sharding.Mesh,
  sampler_mesh: jax.sharding.Mesh,
  by_row: bool = False,
) -> ContinuousSampler:
  """Builds a ContinuousSampler; UserError if the sizes do not fit.

  And if a model with states is to speculate: a state cannot go back.

  Weights, keys and samples are on `mesh`; `sampler_mesh` has the same devices,
  arranged for decoding. `max_prompt_length` is the width of the prompts. With
  `by_row` each request has its own SamplingParams; then no ids are kept.
  """
  shards = sharding.batch_shards(sampler_mesh)
  sampler.require_stops()
  if sampler.speculation and has_states(cfg):
    raise UserError(
      f"continuous_batching.speculation={sampler.speculation}: expected 0 for "
      "a model with gated DeltaNets, whose states cannot go back"
    )
  sizes = batching.shard_sizes(sampler, max_prompt_length, shards)
  of = jit.Functions(cfg, sampler, batching, sizes, shards, by_row)
  return ContinuousSampler(
    **vars(of),
    batch_sharding=sharding.batch_sharding(sampler_mesh),
    jitted=jit.jit_sampler(
      of,
      params_sharding=params_sharding,
      mesh=mesh,
      sampler_mesh=sampler_mesh,
    ),
  )
