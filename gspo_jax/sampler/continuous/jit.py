"""The jitted functions of continuous batching: shardings and donations.

Dimension letters as in `continuous/__init__`.
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.model import paged_cache, rounding
from gspo_jax.runtime import sharding
from gspo_jax.runtime.mesh_jit import MeshJit
from gspo_jax.sampler.continuous import paged_decode
from gspo_jax.sampler.continuous.config import (
  ContinuousBatchingConfig,
  ShardSizes,
)
from gspo_jax.sampler.continuous.paged_decode import DecodeState, SegmentResults
from gspo_jax.sampler.decode_params import (
  decode_params,
  decode_params_sharding,
  decoding_options,
)
from gspo_jax.sampler.samples import (
  Prompts,
  SamplerConfig,
  empty_samples,
  samples_sharding,
)

# A step computes at least so many rows of a shard: a TPU tile has 8.
_FEWEST_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Functions:
  """What `jit_sampler` compiles."""

  cfg: model.ModelConfig
  config: SamplerConfig
  batching: ContinuousBatchingConfig
  sizes: ShardSizes
  shards: int
  by_row: bool  # whether each request has its own SamplingParams

  @property
  def records(self) -> bool:
    """Whether samples have the experts of tokens."""
    return self.config.record_routing and self.cfg.num_experts > 0

  def buckets(self, *, continues: bool = True) -> tuple[int, ...]:
    longest = self.sizes.max_prompt_length
    if continues:
      longest += self.sizes.max_new_tokens
    return self.batching.buckets(longest)

  @property
  def compute_sizes(self) -> tuple[int, ...]:
    """Numbers of slots that a segment can compute: all, a half, and so on."""
    slots, sizes = self.sizes.slots, [self.batching.slots]
    while (slots := slots // 2) * (1 + self.sizes.drafts) >= _FEWEST_ROWS:
      sizes.append(slots * self.shards)
    return tuple(sizes)

  def drafts(self, count: int) -> int:
    """Tokens that each slot drafts in a step where `count` are computed."""
    return self.sizes.drafts_of(count // self.shards)

  def _unstacked_decode_params(self, params):
    return model.unstack_layers(decode_params(params, self.cfg), self.cfg)

  def _begin(self, samples):
    """An empty state, and the samples on the decoding mesh."""
    state = paged_decode.empty(
      self.cfg,
      shards=self.shards,
      num_slots=self.sizes.slots * self.shards,
      num_pages=self.sizes.num_pages * self.shards,
      page_size=self.sizes.page_size,
      pages_per_slot=self.sizes.pages_per_slot,
      by_row=self.by_row,
    )
    # The steps of one call are counted.
    zeros = jax.tree.map(jnp.zeros_like, (samples.slot_steps, samples.drafts))
    return state, dataclasses.replace(
      samples, slot_steps=zeros[0], drafts=zeros[1]
    )

  def _prefill(
    self, params, state, tokens, lengths, pages, num_cached, sources
  ):
    """Stores keys and values in `pages` [Q, C]; see `paged_decode.prefill`.

    If `num_cached` [Q] is given, the pages already hold that many first tokens;
    full pages of these tokens are not written. `sources`: where states go, see
    `paged_decode.store_states`; None for a model without states.
    """
    cached = None
    if num_cached is not None:
      cached = paged_cache.load(state.pages, self.cfg, pages), num_cached
      full = num_cached // self.sizes.page_size
      nowhere = self.sizes.num_pages * self.shards
      column = jnp.arange(pages.shape[1])
      pages = jnp.where(column < full[:, None], nowhere, pages)
    cache, experts = paged_decode.prefill(
      params,
      self.cfg,
      tokens,
      lengths,
      chunk=self.batching.prefill_chunk,
      record_routing=self.records,
      cached=cached,
    )
    stored = paged_cache.store(state.pages, cache.kv, pages)
    state = dataclasses.replace(state, pages=stored)
    if sources is not None:
      state = paged_decode.store_states(state, cache.states, *sources)
    return state, experts

  def _decode(
    self, params, state, samples, plan, compute_slots, min_active, key, drafts
  ):
    """Decodes a segment of the slots `compute_slots` [m], or of all.

    `compute_slots` has all active slots, and equally many of each shard.
    `drafts`, static, of a slot in a step. Every device gets the results.
    """
    everything = compute_slots is None
    state = paged_decode.apply_plan(state, plan, compute_slots)
    computed, samples = paged_decode.decode(
      params,
      self.cfg,
      state if everything else paged_decode.select_slots(state, compute_slots),
      samples,
      sharding.constrain(key),
      sampler=self.config,
      steps=self.sizes.segment_steps,
      min_active=min_active,
      drafts=drafts,
    )
    if not everything:
      computed = paged_decode.scatter_slots(state, computed, compute_slots)
    # One all-gather: XLA:CPU may wait for ever between independent collectives.
    slots = jnp.stack(
      [
        computed.num_tokens,
        computed.pages.active,
        computed.response,
        computed.stop_at,
        computed.pages.lengths,
        state.num_tokens,
      ],
      axis=1,
    )
    num_tokens, active, *others, before = sharding.constrain(slots).T
    results = SegmentResults(  # type: ignore[misc]  # mypy does not count them
      num_tokens,
      active.astype(bool),
      *others,
      num_sampled=(num_tokens - before).sum(),
      drafts=samples.drafts,
    )
    return computed, samples, results

  def _finalize(self, samples):
    """Moves samples to the training mesh; pads the end of each response."""
    # A response that was preempted may have left more tokens than it now has.
    column = jnp.arange(self.config.max_new_tokens)
    real = column < samples.lengths[:, None]
    return dataclasses.replace(
      samples,
      tokens=jnp.where(real, samples.tokens, self.config.pad_id),
      logps=jnp.where(real, samples.logps, 0),
    )

  def _finish_episodes(self, samples, rows):
    """Samples with `rows`, which the host knows: fields of `Samples`.

    An empty row gets a prompt of one token, which no update reads.
    """
    pad_id, prompts = self.config.pad_id, rows["prompts"]
    prompts = Prompts(prompts.tokens, jnp.maximum(prompts.lengths, 1))
    padded = jnp.where(prompts.mask, prompts.tokens, pad_id)
    real = jnp.arange(self.config.max_new_tokens) < rows["lengths"][:, None]
    known = {
      "tokens": jnp.where(real, rows["tokens"], pad_id),
      "logps": jnp.where(rows["turns"] > 0, samples.logps, 0),
      "prompts": Prompts(padded, prompts.lengths),
    }
    return dataclasses.replace(samples, **(rows | known))


def jit_sampler(
  of: Functions,
  *,
  params_sharding: model.Params,
  mesh: jax.sharding.Mesh,
  sampler_mesh: jax.sharding.Mesh,
) -> SimpleNamespace:
  """The jitted functions of a `ContinuousSampler`, each a MeshJit.

  All arguments are positional; `begin`, `prefill`, `write_prefix_routing`,
  `decode`, the moves and `finish_episodes` donate states and samples.
  """
  cfg, sampler = of.cfg, of.config
  # Any: it stands where a DecodeState has arrays.
  batch: Any = sharding.batch_sharding(sampler_mesh)
  pages = paged_cache.shardings(cfg, sampler_mesh)
  slots = dict.fromkeys(paged_decode.OF_SLOTS, batch)
  slots["params"] = batch if of.by_row else None
  state = DecodeState(pages=pages, prompt_states=pages.states, **slots)
  decode_samples = samples_sharding(cfg, sampler, sampler_mesh)
  train_samples = samples_sharding(cfg, sampler, mesh)
  episodes = samples_sharding(cfg, sampler, mesh, turns=True)
  times = 1 + of.by_row  # rows of sampled and of greedy evaluations
  prefills = times * 4 * len(of.buckets())
  decodes = [of.drafts(size) > 0 for size in of.compute_sizes]
  jit = functools.partial(MeshJit, mesh=sampler_mesh, most=times)
  return SimpleNamespace(
    decode_params=jit(
      of._unstacked_decode_params,
      in_shardings=(params_sharding,),
      out_shardings=decode_params_sharding(cfg, sampler_mesh),
    ),
    empty_samples=jit(
      lambda P: empty_samples(P, of.sizes.max_prompt_length, cfg, sampler),
      static_argnums=0,
      out_shardings=train_samples,
    ),
    # Sends each host's facts of its shards to every device.
    share=jit(lambda x: x, out_shardings=sharding.replicated(sampler_mesh)),
    begin=jit(
      of._begin,
      in_shardings=(train_samples,),
      out_shardings=(state, decode_samples),
      donate_argnums=0,
    ),
    prefill=jit(
      of._prefill,
      most=prefills,
      donate_argnums=1,
      out_shardings=(state, batch if of.records else None),
      compiler_options=rounding.OPTIONS,
    ),
    write_prefix_routing=jit(
      paged_decode.write_prefix_routing,
      most=prefills,
      donate_argnums=0,
      out_shardings=decode_samples,
    ),
    decode=jit(
      of._decode,
      # Few slots with drafts, and without if they do not pay.
      most=times * (len(decodes) + sum(decodes)),
      in_shardings=(None,) * 6 + (sharding.replicated(mesh),),
      out_shardings=(state, decode_samples, sharding.replicated(sampler_mesh)),
      static_argnums=7,
      donate_argnums=(1, 2),
      compiler_options=decoding_options(sampler_mesh),
    ),
    move_pages=jit(
      paged_decode.move_pages, donate_argnums=0, out_shardings=state
    ),
    move_slots=jit(
      paged_decode.move_slots, donate_argnums=0, out_shardings=state
    ),
    move_rows=jit(
      paged_decode.move_rows, donate_argnums=0, out_shardings=decode_samples
    ),
    read_rows=jit(paged_decode.read_rows, out_shardings=batch),
    finalize=jit(of._finalize, out_shardings=train_samples),
    finish_episodes=jit(
      of._finish_episodes, donate_argnums=0, out_shardings=episodes
    ),
  )
