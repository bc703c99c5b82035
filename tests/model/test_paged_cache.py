"""The paged cache against a plain list of each row's keys, in float64."""

import contextlib
import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from paged_oracle import HUGE, attention, beside, count_trips, draw

from gspo_jax import model
from gspo_jax.model import paged_attention
from gspo_jax.model import paged_cache as paged
from gspo_jax.plan import chips
from gspo_jax.plan import compile as plan_compile
from gspo_jax.runtime import sharding

K, N, H, S, W, L = 2, 6, 6, 4, 5, 2
CFG = model.variant(
  "tiny",
  num_layers=L,
  num_heads=N,
  num_kv_heads=K,
  head_dim=H,
  dtype="float32",
)


class Book:
  """The tokens of each row as a list, and where in the pages they must lie.

  Of the rows in `shared`, all but the first begin with the first one's pages.
  """

  def __init__(self, rng, lengths, shared=()):
    B = len(lengths)
    self.rng, self.n = rng, B * W + 3
    self.free = list(rng.permutation(self.n))
    self.kept = np.full((2, L, K, self.n, S, H), HUGE, np.float32)
    self.rows = [[] for _ in range(B)]  # tokens, [2, L, K, H]
    self.used = [[] for _ in range(B)]  # pages
    # Where a row has no page, the table says anything.
    self.table = rng.integers(0, self.n, (B, W)).astype(np.int32)
    for row, length in enumerate(lengths):
      if row in shared[1:]:
        self.rows[row] = list(self.rows[shared[0]])
        for page in self.used[shared[0]]:
          self.give(row, page)
      while len(self.rows[row]) < length:
        self.append(row, draw(rng, 2, L, K, H))

  def give(self, row, page):
    self.table[row, len(self.used[row])] = page
    self.used[row].append(page)

  def make_room(self, row):
    if len(self.rows[row]) == S * len(self.used[row]):
      self.give(row, self.free.pop())

  def append(self, row, token):
    self.make_room(row)
    nth, slot = divmod(len(self.rows[row]), S)
    self.kept[:, :, :, self.used[row][nth], slot] = token
    self.rows[row].append(token)

  def lengths(self):
    return np.array([len(tokens) for tokens in self.rows], np.int32)

  def pages(self):
    k, v = self.kept.copy()
    off = np.zeros(len(self.rows), bool)
    return paged.Pages(tuple(k), tuple(v), self.table, self.lengths(), off)

  def decode(self, pages, steps, activity=0.7, scale=1.0):
    """Feeds random rows and compares everything after each step."""
    B = len(self.rows)
    for _ in range(steps):
      mask = self.rng.random(B) < activity
      for row in np.flatnonzero(mask):
        self.make_room(row)
      pages = dataclasses.replace(pages, table=self.table.copy())
      q = scale * draw(self.rng, L, B, N, H)
      new = draw(self.rng, B, 2, L, K, H)
      out, pages = jax.device_get(step(pages, q, new, mask))
      assert np.isfinite(out).all()
      for row in np.flatnonzero(mask):
        self.append(row, new[row])
        k, v = np.stack(self.rows[row], 2)
        for i in range(L):
          wanted = attention(q[i, row], k[i], v[i])
          np.testing.assert_allclose(out[i, row], wanted, atol=5e-6 * scale)
      # To the bit: new tokens are where they belong, and nothing else moved.
      np.testing.assert_array_equal([pages.k, pages.v], self.kept)
      np.testing.assert_array_equal(pages.lengths, self.lengths())


@jax.jit
def step(pages, q, new, mask):
  """All layers of one token; `q` [L, B, N, H], `new` [B, 2, L, K, H]."""
  pages = pages.mark(mask[:, None])
  outs, kept = [], []
  for i in range(L):
    q_BTNH, k_BTKH, v_BTKH = (
      x[:, None] for x in (q[i], *new[:, :, i].swapaxes(0, 1))
    )
    out_BTNH, pair = pages.attend(i, q_BTNH, k_BTKH, v_BTKH)
    outs.append(out_BTNH[:, 0])
    kept.append(pair)
  return jnp.stack(outs), pages.extend(*zip(*kept, strict=True), mask[:, None])


@pytest.mark.parametrize(
  ("lengths", "shared", "more"),
  [
    ((0, 3, S, 7, 2 * S), (), {}),
    ((0, 3, S, 7, 2 * S), (), {"activity": 0.0}),
    ((0, 3, S, 7, 2 * S), (), {"scale": 100.0}),  # sums far apart are rescaled
    ((0, 2 * S, 2 * S, 2 * S, 2 * S + 1), (1, 2, 4), {}),
    ((3,), (), {}),
  ],
)
def test_decoding_equals_attention_over_plain_lists(lengths, shared, more):
  book = Book(np.random.default_rng(0), lengths, shared)
  book.decode(book.pages(), 12, **more)


