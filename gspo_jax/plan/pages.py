"""How many pages of continuous batching fit into the HBM left over."""

import functools
import math
from collections.abc import Iterator

import jax

from gspo_jax.model import ModelConfig, paged_cache
from gspo_jax.program.config import Config
from gspo_jax.sampler.continuous import ContinuousSampler

KEY = "continuous_batching.num_pages"
# Share of the HBM to leave free, for executables and fragmentation.
MARGIN = 0.08
_LANES = 128  # a TPU pads the last dimension of an array to as many


def page_bytes(cfg: ModelConfig, sampler: ContinuousSampler) -> int:
  """Bytes of one page on one device: keys and values of all layers.

  It is a bound for narrow heads that do not fill the lanes: XLA may choose
  another layout for them, without padding.
  """
  mesh, sizes = sampler.mesh, sampler.sizes
  one_a_shard = functools.partial(
    paged_cache.empty,
    cfg,
    num_slots=sampler.shards,
    num_pages=sampler.shards,
    page_size=sizes.page_size,
    pages_per_slot=sizes.pages_per_slot,
  )
  with jax.set_mesh(mesh):
    arrays = jax.eval_shape(one_a_shard)
  size = 0
  for x in (*arrays.k, *arrays.v):
    heads, _, tokens, width = x.shape
    width = -(-width // _LANES) * _LANES
    size += heads * tokens * width * x.dtype.itemsize
  return size // mesh.shape["tensor"]


def room(
  needed: float, hbm: float, cfg: ModelConfig, sampler: ContinuousSampler
) -> dict:
  """The largest pool, of a function that was compiled with some pool.

  All that is no page is taken as compiled: weights, state that stays in the
  HBM, temporaries.

  Args:
    needed: bytes that the function needs on a device, with the sampler's pages.
    hbm: bytes of a device.
    cfg: the model.
    sampler: with the pool of the compiled function.

  Returns:
    `num_pages` of the sampler and the `largest` that leaves `MARGIN` of the HBM
    free, over all devices; `slots_of_longest`, how many of the longest prompts
    and responses these take; and `tokens_a_slot` if they are shared evenly.
  """
  sizes, shards = sampler.sizes, sampler.shards
  size = page_bytes(cfg, sampler)
  more = math.floor((hbm * (1 - MARGIN) - needed) / size)
  largest = max(sizes.num_pages + more, 0)
  return {
    "num_pages": sizes.num_pages * shards,
    "largest": largest * shards,
    "slots_of_longest": largest // (sizes.pages_per_slot + 1) * shards,
    "tokens_a_slot": largest * sizes.page_size // sizes.slots,
    "page_bytes": size,
    "margin": MARGIN,
  }


def smaller(
  config: Config, cfg: ModelConfig, sampler: ContinuousSampler, hbm: float
) -> Iterator[Config]:
  """The config with pools of 1/2, 1/4 and 1/8 of the HBM, where these do.

  For a function that does not compile with its own pool, to measure the rest.
  """
  least = sampler.sizes.pages_per_slot + 1
  for parts in (2, 4, 8):
    pages = int(hbm / parts / page_bytes(cfg, sampler))
    if least <= pages < sampler.sizes.num_pages:
      yield config.replace(
        continuous_batching={"num_pages": pages * sampler.shards}
      )


def advice(room: dict) -> str:
  """Names the key and the largest number that fits."""
  return (
    f"{KEY}={room['num_pages']}: expected at most {room['largest']}, which "
    f"leave {room['margin']:.0%} of the HBM free"
  )
