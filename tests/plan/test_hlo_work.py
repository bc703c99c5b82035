"""FLOPs and bytes of single instructions, counted by hand."""

import re
from itertools import product

import numpy as np
import pytest

from gspo_jax.model import attention
from gspo_jax.plan.hlo import module as hlo_module
from gspo_jax.plan.hlo import work as hlo_work

HEAD = "ENTRY %main (a: f32[4]) -> f32[4] {\n"


def first_of(body, *, computations=""):
  """The module, the computation and the instruction named %it."""
  module = hlo_module.parse(f"{computations}\n{HEAD}{body}\n}}")
  return module, module.entry, module.entry.get("it")


@pytest.mark.parametrize(
  "product",
  [
    "dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
    "rhs_batch_dims={0}, rhs_contracting_dims={1}",
    # As on TPUs: a convolution, mostly of padding.
    "convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, "
    "dim_labels=0bf_0io->0bf",
  ],
)
def test_batched_matrix_products(product):
  """8 products [32, 64] x [64, 16]."""
  work = first_of(
    "  %a = bf16[8,32,64]{2,1,0} parameter(0)\n"
    "  %b = bf16[8,64,16]{2,1,0} parameter(1)\n"
    f"  ROOT %it = f32[8,32,16]{{2,1,0}} {product}"
  )
  assert hlo_work.flops(*work) == 2 * 8 * 32 * 64 * 16
  read, written = 2 * 8 * 64 * (32 + 16), 4 * 8 * 32 * 16
  assert hlo_work.hbm_bytes(*work) == read + written


def test_overlaps_against_brute_force():
  choices = (1, 4, 9), (1, 3), (1, 2, 3), (0, 2), (0, 1), (1, 2, 6), (1, 2)
  tried = 0
  for left, right, stride, low, high, spread, apart in product(*choices):
    width = low + (left - 1) * spread + 1 + high
    out = (width - (right - 1) * apart - 1) // stride + 1
    if out < 1:
      continue
    real = {low + n * spread for n in range(left)}
    met = sum(
      o * stride + k * apart in real for o in range(out) for k in range(right)
    )
    window = {"stride": stride, "low": low}
    window |= {"lhs_dilate": spread, "rhs_dilate": apart}
    assert hlo_work._overlaps(left, right, out, **window) == met
    tried += 1
  assert tried > 300


@pytest.mark.parametrize(
  ("stated", "flops"),
  [("", 0),
   (', backend_config={"cost_estimate":{"bytes":"1","flops":"42"}}', 42)],
)  # fmt: skip
def test_a_kernel_that_states_no_flops_is_unknown(stated, flops):
  work = first_of(
    "  %a = f32[4]{0} parameter(0)\n"
    '  ROOT %it = f32[4]{0} custom-call(%a), custom_call_target="tpu_custom_'
    f'call"{stated}'
  )
  assert hlo_work.flops(*work) == flops
  assert hlo_work.is_unknown_kernel(*work[1:]) == (not flops)


def blocks_of(name, kernel):
  """Queries and keys of the blocks of a kernel of splash; its first operand."""
  end = re.search("fwd|dkv|dq", name)[0]
  suffix = "" if end == "fwd" else f"_{end}"
  sizes = kernel.kwargs["block_sizes"]
  blocks = [getattr(sizes, f"block_{x}{suffix}") for x in ("q", "kv")]
  return blocks, getattr(kernel, f"{end}_mask_info").data_next.shape


