"""The paged cache against plain lists of each row's keys, in float64."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import absent_devices, needs_libtpu
from families import DENSE
from jax.sharding import NamedSharding, PartitionSpec
from paged_oracle import (
  HUGE,
  attention,
  count_iterations,
  random_bf16,
  side_by_side,
)

from gspo_jax.model import paged_attention
from gspo_jax.model import paged_cache as paged
from gspo_jax.runtime import sharding

K, N, H, S, W, L = 2, 6, 6, 4, 5, 2
CFG = dataclasses.replace(DENSE, num_heads=N)
# The options of each layer's `attend`; the window starts within a page.
SINKS = np.float32([-1.0, 0.5, 2.0, 3.0, 0.0, 5.0])
OPTIONS = {}, {"window": 6, "sinks_N": SINKS}
NONE = ((),) * L  # states


def by_layer(keys_and_values):
  """`Pages.kv` of arrays [2, L, ...]."""
  return tuple(zip(*keys_and_values, strict=True))


class Oracle:
  """The tokens of each row as a list, and their places in the pages."""

  def __init__(self, rng, lengths, shared=()):
    B = len(lengths)
    self.rng, self.n = rng, B * W + 3
    self.free = list(rng.permutation(self.n))
    self.expected = np.full((2, L, K, self.n, S, H), HUGE, np.float32)
    self.rows = [[] for _ in range(B)]  # tokens, [2, L, K, H]
    self.used = [[] for _ in range(B)]  # pages
    # Unused entries of the table are random.
    self.table = rng.integers(0, self.n, (B, W)).astype(np.int32)
    for row, length in enumerate(lengths):
      if row in shared[1:]:
        self.rows[row] = list(self.rows[shared[0]])
        for page in self.used[shared[0]]:
          self.add_page(row, page)
      while len(self.rows[row]) < length:
        self.append(row, random_bf16(rng, 2, L, K, H))

  def add_page(self, row, page):
    self.table[row, len(self.used[row])] = page
    self.used[row].append(page)

  def append(self, row, token):
    if len(self.rows[row]) == S * len(self.used[row]):
      self.add_page(row, self.free.pop())
    index, slot = divmod(len(self.rows[row]), S)
    self.expected[:, :, :, self.used[row][index], slot] = token
    self.rows[row].append(token)

  def lengths(self):
    return np.array([len(tokens) for tokens in self.rows], np.int32)

  def pages(self):
    active = np.zeros(len(self.rows), bool)
    kv = by_layer(self.expected.copy())
    return paged.Pages(kv, NONE, self.table, self.lengths(), active)

  def decode(self, pages, steps, activity=0.7, scale=1.0, most=1):
    """Feeds up to `most` tokens to random rows and compares after each step."""
    B = len(self.rows)
    for _ in range(steps):
      room = W * S - self.lengths()
      fed = np.minimum(self.rng.integers(1, most + 1, B), room)
      fed *= self.rng.random(B) < activity
      before = self.lengths()
      q = scale * random_bf16(self.rng, L, B, most, N, H)
      new = random_bf16(self.rng, B, most, 2, L, K, H)
      expected = self.attend(q, new, fed)
      pages = dataclasses.replace(pages, table=self.table.copy())
      mask = np.arange(most) < fed[:, None]
      out, pages = jax.device_get(step(pages, q, new, mask))
      assert np.isfinite(out).all()
      for (row, t), rows_of_layers in expected.items():
        np.testing.assert_allclose(
          out[:, row, t], rows_of_layers, atol=5e-6 * scale
        )
      # Bit for bit: the new tokens are in place, and nothing else changed.
      np.testing.assert_array_equal(pages.kv, self.expected.swapaxes(0, 1))
      np.testing.assert_array_equal(pages.lengths, self.lengths())
      np.testing.assert_array_equal(pages.active, fed > 0)
      kept = self.rng.integers(np.minimum(fed, 1), fed + 1)
      for row, length in enumerate(before + kept):
        del self.rows[row][length:]
      pages = dataclasses.replace(pages, lengths=self.lengths())

  def attend(self, q, new, fed):
    """Appends `fed` [B] tokens; [L, N, H] of each, by row and place."""
    expected = {}
    for row, count in enumerate(fed):
      for t in range(count):
        self.append(row, new[row, t])
        k, v = np.stack(self.rows[row], 2)
        expected[row, t] = [
          attention(q[i, row, t], k[i], v[i], **OPTIONS[i]) for i in range(L)
        ]
    return expected


@jax.jit
def step(pages, q, new, mask):
  """T tokens through all layers; q [L, B, T, N, H], new [B, T, 2, L, K, H]."""
  pages = pages.mark_valid(mask)
  outs, layers = [], []
  for i in range(L):
    k_BTKH, v_BTKH = new[:, :, 0, i], new[:, :, 1, i]
    out_BTNH, pair = pages.attend(i, q[i], k_BTKH, v_BTKH, **OPTIONS[i])
    outs.append(out_BTNH)
    layers.append(pair)
  return jnp.stack(outs), pages.append(tuple(layers), mask)


@pytest.mark.parametrize(
  ("lengths", "shared", "options"),
  [
    ((0, 3, S, 7, 2 * S), (), {}),
    ((0, 3, S, 7, 2 * S), (), {"activity": 0.0}),
    ((0, 3, S, 7, 2 * S), (), {"scale": 100.0}),  # scores far apart
    ((0, 2 * S, 2 * S, 2 * S, 2 * S + 1), (1, 2, 4), {}),
    ((3,), (), {}),
    ((0, 3, S, 7, 2 * S + 2), (), {"most": 3}),
    ((0, 2 * S, 2 * S, 2 * S, 2 * S + 1), (1, 2, 4), {"most": 6}),
  ],
)
def test_decoding_equals_attention_over_plain_lists(lengths, shared, options):
  oracle = Oracle(np.random.default_rng(0), lengths, shared)
  oracle.decode(oracle.pages(), 12, **options)


def test_inactive_rows_cost_nothing(monkeypatch):
  iterations = count_iterations(monkeypatch)
  monkeypatch.setattr(paged_attention, "_block_pairs", lambda *_: 2)
  rng = np.random.default_rng(4)
  pages = jax.tree.map(jnp.asarray, Oracle(rng, (2 * S,) * 4).pages())
  q, k, v = (random_bf16(rng, 4, 1, heads, H) for heads in (N, K, K))
  for rows, blocks in ((4, 6), (2, 3), (0, 0)):  # 3 pages a row, 2 a block
    pages.mark_valid(np.arange(4)[:, None] < rows).attend(0, q, k, v)
    assert iterations.pop() == blocks


def test_store_and_copy_write_the_given_pages():
  rng = np.random.default_rng(2)
  oracle = Oracle(rng, (0,) * 4)
  C, n = 2, oracle.n
  kv = random_bf16(rng, 2, L, 3, K, C * S, H)
  numbers = np.array([[5, 2], [n, 7], [0, n + 9]], np.int32)
  stored = jax.jit(paged.store)(oracle.pages(), by_layer(kv), numbers)
  for p, c in np.argwhere(numbers < n):
    part = kv[:, :, p, :, c * S : (c + 1) * S]
    oracle.expected[:, :, :, numbers[p, c]] = part
  equal = lambda pages: np.testing.assert_array_equal(
    pages.kv, oracle.expected.swapaxes(0, 1)
  )
  equal(stored)
  source, target = np.array([2, 5, 5, 7]), np.array([3, n, 1, n + 1])
  copied = jax.jit(paged.copy)(stored, source, target)
  oracle.expected[:, :, :, [3, 1]] = oracle.expected[:, :, :, [2, 5]]
  equal(copied)


D = 4  # shards of rows and pages; the heads have two
SHARDED_AXES = paged.Pages(((1, 1),) * L, NONE, 0, 0, 0)


def store_copy_and_step(pages, prompts, numbers, source, target, q, new, mask):
  pages = paged.store(pages, prompts, numbers)
  return step(paged.copy(pages, source, target), q, new, mask)


def one_shard(seed, n=6):
  """Two rows of one prompt in pages 0 and 1; page 1 is copied to 2."""
  rng = np.random.default_rng(seed)
  ints = lambda *x: np.array(x, np.int32)
  kv = by_layer(random_bf16(rng, 2, L, K, n, S, H))
  table = ints([0, 1, 4], [0, 2, 5])
  lengths = rng.integers(S, 3 * S, 2).astype(np.int32)
  pages = paged.Pages(kv, NONE, table, lengths, np.zeros(2, bool))
  prompts = by_layer(random_bf16(rng, 2, L, 1, K, 2 * S, H))
  numbers, source, target = ints([seed % 2 * n, 1]), ints(1, 0), ints(2, n)
  q, new = random_bf16(rng, L, 2, 1, N, H), random_bf16(rng, 2, 1, 2, L, K, H)
  mask = rng.random((2, 1)) < 0.7
  return pages, prompts, numbers, source, target, q, new, mask


def test_heads_side_by_side_are_written_side_by_side():
  pages, *rest = one_shard(1)
  expected_out, expected = jax.jit(store_copy_and_step)(pages, *rest)
  pair = lambda kv: jax.tree.map(lambda x: side_by_side(np.asarray(x), 2), kv)
  pages = dataclasses.replace(pages, kv=pair(pages.kv))
  out, actual = jax.jit(store_copy_and_step)(pages, *rest)
  np.testing.assert_allclose(out, expected_out, atol=1e-6)
  np.testing.assert_array_equal(actual.kv, pair(expected.kv))


def test_a_device_uses_only_its_own_pages():
  join = lambda axis, *parts: np.concatenate(parts, axis)
  shards = [one_shard(seed) for seed in range(D)]
  axes = (SHARDED_AXES, ((0, 0),) * L, 0, 0, 0, 1, 0, 0)
  inputs = jax.tree.map(join, axes, *shards)
  alone = [jax.jit(store_copy_and_step)(*shard) for shard in shards]
  expected_out, expected = jax.tree.map(join, (1, SHARDED_AXES), *alone)
  with jax.set_mesh(sharding.make_mesh(data=2, expert=2, tensor=2)):
    compiled = jax.jit(store_copy_and_step).lower(*inputs).compile()
    out, pages = compiled(*inputs)
  np.testing.assert_allclose(out, expected_out, atol=2e-6)
  jax.tree.map(np.testing.assert_array_equal, pages, expected)
  for x in jax.tree.leaves(pages.kv):
    assert x.sharding.shard_shape(x.shape) == (K // 2, 6, S, H)
  for name in ("all-gather", "all-reduce", "all-to-all", "collective"):
    assert name not in compiled.as_text()


def test_states_are_copied_within_a_shard():
  """Rows of the source count from the shard's first; others stay."""
  rng = np.random.default_rng(7)
  old, source = (rng.normal(size=(n, 4, 3)) for n in (8, 4))
  rows = np.array([1, 9, 0, 2, 0, 1, 2, 1], np.int32)  # of two shards
  expected = old.copy()
  expected[[0, 2, 4, 5, 7]] = source[[1, 0, 2, 3, 3]]
  with jax.set_mesh(sharding.make_mesh(data=2, tensor=4)):
    copied = jax.jit(paged.copy_states)(((old,),), ((source,),), rows)
  np.testing.assert_array_equal(copied[0][0], np.float32(expected))


