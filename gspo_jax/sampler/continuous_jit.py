"""What devices do for refill, jitted: where arrays lie, which are donated."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.model import rounding
from gspo_jax.model.paged_cache import Pages
from gspo_jax.runtime import sharding
from gspo_jax.runtime.sharding import MeshJit
from gspo_jax.sampler import paged_decode
from gspo_jax.sampler.decode_params import decode_params, decode_params_sharding
from gspo_jax.sampler.paged_decode import DecodeState
from gspo_jax.sampler.paging import ShardSizes
from gspo_jax.sampler.samples import (
  SamplerConfig,
  empty_samples,
  samples_sharding,
)


@dataclasses.dataclass(frozen=True)
class JittedSampler:
  """The jitted functions of a `PagedSampler`.

  Attributes:
    lay_out: params -> params as decoding wants them.
    fresh: P -> samples, of which nothing is drawn.
    begin: samples -> (slots, samples), as decoding wants them; donates.
    prefill: `slots.prefill`, from params to numbers.
    note: `slots.note`.
    decode: `slots.decode`, from params to key.
    peek: `slots.peek`.
    finish: samples -> samples, as a rollout wants them.
  """

  lay_out: Callable
  fresh: Callable
  begin: Callable
  prefill: Callable
  note: Callable
  decode: Callable
  peek: Callable
  finish: Callable


def functions(
  cfg: model.ModelConfig,
  draw: SamplerConfig,
  *,
  chunk: int,
  sizes: ShardSizes,
  params,
  mesh: jax.sharding.Mesh,
  decoding: jax.sharding.Mesh,
) -> JittedSampler:
  """Jitted for their shardings; compiles nothing yet.

  Args:
    cfg: the model.
    draw: how answers are drawn.
    chunk: tokens of one forward pass of a prefill.
    sizes: of each shard.
    params: shardings of the parameters, on `mesh`.
    mesh: where parameters, keys and samples lie.
    decoding: the same devices as they decode.
  """
  state, rows = _layout(cfg, decoding), sharding.batch_sharding(decoding)
  drawn, kept = samples_sharding(draw, decoding), samples_sharding(draw, mesh)
  record = draw.record_routing and cfg.num_experts > 0
  # Uses of one function share what jit has compiled; not of partial ones.
  jit = lambda f, **how: MeshJit(jax.jit(functools.partial(f), **how), decoding)
  return JittedSampler(
    lay_out=jit(
      lambda params: model.unstack_layers(decode_params(params, cfg), cfg),
      in_shardings=(params,),
      out_shardings=decode_params_sharding(cfg, decoding),
    ),
    fresh=jit(
      lambda P: empty_samples(P, sizes.prompt, cfg, draw),
      static_argnums=0,
      out_shardings=kept,
    ),
    begin=jit(
      _begin(cfg, sizes, sharding.batch_shards(decoding)),
      in_shardings=(kept,),
      out_shardings=(state, drawn),
      donate_argnums=0,
    ),
    prefill=jit(
      _prefill(cfg, chunk, record),
      donate_argnums=1,
      out_shardings=(state, rows if record else None),
      compiler_options=rounding.OPTIONS,
    ),
    note=jit(
      functools.partial(paged_decode.note, group=draw.group_size),
      donate_argnums=0,
      out_shardings=drawn,
    ),
    decode=jit(
      _decode(cfg, draw, sizes.steps),
      in_shardings=(None,) * 6 + (sharding.replicated(mesh),),
      out_shardings=(state, drawn),
      donate_argnums=(1, 2),
      compiler_options=rounding.OPTIONS,
    ),
    peek=jit(paged_decode.peek, out_shardings=rows),
    finish=jit(_finish(draw), out_shardings=kept),
  )


def _begin(cfg, sizes, shards):
  def begin(samples):
    empty = paged_decode.empty(
      cfg,
      rows=sizes.slots * shards,
      pages=sizes.pages * shards,
      page=sizes.page,
      most=sizes.width,
    )
    # It counts the steps of a call.
    return empty, dataclasses.replace(samples, slot_steps=jnp.int32(0))

  return begin


def _prefill(cfg, chunk, record):
  def prefill(params, state, *prompts):
    how = {"chunk": chunk, "record": record}
    return paged_decode.prefill(params, cfg, state, *prompts, **how)

  return prefill


def _decode(cfg, draw, steps):
  def decode(params, state, samples, orders, few, floor, key):
    rest = state, samples, orders, few, floor, sharding.constrain(key)
    how = {"sampler": draw, "steps": steps}
    return paged_decode.decode(params, cfg, *rest, **how)

  return decode


def _finish(draw):
  def finish(samples):
    # An answer that started again may have left more than it drew then.
    real = jnp.arange(draw.max_new_tokens) < samples.lengths[:, None]
    return dataclasses.replace(
      samples,
      tokens=jnp.where(real, samples.tokens, draw.pad_id),
      logps=jnp.where(real, samples.logps, 0),
    )

  return finish


def _layout(cfg, mesh) -> DecodeState:
  """Where the state of decoding lies."""
  rows, lay = sharding.batch_sharding(mesh), jax.sharding.PartitionSpec
  kept = jax.NamedSharding(mesh, lay("tensor", sharding.BATCH_AXES))
  of_layers = (kept,) * cfg.num_layers
  return DecodeState(Pages(of_layers, of_layers, rows, rows, rows), *[rows] * 4)
