"""The sum over a token's experts, by scatter-add and by gathers: for TPUs.

  python -m benchmarks.combine [--out=FILE.json]

The experts of one layer of Qwen3-30B-A3B, forward and backward, on one device
that holds a quarter of them, with the tokens of four devices of
configs/moe_tpu.py. The rows are sorted by expert. Their outputs are added to
the tokens as gspo_jax/model/experts.py does; or gathered to [tokens, k, D] by
the inverse permutation and summed over k, as MaxText does; or gathered and
added for one of the k after the other. The gradient of the first gather of the
tokens is that sum, too. Milliseconds at best and by libtpu's cycles, and bytes;
nothing runs on a chip.

Dimension key: M tokens, k experts a token, R rows for this device's experts, e
of them, D and F widths.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import estimates, record
from gspo_jax.model import experts, lora
from gspo_jax.plan import chips
from gspo_jax.plan import compile as plan_compile
from gspo_jax.runtime import sharding

k, SHARDS, E, D, F = 8, 4, 128, 2048, 768
BF16, I32 = jnp.bfloat16, jnp.int32
# The least slice of the chip, and the tokens of four devices there.
TOPOLOGIES = {"v5p:2x2x1": 4 * 17_408, "v6e:2x2": 4 * 4_096}


def scatter_add(y_RD, row_of_R, slot_Mk):
  zeros = jnp.zeros((len(slot_Mk), y_RD.shape[1]), y_RD.dtype)
  return zeros.at[row_of_R // k].add(y_RD, mode="drop")


def gather_all(y_RD, _, slot_Mk):
  y_MkD = jnp.take(y_RD, slot_Mk, axis=0, mode="fill", fill_value=0)
  return y_MkD.sum(1, dtype=jnp.float32).astype(y_RD.dtype)


def gather_each(y_RD, _, slot_Mk):
  take = lambda slot_M: jnp.take(
    y_RD, slot_M, axis=0, mode="fill", fill_value=0
  ).astype(jnp.float32)
  return sum(map(take, slot_Mk.T)).astype(y_RD.dtype)


def layer(combine, x_MD, weights_Mk, experts_Mk, gate_up, down, dy_MD):
  """The output of the experts, and the gradients of all but `experts_Mk`."""
  gate_up, down = lora.Experts(gate_up), lora.Experts(down)
  e = len(gate_up.weight)
  R = int(experts.SLACK * experts_Mk.size) // SHARDS
  key = jnp.where((experts_Mk >= 0) & (experts_Mk < e), experts_Mk, e)
  order = jnp.argsort(key.reshape(-1), stable=True)
  sizes_e = jnp.bincount(key.reshape(-1), length=e + 1)[:e]
  used_R = jnp.arange(R) < sizes_e.sum()
  row_of_R = jnp.where(used_R, order[:R], 2**30)
  # The compiler leaves it out where a form does not read it.
  slot_Mk = jnp.argsort(order).reshape(experts_Mk.shape)
  slot_Mk = jnp.where(slot_Mk < jnp.minimum(R, sizes_e.sum()), slot_Mk, R)

  @jax.custom_vjp
  def expand(x_MD):
    return jnp.take(x_MD, row_of_R // k, axis=0, mode="clip")

  expand.defvjp(lambda x: (expand(x), None), lambda _, dx: (add_up(dx),))

  @jax.custom_vjp
  def add_up(y_RD):
    return combine(y_RD, row_of_R, slot_Mk)

  add_up.defvjp(lambda y: (add_up(y), None), lambda _, dy: (expand(dy),))

  @jax.custom_vjp
  def weights_of(weights_Mk):
    return jnp.take(weights_Mk.reshape(-1), row_of_R, mode="clip")

  def weights_backward(_, dw_R):
    if combine is not scatter_add:
      return (jnp.take(dw_R, slot_Mk, mode="fill", fill_value=0),)
    dw = jnp.zeros(weights_Mk.size, dw_R.dtype).at[row_of_R].add(dw_R)
    return (dw.reshape(weights_Mk.shape),)

  weights_of.defvjp(lambda w: (weights_of(w), None), weights_backward)

  def forward(x_MD, weights_Mk, gate_up, down):
    y_RD = experts.multiply(
      expand(x_MD), weights_of(weights_Mk), gate_up, down, sizes_e
    )
    return add_up(y_RD)

  y_MD, pull = jax.vjp(forward, x_MD, weights_Mk, gate_up, down)
  return y_MD, pull(dy_MD)


FORMS = {
  "scatter-add": scatter_add,
  "one gather to [M, k, D]": gather_all,
  "k gathers": gather_each,
}


def measure(combine, topology: str, M: int, mesh: Mesh) -> dict:
  """HBM bytes and milliseconds of a device."""
  every = PartitionSpec()
  here = NamedSharding(mesh, every)
  e = E // SHARDS
  shapes = (
    ((M, D), BF16),
    ((M, k), BF16),
    ((M, k), I32),
    ((e, D, 2 * F), BF16),
    ((e, F, D), BF16),
    ((M, D), BF16),
  )
  arguments = [jax.ShapeDtypeStruct(*s, sharding=here) for s in shapes]
  with jax.set_mesh(mesh):
    local = functools.partial(layer, combine)
    whole = sharding.shard_map(local, in_specs=every, out_specs=every)
    compiled = plan_compile.compile_one(
      jax.jit(lambda *args: whole(*args)).lower(*arguments)
    )
  found = estimates.of(compiled.module, topology, mesh.size, unit="ms")
  return found | {"temporaries": compiled.memory.temporaries}


def check() -> None:
  """All forms give the same numbers, on a CPU, in float32.

  Raises:
    AssertionError: they do not.
  """
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  M, e = 64, 8
  chosen = np.argsort(rng.random((M, e * SHARDS)))[:, :k].astype(np.int32)
  given = normal(M, 16), normal(M, k), chosen
  given += normal(e, 16, 12), normal(e, 6, 16), normal(M, 16)
  found = [jax.jit(functools.partial(layer, f))(*given) for f in FORMS.values()]
  for other in found[1:]:
    close = functools.partial(np.testing.assert_allclose, atol=1e-3, rtol=1e-4)
    jax.tree.map(close, found[0], other)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  libtpu, found = plan_compile.prepare(), {}
  check()
  for topology, M in TOPOLOGIES.items():
    devices = plan_compile.devices(chips.parse(topology), 1)
    mesh = sharding.make_mesh(devices, data=-1)
    for name, combine in FORMS.items():
      found[f"{topology}, {name}"] = measure(combine, topology, M, mesh)
      print(topology, name, found[f"{topology}, {name}"], flush=True)
  record.finish("combine", {"libtpu": libtpu, "layer": found}, args.out)


if __name__ == "__main__":
  main()