def test_an_empty_cache_is_created_sharded():
  make = lambda: paged.empty(
    CFG, num_slots=8, num_pages=20, page_size=S, pages_per_slot=W
  )
  with jax.set_mesh(sharding.make_mesh(data=2, expert=2, tensor=2)):
    pages = jax.jit(make)()
  local = lambda x: x.sharding.shard_shape(x.shape)
  assert {local(x) for x in jax.tree.leaves(pages.kv)} == {(K // 2, 5, S, H)}
  rows = pages.table, pages.lengths, pages.active
  assert [local(x) for x in rows] == [(2, W), (2,), (2,)]
  assert not any(x.any() for x in jax.tree.leaves(pages))


@pytest.mark.parametrize(
  ("platform", "dtype", "shape"),
  [
    ("tpu", "bfloat16", (K // 2, 5, S, 128)),  # narrow heads side by side
    ("cpu", "float32", (K, 5, S, 64)),  # stored(): 16-bit slices are slow
  ],
)
def test_an_empty_cache_of_a_platform(monkeypatch, platform, dtype, shape):
  monkeypatch.setattr(sharding, "platform", lambda: platform)
  low = dataclasses.replace(CFG, dtype="bfloat16", head_dim=64)
  pages = paged.empty(
    low, num_slots=3, num_pages=5, page_size=S, pages_per_slot=W
  )
  arrays = jax.tree.leaves(pages.kv)
  assert {(x.dtype, x.shape) for x in arrays} == {(jnp.dtype(dtype), shape)}
  assert [len(layer) for layer in pages.kv] == [2] * L


def several_steps(pages, q, new):
  def body(_, state):
    total, pages = state
    out, pages = step(pages, q, new, jnp.ones((q.shape[1], 1), bool))
    return total + out, pages

  return jax.lax.fori_loop(0, 5, body, (q, pages))


def temporaries(name, dtype, H, n, B=8, C=2):
  """Temporary bytes of a function of donated pages / those of a layer's k."""
  cfg = dataclasses.replace(CFG, dtype=dtype, head_dim=H)
  mesh = jax.sharding.get_mesh()
  replicated = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
  shape = functools.partial(jax.ShapeDtypeStruct, sharding=replicated)
  make = lambda: paged.empty(
    cfg, num_slots=B, num_pages=n, page_size=16, pages_per_slot=32
  )
  pages = jax.tree.map(lambda x: shape(x.shape, x.dtype), jax.eval_shape(make))
  floats = lambda *x: shape(x, dtype)
  ints = lambda *x: shape(x, jnp.int32)
  prompts = ((floats(B, K, C * 16, H),) * 2,) * L
  function, *inputs = {
    "steps": (several_steps, floats(L, B, 1, N, H), floats(B, 1, 2, L, K, H)),
    "store": (paged.store, prompts, ints(B, C)),
    "copy": (paged.copy, ints(B), ints(B)),
  }[name]
  compiled = jax.jit(function, donate_argnums=0).lower(pages, *inputs).compile()
  keys, _ = pages.kv[0]
  key_bytes = keys.size * keys.dtype.itemsize
  return compiled.memory_analysis().temp_size_in_bytes / key_bytes


@pytest.mark.parametrize("name", ["steps", "store", "copy"])
def test_donated_pages_are_written_in_place(name):
  assert temporaries(name, "float32", 16, 4096) < 0.25


@needs_libtpu
@pytest.mark.parametrize(
  ("name", "dtype", "H"),
  [("steps", "bfloat16", 128), ("store", "bfloat16", 128),
   ("copy", "bfloat16", 128), ("steps", "bfloat16", 64),
   pytest.param("store", "bfloat16", 64, marks=pytest.mark.slow),
   pytest.param("steps", "float32", 128, marks=pytest.mark.slow),
   pytest.param("steps", "float32", 64, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_tpu_writes_in_place_too(name, dtype, H):
  """It does not copy all pages between the writes and the kernel either."""
  device = absent_devices("v5e:2x2")[0]
  exact = jax.default_matmul_precision("highest")
  with (
    jax.set_mesh(sharding.make_mesh([device])),
    exact if dtype == "float32" else contextlib.nullcontext(),
  ):
    assert temporaries(name, dtype, H, 2**14) < 0.25
