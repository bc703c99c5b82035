"""Shapes and shardings of weights and states, before any array exists."""

import functools

import jax

from gspo_jax import model
from gspo_jax.learner.optimizer import STATE_AXES
from gspo_jax.runtime import sharding


def sharded(shapes: sharding.Tree, mesh: jax.sharding.Mesh) -> sharding.Tree:
  """A tree of shapes with the sharding of each on a mesh, or a UserError."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    sharding.state_shardings(shapes, mesh, STATE_AXES),
  )


def shardings(abstract: sharding.Tree) -> sharding.Tree:
  return jax.tree.map(lambda x: x.sharding, abstract)


@functools.cache
def params(cfg: model.ModelConfig, mesh: jax.sharding.Mesh) -> model.Params:
  """The weights of `model.init`."""
  init = functools.partial(model.init, cfg=cfg)
  return sharded(jax.eval_shape(init, jax.random.key(0)), mesh)


@functools.cache
def policy(cfg: model.ModelConfig, mesh: jax.sharding.Mesh) -> model.Params:
  """The weights that run; with adapters the base is in `cfg.dtype`."""
  if cfg.lora is None:
    return params(cfg, mesh)
  make = functools.partial(with_adapters, cfg=cfg, seed=0)
  return sharded(jax.eval_shape(make, params(cfg, mesh)), mesh)


def with_adapters(
  params: model.Params, *, cfg: model.ModelConfig, seed: int
) -> model.Params:
  """Weights in `cfg.dtype` below new adapters."""
  adapters = model.lora.init(jax.random.key(seed), cfg)
  return model.lora.join(model.parameters.cast(params, cfg), adapters)