def test_inactive_rows_cost_nothing(monkeypatch):
  trips = count_trips(monkeypatch)
  monkeypatch.setattr(paged_attention, "_pairs", lambda *_: 2)
  rng = np.random.default_rng(4)
  pages = jax.tree.map(jnp.asarray, Book(rng, (2 * S,) * 4).pages())
  q, k, v = (draw(rng, 4, 1, heads, H) for heads in (N, K, K))
  for rows, blocks in ((4, 6), (2, 3), (0, 0)):  # 3 pages a row, 2 a block
    pages.mark(np.arange(4)[:, None] < rows).attend(0, q, k, v)
    assert trips.pop() == blocks


def test_stored_and_copied_pages_are_where_they_were_sent():
  rng = np.random.default_rng(2)
  book = Book(rng, (0,) * 4)
  C, n = 2, book.n
  kv = draw(rng, 2, L, 3, K, C * S, H)
  numbers = np.array([[5, 2], [n, 7], [0, n + 9]], np.int32)
  stored = jax.jit(paged.store)(book.pages(), *map(tuple, kv), numbers)
  for p, c in np.argwhere(numbers < n):
    part = kv[:, :, p, :, c * S : (c + 1) * S]
    book.kept[:, :, :, numbers[p, c]] = part
  np.testing.assert_array_equal([stored.k, stored.v], book.kept)
  source, target = np.array([2, 5, 5, 7]), np.array([3, n, 1, n + 1])
  copied = jax.jit(paged.copy)(stored, source, target)
  book.kept[:, :, :, [3, 1]] = book.kept[:, :, :, [2, 5]]
  np.testing.assert_array_equal([copied.k, copied.v], book.kept)


def test_answers_decode_from_one_prefilled_prompt():
  """Two a prompt: full pages are shared, of the partial one each has a copy."""
  rng = np.random.default_rng(3)
  C, lengths = 3, (9, 2 * S, 3)
  book = Book(rng, (0,) * 6)
  kv = draw(rng, 2, L, 3, K, C * S, H)
  numbers = np.full((3, C), book.n, np.int32)
  source, target = np.full((2, 6), book.n, np.int32)
  for row in range(6):
    p = row // 2
    full, part = divmod(lengths[p], S)
    if row % 2 == 0:
      for c in range(full + (part > 0)):
        numbers[p, c] = book.free.pop()
    for page in numbers[p, :full]:
      book.give(row, page)
    if part:
      source[row], target[row] = numbers[p, full], book.free.pop()
      book.give(row, target[row])
    book.rows[row] = [kv[:, :, p, :, t] for t in range(lengths[p])]
  pages = jax.jit(paged.store)(book.pages(), *map(tuple, kv), numbers)
  pages = jax.jit(paged.copy)(pages, source, target)
  book.kept = np.array([pages.k, pages.v])
  book.decode(pages, 6)


D = 4  # parts of rows and pages; the heads are in two
OF_PAGES = paged.Pages((1,) * L, (1,) * L, 0, 0, 0)  # the axis in parts


def everything(pages, prompts, numbers, source, target, q, new, mask):
  pages = paged.store(pages, *prompts, numbers)
  return step(paged.copy(pages, source, target), q, new, mask)


def one_part(seed, n=6):
  """Two rows over one prompt in pages 0 and 1; 1 is copied to 2."""
  rng = np.random.default_rng(seed)
  ints = lambda *x: np.array(x, np.int32)
  k, v = draw(rng, 2, L, K, n, S, H)
  table = ints([0, 1, 4], [0, 2, 5])
  lengths = rng.integers(S, 3 * S, 2).astype(np.int32)
  pages = paged.Pages(tuple(k), tuple(v), table, lengths, np.zeros(2, bool))
  prompts = tuple(map(tuple, draw(rng, 2, L, 1, K, 2 * S, H)))
  numbers, source, target = ints([seed % 2 * n, 1]), ints(1, 0), ints(2, n)
  q, new = draw(rng, L, 2, N, H), draw(rng, 2, 2, L, K, H)
  return pages, prompts, numbers, source, target, q, new, rng.random(2) < 0.7


def test_heads_side_by_side_are_written_where_they_belong():
  pages, *rest = one_part(1)
  wanted_out, wanted = jax.jit(everything)(pages, *rest)
  both = lambda x: tuple(beside(np.asarray(layer), 2) for layer in x)
  pages = dataclasses.replace(pages, k=both(pages.k), v=both(pages.v))
  out, found = jax.jit(everything)(pages, *rest)
  np.testing.assert_allclose(out, wanted_out, atol=1e-6)
  np.testing.assert_array_equal(found.k, both(wanted.k))
  np.testing.assert_array_equal(found.v, both(wanted.v))


