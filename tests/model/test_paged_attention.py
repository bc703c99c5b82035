"""Attention over pages against a plain sum, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from paged_oracle import HUGE, beside, count_trips, draw
from paged_oracle import attention as plain_attention

from gspo_jax.model import paged_attention as attention
from gspo_jax.runtime import sharding

K, S = 2, 4


def questions(lengths, heads=2, H=128, most=6, seed=0):
  """What `read` takes; slots that nobody may see are huge."""
  rng = np.random.default_rng(seed)
  B, n = len(lengths), len(lengths) * most + 1
  kept = np.full((2, K, n, S, H), HUGE, np.float32)
  table = np.full((B, most), n - 1, np.int32)
  free = list(rng.permutation(n - 1))
  for row, length in enumerate(lengths):
    for t in range(length):
      if t % S == 0:
        table[row, t // S] = free.pop()
      kept[:, :, table[row, t // S], t % S] = draw(rng, 2, K, H)
  q_BKRH = draw(rng, B, K, heads, H)
  return q_BKRH, *kept, table, np.array(lengths, np.int32)


def answers(q_BKRH, k_KnSH, v_KnSH, table, lengths):
  """Of rows that have tokens."""
  out = []
  for row in np.flatnonzero(lengths):
    k, v = (
      x[:, table[row]].reshape(K, -1, x.shape[-1])[:, : lengths[row]]
      for x in (k_KnSH, v_KnSH)
    )
    q_NH = q_BKRH[row].reshape(-1, q_BKRH.shape[-1])
    out_NH = plain_attention(q_NH, k.swapaxes(0, 1), v.swapaxes(0, 1))
    out.append(out_NH.reshape(q_BKRH.shape[1:]))
  return np.array(out)


def assert_plain(out, given):
  """That `out` is right, and finite in rows of no tokens."""
  out = np.asarray(out)
  assert np.isfinite(out).all()
  np.testing.assert_allclose(out[given[-1] > 0], answers(*given), atol=5e-6)


def by_kernel(q_BKRH, *rest):
  with pltpu.force_tpu_interpret_mode():
    return attention.by_kernel(q_BKRH, *rest, q_BKRH.shape[-1] ** -0.5)


def by_blocks(q_BKRH, *rest):
  return attention.by_blocks(q_BKRH, *rest, q_BKRH.shape[-1] ** -0.5)


FORMS = {"blocks": by_blocks, "kernel": by_kernel}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block", [4, 512])
def test_every_form_gives_the_plain_sum(form, block, monkeypatch):
  """In 1 of the kernel's blocks, or in 2 that a row does not fill."""
  monkeypatch.setattr(attention, "_TOKENS", block * S)
  given = questions((S, 0, 5 * S - 1, 0, 6 * S))
  out = np.asarray(jax.jit(FORMS[form])(*given))
  assert_plain(out, given)


@pytest.mark.parametrize("pairs", [3, 5])
@pytest.mark.parametrize("seed", range(8))
def test_the_end_of_the_last_block_adds_nothing(seed, pairs, monkeypatch):
  """7 rows in blocks of 3 or 5 pairs, so that all remainders of 3 come up."""
  monkeypatch.setattr(attention, "_pairs", lambda *_: pairs)
  lengths = np.random.default_rng(seed).integers(0, 6 * S + 1, 7)
  lengths[-1] *= seed % 2
  given = questions(lengths, H=8, heads=1)
  assert_plain(jax.jit(by_blocks)(*given), given)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_heads_side_by_side_do_not_meet(platform, monkeypatch):
  monkeypatch.setattr(sharding, "platform", lambda: platform)
  q, k, v, *rows = questions((5, 3 * S, 0), heads=3, H=64)
  dtype = jnp.bfloat16 if platform == "tpu" else jnp.float32
  low = [jnp.asarray(x, dtype) for x in (q.reshape(3, -1, 64), k, v)]
  beside_one_another = beside(low[1], 2), beside(low[2], 2)
  with pltpu.force_tpu_interpret_mode():
    out = jax.jit(attention.read)(low[0], *beside_one_another, *rows)
  assert out.dtype == dtype
  out = np.asarray(out, np.float32).reshape(q.shape)
  assert np.isfinite(out).all()
  exact = answers(q, k, v, *rows)
  most = 2e-2 if platform == "tpu" else 5e-6
  np.testing.assert_allclose(out[rows[-1] > 0], exact, atol=most)


def test_heads_lie_side_by_side_where_they_fill_a_tpus_lanes(monkeypatch):
  assert attention.side_by_side(8, 64) == 1
  monkeypatch.setattr(sharding, "platform", lambda: "tpu")
  wide = {128: 1, 256: 1, 192: 1, 64: 2, 32: 4, 48: 1}
  assert {H: attention.side_by_side(8, H) for H in wide} == wide
  assert attention.side_by_side(3, 64) == 1
  with jax.set_mesh(sharding.make_mesh(data=4, tensor=2)):
    assert attention.side_by_side(2, 64) == 1  # a device has one head
    assert attention.side_by_side(4, 64) == 2


