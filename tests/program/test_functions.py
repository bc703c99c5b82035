"""A program on the real model: its meshes, an iteration, its compilations."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from repository import ROOT

from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import mesh_jit, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.samples import Prompts


def test_a_gpu_without_bfloat16(debug_config):
  t4 = types.SimpleNamespace(
    platform="gpu", device_kind="Tesla T4", compute_capability="7.5"
  )
  shape = sharding.make_mesh(jax.devices()[:1]).shape
  mesh = types.SimpleNamespace(shape=shape, devices=np.array([t4]), size=1)
  debug_config.model.dtype = "bfloat16"
  words = "model.dtype=bfloat16: Tesla T4 has compute capability 7.5, .*float32"
  with pytest.raises(UserError, match=words):
    build_program(parse(debug_config), mesh)


@pytest.mark.parametrize(
  ("variant", "platform", "tensor", "words"),
  [("tiny", "gpu", 1, "model.exact=True: expected False on a kind of gpu"),
   ("tiny", "tpu", 1, "model.exact=True: expected False on a kind of tpu"),
   ("tiny-moonlight", "cpu", 2, r"or mesh.tensor=1 \(it is 2\): with MLA")],
)  # fmt: skip
def test_what_is_not_exact_is_refused(
  debug_config, variant, platform, tensor, words
):
  debug_config.model.update(variant=variant, exact=True)
  device = types.SimpleNamespace(
    platform=platform,
    device_kind=f"kind of {platform}",
    compute_capability="9.0",
  )
  shape = sharding.make_mesh(jax.devices()[:1]).shape | {"tensor": tensor}
  mesh = types.SimpleNamespace(shape=shape, devices=np.array([device]), size=1)
  with pytest.raises(UserError, match=words):
    build_program(parse(debug_config), mesh, training=False)


@pytest.mark.parametrize(
  ("sampler_mesh", "words"),
  [({"expert": 3}, "expert=3 times tensor=1 does not divide the 8 devices"),
   ({"tensor": 8}, "on sampler_mesh: vocab=258 of embed .* by mesh.tensor=8"),
   ({"expert": -1}, "sampler_mesh.expert=-1: expected 0 or more")],
)  # fmt: skip
def test_a_sampler_mesh_that_does_not_fit(debug_config, sampler_mesh, words):
  debug_config.sampler_mesh.update(sampler_mesh)
  debug_config.data.prompts = debug_config.learner.micro_batch_size = 8
  debug_config.cold_start.batch = 16
  with pytest.raises(UserError, match=words):
    build_program(parse(debug_config), sharding.make_mesh(data=8))


def test_prompts_must_divide_over_the_sampler_mesh(debug_config):
  mesh = sharding.make_mesh(tensor=8)
  debug_config.model.variant = "qwen3-8b"  # eight heads; no array is made
  debug_config.sampler_mesh.tensor = 1
  debug_config.data.prompts = 12
  with pytest.raises(UserError, match=r"rows = 8 \(sampler_mesh\); .*8 and 16"):
    build_program(parse(debug_config), mesh)


@pytest.mark.parametrize(
  ("axes", "prompts", "samples", "size", "slots"),
  [
    ({"data": 8}, 23, 1, 24, 24),
    ({"data": 2, "tensor": 4}, 5, 4, 6, 24),  # 2 shards, not 8 devices
    ({"data": 8}, 65, 8, 72, 256),
  ],
)
def test_an_evaluation_has_no_more_rows_than_it_needs(
  debug_config, axes, prompts, samples, size, slots
):
  """Of 512 responses an iteration, 256 of them at once; or all of them."""
  debug_config.data.prompts, debug_config.rollout.group_size = 64, 8
  debug_config.eval.update({"prompts": prompts, "samples": samples})
  debug_config.continuous_batching.slots = 256
  debug_config.model.variant = "qwen3-8b"  # eight heads; no array is made
  mesh = sharding.make_mesh(**axes)
  found = build_program(parse(debug_config), mesh, training=False).sampler
  assert len(found.padded(prompts)) == size
  assert found.respond.batching.slots == slots
  assert found.generate.batching.slots == 256
  debug_config.continuous_batching.slots = 0
  found = build_program(parse(debug_config), mesh, training=False).sampler
  assert found.respond.batching.slots == min(size * samples, 512)


def test_generate_splits_caches_weights_and_logits(debug_config):
  """Read from the compiled program: what a device holds while it decodes."""
  debug_config.data.prompts = debug_config.learner.micro_batch_size = 8
  debug_config.sampler.max_new_tokens = 23
  debug_config.model.dtype = "float32"
  program = build_program(
    parse(debug_config), sharding.make_mesh(fsdp=2, expert=4), training=False
  )
  shape = jax.ShapeDtypeStruct
  prompts = Prompts(shape((8, 8), jnp.int32), shape((8,), jnp.int32))
  key = jax.eval_shape(lambda: jax.random.key(0))
  lowered = program.sampler.generate.lower(
    program.abstract_params, prompts, key
  )["generate"]
  loops = re.findall(r"= \((.*?)\) while\(", lowered.compile().as_text())
  (decoding,) = [loop for loop in loops if "f32[4,4,22,16]" in loop]
  assert "f32[32,4,22,16]" not in decoding  # 32 rows, over eight devices
  assert "f32[2,64,128]" in decoding  # two experts of eight
  assert "f32[64,65]" in decoding  # a quarter of the vocabulary of 258
  assert "258]" not in decoding


def test_weights_go_to_a_sampler_of_as_many_devices(debug_config):
  """Split otherwise there, cast, and the same; and samples come back."""
  debug_config.data.prompts = debug_config.learner.micro_batch_size = 8
  debug_config.model.dtype = "bfloat16"
  debug_config.sampler_mesh.tensor = 2
  debug_config.sampler_mesh.devices = 4
  devices, own = sharding.split_devices(4)
  made = build_program(
    parse(debug_config),
    sharding.make_mesh(devices, fsdp=-1),
    sampler_devices=own,
  )
  policy = made.init_params(jax.random.key(0))
  separate = made.sampler.separate
  sent = separate.sync_weights(policy)
  assert [x.sharding for x in jax.tree.leaves(sent)] == [
    x.sharding for x in jax.tree.leaves(separate.weights)
  ]
  for x, y in zip(*map(jax.tree.leaves, (policy, sent)), strict=True):
    assert y.sharding.device_set == {*own}
    np.testing.assert_array_equal(np.asarray(x.astype("bfloat16")), y)
  empty = made.sampler.empty_samples()
  rows = np.arange(len(empty.lengths), dtype=np.int32)
  samples = dataclasses.replace(
    empty, lengths=jax.device_put(rows, empty.lengths.sharding)
  )
  here = separate.to_trainer(samples)
  assert here.lengths.sharding == sharding.batch_sharding(made.mesh)
  np.testing.assert_array_equal(here.lengths, rows)
  there = separate.to_sampler(here)
  assert there.lengths.sharding == empty.lengths.sharding
  np.testing.assert_array_equal(there.lengths, rows)


def test_a_part_of_a_sampler_has_a_limit_of_programs(debug_config):
  debug_config.continuous_batching.slots = 4
  program = build_program(
    parse(debug_config), sharding.make_mesh(jax.devices()[:1])
  )
  for part in ("decode", "prefill"):
    jit = getattr(program.sampler.generate.jitted, part)
    jit._programs.update(dict.fromkeys(range(jit.most)))
    program.check_compiled_once()
    jit._programs["another"] = None
    with pytest.raises(RuntimeError, match=f"^{part} has {jit.most + 1} "):
      program.check_compiled_once()
    jit._programs.clear()


def test_code_of_the_users_is_in_no_executable(debug_config, monkeypatch):
  """Its source is no part of an executable's name."""
  monkeypatch.setattr(mesh_jit, "_folder", ROOT)
  mesh = sharding.make_mesh(jax.devices()[:1])
  build_program(parse(debug_config), mesh)
  assert mesh_jit._folder
  debug_config.objective.name = "gspo_jax.losses.policy.gspo_loss"
  build_program(parse(debug_config), mesh)
  assert mesh_jit._folder is None


