"""The schedule's values, and AdamW against a loop in float64."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from random_model import weights

from gspo_jax import model
from gspo_jax.learner import optimizer
from gspo_jax.learner.optimizer import OptimConfig
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError

PLAIN = OptimConfig(learning_rate=0.1, warmup_steps=0, total_steps=100)
PARAMS = {
  "head": jnp.array([[1.0, -2.0], [0.5, 3.0]]),
  "final_norm": {"scale": jnp.array([1.0, 2.0])},
}
GRADS = {
  "head": jnp.array([[0.1, -0.2], [0.3, 0.0]]),
  "final_norm": {"scale": jnp.array([0.05, -0.1])},
}


def rates(steps, **options):
  schedule = optimizer.schedule(dataclasses.replace(PLAIN, **options))
  return np.array([schedule(t) for t in range(steps)])


def test_without_warmup_the_rate_is_the_peak():
  np.testing.assert_allclose(rates(300), 0.1)


def test_warmup_is_a_line_that_starts_above_zero():
  expected = np.minimum(np.arange(1, 31) / 10, 1) * 0.1
  np.testing.assert_allclose(rates(30, warmup_steps=10), expected, rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 1, 20])
@pytest.mark.parametrize(
  ("decay", "left"),
  [("cosine", lambda t: (1 + np.cos(np.pi * t)) / 2),
   ("linear", lambda t: 1 - t)],
)  # fmt: skip
def test_a_decay_goes_from_the_peak_to_its_end(decay, left, warmup):
  for end in (0.0, 0.1):
    rate = rates(130, decay=f"{decay}:min_lr_ratio={end}", warmup_steps=warmup)
    t = np.clip((np.arange(130) - warmup) / (100 - warmup), 0, 1)
    expected = 0.1 * (end + (1 - end) * left(t))
    expected[:warmup] = 0.1 * np.arange(1, warmup + 1) / max(warmup, 1)
    np.testing.assert_allclose(rate, expected, rtol=1e-4, atol=1e-8)
    assert rate.max() == pytest.approx(0.1)
    assert (rate[:100] > 0).all()  # every step of the run learns


@pytest.mark.parametrize("eps", [1e-8, 1e-15, 1e-2])
def test_two_steps_of_adamw(eps):
  cfg = dataclasses.replace(
    PLAIN,
    name=f"adamw:b1=0.8,b2=0.9,eps={eps},weight_decay=0.3",
    warmup_steps=4,
    clip_norm=0.2,
  )
  tx = optimizer.optimizer(cfg)
  update = jax.jit(tx.update)
  params, state = PARAMS, tx.init(PARAMS)
  flat = lambda tree: np.concatenate(
    [np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)]
  )
  decays = np.array([0, 0, 1, 1, 1, 1])  # the scale's leaf comes first
  x, m, v = flat(params), 0, 0
  for t, factor in enumerate((1.0, -3.0)):
    grads = jax.tree.map(lambda g, f=factor: f * g, GRADS)
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
    g = flat(grads)
    g *= min(1, 0.2 / np.sqrt((g**2).sum()))
    m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
    step = m / (1 - 0.8 ** (t + 1))
    step /= np.sqrt(v / (1 - 0.9 ** (t + 1))) + eps
    x = x - 0.1 * (t + 1) / 4 * (step + 0.3 * decays * x)
    np.testing.assert_allclose(flat(params), x, rtol=1e-4)


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e6])
def test_the_norm_is_clipped_and_never_scaled_up(factor):
  cfg = dataclasses.replace(PLAIN, clip_norm=0.25, name="adamw:b1=0.0")
  tx = optimizer.optimizer(cfg)
  grads = jax.tree.map(lambda g: factor * g, GRADS)
  _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
  moment = optax.tree.get(state, "mu")
  norm = float(optax.tree.norm(grads))
  assert float(optax.tree.norm(moment)) == pytest.approx(min(norm, 0.25))
  direction = lambda tree: np.ravel(tree["head"] / optax.tree.norm(tree))
  np.testing.assert_allclose(direction(moment), direction(grads), rtol=1e-5)


MATRIX = "(attention/[qkvo]|mlp/(gate|up|down)|moe/(gate_up|down))$"
SMALL = {"num_layers": 2, "embed_dim": 8, "head_dim": 4, "mlp_dim": 6}


def newton_schulz(g):
  """Five steps towards the nearest orthogonal matrix, in float64."""
  x = np.float64(g) / np.linalg.norm(g)
  for _ in range(5):
    a = x @ x.T
    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
  return x


def orthogonal(path, g_L):
  """`newton_schulz` of each matrix of an array, as large as AdamW's."""
  matrices = g_L.reshape(-1, *g_L.shape[-2:])
  if path.endswith("attention/o"):
    matrices = g_L.reshape(len(g_L), -1, g_L.shape[-1])
  elif "attention" in path:
    matrices = g_L.reshape(*g_L.shape[:2], -1)
  whole = np.stack([newton_schulz(g) for g in matrices])
  return 0.2 * max(whole.shape[1:]) ** 0.5 * whole.reshape(g_L.shape)


