"""The layer at which sampler and trainer part, where `model.exact` fails.

Dimension key: B packed rows, T columns, C pages of a row, K key-value heads, H
head width, L layers that have keys.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import model
from gspo_jax.learner.train_batch import PackedBatch
from gspo_jax.model import exact_attention, paged_cache, rounding
from gspo_jax.program.functions import Program
from gspo_jax.runtime import multihost, sharding


def find(program: Program, policy: model.Params, batch: PackedBatch) -> str:
  """What differs first if both read the rows of the first minibatch again."""
  cfg, sampler, rows = program.cfg, program.sampler, batch.rows
  assert sampler is not None
  fields = rows.tokens, rows.positions, rows.segment_ids
  tokens, positions, segments = (x[0] for x in multihost.to_host(fields))
  fields = [x[segments.any(-1)] for x in (tokens, positions, segments)]
  B, T = 8 * sampler.shards_of_rows, tokens.shape[-1]
  fields = [np.resize(x, (-(-len(x) // B), B, T)) for x in fields]

  def checksums(function, mesh, params):
    function = functools.partial(function, cfg=cfg)
    place = sharding.replicated(mesh)
    options = {"out_shardings": place, "compiler_options": rounding.OPTIONS}
    run = jax.jit(function, **options)
    with jax.set_mesh(mesh):
      parts = [multihost.to_global(x, place) for x in zip(*fields, strict=True)]
      return np.stack([run(params, *x) for x in parts], 1)

  decoded = sampler.generate.jitted.decode_params(sampler.weights(policy))
  a = checksums(_train, program.mesh, policy)
  b = checksums(_decode, sampler.generate.mesh, decoded)
  with_keys = [i for i, x in enumerate(cfg.layers) if x.mixer != "delta_net"]
  names = [f"the keys of layer {i}" for i in with_keys]
  differ = ((a != b) & (fields[2] > 0)).any((1, 2, 3))
  found = [*np.array([*names, "the last hidden states"])[differ], "the logits"]
  return f"reading the same tokens again, {found[0]} are the first to differ"


def _train(policy, tokens, positions, segments, *, cfg):
  out = model.prefill(policy, cfg, tokens, positions, segments)
  return _checksums(out.cache.kv, out.hidden)


def _decode(params, tokens, positions, segments, *, cfg):
  """Column by column; a token's keys lie at its column of the row's pages."""
  (B, T), size = tokens.shape, exact_attention.ALIGN
  C = T // size
  pages_BC = jnp.arange(B * C, dtype=jnp.int32).reshape(B, C)
  pages_BC %= B * C // sharding.size(*sharding.BATCH_AXES)  # of a device
  pages = paged_cache.empty(
    cfg, num_slots=B, num_pages=B * C, page_size=size, pages_per_slot=C
  )

  def step(pages, column):
    number, token_B1, position_B1, segment_B1 = column
    own_BC = (number - position_B1) // size + jnp.arange(C)
    table = jnp.take_along_axis(pages_BC, own_BC, axis=1, mode="clip")
    rows = table, position_B1[:, 0], pages.active
    pages = paged_cache.Pages(pages.kv, pages.states, *rows)
    inputs = token_B1, position_B1, segment_B1 > 0, pages
    out = model.hidden_states(params, cfg, *inputs)
    return out.cache, out.hidden[:, 0]

  by_column = [x.T[..., None] for x in (tokens, positions, segments)]
  columns = jnp.arange(T, dtype=jnp.int32), *by_column
  pages, hidden_TBD = jax.lax.scan(step, pages, columns)
  kv = paged_cache.load(pages, cfg, pages_BC)
  return _checksums(kv, hidden_TBD.swapaxes(0, 1))


def _checksums(kv, hidden_BTD):
  """[L + 1, B, T], of the bits of each token: keys by layer, then `hidden`."""

  def of(x_BKTH):
    bits = jax.lax.bitcast_convert_type(x_BKTH.astype(jnp.float32), jnp.uint32)
    odd_H = 2 * jnp.arange(bits.shape[-1], dtype=jnp.uint32) + 1
    return (bits * odd_H).sum((1, 3), jnp.uint32)

  keys = [of(arrays[0]) for arrays in kv if arrays]
  return jnp.stack([*keys, of(hidden_BTD[:, None])])
