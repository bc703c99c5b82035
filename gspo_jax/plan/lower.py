"""The functions of a run, lowered for its shapes: what a plan compiles.

Dimension key: P prompts, S prompt slots, B decode slots, N texts of a prefill,
T their tokens.
"""

import functools

import jax
import jax.numpy as jnp

from gspo_jax.program.functions import Program
from gspo_jax.runtime import sharding
from gspo_jax.sampler.continuous import ContinuousSampler
from gspo_jax.sampler.decode_params import decode_params_sharding
from gspo_jax.sampler.paged_decode import SegmentPlan
from gspo_jax.sampler.samples import Prompts

FUNCTIONS = ("update", "score", "appraise", "lay_out", "prefill", "generate")


def functions(config, made: Program) -> dict[str, jax.stages.Lowered]:
  """By their names; those of `FUNCTIONS` that such a run has.

  With `continuous_batching.slots`, `generate` is a segment of decoding, `lay_out` what
  prepares the weights for all segments of a batch, and `prefill` stores the
  longest prompts.

  Args:
    config: all the keys of configs/common.py.
    made: its program.
  """
  rows = functools.partial(_lay_rows, made.mesh)
  P, S = config.data.prompts, config.data.max_prompt_length
  shape = jax.ShapeDtypeStruct
  prompts = rows(Prompts(shape((P, S), jnp.int32), shape((P,), jnp.int32)))
  key = jax.eval_shape(lambda: jax.random.key(0))
  params = made.abstract.params
  if isinstance(made.generate, ContinuousSampler):
    lowered, samples = _lower_continuous_sampler(config, made, key)
  else:
    lowered = {"generate": made.generate.lower(params, prompts, key)}
    samples = lowered["generate"].out_info
  batch = rows(made.assemble.lower(prompts, rows(samples)).out_info)
  if made.appraise:
    lowered["appraise"] = made.appraise.lower(made.abstract, batch)
  apply_updates = shape((), jnp.bool_)
  lowered["update"] = made.step.lower(made.abstract, batch, key, apply_updates)
  if made.scores:
    lowered["score"] = lowered["update"]  # the same program
  return lowered


def _lower_continuous_sampler(config, made, key, few=None):
  """What a `PagedSampler` calls, and the shapes of its samples.

  With `few`, the segment is one of so many slots only.
  """
  paged = made.generate
  lay_out = paged.jitted.decode_params.lower(made.abstract.params)
  params = jax.tree.map(
    lambda x, lay: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lay),
    lay_out.out_info,
    decode_params_sharding(made.cfg, paged.jitted.decode.mesh),
  )
  learnt, spare = config.data.prompts, config.rollout.extra_prompts_in_flight
  fresh = paged.jitted.empty_samples.lower(learnt + spare).out_info
  state, samples = paged.jitted.begin.lower(fresh).out_info
  prompts = _prompts(config, paged)
  floor = jax.ShapeDtypeStruct((), jnp.int32)
  orders = _orders(state)
  lowered = {
    "lay_out": lay_out,
    "prefill": paged.jitted.prefill.lower(params, state, *prompts),
    "generate": paged.jitted.decode.lower(
      params, state, samples, orders, few, floor, key
    ),
  }
  return lowered, paged.jitted.empty_samples.lower(learnt).out_info


def _prompts(config, paged):
  """Tokens, lengths and pages of a prefill of the longest prompts."""
  T = longest(config, paged)
  N = paged.prefill_batch(T) * paged.shards
  whole = lambda *dims: jax.ShapeDtypeStruct(
    dims, jnp.int32, sharding=paged.batch_sharding
  )
  return whole(N, T), whole(N), whole(N, T // paged.sizes.page_size)


def longest(config, paged: ContinuousSampler) -> int:
  """T of the longest prompts, or of answers that go on."""
  return paged.buckets(continues=config.rollout.max_tokens_per_iteration > 0)[
    -1
  ]


def _orders(state):
  """Shapes of the orders of a segment: all are of rows."""
  pages = state.pages
  own = {"table": pages.table, "active": pages.active, "new": pages.active}
  names = SegmentPlan.__dataclass_fields__
  return SegmentPlan(**{name: own.get(name, pages.lengths) for name in names})


def _lay_rows(mesh, tree):
  """Shapes of a batch, with shardings."""
  batch, single = sharding.batch_sharding(mesh), sharding.replicated(mesh)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=batch if x.shape else single
    ),
    tree,
  )
