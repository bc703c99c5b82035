"""docs/in_your_code.md: Flax NNX; with `parity` Equinox, with Tunix its own."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from repository import ROOT

PAGE = (ROOT / "docs" / "in_your_code.md").read_text()


def run(*sections: str) -> SimpleNamespace:
  """What the blocks of these sections define, one after the other."""
  names = {}
  for section in sections:
    exec(re.search(f"(?s)## {section}\n.*?```python\n(.*?)```", PAGE)[1], names)
  return SimpleNamespace(**names)


def by_equation(logps, old_logps, advantages, mask):
  """GSPO as its paper writes it, in the dtype of its arguments."""
  ratio = jnp.exp(((logps - old_logps) * mask).sum(1) / mask.sum(1))
  clipped = jnp.clip(ratio, 1 - 3e-4, 1 + 4e-4)
  return -jnp.minimum(ratio * advantages, clipped * advantages).mean()


def error(found, expected) -> float:
  """Relative to the norm of what was expected."""
  flat = lambda tree: np.concatenate(
    [np.ravel(np.asarray(x, float)) for x in jax.tree.leaves(tree)]
  )
  difference = flat(found) - flat(expected)
  return np.linalg.norm(difference) / np.linalg.norm(flat(expected))


def assert_near(value, gradient, wanted) -> None:
  """Terms of about 1 and -1 all but cancel in the value."""
  print(f"{abs(value - wanted[0]):.1e} {error(gradient, wanted[1]):.1e}")
  assert abs(value - wanted[0]) < 1e-6
  assert error(gradient, wanted[1]) < 1e-5


def check(names, value_and_grad):
  """A part of the sequences is clipped; the errors are those of float32."""
  # The trained model is right everywhere: it has no advantages left.
  old = jax.tree.map(lambda x: 0.4 * x, names.model)
  moved = jax.tree.map(lambda x: 1.02 * x, old)
  _, ((tokens, old_logps, advantages), *_) = names.rollout(
    old, jax.random.key(2)
  )
  (value, metrics), gradient = value_and_grad(names.loss, has_aux=True)(
    moved, tokens, old_logps, advantages
  )

  def expected(weights):
    embed, head = weights
    logps = jax.nn.log_softmax(embed[tokens[:, :-1]] @ head)
    logps = jnp.take_along_axis(logps, tokens[:, 1:, None], -1)[..., 0]
    return by_equation(logps, old_logps, advantages, jnp.ones_like(logps))

  assert 0.1 < metrics["clip_frac/sequence"].value() < 0.9
  with jax.enable_x64(True):
    as_double = lambda x: jnp.asarray(np.asarray(x, float))
    old_logps, advantages = as_double(old_logps), as_double(advantages)
    weights = [as_double(x) for x in jax.tree.leaves(moved)]
    wanted = jax.value_and_grad(expected)(weights)
  assert_near(value, gradient, wanted)


def test_flax_nnx():
  names = run("A loop of your own", "Flax NNX")
  assert names.reward > 0.9
  check(names, nnx.value_and_grad)


@pytest.mark.slow
def test_equinox():
  equinox = pytest.importorskip("equinox")
  names = run("A loop of your own", "Equinox")
  assert names.reward > 0.9
  check(names, equinox.filter_value_and_grad)


def tunix_model():
  from tunix.models.qwen3 import model

  config = model.ModelConfig(
    num_layers=1, vocab_size=64, embed_dim=32, hidden_dim=64, num_heads=2,
    head_dim=16, num_kv_heads=1, rope_theta=10_000, norm_eps=1e-6,
  )  # fmt: skip
  return model.Qwen3(config, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_tunix_calls_the_loss_by_its_name():
  common = pytest.importorskip("tunix.rl.common")
  from tunix.rl import function_registry

  config = run("Tunix").config
  config.temperature = 1.0
  rng = np.random.default_rng(0)
  tokens = jnp.asarray(rng.integers(1, 60, (8, 12)))
  mask = np.arange(8) < rng.integers(1, 9, (8, 1))
  noise = rng.normal(scale=1e-3, size=mask.shape)
  model, advantages = tunix_model(), jnp.asarray(rng.normal(size=8), "float32")
  logps_of = lambda model: common.compute_per_token_logps(
    *nnx.split(model), tokens[:, :4], tokens[:, 4:], 63, 0, stop_gradient=False
  )
  example = common.TrainExample(
    prompt_ids=tokens[:, :4],
    prompt_mask=jnp.ones((8, 4), bool),
    completion_ids=tokens[:, 4:],
    completion_mask=jnp.asarray(mask),
    advantages=advantages,
    ref_per_token_logps=None,
    old_per_token_logps=(logps_of(model) + noise).astype(jnp.float32),
  )
  loss = function_registry.get_policy_loss_fn(config.policy_loss_fn)
  (value, aux), gradient = nnx.value_and_grad(loss, has_aux=True)(
    model, example, config, 63, 0
  )
  assert 0.1 < aux["pg_clipfrac"] < 0.9
  equation = lambda model: by_equation(
    logps_of(model), example.old_per_token_logps, advantages, mask
  )
  assert_near(value, gradient, nnx.value_and_grad(equation)(model))
