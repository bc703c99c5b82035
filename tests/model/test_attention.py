"""The attention kernels against the formula, in float64."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from gspo_jax.model import attention
from gspo_jax.plan import chips
from gspo_jax.plan import compile as plan_compile
from gspo_jax.runtime import sharding

B, T, N, K, H = 2, 256, 4, 2, 128


def random_inputs(T=T, H=H):
  """Left padding in the first row, two segments in the second."""
  rng = np.random.default_rng(0)
  normal = lambda heads: rng.normal(size=(B, T, heads, H)).astype(np.float32)
  segments = np.ones((B, T), np.int32)
  segments[0, : T // 3] = 0
  segments[1, T // 2 :] = 2
  return normal(N), normal(K), normal(K), segments


def plain(q, k, v, segments):
  """One token and head at a time, in float64."""
  out = np.zeros(q.shape)
  for b, t, n in np.ndindex(q.shape[:3]):
    keys = np.flatnonzero(segments[b, : t + 1] == segments[b, t])
    scores = np.float64(k[b, keys, n // (N // K)]) @ q[b, t, n]
    weights = np.exp((scores - scores.max()) / np.sqrt(q.shape[-1]))
    out[b, t, n] = weights @ v[b, keys, n // (N // K)] / weights.sum()
  return out


@pytest.fixture(scope="module")
def expected():
  return plain(*random_inputs())


KERNELS = {
  "plain": attention.attend,
  "splash": functools.partial(attention.splash, interpret=True),
}


@pytest.mark.parametrize("name", KERNELS)
def test_each_kernel_equals_the_formula(name, expected):
  out = jax.jit(KERNELS[name])(*random_inputs())
  np.testing.assert_allclose(out, expected, atol=5e-6)


@pytest.mark.parametrize("blocks", ["default", "wide", "apart"])
def test_gradients_of_splash_equal_those_in_blocks(blocks, monkeypatch):
  """With longer blocks of keys, or a separate kernel for the queries."""
  if blocks == "wide":
    monkeypatch.setattr(attention, "splash_blocks", lambda tokens: (128, 256))
  elif blocks == "apart":
    monkeypatch.setattr(attention, "_PARTS_BYTES", 0)
  *qkv, segments = random_inputs(T=256 if blocks == "default" else 512)
  cotangent = np.random.default_rng(1).normal(size=qkv[0].shape)
  splash = functools.partial(attention.splash, interpret=True)

  def gradients(kernel):
    loss = lambda qkv: (kernel(*qkv, segments) * cotangent).sum()
    return jax.grad(loss)

  traced = str(jax.make_jaxpr(gradients(splash))(qkv))
  assert ("splash_mha_dq" in traced) == (blocks == "apart")
  # The parts of the queries' gradient, one for each block of keys.
  assert (f"f32[{B},2,{N},512,{H}]" in traced) == (blocks == "wide")
  actual = jax.jit(gradients(splash))(qkv)
  expected = jax.jit(gradients(attention.in_blocks))(qkv)
  for a, b in zip(actual, expected, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize(
  ("tokens", "blocks"),
  [
    (640, (128, 128)),
    (4096, (512, 512)),
    (16384, (512, 2048)),
    (17408, (512, 1024)),
    (65536, (512, 2048)),
  ],
)
def test_blocks_of_keys_are_at_most_an_eighth_of_a_long_row(tokens, blocks):
  assert attention.splash_blocks(tokens) == blocks


@pytest.mark.parametrize(
  ("kind", "tokens", "heads", "block"),
  [
    ("TPU v5", 65536, 8, 2048),  # 4 GiB of parts
    ("TPU v5", 131_072, 4, 0),
    ("TPU7x", 131_072, 4, 4096),  # 8 GiB in blocks of 2,048 keys
    ("TPU7x", 131_072, 8, 0),
    ("TPU7x", 65536, 8, 2048),
    ("TPU7x", 67_584, 8, 0),  # not a multiple of 4,096
  ],
)
def test_a_tpu7x_has_longer_blocks_of_keys_where_the_parts_are_many(
  kind, tokens, heads, block, monkeypatch
):
  """The kernel for the queries' gradient is the last resort."""
  monkeypatch.setattr(sharding, "device_kind", lambda: kind)
  wide_block = attention.splash_blocks(tokens)[1]
  query_bytes = tokens * heads * 128 * 2
  assert attention._fused_block(tokens, wide_block, query_bytes) == block


def jaxpr(platform, monkeypatch, T=T, H=H, dtype=jnp.bfloat16):
  """The program traced for a platform, as text."""
  monkeypatch.setattr(sharding, "platform", lambda: platform)
  q, k, v, segments = random_inputs(T, H)
  q, k, v = (x.astype(dtype) for x in (q, k, v))
  # A new function each time: JAX caches its traces.
  attend = lambda *args: attention.attend(*args)
  return str(jax.make_jaxpr(attend)(q, k, v, segments))


