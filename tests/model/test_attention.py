"""Attention by kernel: the same numbers as the plain formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.model import attention
from gspo_jax.runtime import sharding

B, T, N, K, H = 2, 256, 4, 2, 128


def draw(T=T, H=H):
  """Left padding in the first row, two texts in the second."""
  rng = np.random.default_rng(0)
  normal = lambda heads: rng.normal(size=(B, T, heads, H)).astype(np.float32)
  segments = np.ones((B, T), np.int32)
  segments[0, : T // 3] = 0
  segments[1, T // 2 :] = 2
  return normal(N), normal(K), normal(K), segments


def plain(q, k, v, segments):
  """A token at a time, float64."""
  out = np.zeros(q.shape)
  for b, t, n in np.ndindex(q.shape[:3]):
    seen = np.flatnonzero(segments[b, : t + 1] == segments[b, t])
    scores = np.float64(k[b, seen, n // (N // K)]) @ q[b, t, n]
    odds = np.exp((scores - scores.max()) / np.sqrt(q.shape[-1]))
    out[b, t, n] = odds @ v[b, seen, n // (N // K)] / odds.sum()
  return out


@pytest.fixture(scope="module")
def expected():
  return plain(*draw())


KERNELS = {
  "here": attention.attend,
  "splash": functools.partial(attention.splash, interpret=True),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_gives_the_plain_sum(name, expected):
  out = jax.jit(KERNELS[name])(*draw())
  np.testing.assert_allclose(out, expected, atol=5e-6)


def test_gradients_of_splash_and_xla_agree():
  *qkv, segments = draw()
  target = np.random.default_rng(1).normal(size=qkv[0].shape)

  def gradients(kernel):
    loss = lambda qkv: (kernel(*qkv, segments) * target).sum()
    return jax.jit(jax.grad(loss))(qkv)

  for a, b in zip(*map(gradients, KERNELS.values()), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)


def text(platform, monkeypatch, T=T, H=H, dtype=jnp.bfloat16):
  """What is traced for a platform."""
  monkeypatch.setattr(sharding, "platform", lambda: platform)
  q, k, v, segments = draw(T, H)
  q, k, v = (x.astype(dtype) for x in (q, k, v))
  # A new function each time: JAX remembers what it traced.
  attend = lambda *args: attention.attend(*args)
  return str(jax.make_jaxpr(attend)(q, k, v, segments))


def test_a_tpu_holds_no_square_of_scores(monkeypatch):
  traced = text("tpu", monkeypatch)
  assert "splash" in traced
  assert f"{N},{T},{T}]" not in traced
  assert f"{K},{N // K},{T},{T}]" in text("cpu", monkeypatch)


def test_narrow_heads_fall_to_xla(monkeypatch):
  assert "splash" not in text("tpu", monkeypatch, H=64)


def test_splash_pads_what_is_no_multiple_of_its_block():
  given = draw(T=200)
  out = jax.jit(KERNELS["splash"])(*given)
  np.testing.assert_allclose(out, plain(*given), atol=5e-6)


def test_a_gpu_is_given_cudnn(monkeypatch):
  """Which is not here: JAX looks for it when it traces."""
  with pytest.raises(RuntimeError, match="cuDNN"):
    text("gpu", monkeypatch)
  assert "cudnn" not in text("gpu", monkeypatch, dtype=jnp.float32)


def test_the_platform_is_that_of_the_mesh_to_compile_for():
  tpu = jax.sharding.AbstractDevice("TPU v5", 1, "tpu")
  mesh = jax.sharding.AbstractMesh((2,), ("data",), abstract_device=tpu)
  with jax.sharding.use_abstract_mesh(mesh):
    assert sharding.platform() == "tpu"
  assert sharding.platform() == "cpu"
