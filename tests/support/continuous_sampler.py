"""A continuous sampler whose trainer and sampler share one mesh."""

import jax

from gspo_jax import model
from gspo_jax.runtime import sharding
from gspo_jax.sampler import continuous


def build(
  cfg, config, batching, max_prompt_length, *, devices=1, by_row=False, **axes
):
  mesh = sharding.make_mesh(jax.devices()[:devices], **axes)
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), cfg))
  return continuous.build_continuous_sampler(
    cfg,
    config,
    batching=batching,
    max_prompt_length=max_prompt_length,
    params_sharding=model.shardings(shapes, mesh),
    mesh=mesh,
    sampler_mesh=mesh,
    by_row=by_row,
  )