def test_no_platform_holds_all_scores(monkeypatch):
  traced = jaxpr("tpu", monkeypatch)
  assert "splash" in traced
  assert f"{N},{T},{T}]" not in traced
  traced = jaxpr("cpu", monkeypatch)
  assert f"f32[{B},{K},{64 * N // K},{T}]" in traced
  assert f"f32[{B},{K},{T * N // K},{T}]" not in traced
  assert "splash" not in jaxpr("tpu", monkeypatch, H=64)  # too narrow


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "cached"), [(100, 2**18), (200, 1)])
def test_gradients_in_blocks_equal_those_of_the_formula(
  tokens, cached, dtype, monkeypatch
):
  """All rows at once, and one at a time; the last block is shorter."""
  monkeypatch.setattr(attention, "_CACHED_SCORES", cached)
  *qkv, segments = random_inputs(T=tokens, H=8)
  qkv = [jnp.asarray(x, dtype) for x in qkv]
  cotangent = np.random.default_rng(1).normal(size=qkv[0].shape)

  def formula(q, k, v, segments):
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    same = segments[:, :, None] == segments[:, None]
    visible = (same & np.tri(tokens, dtype=bool))[:, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)

  def gradients(function, qkv):
    loss = lambda qkv: (function(*qkv, segments) * cotangent).sum()
    return jax.jit(jax.grad(loss))(qkv)

  actual = gradients(lambda *x: attention.in_blocks(*x), qkv)
  expected = gradients(formula, [x.astype(jnp.float32) for x in qkv])
  for x, a, b in zip(qkv, actual, expected, strict=True):
    assert a.dtype == x.dtype
    close = 1e-5 if dtype == "float32" else 0.01 * np.abs(b).max()
    np.testing.assert_allclose(a.astype(jnp.float32), b, atol=close)


def test_a_rematerialised_block_computes_the_scores_twice():
  """Forward, and backward from the kept log-sum-exp, not forward again."""
  *qkv, segments = random_inputs(T=64, H=8)
  keep = jax.checkpoint_policies.save_only_these_names("attention")

  def exponentials(function):
    loss = lambda qkv: (function(*qkv, segments) ** 2).sum()
    return str(jax.make_jaxpr(jax.grad(loss))(qkv)).count(" exp ")

  attend = lambda *x: attention.in_blocks(*x)
  once = exponentials(attend)
  assert exponentials(jax.checkpoint(attend, policy=keep)) == once
  assert exponentials(jax.checkpoint(attend)) > once


def test_splash_pads_to_a_multiple_of_its_block():
  inputs = random_inputs(T=200)
  out = jax.jit(KERNELS["splash"])(*inputs)
  np.testing.assert_allclose(out, plain(*inputs), atol=5e-6)


def test_a_gpu_uses_cudnn(monkeypatch):
  """JAX requires cuDNN while tracing, and it is not installed."""
  with pytest.raises(RuntimeError, match="cuDNN"):
    jaxpr("gpu", monkeypatch)
  assert "cudnn" not in jaxpr("gpu", monkeypatch, dtype=jnp.float32)


def test_the_platform_is_that_of_the_mesh():
  tpu = jax.sharding.AbstractDevice("TPU v5", 1, "tpu")
  mesh = jax.sharding.AbstractMesh((2,), ("data",), abstract_device=tpu)
  with jax.sharding.use_abstract_mesh(mesh):
    assert sharding.platform() == "tpu"
  assert sharding.platform() == "cpu"


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="no libtpu"
)
@pytest.mark.parametrize(
  ("tokens", "heads", "gib"),
  [
    (16384, (32, 4), 1.4),  # 4.33 with blocks of 512 keys
    (32768, (32, 4), 4.8),  # 16.7 likewise
    (65536, (32, 4), 2.9),  # 64 likewise: a kernel for the queries' gradient
    (65536, (8, 1), 4.4),  # a quarter of the heads, as with `mesh.context=4`
    (131_072, (4, 1), 0.9),  # an eighth, on a device of `mesh.context=8`
  ],
)
def test_temporaries_of_one_layer_on_a_v5p(tokens, heads, gib):
  """Forward and backward pass of one row of Qwen3-30B-A3B's heads."""
  plan_compile.prepare()
  device = plan_compile.devices(chips.parse("v5p:2x2x1"), 1)[0]
  shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(
    dims, dtype, sharding=SingleDeviceSharding(device)
  )
  query, key = (shape(1, tokens, n, 128) for n in heads)

  def backward(q, k, v, segments, dout):
    attend = lambda *qkv: attention.splash(*qkv, segments)
    return jax.vjp(attend, q, k, v)[1](dout)

  segments = shape(1, tokens, dtype=jnp.int32)
  lowered = jax.jit(backward).lower(query, key, key, segments, query)
  memory = plan_compile.compile_one(lowered).memory
  assert memory.temporaries < gib * 2**30
