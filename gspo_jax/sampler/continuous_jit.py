"""The jitted functions of continuous batching: shardings and donations.

Dimension key: B slots, b of them, A responses, R most new tokens, W pages of a
slot, N prefixes of one prefill or finished responses, T tokens of a prefix, C
its pages, P prompts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.model import paged_cache, rounding
from gspo_jax.runtime import sharding
from gspo_jax.runtime.sharding import MeshJit
from gspo_jax.sampler import paged_decode
from gspo_jax.sampler.continuous_config import ShardSizes
from gspo_jax.sampler.decode_params import decode_params, decode_params_sharding
from gspo_jax.sampler.paged_decode import DecodeState
from gspo_jax.sampler.samples import (
  SamplerConfig,
  append_tokens,
  empty_samples,
  samples_sharding,
)


@dataclasses.dataclass(frozen=True)
class JittedSampler:
  """The jitted functions of a `ContinuousSampler`.

  All arguments are positional. `params` below are those that `decode_params`
  returns; integers are int32.

  Attributes:
    decode_params: (params of `model.init`) -> params for decoding.
    empty_samples: (P: int) -> Samples of P * G unfinished, empty responses.
    begin: (samples, DecodeState of an earlier call or None) -> (DecodeState
      without responses, samples), on the decoding mesh, with `slot_steps` 0;
      donates both.
    prefill: (params, state, tokens [N, T], lengths [N], pages [N, C],
      num_cached [N] or None) -> (state, experts [N, L, T, k] or None); stores
      the keys and values of `paged_decode.prefill` in these pages, which hold
      those of the first `num_cached` tokens; donates the state. Full pages of
      these tokens are not written.
    write_prompt_routing: (samples, experts [N, L, T, k], lengths [N],
      first_response [N]) -> samples; `paged_decode.write_prompt_routing`.
      Donates the samples.
    decode: (params, state, samples, SegmentPlan, compute_slots [b] or None,
      min_active [], key) -> (state, samples, results); a segment of the slots
      `compute_slots`, or of all. `compute_slots` are equally many of each
      shard, all active ones among them and none of them new. The results,
      whole on every device, are the tokens [B] of the response in each slot,
      and whether it goes on, [B] bool. Donates state and samples.
    read_tokens: (samples, responses [N]) -> their tokens [N, R].
    finalize: (samples) -> samples on the training mesh, with `pad_id` and 0
      after the end of each response.
    append_tokens: (samples, tokens [A, R], counts [A], finish [A]) -> samples,
      all on the training mesh; `samples.append_tokens`. Donates the samples.
  """

  decode_params: MeshJit
  empty_samples: MeshJit
  begin: MeshJit
  prefill: MeshJit
  write_prompt_routing: MeshJit
  decode: MeshJit
  read_tokens: MeshJit
  finalize: MeshJit
  append_tokens: MeshJit


def jit_sampler(
  cfg: model.ModelConfig,
  sampler: SamplerConfig,
  *,
  prefill_chunk: int,
  sizes: ShardSizes,
  params_sharding,
  mesh: jax.sharding.Mesh,
  sampler_mesh: jax.sharding.Mesh,
) -> JittedSampler:
  """Jits the functions; arguments as of `build_continuous_sampler`."""
  batch = sharding.batch_sharding(sampler_mesh)
  state, shards = (
    _state_sharding(cfg, sampler_mesh),
    sharding.batch_shards(sampler_mesh),
  )
  decode_samples = samples_sharding(sampler, sampler_mesh)
  train_samples = samples_sharding(sampler, mesh)
  record_routing = sampler.record_routing and cfg.num_experts > 0

  jit = functools.partial(sharding.mesh_jit, mesh=sampler_mesh)

  def unstacked_decode_params(params):
    return model.unstack_layers(decode_params(params, cfg), cfg)

  def begin(samples, state):
    if state is None:
      state = paged_decode.empty(
        cfg,
        num_slots=sizes.slots * shards,
        num_pages=sizes.num_pages * shards,
        page_size=sizes.page_size,
        pages_per_slot=sizes.pages_per_slot,
      )
    # The steps of one call are counted.
    return state, dataclasses.replace(samples, slot_steps=jnp.int32(0))

  def prefill(params, state, tokens, lengths, pages, num_cached):
    cached = None
    if num_cached is not None:
      k, v = paged_cache.load(state.pages, pages, cfg.head_dim)
      cached = k, v, num_cached
      full = num_cached // sizes.page_size
      nowhere = state.pages.k[0].shape[1]
      column = jnp.arange(pages.shape[1])
      pages = jnp.where(column < full[:, None], nowhere, pages)
    cache, experts = paged_decode.prefill(
      params,
      cfg,
      tokens,
      lengths,
      chunk=prefill_chunk,
      record_routing=record_routing,
      cached=cached,
    )
    stored = paged_cache.store(state.pages, cache.k, cache.v, pages)
    return dataclasses.replace(state, pages=stored), experts

  def decode(params, state, samples, plan, compute_slots, min_active, key):
    # No slot is new where a subset is computed.
    everything = compute_slots is None
    state = paged_decode.apply_plan(state, plan, copy_pages=everything)
    computed, samples = paged_decode.decode(
      params,
      cfg,
      state if everything else paged_decode.select_slots(state, compute_slots),
      samples,
      sharding.constrain(key),
      sampler=sampler,
      steps=sizes.segment_steps,
      min_active=min_active,
    )
    if not everything:
      computed = paged_decode.scatter_slots(state, computed, compute_slots)
    return computed, samples, (computed.num_tokens, computed.pages.active)

  def finalize(samples):
    # A response that was preempted may have left more tokens than it now has.
    column = jnp.arange(sampler.max_new_tokens)
    real = column < samples.lengths[:, None]
    return dataclasses.replace(
      samples,
      tokens=jnp.where(real, samples.tokens, sampler.pad_id),
      logps=jnp.where(real, samples.logps, 0),
    )

  return JittedSampler(
    decode_params=jit(
      unstacked_decode_params,
      in_shardings=(params_sharding,),
      out_shardings=decode_params_sharding(cfg, sampler_mesh),
    ),
    empty_samples=jit(
      lambda P: empty_samples(P, sizes.max_prompt_length, cfg, sampler),
      static_argnums=0,
      out_shardings=train_samples,
    ),
    begin=jit(
      begin,
      in_shardings=(train_samples, None),
      out_shardings=(state, decode_samples),
      donate_argnums=(0, 1),
    ),
    prefill=jit(
      prefill,
      donate_argnums=1,
      out_shardings=(state, batch if record_routing else None),
      compiler_options=rounding.OPTIONS,
    ),
    write_prompt_routing=jit(
      functools.partial(
        paged_decode.write_prompt_routing, group_size=sampler.group_size
      ),
      donate_argnums=0,
      out_shardings=decode_samples,
    ),
    decode=jit(
      decode,
      in_shardings=(None,) * 6 + (sharding.replicated(mesh),),
      out_shardings=(state, decode_samples, sharding.replicated(sampler_mesh)),
      donate_argnums=(1, 2),
      compiler_options=rounding.OPTIONS,
    ),
    read_tokens=jit(paged_decode.read_tokens, out_shardings=batch),
    finalize=jit(finalize, out_shardings=train_samples),
    append_tokens=jit(
      append_tokens, donate_argnums=0, out_shardings=train_samples
    ),
  )


def _state_sharding(cfg, mesh) -> DecodeState:
  """The sharding of each array of the decode state."""
  batch = sharding.batch_sharding(mesh)
  pages = paged_cache.shardings(cfg, mesh)
  return DecodeState(pages, batch, batch, batch, batch, batch)