def test_a_device_serves_its_own_rows_from_its_own_pages():
  join = lambda axis, *parts: np.concatenate(parts, axis)
  parts = [one_part(seed) for seed in range(D)]
  axes = (OF_PAGES, ((0,) * L,) * 2, 0, 0, 0, 1, 0, 0)
  given = jax.tree.map(join, axes, *parts)
  alone = [jax.jit(everything)(*part) for part in parts]
  wanted_out, wanted = jax.tree.map(join, (1, OF_PAGES), *alone)
  with jax.set_mesh(sharding.make_mesh(data=2, expert=2, tensor=2)):
    compiled = jax.jit(everything).lower(*given).compile()
    out, pages = compiled(*given)
  np.testing.assert_allclose(out, wanted_out, atol=2e-6)
  jax.tree.map(np.testing.assert_array_equal, pages, wanted)
  for x in (*pages.k, *pages.v):
    assert x.sharding.shard_shape(x.shape) == (K // 2, 6, S, H)
  for name in ("all-gather", "all-reduce", "all-to-all", "collective"):
    assert name not in compiled.as_text()


def test_an_empty_state_is_laid_out_from_its_creation():
  make = lambda: paged.empty(CFG, rows=8, pages=20, page=S, most=W)
  with jax.set_mesh(sharding.make_mesh(data=2, expert=2, tensor=2)):
    pages = jax.jit(make)()
  local = lambda x: x.sharding.shard_shape(x.shape)
  assert {local(x) for x in (*pages.k, *pages.v)} == {(K // 2, 5, S, H)}
  rows = pages.table, pages.lengths, pages.active
  assert [local(x) for x in rows] == [(2, W), (2,), (2,)]
  assert not any(x.any() for x in jax.tree.leaves(pages))


def test_narrow_heads_lie_side_by_side_on_a_tpu(monkeypatch):
  monkeypatch.setattr(sharding, "platform", lambda: "tpu")
  narrow = dataclasses.replace(CFG, head_dim=64)
  pages = paged.empty(narrow, rows=3, pages=5, page=S, most=W)
  assert {x.shape for x in (*pages.k, *pages.v)} == {(K // 2, 5, S, 128)}


def test_an_empty_state_is_in_the_models_dtype():
  low = dataclasses.replace(CFG, dtype="bfloat16")
  pages = paged.empty(low, rows=3, pages=5, page=S, most=W)
  assert {x.dtype for x in (*pages.k, *pages.v)} == {jnp.dtype("bfloat16")}
  assert (len(pages.k), len(pages.v)) == (L, L)


def several_steps(pages, q, new):
  def body(_, state):
    total, pages = state
    out, pages = step(pages, q, new, jnp.ones(q.shape[1], bool))
    return total + out, pages

  return jax.lax.fori_loop(0, 5, body, (q, pages))


def temporaries(name, dtype, H, n, B=8, C=2):
  """Bytes that a function of donated pages needs, to a layer's keys."""
  cfg = dataclasses.replace(CFG, dtype=dtype, head_dim=H)
  mesh = jax.sharding.get_mesh()
  lay = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
  shape = functools.partial(jax.ShapeDtypeStruct, sharding=lay)
  make = lambda: paged.empty(cfg, rows=B, pages=n, page=16, most=32)
  pages = jax.tree.map(lambda x: shape(x.shape, x.dtype), jax.eval_shape(make))
  real = lambda *x: shape(x, dtype)
  whole = lambda *x: shape(x, jnp.int32)
  prompts = (real(B, K, C * 16, H),) * L
  function, *given = {
    "steps": (several_steps, real(L, B, N, H), real(B, 2, L, K, H)),
    "store": (paged.store, prompts, prompts, whole(B, C)),
    "copy": (paged.copy, whole(B), whole(B)),
  }[name]
  compiled = jax.jit(function, donate_argnums=0).lower(pages, *given).compile()
  keys = pages.k[0].size * pages.k[0].dtype.itemsize
  return compiled.memory_analysis().temp_size_in_bytes / keys


@pytest.mark.parametrize("name", ["steps", "store", "copy"])
def test_donated_pages_are_written_in_place(name):
  assert temporaries(name, "float32", 16, 4096) < 0.25


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="no libtpu"
)
@pytest.mark.parametrize(
  ("name", "dtype", "H", "most"),
  [
    ("steps", "bfloat16", 128, 0.25),
    ("store", "bfloat16", 128, 0.25),
    ("copy", "bfloat16", 128, 0.25),
    ("steps", "float32", 128, 0.25),
    ("steps", "bfloat16", 64, 0.25),
    ("store", "bfloat16", 64, 0.25),
    ("steps", "float32", 64, 0.25),
  ],
)
def test_a_tpu_writes_in_place_too(name, dtype, H, most):
  """And does not lay all pages out anew between the writes and the kernel."""
  plan_compile.prepare()
  device = plan_compile.devices(chips.parse("v5e:2x2"), 1)[0]
  exact = jax.default_matmul_precision("highest")
  with (
    jax.set_mesh(sharding.make_mesh([device])),
    exact if dtype == "float32" else contextlib.nullcontext(),
  ):
    assert temporaries(name, dtype, H, 2**14) < most
