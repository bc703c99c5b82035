"""The blocks that a grouped product computes and reads, one by one."""

import itertools
import math

import numpy as np
import pytest

from gspo_jax.plan.hlo import module as hlo_module
from gspo_jax.plan.hlo.kernels import grouped_product

M, K, N, G = 1024, 512, 384, 4
# Groups that end within a block, as nearly all do.
ENDS = np.array([250, 590, 777, M])
SHAPES = {
  "x": f"bf16[{M},{K}]",
  "dy": f"bf16[{M},{N}]",
  "w": f"bf16[{G},{K},{N}]",
}


def kernel(left, right, out, tiling):
  """The computation and the instruction, as libtpu 0.0.51 writes them."""
  text = (
    "ENTRY %main (a: bf16[4]) -> bf16[4] {\n"
    f"  %l = {SHAPES[left]} parameter(0)\n"
    f"  %r = {SHAPES[right]} parameter(1)\n"
    f"  %sizes = s32[{G + 1}]{{0}} parameter(2)\n"
    f"  ROOT %ragged-dot-none.2 = {SHAPES[out]} custom-call(%sizes, %l, %r), "
    'custom_call_target="tpu_custom_call", frontend_attributes={mosaic_fusion_'
    f'entry_point="true",ragged_dot_tiling="{",".join(map(str, tiling))}"}}\n}}'
  )
  entry = hlo_module.parse(text).entry
  return entry, entry.root


def visited(rows):
  """The (group, block) pairs of rows that the kernel visits, in order."""
  for group, (start, end) in enumerate(zip([0, *ENDS], ENDS, strict=False)):
    for block in range(start // rows, math.ceil(end / rows)):
      yield group, block


def fetched(keys):
  """How often a block is read: not again if it is the same as before."""
  keys = list(keys)
  return 1 + sum(a != b for a, b in itertools.pairwise(keys))


TILES = [(128, 512, 384), (128, 512, 256), (256, 128, 384), (64, 256, 128)]


@pytest.mark.parametrize("tiling", TILES)
def test_a_product_by_walking_over_its_blocks(tiling):
  m, k, n = tiling
  grid = [
    (column, group, block, part)
    for column in range(math.ceil(N / n))
    for group, block in visited(m)
    for part in range(math.ceil(K / k))
  ]
  cost = grouped_product(*kernel("x", "w", "dy", tiling))
  assert cost.flops == 2 * M * K * N
  assert cost.flops + cost.padding_flops == 2 * m * k * n * len(grid)
  x = fetched((block, part) for _, _, block, part in grid) * m * k
  # The last column's blocks reach beyond the matrices: that is not read.
  share = N / (math.ceil(N / n) * n)
  w = fetched((c, group, part) for c, group, _, part in grid) * k * n * share
  assert cost.hbm_bytes == pytest.approx(2 * (x + w + M * N), rel=0.02)


@pytest.mark.parametrize("tiling", TILES)
def test_the_gradient_of_matrices_by_walking_over_its_blocks(tiling):
  m, k, n = tiling
  parts, columns = math.ceil(K / k), math.ceil(N / n)
  visits = len(list(visited(m)))
  cost = grouped_product(*kernel("x", "dy", "w", tiling))
  assert cost.flops == 2 * M * K * N
  walks = parts * columns
  assert cost.flops + cost.padding_flops == 2 * m * k * n * visits * walks
  read = columns * M * K + parts * M * N
  assert cost.hbm_bytes == 2 * (read + G * K * N)


def test_rows_that_hold_no_token_are_not_multiplied():
  entry, _ = kernel("x", "w", "dy", TILES[0])
  assert grouped_product(entry, entry.get("l")) is None  # no kernel
  full = grouped_product(*kernel("x", "w", "dy", TILES[0]))
  half = grouped_product(*kernel("x", "w", "dy", TILES[0]), filled=0.5)
  assert half.flops == full.flops / 2
  block = 2 * 128 * K * N
  saved = (full.flops + full.padding_flops) - (half.flops + half.padding_flops)
  assert saved == M / 2 / 128 * block
  assert full.hbm_bytes - half.hbm_bytes == 2 * M * (K + N) / 2
