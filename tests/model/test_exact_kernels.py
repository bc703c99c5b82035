"""The TPU kernels of `model.exact`, interpreted, and what calls them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from gspo_jax.model import attention, exact, exact_kernels, rounding
from gspo_jax.model.variants import variant
from gspo_jax.program import functions
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError

KEYS = jax.random.split(jax.random.key(0), 9)
draw = lambda i, *shape: jax.random.normal(KEYS[i], shape)


@pytest.fixture
def on_tpu(monkeypatch):
  monkeypatch.setattr(sharding, "platform", lambda: "tpu")
  monkeypatch.setattr(sharding, "cores", lambda: 1)
  with pltpu.force_tpu_interpret_mode(), exact.exactly(True):
    yield


@pytest.mark.parametrize("shape", [(5, 384, 130), (600, 4224, 512)])
def test_product(shape):
  """Rows and columns of a last block are few; K is in blocks of 1,408."""
  M, K, N = shape
  x, w = (
    draw(i, *x).astype("bfloat16") for i, x in enumerate([(M, K), (K, N)])
  )
  with pltpu.force_tpu_interpret_mode():
    found = exact_kernels.product(x, w, jnp.dtype("float32"))
  expected = np.float32(x) @ np.float32(w)
  np.testing.assert_allclose(found, expected, atol=2e-3)


def test_blocks_of_terms_follow_from_their_number_alone():
  sizes = {K: exact_kernels._block(K) for K in (384, 2048, 4096, 4224, 6144)}
  assert sizes == {384: 384, 2048: 2048, 4096: 2048, 4224: 1408, 6144: 2048}


@pytest.mark.usefixtures("on_tpu")
def test_a_norm_is_one_kernel_and_has_the_ordinary_gradient():
  from gspo_jax.model import layers

  cfg = variant("tiny", dtype="bfloat16")
  x, scale = draw(0, 3, 50, 96).astype("bfloat16"), draw(1, 96)

  def loss(x, scale, on):
    with exact.exactly(on):
      y = layers.rms_norm(x, scale, cfg)
    return rounding.wide(y).sum(), y

  run = jax.grad(loss, argnums=(0, 1), has_aux=True)
  assert "exact_rows" in str(jax.make_jaxpr(lambda x: loss(x, scale, True))(x))
  results = (run(x, scale, on) for on in (True, False))
  for found, expected in zip(*map(jax.tree.leaves, results), strict=True):
    np.testing.assert_array_equal(found, expected)


SEGMENTS = np.array([[1] * 200 + [0] * 56 + [2] * 100 + [0] * 28])


@pytest.mark.usefixtures("on_tpu")
@pytest.mark.parametrize(
  ("window", "sinks"),
  [pytest.param(None, False, marks=pytest.mark.slow), (70, True)],
)
def test_attention_of_packed_rows_is_by_the_kernel_of_pages(window, sinks):
  q, k, v = (draw(i, 1, 384, n, 128) for i, n in enumerate((4, 2, 2)))
  sinks_N = draw(3, 4) if sinks else None
  real = (SEGMENTS > 0)[..., None, None]

  def loss(forward, *qkv):
    with exact.exactly(forward == "exact"):
      run = attention.attend if forward == "exact" else attention.in_blocks
      out = run(*qkv, SEGMENTS, window=window, sinks_N=sinks_N)
    return jnp.sin(jnp.where(real, out, 0)).sum(), jnp.where(real, out, 0)

  grad = jax.grad(loss, argnums=(1, 2, 3), has_aux=True)
  results = (grad(forward, q, k, v) for forward in ("exact", "in blocks"))
  for found, expected in zip(*map(jax.tree.leaves, results), strict=True):
    np.testing.assert_allclose(found, expected, atol=3e-5)
  shifted = np.roll(SEGMENTS, 32)
  out = attention.attend(q, k, v, shifted)
  assert np.isnan(out[:, 32:232]).all()


@pytest.mark.parametrize(
  ("name", "changes", "page", "expected"),
  [
    ("tiny", {"dtype": "float32"}, 128, "or model.dtype=bfloat16"),
    ("tiny", {}, 64, "or continuous_batching.page_size=128"),
    ("tiny", {}, 128, "or model.head_dim: a multiple of 128"),
    ("tiny-minimax-m2", {}, 128, "or a norm of each head"),
    ("tiny-moonlight", {}, 128, "or layers of attention alone"),
  ],
)
def test_what_kernels_lack_is_refused(name, changes, page, expected):
  chip = SimpleNamespace(platform="tpu", device_kind="TPU v5")
  mesh = SimpleNamespace(devices=np.array([chip]), shape={"tensor": 1})
  cfg = variant(name, exact=True, **{"dtype": "bfloat16"} | changes)
  with pytest.raises(UserError, match=expected):
    functions._check_exact(cfg, mesh, page)
