"""The program of a config: what it refuses, and where its arrays lie."""

import re

import jax
import jax.numpy as jnp
import pytest

from gspo_jax import program, sharding
from gspo_jax.errors import UserError
from gspo_jax.sampler import Prompts


@pytest.mark.parametrize(
  ("sampler_mesh", "words"),
  [
    ({"expert": 3}, "expert=3 times tensor=1 does not divide the 8 devices"),
    ({"tensor": 8}, "on sampler_mesh: vocab=258 of embed .* by mesh.tensor=8"),
    ({"expert": -1}, "sampler_mesh.expert=-1: expected 0 or more"),
  ],
)
def test_a_sampler_mesh_that_does_not_fit(debug_config, sampler_mesh, words):
  debug_config.sampler_mesh.update(sampler_mesh)
  debug_config.data.prompts = debug_config.learner.micro_rows = 8
  debug_config.cold_start.batch = 16
  with pytest.raises(UserError, match=words):
    program.build(debug_config, sharding.make_mesh(data=8))


def test_prompts_must_lie_evenly_where_answers_are_drawn(debug_config):
  mesh = sharding.make_mesh(tensor=8)
  debug_config.model.variant = "qwen3-8b"  # eight heads; no array is made
  debug_config.sampler_mesh.tensor = 1
  debug_config.data.prompts = 12
  with pytest.raises(UserError, match=r"rows = 8 \(sampler_mesh\); .*8 and 16"):
    program.build(debug_config, mesh)


def test_generate_splits_caches_weights_and_logits(debug_config):
  """Read from the compiled program: what a device holds while it decodes."""
  debug_config.data.prompts = debug_config.learner.micro_rows = 8
  debug_config.sampler.max_new_tokens = 23
  debug_config.model.dtype = "float32"
  run = program.build(debug_config, sharding.make_mesh(fsdp=2, expert=4))
  shape = jax.ShapeDtypeStruct
  prompts = Prompts(shape((8, 8), jnp.int32), shape((8,), jnp.int32))
  key = jax.eval_shape(lambda: jax.random.key(0))
  text = run.generate.lower(run.abstract.params, prompts, key).compile()
  loops = re.findall(r"= \((.*?)\) while\(", text.as_text())
  (decoding,) = [loop for loop in loops if "f32[4,4,22,16]" in loop]
  assert "f32[32,4,22,16]" not in decoding  # 32 rows, over eight devices
  assert "f32[2,64,128]" in decoding  # two experts of eight
  assert "f32[64,65]" in decoding  # a quarter of the vocabulary of 258
  assert "258]" not in decoding
