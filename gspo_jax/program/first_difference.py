"""The layer at which sampler and trainer part, where `model.exact` fails.

Dimension key: B packed rows, T columns, C pages of a row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import model
from gspo_jax.learner.train_batch import PackedBatch
from gspo_jax.model import exact_attention, paged_cache, rounding
from gspo_jax.program.functions import Program
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.mesh_jit import MeshJit


def find(program: Program, policy: model.Params, batch: PackedBatch) -> str:
  """Names what differs first if both read the first minibatch again."""
  cfg, rows = program.cfg, batch.rows
  sampler: Any = program.sampler  # with continuous batching
  fields = multihost.to_host((rows.tokens, rows.positions, rows.segment_ids))
  used, B = fields[2][0].any(-1), 8 * sampler.shards_of_rows
  shape = -(-used.sum() // B), B, rows.tokens.shape[-1]
  fields = [np.resize(x[0][used], shape) for x in fields]

  def reader(function, mesh, params):
    whole = sharding.replicated(mesh)
    function = functools.partial(function, cfg=cfg)
    run = MeshJit(
      function, mesh, out_shardings=whole, compiler_options=rounding.OPTIONS
    )
    return lambda x: jax.device_get(run(params, *multihost.to_global(x, whole)))

  decoded = sampler.generate.jitted.decode_params(sampler.weights(policy))
  train = reader(_train, program.mesh, policy)
  decode = reader(_decode, sampler.generate.mesh, decoded)
  names = [f"the keys of layer {i}" for i in range(cfg.num_layers)]
  names.append("the last hidden states")
  first = len(names)
  for part in zip(*fields, strict=True):
    real = (part[2] > 0)[:, None, :, None]
    for i, (a, b) in enumerate(zip(train(part), decode(part), strict=True)):
      if any(((x != y) & real).any() for x, y in zip(a, b, strict=True)):
        first = min(first, i)
  if first == len(names):
    return "reading the tokens again, no layer differs"
  return f"reading the tokens again, {names[first]} are the first to differ"


def _train(policy, *fields, cfg):
  """Keys and values by layer, [B, heads, T, width] each, then hidden states."""
  out: Any = model.prefill(policy, cfg, *fields)
  return *out.cache.kv, (out.hidden[:, None],)


def _decode(params, tokens, positions, segments, *, cfg):
  """By one column after the other; a token's page is at its columns."""
  (B, T), size = tokens.shape, exact_attention.align(sharding.platform())
  C = T // size
  pages_BC = jnp.arange(B * C, dtype=jnp.int32).reshape(B, C)
  pages_BC %= B * C // sharding.size(*sharding.BATCH_AXES)  # of a device
  sizes = {"num_slots": B, "num_pages": B * C, "pages_per_slot": C}
  pages = paged_cache.empty(cfg, page_size=size, **sizes)

  def step(pages, column):
    begin_B1, token_B1, position_B1, segment_B1 = column
    own_BC = begin_B1 // size + jnp.arange(C)
    table = jnp.take_along_axis(pages_BC, own_BC, axis=1, mode="clip")
    rows = table, position_B1[:, 0], pages.active
    begins = lambda x: (position_B1 == 0).reshape(-1, *[1] * (x.ndim - 1))
    states = jax.tree.map(lambda x: jnp.where(begins(x), 0, x), pages.states)
    pages = paged_cache.Pages(pages.kv, states, *rows)
    inputs = token_B1, position_B1, segment_B1 > 0, pages
    out = model.hidden_states(params, cfg, *inputs)
    return out.cache, out.hidden

  fields = jnp.arange(T) - positions, tokens, positions, segments
  columns = [x.T[..., None] for x in fields]
  pages, x_TB1D = jax.lax.scan(step, pages, columns)
  return *paged_cache.load(pages, cfg, pages_BC), (jnp.moveaxis(x_TB1D, 0, 2),)
