"""Bundles of kernels: the dump, and how often a call runs each part."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from compilers import absent_devices, needs_libtpu

from gspo_jax.model import exact_kernels, paged_kernel
from gspo_jax.plan import chips, hlo
from gspo_jax.plan import compile as plan_compile
from gspo_jax.plan.hlo import bundles, kernels
from gspo_jax.plan.hlo import module as hlo_module
from gspo_jax.plan.hlo.bundles import Kernel, Loop
from gspo_jax.plan.hlo.cost import Work
from gspo_jax.runtime import sharding

# A number is so many bundles, a list is a loop, and a tuple a region that a
# branch may jump over.
PROGRAM = [3, [4, (5, (6,), 7), [2, (8,)], 1, [9], (10,)], [11], 2]


def lines(program, depth=0, numbers=None):
  """The dump of a program as libtpu 0.0.51 writes it."""
  numbers = numbers or itertools.count(1)
  marks = ">" * depth
  for part in program:
    if isinstance(part, int):
      for i in range(part):
        # An empty bundle has no marks.
        yield (
          "  0x1f   : {} " if i % 2 else f"  0x1f   : {marks} {{ %s1 = smov }}"
        )
    elif isinstance(part, list):
      yield f"  0x20 LB: {marks}> {{ %s1 = smov }}"
      yield from lines(part, depth + 1, numbers)
    else:
      region = next(numbers)
      branch = f"sbr.rel (%p1) target = $region{region}"
      yield f"  0x21   : {marks} {{ {branch} }}"
      yield from lines(part, depth, numbers)
      yield (
        f"  0x22 PF: {marks} {{ %s1 = smov }} /* Start/End empty region "
        f"{region} :: Start region 99 */"
      )


def test_a_dump_is_a_tree_of_loops():
  """With branches, ends of regions and first bundles of loops."""
  kernel = bundles.parse("LB: loop body\n\n" + "\n".join(lines(PROGRAM)))
  body = kernel.body
  assert not kernel.both_cores
  assert body.bundles == 3 + 2
  first, second = body.inner
  assert second == Loop(1 + 11)
  assert first.bundles == 1 + 4 + (1 + 5 + (1 + 6 + 1) + 7 + 1) + 1 + (
    1 + 10 + 1
  )
  assert first.conditional == [6, 10]  # the outer one holds another
  assert first.inner == [Loop(1 + 2 + (1 + 8 + 1), [8]), Loop(1 + 9)]
  assert body.whole == sum(1 for _ in lines(PROGRAM))


def test_a_bundle_of_an_outer_loop_may_stand_in_an_inner_one():
  text = "\n".join(lines([3, [4, [2], 5]]))
  (*_, last) = text.splitlines()
  outer = last.replace(">", "")
  kernel = bundles.parse("\n".join([text, outer, last, outer]))
  (loop,) = kernel.body.inner
  assert kernel.body.bundles == 3 + 2
  assert loop.bundles == 1 + 4 + 5 + 1
  assert loop.inner == [Loop(1 + 2)]


def call(name, operands, result):
  """The computation and its instruction, a kernel of libtpu 0.0.51."""
  text = "ENTRY %main (a: bf16[4]) -> bf16[4] {\n"
  for number, operand in enumerate(operands):
    text += f"  %p{number} = {operand} parameter({number})\n"
  used = ", ".join(f"%p{number}" for number in range(len(operands)))
  text += (
    f"  ROOT %{name}.2 = {result} custom-call({used}), "
    'custom_call_target="tpu_custom_call"\n}'
  )
  entry = hlo_module.parse(text).entry
  return entry, entry.root


HEADS, TOKENS, H = 4, 4096, 128


@pytest.mark.parametrize("fused", [False, True])
def test_a_splash_kernel_by_walking_over_its_grid(fused):
  """Blocks of 512 queries, and of 512 keys, or 1,024 in the fused pass."""
  keys = 1024 if fused else 512
  of_queries, of_keys = TOKENS // 512, TOKENS // keys
  query = f"bf16[{HEADS},{TOKENS},{H}]"
  parts = f"bf16[{of_keys},{HEADS},{TOKENS},{H}]"
  entry, i = call(
    "splash_mha_dkv" if fused else "splash_mha_fwd",
    [f"s8[1,{of_queries},{of_keys}]", query, query, query],
    f"({parts}, {query}, {query})" if fused else f"({query}, {query})",
  )
  issued = 7
  pairs = [*itertools.product(range(HEADS), range(of_queries), range(of_keys))]
  for _, q, k in pairs:
    issued += 20  # each step
    issued += 300 * (k * keys < (q + 1) * 512)  # the block is not above
    outer, last = (q, of_queries) if fused else (k, of_keys)
    issued += 40 * (outer == 0) + 50 * (outer == last - 1)
  step = Loop(20 + 40 + 300 + 50, [40, 300, 50])
  kernel = Kernel(Loop(7, [], [step]), True)
  assert kernels.issued(kernel, entry, i, Work(0.0)).bundles == issued


def paged(window="", both=True):
  """A kernel of four heads and blocks of 512 tokens, its call and its row."""
  block = Loop(300, [], [Loop(17), Loop(7), Loop(5)])
  row = Loop(77, [], [block, Loop(7)])
  pages = "bf16[4,6000,128,128]"
  entry, i = call(
    f"paged_attention{window}",
    ["s32[64]", "s32[640]", "bf16[64,4,8,128]", "f32[4,8,1]", pages, pages],
    "bf16[64,4,8,128]",
  )
  body = Loop(5, [], [Loop(61, [], [Loop(17), Loop(7)]), row])
  return kernels.pages(Kernel(body, both), entry, i, paged_kernel.block_pages)


def test_pages_are_read_by_rows_and_pages():
  assert paged() == kernels.Pages(
    parts=2, row=84, page=300 / 4 + 17 + 7 + 5, rows=64, pages=6000,
    page_bytes=4 * 128 * 128 * 2 * 2, window=None,
  )  # fmt: skip
  # One core has all heads: a block of 1 MiB is as long.
  assert paged(both=False).parts == 1
  assert paged("_window_128").window == 2
  assert paged("_window_130").window == 3


PAGED = """
ENTRY %main (q: bf16[8,4,8,128]) -> bf16[8,4,8,128] {
  %q = bf16[8,4,8,128] parameter(0)
  %s = f32[4,8,1] parameter(1)
  %k = bf16[4,100,128,128] parameter(2)
  %NAME.6 = bf16[8,4,8,128] custom-call(%q, %s, %k, %k), custom_call
  ROOT %NAME.7 = bf16[8,4,8,128] custom-call(%q, %s, %k, %k), custom_call
}
"""


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("bundles", [200, 20_000])
def test_a_kernel_takes_its_bundles_or_its_bytes(bundles, both, window):
  """Equal kernels issue the same, although only one of them is dumped."""
  chip = chips.CHIPS["v5p"]
  name = "paged_attention" + (f"_window_{window}" if window else "")
  text = PAGED.replace("NAME", name).replace(
    ", custom_call\n", ', custom_call_target="tpu_custom_call"\n'
  )
  inner = [Loop(10), Loop(20), Loop(30)]
  body = Loop(0, [], [Loop(100, [], [Loop(4 * bundles, [], inner)])])
  cost = hlo.cost_of(
    text,
    chip,
    lambda *_: 1.0,
    1,
    kernels={f"{name}.6": Kernel(body, both)},
    block_pages=paged_kernel.block_pages,
  )
  # Each core has two heads, or one has all.
  row, page = 2 * 100 / chip.clock, 2 * (bundles + 60) / chip.clock
  page = max(page, 2 * 4 * 128 * 128 * 2 * 2 / chip.hbm_bandwidth)
  full = 8 * row + 100 * page
  if window:  # two pages of a row
    row, page = row + 2 * page, 0.0
    full = 8 * row
  assert cost.reading.row == pytest.approx(row)
  assert cost.reading.block == pytest.approx(page)
  assert cost.reading.full == pytest.approx(full)
  moved = 2 * (8 * 4 * 8 * 128 * 4 + 4 * 8 * 4) + (
    2 * (8 * 2 if window else 100) * 4 * 128 * 128 * 4
  )
  assert cost.hbm_bytes == pytest.approx(moved)
  seconds = max(full, moved / chip.hbm_bandwidth)
  assert cost.roofline_seconds == pytest.approx(seconds)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
  ("mode", "page", "tokens", "issued", "renewed"),
  [(None, 128, 512, 544, 544), (None, 512, 512, 316, 264),
   (None, 512, 1024, 2 * 271, 476), ("kv_head", 512, 1024, 2 * 271, 477)],
)  # fmt: skip
def test_the_paged_kernel_of_a_v5p(mode, page, tokens, issued, renewed):
  """By hand, of libtpu 0.0.51 and jax 0.10; of jax 0.12 by this reader."""
  from jax.experimental.pallas.ops.tpu import paged_attention as pa

  mesh = sharding.make_mesh(absent_devices("v5p:2x2x1")[:1])
  place = sharding.replicated(mesh)
  shape = lambda *dims, dtype: jax.ShapeDtypeStruct(dims, dtype, sharding=place)
  pages = shape(4, 1024, page, 128, dtype=jnp.bfloat16)
  read = lambda *operands: pa.paged_attention(
    *operands, pages_per_compute_block=tokens // page, megacore_mode=mode
  )
  done = plan_compile.compile_one(
    jax.jit(read).lower(
      shape(128, 32, 128, dtype=jnp.float32),
      pages,
      pages,
      shape(128, dtype=jnp.int32),
      shape(128, 128, dtype=jnp.int32),
    )
  )
  ((_, kernel),) = done.kernels.items()
  assert kernel.both_cores == (mode is not None)
  (row,) = kernel.body.inner
  assert row.bundles == pytest.approx(160, rel=0.1)
  issued = issued if jax.__version_info__ < (0, 11) else renewed
  assert sum(x.whole for x in row.inner) == pytest.approx(issued, rel=0.08)


@pytest.mark.slow
@needs_libtpu
def test_an_exact_product_issues_a_block_for_each_step_of_its_grid():
  """Twice the rows issue twice as much, and do twice the FLOPs."""
  chip, K, N = chips.CHIPS["v5p"], 2048, 1024
  mesh = sharding.make_mesh(absent_devices("v5p:2x2x1")[:1])
  place = sharding.replicated(mesh)
  shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=place)
  product = jax.jit(lambda x, w: exact_kernels.product(x, w, x.dtype))
  bundles = {}
  for M in (1024, 2048):
    done = plan_compile.compile_one(product.lower(shape(M, K), shape(K, N)))
    links = lambda *_: 1.0
    cost = hlo.cost_of(done.text, chip, links, 1, kernels=done.kernels)
    assert cost.flops == 2 * M * K * N
    ((name, kernel),) = done.kernels.items()
    entry = hlo_module.parse(done.text).entry
    (call,) = (i for i in entry if i.name == name)
    bundles[M] = kernels.issued(kernel, entry, call, Work(0.0)).bundles
  assert bundles[2048] == pytest.approx(2 * bundles[1024], rel=0.01)
