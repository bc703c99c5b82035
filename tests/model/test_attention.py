"""The attention kernels against the formula, in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import absent_devices, needs_libtpu

from gspo_jax.model import attention
from gspo_jax.plan import compile as plan_compile
from gspo_jax.runtime import sharding

B, T, N, K, H = 2, 256, 4, 2, 128
SINKS = np.float32([-1.0, 0.5, 2.0, 5.0])


def random_inputs(T=T, H=H, V=None):
  """Left padding in the first row, two segments in the second."""
  rng = np.random.default_rng(0)
  normal = lambda *last: rng.normal(size=(B, T, *last)).astype(np.float32)
  segments = np.ones((B, T), np.int32)
  segments[0, : T // 3] = 0
  segments[1, T // 2 :] = 2
  return normal(N, H), normal(K, H), normal(K, V or H), segments


def exact(q, k, v, segments, cotangent, window=None, sinks_N=None, scale=None):
  """In float64: the output, and gradients of (output * cotangent).sum()."""
  q, k, v, dout = (np.float64(x) for x in (q, k, v, cotangent))
  groups, tokens = N // k.shape[2], np.arange(q.shape[1])
  k, v = (np.repeat(x, groups, axis=2) for x in (k, v))
  scale = scale or q.shape[-1] ** -0.5
  age_TT = tokens[:, None] - tokens
  visible = segments[:, :, None] == segments[:, None]
  visible &= (age_TT >= 0) & (age_TT < (window or len(tokens)))
  scores = np.einsum("btnh,bsnh->bnts", q, k, optimize=True) * scale
  scores = np.where(visible[:, None], scores, -np.inf)
  sinks_N = np.full(N, -np.inf) if sinks_N is None else sinks_N
  sinks = np.broadcast_to(sinks_N[:, None, None], (*scores.shape[:3], 1))
  weights = np.exp(
    np.concatenate([scores, sinks], -1) - scores.max(-1)[..., None]
  )
  weights /= weights.sum(-1, keepdims=True)
  p, of_sinks = weights[..., :-1], weights[..., -1]
  einsum = functools.partial(np.einsum, optimize=True)
  out = einsum("bnts,bsnh->btnh", p, v)
  mean = einsum("btnh,btnh->bnt", out, dout)
  ds = scale * p * (einsum("btnh,bsnh->bnts", dout, v) - mean[..., None])
  by_group = lambda x: x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3)
  return out, (
    einsum("bnts,bsnh->btnh", ds, k),
    by_group(einsum("bnts,btnh->bsnh", ds, q)),
    by_group(einsum("bnts,btnh->bsnh", p, dout)),
    -(of_sinks * mean).sum((0, 2)),
  )


KERNELS = {
  "plain": attention.attend,
  "splash": functools.partial(attention.splash, interpret=True),
}


def gradient(kernel, segments, cotangent, **options):
  """Traced anew: gradients of q, k, v, sinks as of `exact`, and the output."""

  def loss(q, k, v, sinks_N):
    out = kernel(q, k, v, segments, sinks_N=sinks_N, **options)
    return (out * cotangent).sum(), out

  return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))


@pytest.mark.parametrize(
  ("name", "tokens", "window", "sinks_N", "options"),
  [
    ("splash", T, None, None, {}),
    ("splash", 200, None, None, {}),  # not a multiple of a block
    ("splash", T, None, SINKS, {"H": 64}),
    ("splash", T, 70, None, {"H": 128}),
    ("splash", T, 130, SINKS, {"H": 64}),
    ("splash", T, 1, SINKS, {"H": 64}),
    ("splash", T, T + 1, SINKS, {"H": 64}),
    ("splash", T, 100, SINKS, {"H": 64, "dtype": "bfloat16"}),
    ("splash", T, None, None, {"H": 192, "V": 128, "scale": 0.1}),  # as in MLA
    ("plain", T, None, None, {}),
    ("plain", 200, None, None, {"cached": 1}),
    ("plain", 100, None, SINKS, {"dtype": "bfloat16"}),
    ("plain", 200, 70, None, {"cached": 1, "dtype": "bfloat16"}),
    ("plain", 200, 70, SINKS, {}),
    ("plain", 200, 130, SINKS, {"cached": 1}),
    ("plain", 100, 1, SINKS, {"cached": 1}),
    ("plain", 100, 101, SINKS, {}),
    ("plain", T, None, None, {"H": 24, "V": 16, "scale": 0.1}),
  ],
)
def test_each_kernel_and_its_gradients_equal_the_formula(
  name, tokens, window, sinks_N, options, monkeypatch
):
  """In blocks all rows at once, or one at a time; the last block is shorter."""
  monkeypatch.setattr(attention, "_CACHED_SCORES", options.get("cached", 2**18))
  H = options.get("H", 128 if name == "splash" else 8)
  *qkv, segments = random_inputs(tokens, H, options.get("V", H))
  dtype, scale = options.get("dtype", "float32"), options.get("scale")
  qkv = [x.astype(jnp.dtype(dtype)) for x in qkv]
  cotangent = np.random.default_rng(1).normal(
    size=(B, tokens, N, qkv[2].shape[-1])
  )
  settings = {"window": window, "scale": scale}
  of = gradient(KERNELS[name], segments, cotangent, **settings)
  grads, out = of(*qkv, sinks_N)
  expected, exact_grads = exact(
    *qkv, segments, cotangent, sinks_N=sinks_N, **settings
  )
  low = dtype == "bfloat16"
  atol = 0.01 * np.abs(expected).max() if low else 5e-6
  np.testing.assert_allclose(np.float32(out), expected, atol=atol)
  if sinks_N is None:
    assert grads[3] is None
  for x, a, b in zip((*qkv, sinks_N), grads, exact_grads, strict=True):
    if x is None:
      continue
    assert a.dtype == x.dtype
    largest = np.abs(b).max()
    atol = 0.01 * largest if low else 1e-5 + 1e-6 * largest
    np.testing.assert_allclose(np.float32(a), b, atol=atol)


def random_segments(rng, tokens):
  """Segments of any lengths; padding before, after, or between."""
  cuts = np.sort(rng.integers(0, tokens, rng.integers(1, 9)))
  numbers = np.arange(1, len(cuts) + 2) * rng.integers(0, 2, len(cuts) + 1)
  return np.repeat(numbers, np.diff([0, *cuts, tokens]))


@pytest.mark.parametrize(
  ("tokens", "window", "sinks_N", "apart", "K"),
  [(500, None, None, False, 1), (512, 150, SINKS, True, 4)],
)  # fmt: skip
def test_splash_that_skips_blocks_is_splash(
  tokens, window, sinks_N, apart, K, monkeypatch
):
  """Bit for bit, padding included; at real tokens it is the formula."""
  monkeypatch.setattr(attention, "splash_blocks", lambda *_: (128, 256))
  if apart:
    monkeypatch.setattr(attention, "_PARTS_BYTES", 0)
  rng = np.random.default_rng(tokens + K)
  segments = np.stack([random_segments(rng, tokens) for _ in range(3)])
  segments[2] = 0  # an empty row
  normal = lambda n: rng.normal(size=(3, tokens, n, 32)).astype(np.float32)
  qkv, cotangent = (normal(N), normal(K), normal(K)), normal(N)
  cotangent[segments == 0] = 0

  splash = gradient(KERNELS["splash"], segments, cotangent, window=window)
  text = str(splash.trace(*qkv, sinks_N).jaxpr)
  assert ("splash_mha_dq" in text) == apart
  # The parts of the queries' gradient, one for each block of keys.
  assert (f"f32[1,2,{N},512,32]" in text) != apart
  *grads, out = skipping = jax.tree.leaves(splash(*qkv, sinks_N))
  expected, exact_grads = exact(*qkv, segments, cotangent, window, sinks_N)
  kernel = attention._splash_kernel
  unskipped = lambda sizes, segments_T, *options: kernel(
    sizes, jnp.zeros_like(segments_T), *options
  )
  monkeypatch.setattr(attention, "_splash_kernel", unskipped)
  whole = gradient(KERNELS["splash"], segments, cotangent, window=window)
  for a, b in zip(skipping, jax.tree.leaves(whole(*qkv, sinks_N)), strict=True):
    np.testing.assert_array_equal(a, b)
  assert np.isfinite(out).all()
  pairs = [(out[segments > 0], expected[segments > 0])]
  for a, b in [*pairs, *zip(grads, exact_grads, strict=False)]:
    limit = 1e-6 if b.ndim > 1 else 2e-6  # sinks: a sum over all tokens
    np.testing.assert_allclose(a, b, atol=limit * np.abs(b).max())
  for grad in grads[:3]:
    assert not grad[segments == 0].any()


def needed_steps(info, by_key):
  """The blocks (queries, keys) of the steps that compute, in their order."""
  mask, block = (np.asarray(x)[0] for x in (info.block_mask, info.data_next))
  if by_key:
    return [(block[g, k], k) for k, g in np.argwhere(mask.T)]
  return [(q, block[q, g]) for q, g in np.argwhere(mask)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
  ("window", "apart"), [(None, False), (None, True), (300, True), (60, True)]
)
def test_blocks_that_are_not_skipped_hold_a_pair(
  seed, window, apart, monkeypatch
):
  """And each step that is skipped finds a block that is needed."""
  monkeypatch.setattr(attention, "_BLOCK", 128)
  monkeypatch.setattr(attention, "_SPLASH_BLOCK", 256)
  if apart:
    monkeypatch.setattr(attention, "_PARTS_BYTES", 0)
  tokens = 2048
  segments = random_segments(np.random.default_rng(seed), tokens)
  block, _ = attention.splash_blocks(tokens, window)
  assert block == (128 if window else 256)
  token = np.arange(tokens)
  segments = np.where(segments == 0, -1 - token // block, segments)
  sizes = attention._splash_sizes(tokens, 2**10, window, 256)
  kernel = lambda x: attention._splash_kernel(sizes, jnp.asarray(x), window)
  skipping, whole = kernel(segments), kernel(np.zeros(tokens, int))
  age = token[:, None] - token
  pairs = (age >= 0) & (age < (window or tokens))
  pairs &= segments[:, None] == segments
  assert sizes.use_fused_bwd_kernel != apart
  parts = [
    ("fwd", sizes.block_q, sizes.block_kv),
    ("dkv", sizes.block_q_dkv, sizes.block_kv_dkv),
  ]
  if apart:
    parts += [("dq", sizes.block_q_dq, sizes.block_kv_dq)]
  for name, block_q, block_kv in parts:
    info = getattr(skipping, f"{name}_mask_info")
    most = getattr(whole, f"{name}_mask_info").block_mask
    cut = pairs.reshape(tokens // block_q, block_q, -1, block_kv)
    expected = np.argwhere(cut.any((1, 3))).tolist()
    steps = needed_steps(info, name == "dkv")
    assert sorted(steps) == [tuple(x) for x in expected]
    assert len(steps) < most.sum() or window
    block = np.asarray(info.data_next)[0]
    names = block.T if name == "dkv" else block
    other = [x[name != "dkv"] for x in steps]
    # In the kernel's order, round and round for all heads, a block is copied
    # when the name changes.
    copies = np.count_nonzero(names.ravel() != np.roll(names.ravel(), 1))
    assert copies <= len(steps)
    assert set(names.ravel()) == set(other)


@pytest.mark.parametrize(("K", "parts"), [(1, 2), (4, 4)], ids=["one", "all"])
def test_two_cores_share_the_heads_of_a_single_row(K, parts, monkeypatch):
  """They lead the grid of each kernel, and change no gradient."""
  q, *kv, segments = (x[1:] for x in random_inputs(H=64))
  qkv = [q, *(np.concatenate([x, -x], 2)[:, :, :K] for x in kv)]

  cotangent = np.random.default_rng(1).normal(size=q.shape)

  def run(cores):
    monkeypatch.setattr(sharding, "cores", lambda: cores)
    splash = gradient(KERNELS["splash"], segments, cotangent)
    return str(splash.trace(*qkv, SINKS).jaxpr), splash(*qkv, SINKS)[0]

  (one, expected), (two, actual) = run(1), run(2)
  grids = lambda traced: re.findall(r"grid=\(.*?\)", traced)
  assert grids(one) == [f"grid=({N}, 1, 1)", f"grid=(1, {N}, 1)"]
  P, U = parts, N // parts
  assert grids(two) == [f"grid=({P}, {U}, 1, 1)", f"grid=({P}, 1, {U}, 1)"]
  for a, b in zip(actual, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_end_where_the_window_or_the_segment_does(name):
  """Elsewhere they are exactly 0."""
  *qkv, segments = random_inputs(H=64)
  tokens = {0: 200, 1: T // 2 + 12}  # row -> the only token with a loss
  first = {0: 200 - 49, 1: T // 2}  # by the window, and by the segment
  attend = functools.partial(KERNELS[name], window=50, sinks_N=SINKS)

  def loss(q, k, v):
    out = attend(q, k, v, segments)
    return sum((out[b, t] ** 2).sum() for b, t in tokens.items())

  dq, dk, dv = jax.jit(jax.grad(loss, (0, 1, 2)))(*qkv)
  for b, t in tokens.items():
    nonzero = lambda x: np.flatnonzero(np.any(x[b], (1, 2)))  # noqa: B023
    assert nonzero(dq) == [t]
    for x in (dk, dv):
      np.testing.assert_array_equal(nonzero(x), np.arange(first[b], t + 1))


@pytest.mark.parametrize(
  ("tokens", "window", "blocks"),
  [(640, None, (128, 128)), (4096, None, (1024, 1024)),
   (16384, None, (1024, 2048)), (16384, 128, (512, 2048)),
   (16384, 1024, (512, 2048)), (16384, 2048, (1024, 2048)),
   (16896, None, (512, 512)), (17408, None, (1024, 1024)),
   (65536, None, (1024, 2048))],
)  # fmt: skip
def test_long_blocks_of_keys_are_at_most_an_eighth_of_a_row(
  tokens, window, blocks
):
  assert attention.splash_blocks(tokens, window) == blocks


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


def test_parts_of_narrow_heads_take_the_bytes_of_wide_ones(monkeypatch):
  """In HBM a head of width 64 fills all 128 lanes."""
  *qkv, segments = random_inputs(H=64)
  loss = lambda qkv: attention.splash(*qkv, segments).sum()
  parts = 4 * 128 * T * N  # of a row, in one block of keys
  for limit, apart in ((parts, False), (parts - 1, True)):
    monkeypatch.setattr(attention, "_PARTS_BYTES", limit)
    traced = str(jax.make_jaxpr(jax.grad(lambda x: loss(x)))(qkv))
    assert ("splash_mha_dq" in traced) == apart


def jaxpr(platform, monkeypatch, T=T, H=H, dtype=jnp.bfloat16, **options):
  """The program traced for a platform, as text."""
  monkeypatch.setattr(sharding, "platform", lambda: platform)
  q, k, v, segments = random_inputs(T, H)
  q, k, v = (x.astype(dtype) for x in (q, k, v))
  # A new function each time: JAX caches its traces.
  attend = lambda *args: attention.attend(*args, **options)
  return str(jax.make_jaxpr(attend)(q, k, v, segments))


def test_no_platform_holds_all_scores(monkeypatch):
  traced = jaxpr("tpu", monkeypatch)
  assert "splash" in traced
  assert f"{N},{T},{T}]" not in traced
  traced = jaxpr("cpu", monkeypatch)
  assert f"f32[{B},{K},{64 * N // K},{T}]" in traced
  assert f"f32[{B},{K},{T * N // K},{T}]" not in traced
  # A block reads only the keys that its window reaches.
  traced = jaxpr("cpu", monkeypatch, window=32, sinks_N=SINKS)
  assert f"f32[{B},{K},{64 * N // K},{64 + 31}]" in traced
  assert f",{64 * N // K},{T}]" not in traced
  assert "splash" in jaxpr("tpu", monkeypatch, H=64)
  assert "splash" not in jaxpr("tpu", monkeypatch, H=32)  # too narrow


@pytest.mark.parametrize(
  ("queries", "keys", "first"), [(2, 63, 63), (2, 15, 2), (64, 1024, 64)]
)
def test_few_queries_come_second_in_the_products_of_a_cpu(queries, keys, first):
  rng = np.random.default_rng(0)
  q, k = rng.normal(size=(3, queries, 8)), rng.normal(size=(3, keys, 8))
  operands = np.float32(q), np.float32(k)
  products = jax.jit(attention.products)
  expected = q @ k.swapaxes(1, 2)
  np.testing.assert_allclose(products(*operands), expected, rtol=0, atol=1e-5)
  compiled = products.lower(*operands).compile().as_text()
  assert re.search(rf"f32\[3,{first},\d+\]\S* dot\(", compiled)


@pytest.mark.parametrize(
  ("kernel", "operation"),
  [(attention.in_blocks, " exp "), (attention.splash, "name=splash_mha_fwd")],
)
def test_a_rematerialised_block_has_one_forward_pass(kernel, operation):
  """The backward pass begins at the kept log-sum-exp."""
  *qkv, segments = random_inputs(H=64)
  keep = jax.checkpoint_policies.save_only_these_names("attention")

  def count(function):
    loss = lambda qkv: (function(*qkv, segments) ** 2).sum()
    return str(jax.make_jaxpr(jax.grad(loss))(qkv)).count(operation)

  attend = lambda *x: kernel(*x)
  once = count(attend)
  assert count(jax.checkpoint(attend, policy=keep)) == once > 0
  assert count(jax.checkpoint(attend)) > once


def test_the_platform_is_that_of_the_mesh():
  tpu = jax.sharding.AbstractDevice("TPU v5", 1, "tpu")
  mesh = jax.sharding.AbstractMesh((2,), ("data",), abstract_device=tpu)
  with jax.sharding.use_abstract_mesh(mesh):
    assert sharding.platform() == "tpu"
  assert sharding.platform() == "cpu"


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
  ("tokens", "heads", "options", "gib"),
  [
    (16384, (32, 4, 128), {}, 1.4),  # 4.33 with blocks of 512 keys
    (32768, (32, 4, 128), {}, 4.8),  # 16.7 likewise
    # 64 likewise: a kernel for the queries' gradient
    (65536, (32, 4, 128), {}, 3.1),
    # a quarter of the heads, as with `mesh.context=4`
    (65536, (8, 1, 128), {}, 4.5),
    # Qwen3-235B-A22B; 5.2 for both rows at a time
    (16384, (64, 4, 128), {"rows": 2}, 4.5),
    # an eighth, on a device of `mesh.context=8`
    (131_072, (4, 1, 128), {}, 0.9),
    (16384, (32, 8, 64), {}, 1.5),  # Llama-3.2-1B; 18.6 in blocks of queries
    (16384, (64, 8, 64), {"sinks": True}, 2.8),  # gpt-oss; 33.6 in blocks
    (16384, (64, 8, 64), {"sinks": True, "window": 128}, 1.4),  # 3.1 in blocks
    (4096, (16, 2, 256), {}, 0.4),  # Qwen3.6-35B-A3B
    (4096, (16, 16, 192), {"value": 128}, 0.5),  # Moonlight
    (4096, (20, 20, 256), {}, 0.5),  # GLM-4.7-Flash
  ],
)
def test_one_layer_on_a_v5p(tokens, heads, options, gib):
  """Temporaries and cores of a layer with `heads`: queries, keys, width."""
  mesh = sharding.make_mesh(absent_devices("v5p:2x2x1")[:1])
  shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(
    dims, dtype, sharding=sharding.replicated(mesh)
  )
  *numbers, width = heads
  rows = options.get("rows", 1)
  query, key = (shape(rows, tokens, n, width) for n in numbers)
  output, value = (
    shape(rows, tokens, n, options.get("value", width)) for n in numbers
  )
  sinks = shape(heads[0], dtype=jnp.float32) if "sinks" in options else None

  def backward(q, k, v, sinks_N, segments, dout):
    attend = lambda q, k, v, sinks_N: attention.splash(
      q, k, v, segments, window=options.get("window"), sinks_N=sinks_N
    )
    return jax.vjp(attend, q, k, v, sinks_N)[1](dout)

  segments = shape(rows, tokens, dtype=jnp.int32)
  operands = query, key, value, sinks, segments, output
  with jax.set_mesh(mesh):
    done = plan_compile.compile_one(jax.jit(backward).lower(*operands))
  assert done.memory.temporaries < gib * 2**30
  kernels = [k for n, k in done.kernels.items() if n.startswith("splash")]
  assert len(kernels) >= 2
  assert all(kernel.both_cores for kernel in kernels)
