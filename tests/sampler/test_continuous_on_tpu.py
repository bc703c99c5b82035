"""Segments of Qwen3-30B-A3B, compiled for TPUs: copies, bytes, memory."""

import math

import jax
import numpy as np
import pytest
from compilers import needs_libtpu

from gspo_jax.configs import moe_tpu_v5
from gspo_jax.plan import chips, lower, roofline
from gspo_jax.plan import compile as plan_compile
from gspo_jax.plan.hlo.module import parse as parse_hlo
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding as sh
from gspo_jax.sampler.decode_params import decode_params_sharding
from gspo_jax.sampler.samples import Prompts

pytestmark = [pytest.mark.slow, needs_libtpu]

PAGE = 128
SLOTS = {"v5p:2x2x2": 64, "v5e:4x4": 20}  # slots a device
LARGE = 2**18  # elements; weights have more


def configured(devices, slots):
  config = moe_tpu_v5.get_config()
  config.mesh.fsdp, config.mesh.expert = devices // 4, 4
  config.sampler_mesh.expert = devices
  config.data.prompts, config.rollout.group_size = 2 * devices, 8
  config.sampler.max_new_tokens = 3072
  config.learner.micro_batch_size = devices
  config.continuous_batching.slots = slots * devices
  config.continuous_batching.page_size = PAGE
  config.continuous_batching.num_pages = 0
  return config


class Segment:
  """Compiled segments of all slots and of the fewest; bytes of one device."""

  def __init__(self, topology):
    plan_compile.prepare()
    where, self.slots = chips.parse(topology), SLOTS[topology]
    devices = plan_compile.devices(where, 1)
    keys = configured(len(devices), self.slots)
    config = parse(keys)
    program = build_program(config, sh.make_mesh(devices, **keys.mesh))
    generate = program.sampler.generate
    key = jax.eval_shape(lambda: jax.random.key(0))
    P, S = config.data.prompts, config.data.max_prompt_length
    ints = lambda *dims: jax.ShapeDtypeStruct(dims, np.int32)
    call = program.abstract_policy, Prompts(ints(P, S), ints(P)), key
    lowered = generate.lower(*call, subsets=True)
    self.whole = plan_compile.compile_one(lowered["generate"])
    fewest = generate.compute_sizes[-1]
    self.subset = plan_compile.compile_one(lowered[f"generate {fewest}"])
    empty = generate.jitted.empty_samples.lower(P).out_info
    state, _ = generate.jitted.begin.lower(empty).out_info
    place = generate.batch_sharding
    few = jax.ShapeDtypeStruct((8 * len(devices),), np.int32, sharding=place)
    moves = generate.jitted.move_pages.lower(state, sh.Moves(few, few, few))
    self.moves = plan_compile.compile_one(moves)
    planned = lower.Planned(config, program, where)
    report = roofline.work("generate", self.whole, planned)
    self.step, sizes = report["decode"], generate.sizes  # a step of all slots
    # Tokens of a slot, and of the pool, with a partial page of each prompt.
    self.longest = sizes.pages_per_slot * PAGE
    self.pool = sizes.num_pages * PAGE
    cfg = program.cfg
    self.router = dims((cfg.embed_dim, cfg.num_experts))
    self.cache_shape = cfg.num_kv_heads, sizes.num_pages, PAGE, cfg.head_dim
    weights = zip(
      jax.tree.leaves(lowered["decode_params"].out_info),
      jax.tree.leaves(decode_params_sharding(cfg, generate.mesh)),
      strict=True,
    )
    self.weight_shapes = {
      getattr(place, "sharding", place).shard_shape(x.shape)
      for x, place in weights
    }


@pytest.fixture(scope="module", params=SLOTS)
def segment(request):
  return Segment(request.param)


@pytest.mark.parametrize("which", ["whole", "subset", "moves"])
def test_it_fits_and_its_temporaries_are_small(segment, which):
  compiled = getattr(segment, which)
  assert compiled.memory is not None, compiled.reason
  assert compiled.memory.temporaries < 0.02 * segment.step["pages_bytes"]


@pytest.mark.parametrize("mean", [1.0, 0.5, 0.25])
def test_a_step_moves_little_more_than_weights_and_cached_tokens(segment, mean):
  """At most 1.3 times the bytes of the weights and of the cached tokens."""
  step = segment.step
  assert step["kernel"]
  token = step["pages_bytes"] / segment.pool
  weights = step["least_bytes"] - step["pages_bytes"]
  rest = step["hbm_bytes"] - step["pages_bytes"]
  length = mean * segment.longest
  least = weights + token * segment.slots * length
  half = PAGE / 2 if mean < 1 else 0
  moved = rest + token * segment.slots * (length + half)
  assert weights <= moved < 1.3 * least


def dims(shape):
  return tuple(sorted(n for n in shape if n > 1))


@pytest.mark.parametrize("which", ["whole", "subset", "moves"])
def test_nothing_copies_pages_or_weights(segment, which):
  """But for a router, a thousandth of its layer, with a subset of slots."""
  large = {dims(segment.cache_shape)}
  large |= {dims(shape) for shape in segment.weight_shapes}
  large -= {segment.router} if which == "subset" else set()
  module = parse_hlo(getattr(segment, which).text)
  copies = [
    (i.op, array.dims)
    for computation in module.computations.values()
    for i in computation
    if i.op in ("copy", "transpose")
    for array in i.arrays
    if math.prod(array.dims) >= LARGE and dims(array.dims) in large
  ]
  assert not copies
