"""Static batching: all responses decode together until the longest ends.

Each prompt is prefilled once; its G responses share its keys and values.

Dimension key: P prompts, G responses a prompt, B = P * G responses, S prompt
length, R most new tokens, V vocabulary, L layers, k experts a token, K kept ids
a token.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.model import cache as kv
from gspo_jax.record.progress import Progress
from gspo_jax.runtime import sharding
from gspo_jax.runtime.mesh_jit import MeshJit
from gspo_jax.runtime.sharding import BATCH_AXES, constrain
from gspo_jax.sampler import next_token
from gspo_jax.sampler.decode_params import decode_params, decoding_options
from gspo_jax.sampler.samples import (
  STOPPED,
  TRUNCATED,
  OnFinished,
  Prompts,
  SamplerConfig,
  Samples,
  empty_samples,
  finished_responses,
  samples_sharding,
)

_FIRST_SLOTS = 64  # least length of the responses' first cache; it doubles
_BLOCKS = 100  # most decoder blocks to compile, over all lengths of the cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
  step: jax.Array  # [] int32
  last_token: jax.Array  # [B] int32, not fed yet
  done: jax.Array  # [B] bool, whether the response has stopped
  stop_state: jax.Array  # [B] int32, of `StopStrings` after the newest token
  cache: kv.Cache  # of the tokens fed so far
  samples: Samples  # `experts`: [L, B, R, k], of the tokens fed so far


def generate(
  params: model.Params,
  cfg: model.ModelConfig,
  prompts: Prompts,
  key: jax.Array,
  *,
  sampler: SamplerConfig,
) -> Samples:
  """Generates `group_size` responses to each prompt.

  A `while_loop` decodes until the longest response ends, over a cache that
  doubles as responses grow: the cost follows the generated tokens, not
  `max_new_tokens`. The key of token t of response b is made of (key, b, t): the
  same key gives the same samples, and the responses of a group differ.

  Args:
    params: as `model.init` returns them.
    cfg: static.
    prompts: P prompts.
    key: a typed PRNG key.
    sampler: static.

  Returns:
    Samples of B = P * G responses, STOPPED or TRUNCATED.
  """
  sampler.require_stops()
  cfg = dataclasses.replace(cfg, exact=False)  # only continuous batching is
  params = decode_params(params, cfg)
  logits, cache, prompt_experts = _prefill(params, cfg, prompts, sampler)
  params = model.unstack_layers(params, cfg)
  B = len(logits)
  row_keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(B))
  samples = empty_samples(len(prompts.lengths), 0, cfg, sampler)
  if samples.experts is not None:
    experts = constrain(samples.experts.swapaxes(0, 1), None, BATCH_AXES)
    samples = dataclasses.replace(samples, experts=experts)
  state = _State(
    step=jnp.int32(0),
    last_token=jnp.zeros(B, jnp.int32),
    done=jnp.zeros(B, bool),
    stop_state=jnp.zeros(B, jnp.int32),
    cache=cache,
    samples=samples,
  )
  state = _sample_token(state, logits, row_keys, sampler)
  starts = jnp.repeat(prompts.lengths, sampler.group_size)
  state = _decode(state, params, cfg, starts, row_keys, sampler)
  finish = jnp.where(state.done, STOPPED, TRUNCATED).astype(jnp.int8)
  if (experts := state.samples.experts) is not None:
    of_prompts = jnp.repeat(prompt_experts, sampler.group_size, axis=1)
    experts = jnp.concatenate([of_prompts, experts], axis=2)
    experts = constrain(experts.swapaxes(0, 1), BATCH_AXES)
  return dataclasses.replace(
    state.samples, finish=finish, slot_steps=B * state.step, experts=experts
  )


@dataclasses.dataclass(frozen=True)
class StaticSampler:
  """`generate`, jitted; called as a `ContinuousSampler` is."""

  config: SamplerConfig
  jitted: MeshJit
  batching = None  # slots and pages of continuous batching

  @property
  def mesh(self) -> jax.sharding.Mesh:
    return self.jitted.mesh

  def __call__(
    self,
    params: model.Params,
    prompts: Prompts,
    key: jax.Array,
    *,
    on_finished: OnFinished | None = None,
    progress: Progress | None = None,
  ) -> Samples:
    samples = self.jitted(params, prompts, key)
    if on_finished:
      on_finished(finished_responses(samples))
    if progress:
      progress.advance(len(samples.lengths))
    return samples

  def lower(
    self,
    params: model.Params,
    prompts: Prompts,
    key: jax.Array,
    **options: bool,
  ) -> dict[str, jax.stages.Lowered]:
    """Lowers the function; `options` are for continuous batching alone."""
    return {"generate": self.jitted.lower(params, prompts, key)}

  def describe(self, *, continues: bool) -> str:
    """A log line about the programs; "" if there is only one."""
    return ""


def build_static_sampler(
  cfg: model.ModelConfig,
  sampler: SamplerConfig,
  *,
  params_sharding: model.Params,
  mesh: jax.sharding.Mesh,
  sampler_mesh: jax.sharding.Mesh,
) -> StaticSampler:
  """Builds a StaticSampler; arguments as of `build_continuous_sampler`."""

  def generate_static(params, prompts, key):
    # Arrays of another mesh must be moved to this one before they are used.
    prompts = sharding.constrain(prompts, sharding.BATCH_AXES)
    return generate(params, cfg, prompts, constrain(key), sampler=sampler)

  batch, replicated = sharding.batch_sharding(mesh), sharding.replicated(mesh)
  jitted = MeshJit(
    generate_static,
    sampler_mesh,
    in_shardings=(params_sharding, batch, replicated),
    out_shardings=samples_sharding(cfg, sampler, mesh),
    compiler_options=decoding_options(sampler_mesh),
  )
  return StaticSampler(sampler, jitted)


def _prefill(params, cfg, prompts, sampler):
  """First logits [B, V]; shared cache; experts [L, P, S, k] or None."""
  out = model.prefill(
    params, cfg, prompts.tokens, prompts.positions, prompts.mask
  )
  assert out.cache is not None
  logits = next_token.logits(params, cfg, out.hidden[:, -1])
  cache = kv.share_prefix(
    out.cache, cfg, sampler.group_size, cache_slots(0, cfg, sampler)
  )
  logits = jnp.repeat(logits, sampler.group_size, axis=0)
  experts = None
  if sampler.record_routing and out.routing:
    experts = out.routing.experts
  logits = constrain(logits, next_token.ROW_AXES, next_token.VOCAB_AXES)
  return logits, cache, experts


def cache_slots(
  slots: int, cfg: model.ModelConfig, sampler: SamplerConfig
) -> int:
  """The length of the next cache, after a full one of `slots` (0: none).

  Each length compiles all blocks again (seconds each, on a TPU), so a deep
  model starts with a longer cache and has fewer lengths.
  """
  longest = max(sampler.max_new_tokens - 1, 1)  # the last token is not fed
  num_lengths = max(_BLOCKS // cfg.num_layers, 1)
  first = max(_FIRST_SLOTS, -(-longest // 2 ** (num_lengths - 1)))
  return min(max(first, 2 * slots), longest)


def _decode(state, params, cfg, starts, row_keys, sampler) -> _State:
  """Decodes until all responses are done; doubles the cache when it is full.

  Each doubling is a branch of a `cond`, so short responses never touch the
  longer cache; it compiles the step once more. The returned state has no cache.
  `starts` [B] are the positions of the first tokens.
  """
  slots = state.cache.valid.shape[1]
  limit = min(slots + 1, sampler.max_new_tokens)
  proceed = lambda s: (s.step < limit) & ~s.done.all()

  def body(s):
    positions = (starts + s.step - 1)[:, None]
    real = jnp.ones_like(positions)
    out = model.hidden_states(
      params, cfg, s.last_token[:, None], positions, real, s.cache
    )
    samples = s.samples
    if samples.experts is not None and out.routing:
      experts = jax.lax.dynamic_update_slice_in_dim(
        samples.experts, out.routing.experts, s.step - 1, axis=2
      )
      samples = dataclasses.replace(samples, experts=experts)
    s = dataclasses.replace(s, cache=out.cache, samples=samples)
    logits = next_token.logits(params, cfg, out.hidden[:, 0])
    return _sample_token(s, logits, row_keys, sampler)

  state = jax.lax.while_loop(proceed, body, state)
  drop_cache = lambda s: dataclasses.replace(s, cache=None)
  if limit == sampler.max_new_tokens:
    return drop_cache(state)

  def double_cache(s):
    s = dataclasses.replace(
      s, cache=kv.grow(s.cache, cache_slots(slots, cfg, sampler))
    )
    return _decode(s, params, cfg, starts, row_keys, sampler)

  return jax.lax.cond(state.done.all(), drop_cache, double_cache, state)


def _sample_token(s: _State, logits, row_keys, sampler) -> _State:
  steps_B = jnp.full(s.last_token.shape, s.step)
  new = next_token.sample_token(logits, row_keys, steps_B, sampler)
  token = new["tokens"] = jnp.where(s.done, sampler.pad_id, new["tokens"])
  new["logps"] = jnp.where(s.done, 0.0, new["logps"])
  write = lambda old, x: jax.lax.dynamic_update_slice(  # [B, R] or [B, K, R]
    old, x[..., None], (*[0] * x.ndim, s.step)
  )
  stop_state, stop = next_token.stop(token, steps_B + 1, s.stop_state, sampler)
  written: dict[str, Any] = {
    name: write(getattr(s.samples, name), x) for name, x in new.items()
  }
  samples = dataclasses.replace(
    s.samples,
    lengths=s.samples.lengths + ~s.done,
    **written,
  )
  return dataclasses.replace(
    s,
    step=s.step + 1,
    last_token=token,
    done=s.done | stop,
    stop_state=stop_state,
    samples=samples,
  )
