"""Segments of decoding over pages, as the TPU's compiler makes them.

Of Qwen3-30B-A3B in full. Nothing runs: bytes are counted in the compiled text.
"""

import importlib.util
import math

import jax
import numpy as np
import pytest

from configs import moe_tpu_v5
from gspo_jax.plan import analysis, chips, lower
from gspo_jax.plan import compile as plan_compile
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding as sh
from gspo_jax.sampler.decode_params import decode_params_sharding

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="no libtpu"
  ),
]

PAGE = 128
BLOCK = 512  # tokens of a row that the kernel reads at one time
SLOTS = {"v5p:2x2x2": 64, "v5e:4x4": 20}  # a device
LARGE = 2**18  # elements; less is no matrix of weights


def configured(devices, slots):
  config = moe_tpu_v5.get_config()
  config.mesh.fsdp, config.mesh.expert = devices // 4, 4
  config.sampler_mesh.expert = devices
  config.data.prompts = 2 * devices
  config.learner.micro_batch_size = devices
  config.continuous_batching.slots, config.continuous_batching.page_size = (
    slots * devices,
    PAGE,
  )
  return config


class Segment:
  """What was compiled, `last` of a quarter of the slots; bytes of a device."""

  def __init__(self, topology):
    plan_compile.prepare()
    where, self.slots = chips.parse(topology), SLOTS[topology]
    devices = plan_compile.devices(where, 1)
    config = configured(len(devices), self.slots)
    made = build_program(parse(config), sh.make_mesh(devices, **config.mesh))
    key = jax.eval_shape(lambda: jax.random.key(0))
    lowered, _ = lower._lower_continuous_sampler(config, made, key)
    self.done = plan_compile.compile_one(lowered["generate"])
    few = jax.ShapeDtypeStruct(
      (self.slots // 4 * len(devices),),
      np.int32,
      sharding=made.generate.rows,
    )
    last, _ = lower._lower_continuous_sampler(config, made, key, few)
    self.last = plan_compile.compile_one(last["generate"])
    report = analysis.analyze("generate", self.done, config, made, where)
    self.step, sizes = report["decode"], made.generate.sizes
    # A prompt's own partial page is in the pool, too.
    self.longest, self.pool = sizes.width * PAGE, sizes.pages * PAGE
    cfg = made.cfg
    self.router = real((cfg.embed_dim, cfg.num_experts))
    self.cache_shape = (cfg.num_kv_heads, sizes.pages, PAGE, cfg.head_dim)
    laid_out = zip(
      jax.tree.leaves(lowered["lay_out"].out_info),
      jax.tree.leaves(
        decode_params_sharding(cfg, made.generate.devices.decode.mesh)
      ),
      strict=True,
    )
    self.weight_shapes = {
      getattr(lay, "sharding", lay).shard_shape(x.shape) for x, lay in laid_out
    }


@pytest.fixture(scope="module", params=SLOTS)
def segment(request):
  return Segment(request.param)


@pytest.mark.parametrize("which", ["done", "last"])
def test_it_fits_and_needs_little_beside_the_cache(segment, which):
  done = getattr(segment, which)
  assert done.memory is not None, done.reason
  assert done.memory.temporaries < 0.02 * segment.step["pages_bytes"]


@pytest.mark.parametrize("mean", [1.0, 0.5, 0.25])
def test_a_step_reads_little_beside_weights_and_pages(segment, mean):
  """With rows of `mean` times the longest, and the kernel's last half block.

  Least are the weights and the tokens there, once each; what a step moves with
  them, as compiled, must not be more than 1.3 times that.
  """
  step = segment.step
  assert step["kernel"]
  token = step["pages_bytes"] / segment.pool
  weights = step["least_bytes"] - step["pages_bytes"]
  rest = step["hbm_bytes"] - step["pages_bytes"]
  length = mean * segment.longest
  least = weights + token * segment.slots * length
  half = BLOCK / 2 if mean < 1 else 0
  moved = rest + token * segment.slots * (length + half)
  assert weights <= moved < 1.3 * least


def real(shape):
  return tuple(sorted(n for n in shape if n > 1))


@pytest.mark.parametrize("which", ["done", "last"])
def test_nothing_copies_pages_or_weights(segment, which):
  """Anywhere in the program, its loop or not, in whatever order of the axes.

  But for a router, a thousandth of its layer, where few slots are computed.
  """
  kept = {real(segment.cache_shape)}
  kept |= {real(shape) for shape in segment.weight_shapes}
  kept -= {segment.router} if which == "last" else set()
  copies = [
    (i.op, array.dims)
    for computation in getattr(segment, which).module.computations.values()
    for i in computation
    if i.op in ("copy", "transpose")
    for array in i.arrays
    if math.prod(array.dims) >= LARGE and real(array.dims) in kept
  ]
  assert not copies
