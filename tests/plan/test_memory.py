"""What else is in memory, and the largest pool of pages that it leaves."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from gspo_jax import model
from gspo_jax.configs import tiny_cpu
from gspo_jax.plan import chips, planner
from gspo_jax.plan import compile as plan_compile
from gspo_jax.plan import memory as plan_memory
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding

MIB, GIB = 2**20, 2**30
WHERE = chips.parse("v5e:2x4")
STATIC, PAGED = (SimpleNamespace(batching=slots) for slots in (None, 8))


@pytest.fixture(scope="module")
def made():
  """Programs with 4 GiB of moments over 8 devices; the second has more."""
  mesh = sharding.make_mesh(fsdp=8)
  split = jax.ShapeDtypeStruct(
    (8, GIB // 8), jnp.float32, sharding=sharding.batch_sharding(mesh)
  )
  count = jax.ShapeDtypeStruct(
    (), jnp.int32, sharding=sharding.replicated(mesh)
  )
  critic = SimpleNamespace(params=[split] * 2, opt_state=[split] * 3)
  state = SimpleNamespace(
    params=[split] * 4,
    opt_state=[split, count],
    reference=[split] * 5,
    critic=critic,
  )
  bare = SimpleNamespace(
    params=[split],
    opt_state=[split, count],
    reference=None,
    critic=None,
  )
  return program(bare), program(state, teachers=([split] * 6, [split]))


def program(state, generate=STATIC, separate=None, teachers=()):
  """A program with the state of its learner alone."""
  return SimpleNamespace(
    abstract_policy=state.params,
    learner=SimpleNamespace(abstract=state, teachers=teachers),
    sampler=SimpleNamespace(generate=generate, separate=separate),
  )


def memory(name, made, temporaries):
  sizes = plan_compile.Memory(GIB, 0, 0, temporaries, 0, 0)
  resident = plan_memory.resident(name, made)
  return plan_memory.memory(name, sizes, resident, WHERE)


def test_what_a_function_does_not_read_stays(made):
  _, whole = made
  resident = lambda name: plan_memory.resident(name, whole)
  teachers = 7 * GIB // 2
  assert resident("update") == teachers
  assert resident("old_logps") == teachers  # the same program
  assert resident("generate") == teachers + (1 + 3 + 5 + 2) * GIB // 2 + 4
  assert resident("reference_and_values") == (4 + 1 + 3) * GIB // 2 + 4


def test_with_pages_the_parameters_stay_while_others_decode(made):
  bare, _ = made
  paged = program(bare.learner.abstract, PAGED)
  resident = plan_memory.resident
  parameters = GIB // 2
  for name, more in (("decode_params", 0), ("prefill", parameters)):
    assert resident(name, paged) == resident("generate", bare) + more
  assert resident("generate", paged) == resident("prefill", paged)


def test_a_sampler_of_its_own_devices_holds_weights_alone(made):
  """Those in use, and one copy for each batch ahead; no moments."""
  _, whole = made
  state = whole.learner.abstract
  separate = SimpleNamespace(weights=state.params, in_transit=state.params)
  weights = 4 * GIB // 2
  resident = plan_memory.resident
  static = program(state, separate=separate)
  paged = program(state, PAGED, separate)
  for ahead in (0, 1, 4):
    # Weights are an argument of these two.
    assert resident("generate", static, ahead) == ahead * weights
    assert resident("decode_params", paged, ahead) == ahead * weights
    for name in ("prefill", "generate"):
      assert resident(name, paged, ahead) == (1 + ahead) * weights
  # The trainer holds a copy on its way.
  assert resident("update", paged) == weights
  assert resident("reference_and_values", paged) == weights + resident(
    "reference_and_values", whole
  )


def test_what_the_compiler_fits_may_not_fit_beside_the_moments(made):
  made, _ = made
  temporaries = int(14.5 * GIB)
  assert "fits" not in memory("update", made, temporaries)
  report = memory("generate", made, temporaries)
  needed = GIB + temporaries + GIB // 2 + 4
  assert report["memory"]["needed"] == needed
  assert report["memory"]["free"] == WHERE.chip.hbm - needed
  assert report["fits"] is False
  assert report["reason"] == (
    "16.00 GiB needed, 0.50 of it for state that generate does not read, but "
    "15.75 GiB there"
  )


@pytest.fixture(scope="module")
def paged():
  """A config with 4 slots and 96 pages of 4 tokens, and its program."""
  keys = tiny_cpu.get_config("debug")
  keys.continuous_batching.update(
    {"slots": 4, "page_size": 4, "prefill_chunk": 8, "num_pages": 96}
  )
  config = parse(keys)
  mesh = sharding.make_mesh(jax.devices()[:2], data=2)
  return config, build_program(config, mesh)


def slots_of(tensor):
  """A sampler with 8 slots on each device, and pages of 4 tokens."""
  return SimpleNamespace(
    mesh=sharding.make_mesh(jax.devices()[:2], data=-1, tensor=tensor),
    sizes=SimpleNamespace(page_size=4, pages_per_slot=3, slots=8),
    batching=SimpleNamespace(slots=16),
    shards=1,
  )


@pytest.mark.parametrize("tensor", [1, 2])
def test_states_of_slots_and_whole_latents(tensor):
  """A device has its part of the heads, and all latents."""
  sampler = slots_of(tensor)
  cfg = model.variant("tiny-qwen3.5", dtype="float32")
  # One layer, 4 heads of [16, 16], and 3 tokens of 2 groups of heads; of 8
  # slots, and of two prompts whose responses wait for one.
  states = 10 * 4 * (4 * 16 * 16 + 2 * 3 * 64) // tensor
  assert plan_memory.state_bytes(cfg, sampler) == states
  # Of the other layer, keys and values, 2 heads, padded to 128 columns.
  size = plan_memory.page_bytes(cfg, sampler)
  assert size == 2 * 2 // tensor * 4 * 128 * 4
  cfg = model.variant("tiny-moonlight", dtype="float32")
  assert plan_memory.state_bytes(cfg, sampler) == 0
  assert plan_memory.page_bytes(cfg, sampler) == 3 * 4 * 128 * 4


def test_states_are_named_even_where_no_pool_is_small_enough():
  def reasons(variant):
    sampler = SimpleNamespace(generate=slots_of(1))
    program = SimpleNamespace(cfg=model.variant(variant), sampler=sampler)
    unfit = {"fits": False, "reason": "too much"}
    results = {name: dict(unfit) for name in ("update", "generate")}
    planner._add_advice(results, program)
    return [result["reason"] for result in results.values()]

  update, generate = reasons("qwen3.6-35b-a3b")
  assert update == "too much"
  # 30 layers with 32 heads of [128, 128], and 3 tokens of 16 key heads.
  size = 10 * 30 * (4 * 32 * 128 * 128 + 2 * 16 * 3 * 512) / GIB
  assert generate == (
    "too much; continuous_batching.slots=16: their states take "
    f"{size:.2f} GiB of a device"
  )
  assert reasons("moonlight-16b-a3b") == ["too much"] * 2


def test_the_largest_pool_leaves_the_margin_and_not_a_page_more(paged):
  _, program = paged
  generate, cfg = program.sampler.generate, program.cfg
  hbm, needed = 64 * MIB, 5 * MIB
  room = plan_memory.room(needed, hbm, cfg, generate)
  assert (room["num_pages"], generate.shards) == (96, 2)
  more = room["largest"] // 2 - 48
  size = room["page_bytes"]
  assert needed + more * size <= (1 - plan_memory.MARGIN) * hbm
  assert needed + (more + 1) * size > (1 - plan_memory.MARGIN) * hbm
  # The longest is 8 prompt tokens and 12: 5 pages, and a partial one.
  assert room["slots_of_longest"] == room["largest"] // 2 // 6 * 2
  assert room["tokens_a_slot"] == room["largest"] // 2 * 4 // 2
  assert plan_memory.advice(room) == (
    f"continuous_batching.num_pages=96: expected at most {room['largest']}, "
    "which leave 8% of the HBM free"
  )
  none = plan_memory.room(2 * hbm, hbm, cfg, generate)
  assert none["largest"] == 0