def test_without_training_there_is_no_learner_and_no_check(debug_config):
  debug_config.learner.micro_batch_size = 3  # divides nothing
  debug_config.sampler.temperature = 0
  mesh = sharding.make_mesh(jax.devices()[:1])
  program = build_program(parse(debug_config), mesh, training=False)
  assert program.learner is None
  assert program.cold_start is None
  with pytest.raises(UserError, match="temperature"):
    build_program(parse(debug_config), mesh)


@pytest.mark.parametrize("every_minibatch", [False, True])
def test_tokens_of_the_functions_that_run(debug_config, every_minibatch):
  """Old log-probs of the first minibatch are of one micro-batch alone."""
  if every_minibatch:  # for the reward
    debug_config.objective.update({"kl_coef": 0.1, "kl_estimator": "k1"})
  debug_config.learner.update({"minibatches": 2, "micro_batch_size": 2})
  mesh = sharding.make_mesh(jax.devices()[:1])
  learner = build_program(parse(debug_config), mesh).learner
  width = learner.packing.width
  lengths = np.full(16, width - 8)  # a row each
  lengths[3] = 0  # and one of nothing
  prompt_lengths = np.full(4, 8)
  packed = learner.pack(prompt_lengths, lengths, jax.random.key(0))
  tokens = learner.row_tokens(prompt_lengths, lengths, packed)
  whole = 8, 15 * width, 16 * width
  assert tokens.pop("update") == whole
  if every_minibatch:
    assert tokens == {"old_logps": whole, "reference_and_values": whole}
  else:
    (old,) = tokens.values()
    assert old.micro_batches == 1 + 4
    assert old.computed == 10 * width
    assert 9 * width <= old.real <= 10 * width