@pytest.mark.parametrize("form", FORMS)
def test_of_bfloat16_little_is_lost_but_the_outputs_own_rounding(form):
  """That of the weights shows, that of scores or of their sum would, too."""
  q, k, v, *rows = questions((60, 70), most=20)
  low = (jnp.bfloat16(x) for x in (q, k, v))
  out = jax.jit(FORMS[form])(*low, *rows)
  assert out.dtype == jnp.bfloat16
  exact = answers(q, k, v, *rows)
  error = lambda x: np.abs(np.float32(x) - exact).mean()
  assert error(out) < 1.4 * error(jnp.bfloat16(exact))


def traced(platform, monkeypatch, H=128, dtype=jnp.bfloat16):
  monkeypatch.setattr(sharding, "platform", lambda: platform)
  q, k, v, *rows = questions((5, 1), H=H)
  q, k, v = (x.astype(dtype) for x in (q.reshape(2, -1, H), k, v))
  # A new function each time: JAX remembers what it traced.
  read = lambda *given: attention.read(*given)
  return str(jax.make_jaxpr(read)(q, k, v, *rows))


def test_the_kernel_takes_wide_heads_of_bfloat16_on_a_tpu(monkeypatch):
  assert "pallas_call" in traced("tpu", monkeypatch)
  assert "pallas_call" not in traced("tpu", monkeypatch, H=64)
  # Its keys and values are bfloat16 whatever it is given.
  assert "pallas_call" not in traced("tpu", monkeypatch, dtype=jnp.float32)
  assert "pallas_call" not in traced("gpu", monkeypatch)


@pytest.mark.parametrize(
  ("most", "page", "wanted", "columns"),
  [
    (60, 16, 32, 64),
    (64, 16, 32, 64),
    (7, 128, 4, 8),
    (3, 128, 3, 3),
    (3, 1024, 1, 3),
  ],
)
def test_the_kernels_blocks_are_full(most, page, wanted, columns, monkeypatch):
  from jax.experimental.pallas.ops.tpu import paged_attention as pa

  def spy(q, k, v, lengths, table, *, pages_per_compute_block):
    assert pages_per_compute_block == wanted
    assert table.shape == (3, columns)
    assert lengths.tolist() == [1, 1, 2]  # no row is empty
    return q

  monkeypatch.setattr(pa, "paged_attention", spy)
  kept = jnp.zeros((1, 2, page, 128))
  table, lengths = jnp.zeros((3, most), jnp.int32), jnp.arange(3)
  by_kernel(jnp.ones((3, 1, 1, 128)), kept, kept, table, lengths)


def test_work_follows_the_tokens(monkeypatch):
  trips = count_trips(monkeypatch)
  monkeypatch.setattr(attention, "_pairs", lambda *_: 4)

  def count(lengths, most):
    by_blocks(*questions(lengths, H=4, heads=1, most=most))
    return trips.pop()

  short = (1, S, 3, 2, 1, S, S, 1)
  assert count(short, 1) == count(short, 50) > 0
  assert count([2 * S] * 8, 50) == 2 * count(short, 50)
  # Nor do the others pay for the longest: 40 pages and 7 are not 8 x 40.
  assert count((40 * S, *short[1:]), 50) <= 6 * count(short, 50)
  assert count((0,) * 8, 50) == 0


@pytest.mark.parametrize(
  ("platform", "heads", "pairs"),
  [("cpu", 4, 64), ("cpu", 8, 32), ("gpu", 4, 8192), ("tpu", 8, 4096)],
)
def test_a_block_has_so_many_bytes(platform, heads, pairs, monkeypatch):
  """A page of 16 tokens, 16 wide, in float32 is a KiB a head."""
  monkeypatch.setattr(sharding, "platform", lambda: platform)
  keys = jax.ShapeDtypeStruct((heads, 9, 16, 16), jnp.float32)
  assert attention._pairs(64, 512, keys) == pairs
  assert attention._pairs(64, 1, keys) == min(pairs, 64)
  long = jax.ShapeDtypeStruct((heads, 9, 2**16, 16), jnp.float32)
  assert attention._pairs(64, 512, long) == max(1, pairs // 4096)


def test_all_pairs_are_taken(monkeypatch):
  trips = count_trips(monkeypatch)
  monkeypatch.setattr(attention, "_pairs", lambda *_: 5)
  by_blocks(*questions([2 * S] * 8, H=4, heads=1, most=50))
  assert trips.pop() == -(-8 * 2 // 5)
