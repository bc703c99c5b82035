"""Adapters add alpha / rank * A B to a weight: forward, gradient, on a mesh.

Dimension key: M tokens, D model width, E experts, F hidden width, r rank.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import SIZES
from jax.sharding import PartitionSpec
from random_model import base_and_adapters, weights

from gspo_jax import model
from gspo_jax.model import lora
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError

LORA = model.LoraConfig(rank=3, alpha=5.0)  # a scale that rounds
MOE = model.variant("tiny", attention_bias=True, lora=LORA, **SIZES)
BIASED = dataclasses.replace(MOE, expert_bias=True, swiglu_limit=0.5)
DENSE = dataclasses.replace(MOE, num_experts=0, experts_per_token=0)
each_model = pytest.mark.parametrize("cfg", [DENSE, MOE], ids=["dense", "moe"])
TOKENS = np.random.default_rng(0).integers(0, 24, (8, 6))
POSITIONS = np.broadcast_to(np.arange(6), TOKENS.shape)


@functools.partial(jax.jit, static_argnums=1)
def logits(params, cfg):
  real = np.ones(TOKENS.shape, int)
  return model.forward(params, cfg, TOKENS, POSITIONS, real).logits


init = jax.jit(lora.init, static_argnums=1)
merge = jax.jit(lora.merge, static_argnums=(1, 2))


def largest(x, y):
  return np.abs(np.asarray(x) - np.asarray(y)).max()


@each_model
def test_applied_adapters_equal_merged_weights(cfg):
  """Up to 16 times what rounding each weight would change."""
  base, adapters = base_and_adapters(cfg)
  params, run = lora.join(base, adapters), lambda x: logits(x, cfg)
  merged = jax.device_get(merge(params, cfg.lora))
  assert jax.tree.structure(merged) == jax.tree.structure(base)
  rng = np.random.default_rng(1)
  sign = lambda x: np.float32(rng.choice([-1, 1], x.shape))
  # A rounding is at most 2^-24 of a number; sums of 16 to 32 numbers have more.
  moved = jax.tree.map(lambda x: x * (1 + 2.0**-20 * sign(x)), merged)
  exact = run(merged)
  assert largest(run(params), exact) < largest(run(moved), exact) < 1e-3
  assert largest(run(base), exact) > 0.5


def test_the_gradient_of_adapters_equals_that_through_merged_weights():
  """On one device and on eight. Of experts: test_experts.py."""
  cfg = DENSE
  base, adapters = base_and_adapters(cfg)
  cotangent = np.random.default_rng(1).normal(size=(*TOKENS.shape, 24))

  def loss(adapters, base, merge):
    params = lora.join(base, adapters)
    params = lora.merge(params, cfg.lora) if merge else params
    return (logits(params, cfg) * cotangent).sum()

  gradient = jax.jit(jax.grad(loss), static_argnums=2)
  mesh = sharding.make_mesh(fsdp=2, expert=2, tensor=2)
  place = lambda tree: jax.device_put(tree, model.shardings(tree, mesh))
  one, expected = (gradient(adapters, base, merge) for merge in (False, True))
  with jax.set_mesh(mesh):
    eight = gradient(place(adapters), place(base), False)
  trees = map(sharding.leaves_by_path, (expected, one, eight))
  expected, *others = jax.device_get(list(trees))
  for path, x in expected.items():
    assert np.abs(x).max() > 1e-2, path
    for other in others:
      np.testing.assert_allclose(other[path], x, atol=1e-4 * np.abs(x).max())


@pytest.mark.parametrize("cfg", [DENSE, BIASED], ids=["dense", "biases"])
def test_new_adapters_change_no_bit(cfg):
  base = weights(cfg)
  fresh = init(jax.random.key(1), cfg)
  changed = logits(lora.join(base, fresh), cfg)
  np.testing.assert_array_equal(changed, logits(base, cfg))
  for path, x in sharding.leaves_by_path(fresh).items():
    assert np.any(x) == path.endswith(lora.A)


def test_a_is_uniform_within_one_over_the_root_of_its_inputs():
  """As in PEFT: kaiming_uniform with a = sqrt(5)."""
  cfg = dataclasses.replace(MOE, lora=model.LoraConfig(64, 1.0))
  fresh = init(jax.random.key(0), cfg)
  inputs = {"q": 16, "o": 4 * 8, "gate_up": 16, "down": 8}
  for name, count in inputs.items():
    part = fresh["layers"]["attention" if name in "qo" else "moe"]
    a = part[name + lora.A] * count**0.5
    assert np.abs(a).max() <= 1
    assert np.var(a) == pytest.approx(1 / 3, rel=0.1)


@pytest.mark.parametrize("targets", ["attention", "mlp", "all-linear"])
def test_targets(targets):
  chosen = model.LoraConfig(2, 1.0, targets)
  for cfg, mlp in ((DENSE, {"gate", "up", "down"}), (MOE, {"gate_up", "down"})):
    parts = {"attention": set("qkvo"), "mlp": mlp}
    expected = parts.get(targets, set("qkvo") | mlp)
    base, _ = base_and_adapters(cfg)
    adapters = init(jax.random.key(0), dataclasses.replace(cfg, lora=chosen))
    paths = sharding.leaves_by_path(adapters)
    assert {re.split("/|_lora", path)[-2] for path in paths} == expected
    joined = lora.join(base, adapters)
    again = lora.split(joined)
    jax.tree.map(np.testing.assert_array_equal, again, (base, adapters))
    count = lambda tree: len(jax.tree.leaves(tree))
    assert count(joined) == count(base) + 2 * len(expected)


def test_a_merge_is_rounded_once():
  base, adapters = base_and_adapters(DENSE)
  narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base)
  params = lora.join(narrow, adapters)
  exact = merge(params, LORA, "float32")["layers"]["mlp"]["up"]
  kept = merge(params, LORA)["layers"]["mlp"]["up"]
  assert exact.dtype == jnp.float32
  assert kept.dtype == jnp.bfloat16
  np.testing.assert_array_equal(kept, exact.astype(jnp.bfloat16))
  mlp = adapters["layers"]["mlp"]
  delta = np.einsum(
    "lir,lro->lio", *(np.float64(mlp["up" + x]) for x in (lora.A, lora.B))
  )
  wide = np.float64(narrow["layers"]["mlp"]["up"]) + 5 / 3 * delta
  np.testing.assert_allclose(exact, wide, atol=1e-6)


def test_adapters_are_sharded_as_their_weights():
  spec = model.parameters.partition_spec
  for row in model.parameters.TABLE:
    if not row.target:
      continue
    full, (a, b) = spec(row.end), (spec(x.end) for x in row.adapters)
    _, inputs, outputs = row.groups
    assert a == PartitionSpec(*full[: outputs[0]], None)
    assert b == PartitionSpec(*full[: inputs[0]], None, *full[outputs[0] :])


@pytest.mark.parametrize(
  ("values", "words"),
  [((-1, 1.0), "model.lora.rank=-1: expected 0 or more"),
   ((4, 0.0), "model.lora.alpha=0.0: expected more than 0"),
   ((4, 1.0, "mpl"), "model.lora.targets='mpl'.*'mlp'")],
)  # fmt: skip
def test_mistakes(values, words):
  with pytest.raises(UserError, match=words):
    model.LoraConfig(*values)