@pytest.mark.parametrize(("name", "axis"), [("tiny", 2), ("qwen3-0.6b", 1)])
def test_a_step_of_muon(name, axis):
  """It makes each matrix orthogonal; all other parameters have AdamW's step."""
  cfg = model.variant(name, vocab_size=16, **SMALL)
  params, grads = (weights(cfg, seed) for seed in (0, 1))
  numbers = "weight_decay=0.5"
  adamw = dataclasses.replace(PLAIN, name=f"adamw:{numbers}", clip_norm=1e9)
  muon = optimizer.optimizer(dataclasses.replace(adamw, name=f"muon:{numbers}"))
  adamw = optimizer.optimizer(adamw)
  step = lambda g, p: adamw.update(g, adamw.init(p), p)[0]
  expected = jax.jit(step)(grads, params)
  axes = dict.fromkeys(("fsdp", "expert", "tensor"), axis)
  mesh = sharding.make_mesh(jax.devices()[: axis**3], **axes)
  arguments = grads, jax.jit(muon.init)(params), params
  arguments = jax.device_put(
    arguments, sharding.state_shardings(arguments, mesh, optimizer.STATE_AXES)
  )
  step = jax.jit(muon.update).lower(*arguments).compile()
  updates = sharding.leaves_by_path(step(*arguments)[0])
  others = sharding.leaves_by_path(expected)
  grads, params = map(sharding.leaves_by_path, (grads, params))
  matrices = {p for p in updates if re.search(MATRIX, p)}
  assert len(matrices) == (6 if cfg.num_experts else 7)
  for path, update in updates.items():
    if path not in matrices:
      np.testing.assert_allclose(update, others[path], rtol=1e-4, atol=1e-7)
      continue
    expected = orthogonal(path, grads[path]) + 0.5 * params[path]
    np.testing.assert_allclose(update, -0.1 * expected, rtol=0.02, atol=1e-4)
  # No device holds the experts of another one.
  E = cfg.num_experts
  gathers = re.findall(r"f32\[2,(\d+),\d+,\d+\]\S* all-gather", step.as_text())
  assert not E or str(E) not in gathers


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_frozen_routers_are_left_out(name):
  """The rest is updated as if the model had no routers."""
  cfg = model.variant("tiny", vocab_size=16, router_bias=True, **SMALL)
  params, grads = (weights(cfg, seed) for seed in (0, 1))
  # This eps makes a step depend on the norm that is clipped.
  plain = dataclasses.replace(PLAIN, name=f"{name}:eps=1,weight_decay=0.5")
  frozen = optimizer.optimizer(
    dataclasses.replace(plain, freeze_moe_router=True)
  )
  plain = optimizer.optimizer(plain)
  state = jax.jit(frozen.init)(params)
  assert sharding.state_shardings(
    state, sharding.make_mesh(jax.devices()[:1]), optimizer.STATE_AXES
  )
  assert not any("router" in path for path in sharding.leaves_by_path(state))
  updates = jax.jit(frozen.update)(grads, state, params)[0]
  params, grads = (jax.tree.map(np.copy, x) for x in (params, grads))
  for name in ("router", "router_bias"):
    assert not updates["layers"]["moe"].pop(name).any()
    for tree in params, grads:
      del tree["layers"]["moe"][name]
  step = lambda g, p: plain.update(g, plain.init(p), p)[0]
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6),
    updates,
    jax.jit(step)(grads, params),
  )


@pytest.mark.parametrize(
  ("option", "value", "words"),
  [("decay", "cosinus", "did you mean 'cosine'"),
   ("name", "adam", "did you mean 'adamw'"),
   ("decay", "constant:min_lr_ratio=.1", "'min_lr_ratio': it takes none"),
   ("decay", "cosine:min_lr_ratio=2", "min_lr_ratio=2: expected 0 to 1"),
   ("name", "adamw:b2=1.5", "optim.name: b2=1.5: expected 0 or more, under 1"),
   ("name", "adamw:b1=x", "optim.name=adamw:b1=x: b1: expected a number"),
   ("name", "muon:weight_decay=-1", "weight_decay=-1: expected 0 or more"),
   ("name", "adamw:eps=0", "optim.name: eps=0: expected more than 0")],
)  # fmt: skip
def test_bad_settings(option, value, words):
  with pytest.raises(UserError, match=words):
    dataclasses.replace(PLAIN, **{option: value})
