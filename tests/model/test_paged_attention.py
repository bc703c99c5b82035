"""Attention over pages against plain attention in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from paged_oracle import HUGE, count_iterations, random_bf16, side_by_side
from paged_oracle import attention as plain_attention

from gspo_jax.model import paged_attention as attention
from gspo_jax.model import paged_kernel
from gspo_jax.runtime import sharding

K, S = 2, 4


def random_inputs(lengths, heads=2, H=128, max_pages=6, seed=0):
  """The arguments of `read`; slots beyond the lengths are huge."""
  rng = np.random.default_rng(seed)
  B, n = len(lengths), len(lengths) * max_pages + 1
  pages = np.full((2, K, n, S, H), HUGE, np.float32)
  table = np.full((B, max_pages), n - 1, np.int32)
  free = list(rng.permutation(n - 1))
  for row, length in enumerate(lengths):
    for t in range(length):
      if t % S == 0:
        table[row, t // S] = free.pop()
      pages[:, :, table[row, t // S], t % S] = random_bf16(rng, 2, K, H)
  q_BKRH = random_bf16(rng, B, K, heads, H)
  return q_BKRH, *pages, table, np.array(lengths, np.int32)


def expected_output(q_BKRH, k_KnSH, v_KnSH, table, lengths, **options):
  """The output of the rows that have tokens."""
  out = []
  for row in np.flatnonzero(lengths):
    k, v = (
      x[:, table[row]].reshape(K, -1, x.shape[-1])[:, : lengths[row]]
      for x in (k_KnSH, v_KnSH)
    )
    q_NH = q_BKRH[row].reshape(-1, q_BKRH.shape[-1])
    kv = k.swapaxes(0, 1), v.swapaxes(0, 1)
    out_NH = plain_attention(q_NH, *kv, **options)
    out.append(out_NH.reshape(q_BKRH.shape[1:]))
  return np.array(out)


def assert_equals_plain(out, inputs, **options):
  """Checks `out`, which must be finite in rows without tokens, too."""
  out = np.asarray(out)
  assert np.isfinite(out).all()
  expected = expected_output(*inputs, **options)
  np.testing.assert_allclose(out[inputs[-1] > 0], expected, atol=5e-6)


def by_kernel(q_BKRH, *rest):
  scale = q_BKRH.shape[-1] ** -0.5
  with pltpu.force_tpu_interpret_mode():
    return paged_kernel.attend(q_BKRH[:, None], *rest, scale)[:, 0]


def by_blocks(q_BKRH, *rest, **options):
  scale = q_BKRH.shape[-1] ** -0.5
  return attention.by_blocks(q_BKRH, *rest, scale, **options)


FORMS = {"blocks": by_blocks, "kernel": by_kernel}


@pytest.mark.parametrize("window", [None, 1, S, S + 1, 3 * S - 1, 6 * S])
@pytest.mark.parametrize("pairs", [1, 5])
def test_windows_and_sinks_equal_plain_attention(pairs, window, monkeypatch):
  """A page before the window is not even read: it is not a number."""
  monkeypatch.setattr(attention, "_block_pairs", lambda *_: pairs)
  sinks_N = 2 * np.random.default_rng(1).normal(size=K * 3).astype(np.float32)
  options = {"window": window, "sinks_N": sinks_N}
  lengths = 0, 1, 6 * S, 5 * S - 1, 0, 3 * S + 1
  inputs = random_inputs(lengths, H=8, heads=3)
  expected = expected_output(*inputs, **options)
  q, *pages, table, lengths = inputs
  for row, length in enumerate(lengths):
    unread = max(0, length - (window or length)) // S
    for x in pages:
      x[:, table[row, :unread]] = np.nan
  run = jax.jit(lambda *inputs: by_blocks(*inputs, **options))
  out = np.asarray(run(q, *pages, table, lengths))
  assert np.isfinite(out).all()
  np.testing.assert_allclose(out[lengths > 0], expected, atol=5e-6)


SINKS = np.float32([-1.0, 0.5, 2.0, 3.0, 0.0, 5.0])


@pytest.mark.parametrize("options", [{}, {"window": 6, "sinks_N": SINKS}])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_heads_side_by_side_do_not_mix(platform, options, monkeypatch):
  """The second of two queries attends to one token more."""
  monkeypatch.setattr(sharding, "platform", lambda: platform)
  q, k, v, table, lengths = random_inputs((5, 3 * S, 0), heads=3, H=64)
  first = lengths - (lengths > 0)
  q_BTKRH = np.stack([q, q[::-1]], 1)
  dtype = jnp.bfloat16 if platform == "tpu" else jnp.float32
  low = [jnp.asarray(x, dtype) for x in (q_BTKRH.reshape(3, 2, -1, 64), k, v)]
  pages = side_by_side(low[1], 2), side_by_side(low[2], 2)
  read = jax.jit(lambda *inputs: attention.read(*inputs, **options))
  with pltpu.force_tpu_interpret_mode():
    out = read(low[0], *pages, table, first)
  assert out.dtype == dtype
  out = np.asarray(out, np.float32).reshape(q_BTKRH.shape)
  assert np.isfinite(out).all()
  atol = 2e-2 if platform == "tpu" else 5e-6
  for t, tokens in enumerate((first, lengths)):
    exact = expected_output(q_BTKRH[:, t], k, v, table, tokens, **options)
    np.testing.assert_allclose(out[lengths > 0, t], exact, atol=atol)


def test_heads_lie_side_by_side_if_they_fill_the_lanes_of_a_tpu(monkeypatch):
  assert attention.side_by_side(8, 64) == 1
  monkeypatch.setattr(sharding, "platform", lambda: "tpu")
  expected = {128: 1, 256: 1, 192: 1, 64: 2, 32: 4, 48: 1}
  assert {H: attention.side_by_side(8, H) for H in expected} == expected
  assert attention.side_by_side(3, 64) == 1
  with jax.set_mesh(sharding.make_mesh(data=4, tensor=2)):
    assert attention.side_by_side(2, 64) == 1  # a device has one head
    assert attention.side_by_side(4, 64) == 2


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_loses_little_but_the_rounding_of_the_output(form):
  """Rounding of scores or of their sum would add more."""
  q, k, v, *rows = random_inputs((60, 70), max_pages=20)
  low = (jnp.bfloat16(x) for x in (q, k, v))
  out = jax.jit(FORMS[form])(*low, *rows)
  assert out.dtype == jnp.bfloat16
  exact = expected_output(q, k, v, *rows)
  error = lambda x: np.abs(np.float32(x) - exact).mean()
  assert error(out) < 1.4 * error(jnp.bfloat16(exact))


def traced(platform, monkeypatch, H=128, dtype=jnp.bfloat16, **options):
  monkeypatch.setattr(sharding, "platform", lambda: platform)
  q, k, v, *rows = random_inputs((5, 1), H=H)
  q, k, v = (x.astype(dtype) for x in (q.reshape(2, 1, -1, H), k, v))
  # A new function each time: JAX caches its traces.
  read = lambda *inputs: attention.read(*inputs, **options)
  return str(jax.make_jaxpr(read)(q, k, v, *rows))


def test_the_kernel_is_used_for_wide_bfloat16_heads_on_a_tpu(monkeypatch):
  assert "pallas_call" in traced("tpu", monkeypatch)
  assert "pallas_call" not in traced("tpu", monkeypatch, H=64)
  # The kernel would round them to bfloat16.
  assert "pallas_call" not in traced("tpu", monkeypatch, dtype=jnp.float32)
  assert "pallas_call" in traced("tpu", monkeypatch, window=5)
  assert "pallas_call" in traced("tpu", monkeypatch, sinks_N=SINKS[:4])


def test_work_is_proportional_to_the_tokens(monkeypatch):
  iterations = count_iterations(monkeypatch)
  monkeypatch.setattr(attention, "_block_pairs", lambda *_: 4)

  def count(lengths, max_pages, window=None):
    lengths = [*lengths, *[0] * (9 - len(lengths))]  # one shape to compile
    inputs = random_inputs(lengths, H=4, heads=1, max_pages=max_pages)
    by_blocks(*inputs, window=window)
    return iterations.pop()

  short = (1, S, 3, 2, 1, S, S, 1)
  assert count(short, 1) == count(short, 50) > 0
  assert count([2 * S] * 8, 50) == 2 * count(short, 50)
  # The longest row does not lengthen the others: 47 pages, not 8 x 40.
  assert count((40 * S, *short[1:]), 50) <= 6 * count(short, 50)
  assert count((0,) * 8, 50) == 0
  assert count([2 * S] * 9, 50) == -(-9 * 2 // 4)  # the last block is not full
  # Whole pages, or parts of one page more.
  assert count([40 * S] * 8, 50, 2 * S) == 8 * 2 // 4
  assert count([40 * S + 1] * 8, 50, 2 * S) == 8 * 3 // 4


@pytest.mark.parametrize(
  ("platform", "heads", "pairs"),
  [("cpu", 4, 64), ("cpu", 8, 32), ("gpu", 4, 8192), ("tpu", 8, 4096)],
)
def test_the_bytes_of_a_block(platform, heads, pairs, monkeypatch):
  """A page of 16 tokens, width 16, float32 has 1 KiB per head."""
  monkeypatch.setattr(sharding, "platform", lambda: platform)
  keys = jax.ShapeDtypeStruct((heads, 9, 16, 16), jnp.float32)
  assert attention._block_pairs(64, 512, keys) == pairs
  assert attention._block_pairs(64, 1, keys) == min(pairs, 64)
  long = jax.ShapeDtypeStruct((heads, 9, 2**16, 16), jnp.float32)
  assert attention._block_pairs(64, 512, long) == max(1, pairs // 4096)
