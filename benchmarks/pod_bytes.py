"""Bytes and host seconds of the parts of an iteration that grow with a pod.

  python -m benchmarks.pod_bytes --out=benchmarks/pod_bytes.json

Nothing is compiled, and no device is needed. Each device has 128 responses of
at most 16,384 tokens, as with configs/moe_tpu_v5.py on 64 chips.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType

from gspo_jax.learner import packing
from gspo_jax.runtime import sharding
from gspo_jax.sampler.samples import Prompts

_RESPONSES = 128  # a device
_COLLECTIVES = ("all_gather", "all_to_all", "psum")


def packing_bytes(
  *, data: int = 1, fsdp: int = 1, expert: int = 1, routing: bool = False
) -> dict[str, int]:
  """Bytes of each kind of collective that a device receives in packing.

  `routing`: the experts of 48 layers, 8 of a token, are packed, too.
  """
  devices = data * fsdp * expert
  B, S, R, G, M = _RESPONSES * devices, 1024, 16384, 16, 4
  cfg = packing.PackingConfig(S + R, M, devices, devices)
  array = jax.ShapeDtypeStruct
  ints = lambda *shape: array(shape, jnp.int32)
  arguments = (
    Prompts(ints(B // G, S), ints(B // G)),
    ints(B, R),
    ints(B),
    packing.Packing(ints(B), ints(B), ints(M)),
    array((B, R), jnp.float32),
    array((B, 48, S + R, 8), jnp.uint8) if routing else None,
  )

  def pack(*args):
    *places, logps, experts = args
    return packing.pack_responses(*places, cfg, logps=logps, experts=experts)

  mesh = _abstract_mesh(data=data, fsdp=fsdp, expert=expert)
  with jax.sharding.use_abstract_mesh(mesh):
    return _received(jax.make_jaxpr(pack)(*arguments).jaxpr)


def _abstract_mesh(**sizes: int) -> AbstractMesh:
  shape = [sizes.get(axis, 1) for axis in sharding.AXES]
  kinds = (AxisType.Auto,) * len(shape)
  return AbstractMesh(tuple(shape), sharding.AXES, axis_types=kinds)


def _received(jaxpr) -> dict[str, int]:
  total = dict.fromkeys(_COLLECTIVES, 0)
  for name, count in _collectives(jaxpr, 1):
    total[name] += count
  return total


def _collectives(jaxpr, times) -> Iterator[tuple[str, int]]:
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    if name in _COLLECTIVES:
      arrays = [out.aval for out in equation.outvars]
      yield name, times * sum(a.size * a.dtype.itemsize for a in arrays)
    trips = equation.params.get("length", 1) if name == "scan" else 1
    for inner in jaxprs_in_params(equation.params):
      yield from _collectives(inner, times * trips)