def scores(T, window, rows, columns):
  """The scores that splash computes: blocks with an unmasked score."""
  visible = np.tri(T, dtype=bool)
  if window:
    visible &= ~np.tri(T, k=-window, dtype=bool)
  blocks = visible.reshape(T // rows, rows, -1, columns)
  return blocks.any((1, 3)).sum() * rows * columns


@pytest.mark.parametrize("T", [128, 640, 768, 1024, 8192])
@pytest.mark.parametrize(
  ("name", "results", "products", "window"),
  [("splash_mha_fwd_segmented", "bf16[8,{T},32]", 2, None),
   ("splash_mha_fwd_segmented", "bf16[8,{T},32]", 2, 128),
   ("splash_mha_fwd_segmented", "bf16[8,{T},32]", 2, 1300),
   ("splash_mqa_dkv", "(bf16[2,{T},32], bf16[2,{T},32])", 4, None),
   ("splash_mqa_dkv", "(bf16[2,{T},32], bf16[2,{T},32])", 4, 1300),
   ("splash_mha_dkv", "(bf16[{n},8,{T},32], bf16[2,{T},32])", 5, None),
   ("splash_mha_dq", "bf16[8,{T},32]", 3, None),
   ("splash_mha_dq", "bf16[8,{T},32]", 3, 128)],
)  # fmt: skip
def test_attention_kernels_by_counting_blocks(
  name, results, products, window, T
):
  unfused = 0 if products == 5 else 2**60
  sizes = attention._splash_sizes(T, unfused, window, 256)
  kernel = attention._splash_kernel(sizes, np.zeros(T, int), window)
  blocks, mask = blocks_of(name, kernel)
  results = results.format(T=T, n=T // blocks[1])
  body = (
    f"  %mask = s8[{','.join(map(str, mask))}]{{2,1,0}} parameter(0)\n"
    f"  %q = bf16[8,{T},32]{{2,1,0}} parameter(1)\n"
    f"  %k = bf16[2,{T},32]{{2,1,0}} parameter(2)\n"
    f"  ROOT %{name}.3 = {results} custom-call(%mask, %q, %k, %k), "
    'custom_call_target="tpu_custom_call"'
  )
  module = hlo_module.parse(f"{HEAD}{body}\n}}")
  instruction = module.entry.root
  one = 2 * 8 * scores(T, window, *blocks) * 32
  assert hlo_work.flops(module, module.entry, instruction) == products * one
  assert not hlo_work.is_unknown_kernel(module.entry, instruction)


STACK = """
%pick (s: f32[48,1000], n: s32[]) -> f32[1000] {
  %s = f32[48,1000]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %z = s32[] constant(0)
  %row = f32[1,1000]{1,0} dynamic-slice(%s, %n, %z)
  ROOT %flat = f32[1000]{0} bitcast(%row)
}

%double (s: f32[48,1000], n: s32[]) -> f32[1000] {
  %s.1 = f32[48,1000]{1,0} parameter(0)
  %n.1 = s32[] parameter(1)
  %f = f32[1000]{0} fusion(%s.1, %n.1), kind=kLoop, calls=%pick
  ROOT %sum = f32[1000]{0} add(%f, %f)
}

%store (s: f32[48,1000], r: f32[1,1000], n: s32[]) -> f32[48,1000] {
  %s.2 = f32[48,1000]{1,0} parameter(0)
  %r = f32[1,1000]{1,0} parameter(1)
  %n.2 = s32[] parameter(2)
  %z.2 = s32[] constant(0)
  ROOT %new = f32[48,1000]{1,0} dynamic-update-slice(%s.2, %r, %n.2, %z.2)
}
"""
PARAMETERS = (
  "  %a = f32[48,1000]{1,0} parameter(0)\n"
  "  %v = f32[1,1000]{1,0:S(1)} parameter(1)\n"
  "  %i = s32[]{:S(6)} parameter(2)\n"
  "  %ids = s32[5]{0:S(1)} parameter(3)\n"
  "  %rows = f32[5,1000]{1,0:S(1)} parameter(4)\n"
  "  %s = f32[1000]{0} parameter(5)\n"
  "  %n = bf16[48,1000]{1,0:T(16,128)(2,1)} parameter(6)\n"
)


NESTED = """
%names (n: f32[48,1000]) -> f32[48000] {
  %n = f32[48,1000]{1,0} parameter(0)
  ROOT %b = f32[48000]{0} bitcast(%n)
}

%outer (o: f32[48,1000]) -> f32[] {
  %o = f32[48,1000]{1,0} parameter(0)
  %inner = f32[48000]{0} fusion(%o), kind=kLoop, calls=%names
  ROOT %r = f32[] reduce(%inner), to_apply=%add
}
"""


PASSED = """
%link (g: f32[1000], y: f32[48,1000]) -> (f32[1000], f32[4000], f32[48,1000]) {
  %g = f32[1000]{0} parameter(0)
  %y = f32[48,1000]{1,0} parameter(1)
  %all = f32[4000]{0} all-gather(%g), channel_id=7, replica_groups={{0,1,2,3}}
  %y2 = f32[48,1000]{1,0} negate(%y)
  ROOT %t = (f32[1000]{0}, f32[4000]{0}, f32[48,1000]{1,0}) tuple(%g, %all, %y2)
}
"""


# libtpu 0.0.51 for tpu7x: a stack of bfloat16, which it names by the layout of
# its slices while it updates it in place.
RELABELLED = """
%as_slices (p: bf16[48,1000]) -> bf16[48,1000] {
  %p = bf16[48,1000]{1,0:T(16,128)(2,1)} parameter(0)
  ROOT %copy = bf16[48,1000]{1,0:T(8,128)(2,1)} copy(%p)
}

%row (q: bf16[48,1000], n: s32[]) -> bf16[1,1000] {
  %q = bf16[48,1000]{1,0:T(16,128)(2,1)} parameter(0)
  %n = s32[] parameter(1)
  %z = s32[] constant(0)
  %named = bf16[48,1000]{1,0:T(8,128)(2,1)} fusion(%q), kind=kLoop, calls=%as_slices
  ROOT %slice = bf16[1,1000]{1,0} dynamic-slice(%named, %n, %z)
}

%doubled (s: bf16[48,1000], m: s32[]) -> bf16[48,1000] {
  %s = bf16[48,1000]{1,0:T(16,128)(2,1)} parameter(0)
  %m = s32[] parameter(1)
  %zero = s32[] constant(0)
  %old = bf16[1,1000]{1,0} fusion(%s, %m), kind=kLoop, calls=%row
  %new = bf16[1,1000]{1,0} add(%old, %old)
  %stack = bf16[48,1000]{1,0:T(8,128)(2,1)} fusion(%s), kind=kLoop, calls=%as_slices
  %updated = bf16[48,1000]{1,0:T(8,128)(2,1)} dynamic-update-slice(%stack, %new, %m, %zero)
  ROOT %back = bf16[48,1000]{1,0:T(16,128)(2,1)} copy(%updated)
}

%copied (c: bf16[48,1000]) -> bf16[48,1000] {
  %c = bf16[48,1000]{1,0:T(16,128)(2,1)} parameter(0)
  ROOT %copied_c = bf16[48,1000]{1,0:T(8,128)(2,1)} fusion(%c), kind=kLoop, calls=%as_slices
}
"""  # noqa: E501


NARROW = """
%wide (q: bf16[48,1000], n: s32[]) -> f32[1,1000] {
  %q = bf16[48,1000]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %z = s32[] constant(0)
  %f = f32[48,1000]{1,0} convert(%q)
  ROOT %slice = f32[1,1000]{1,0} dynamic-slice(%f, %n, %z)
}
"""
ROW, ROWS = 4000, 48 * 4000  # bytes in float32


@pytest.mark.parametrize(
  ("computations", "line", "moved"),
  [
    # A slice reads the slice, and an update in place writes the update.
    (STACK, "f32[1000]{0} fusion(%a, %i), calls=%pick", 2 * ROW),
    (STACK, "f32[1000]{0} fusion(%a, %i), calls=%double", 2 * ROW),
    (STACK, "f32[48,1000]{1,0} fusion(%a, %v, %i), calls=%store", ROW),
    ("", "f32[5,1000]{1,0} gather(%a, %ids), slice_sizes={1,1000}", 10 * ROW),
    # A scatter reads and writes the rows that it adds to.
    ("", "f32[48,1000]{1,0} scatter(%a, %ids, %rows), to_apply=%add", 10 * ROW),
    # A prefetch reads HBM once; names and aliases move nothing.
    ("", "(f32[48,1000]{1,0:S(1)}, f32[48,1000]{1,0}, u32[]{:S(2)}) "
     "copy-start(%a)", ROWS),
    ("", "f32[48000]{0} bitcast(%a)", 0),
    ("", "(f32[48,1000]{1,0}) tuple(%a)", 0),
    ("", 'f32[9]{0} custom-call(), custom_call_target="AllocateBuffer"', 0),
    # So the compiler writes attention over a cache: this was 0 bytes once.
    (NESTED, "f32[]{:S(1)} fusion(%a), calls=%outer", ROWS),
    # A fusion does not move what it passes on, nor what a collective moves.
    (PASSED, "(f32[1000]{0}, f32[4000]{0}, f32[48,1000]{1,0}) "
     "fusion(%s, %a), calls=%link", 2 * ROWS),
    # A stack under another layout was charged as a whole in each trip; a copy
    # alone is one.
    (RELABELLED, "bf16[1,1000]{1,0} fusion(%n, %i), calls=%row", ROW),
    (RELABELLED, "bf16[48,1000]{1,0} fusion(%n, %i), calls=%doubled", ROW),
    (RELABELLED, "bf16[48,1000]{1,0} fusion(%n), calls=%copied", ROWS),
    # A slice of a converted stack reads the narrow one.
    (NARROW, "f32[1,1000]{1,0} fusion(%n, %i), calls=%wide", ROW / 2 + ROW),
  ],
)  # fmt: skip
def test_the_bytes_that_an_instruction_moves(computations, line, moved):
  work = first_of(f"{PARAMETERS}  ROOT %it = {line}", computations=computations)
  assert hlo_work.hbm_bytes(*work) == moved


def bitonic_passes(n):
  """The passes of a bitonic network over n elements, by running it."""
  rng = np.random.default_rng(0)
  x, passes, size = rng.permutation(n), 0, 2
  while size <= n:
    step = size // 2
    while step:
      here = np.arange(n)
      low = here[here & step == 0]
      up = (low & size) == 0
      swap = (x[low] > x[low + step]) == up
      first, second = x[low].copy(), x[low + step].copy()
      x[low] = np.where(swap, second, first)
      x[low + step] = np.where(swap, first, second)
      passes, step = passes + 1, step // 2
    size *= 2
  assert (x == np.arange(n)).all()
  return passes


@pytest.mark.parametrize("n", [2, 256, 1024])
def test_a_sort_passes_all_operands_through_a_bitonic_network(n):
  _, _, sort = first_of(
    f"  %k = s32[8,{n}]{{1,0}} parameter(0)\n"
    f"  %v = bf16[8,{n}]{{1,0}} parameter(1)\n"
    f"  ROOT %it = (s32[8,{n}]{{1,0}}, bf16[8,{n}]{{1,0}}) sort(%k, %v), "
    "dimensions={1}, to_apply=%less"
  )
  # 32 bits of a register for each element, also for 16.
  assert hlo_work.sorted_bytes(sort) == bitonic_passes(n) * 2 * 8 * n * 4


@pytest.mark.parametrize(
  ("stated", "cycles"),
  [('"estimated_cycles":"74906"', 74906), ("", None),
   ('"estimated_cycles":"0"', None),
   ('"estimated_cycles":"9223372036854775807"', None)],
)  # fmt: skip
def test_cycles_that_the_compiler_does_not_know(stated, cycles):
  _, _, i = first_of(
    "  %a = f32[4]{0} parameter(0)\n"
    "  ROOT %it = f32[4]{0} add(%a, %a), "
    f'backend_config={{"window_config":{{{stated}}}}}'
  )
  assert hlo_work.estimated_cycles(i) == cycles
