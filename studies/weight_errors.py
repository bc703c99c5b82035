"""Errors in the weights that a run samples with, to imitate another engine.

The trainer's weights stay as they are. `float8` and `int:BITS` round the
matrices of all layers, the embedding and the output, as engines of low
precision do; routers stay exact, as in such engines. `router:SIZE` adds normal
noise to the routers alone, of SIZE times the root mean square of their weights
and new in each iteration. It is drawn with the key of the rollout, so that a
resumed run repeats it.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from gspo_jax import model, train

BLOCK = 32  # weights that share a scale


@contextlib.contextmanager
def sampled_with(error: str) -> Iterator[None]:
  """Runs of `train.train_and_evaluate` inside sample with this error; "": none.

  Evaluations have no error.
  """
  if not error:
    yield
    return
  prepare, change = train.prepare, jax.jit(functools.partial(with_error, error))

  def prepared(*args):
    experiment = prepare(*args)
    sampler = experiment.program.sampler
    sampler = dataclasses.replace(
      sampler, generate=_Sampler(sampler.generate, change)
    )
    program = dataclasses.replace(experiment.program, sampler=sampler)
    return dataclasses.replace(experiment, program=program)

  train.prepare = prepared
  try:
    yield
  finally:
    train.prepare = prepare


class _Sampler:
  """A sampler that first changes the weights."""

  def __init__(self, sampler, change):
    self._sampler, self._change = sampler, change

  def __call__(self, params, prompts, key, **rest):
    changed = self._change(params, jax.random.fold_in(key, 1))
    places = jax.tree.map(lambda x: x.sharding, params)
    return self._sampler(jax.device_put(changed, places), prompts, key, **rest)

  def __getattr__(self, name: str):
    return getattr(self._sampler, name)


def with_error(
  error: str, params: model.Params, key: jax.Array
) -> model.Params:
  """The weights with the error; `key` draws the noise of routers."""
  kind, _, level = error.partition(":")
  if kind not in ("float8", "int", "router"):
    raise ValueError(f"{error!r}: expected float8, int:BITS or router:SIZE")

  def change(path, x):
    is_router = "router" in jax.tree_util.keystr(path)
    if is_router != (kind == "router") or x.ndim < 2 or "norm" in str(path):
      return x
    if is_router:
      size = float(level) * jnp.sqrt(jnp.mean(x**2))
      return x + size * jax.random.normal(key, x.shape)
    return rounded(x, 0 if kind == "float8" else int(level))

  return jax.tree.map_with_path(change, params)


def rounded(x: jax.Array, bits: int) -> jax.Array:
  """Rounds to integers of so many bits, or to float8 (E4M3) for 0.

  `BLOCK` numbers in a row share a scale, which takes the largest of them to the
  largest number of the format.
  """
  blocks = x.reshape(-1, BLOCK)
  top = 2.0 ** (bits - 1) - 1 if bits else 448.0
  scale = jnp.abs(blocks).max(1, keepdims=True) / top
  scaled = blocks / jnp.where(scale == 0, 1.0, scale)
  if bits:
    scaled = jnp.round(scaled)
  else:
    scaled = scaled.astype(jnp.float8_e4m3fn).astype(x.dtype)
  return (scaled * scale).reshape(x.shape)
