"""`model.exact`, compiled for TPU v5p: who decides in which order to add.

In the programs of the sampler, and in the forward pass of the trainer, no
product and no sum is XLA's own, and kernels divide a row's terms alike.
"""

import functools
import re

import jax
import numpy as np
import pytest
from compilers import absent_devices, needs_libtpu
from jax.sharding import NamedSharding

from gspo_jax.configs import moe_tpu_v5
from gspo_jax.logprobs import token_logprobs
from gspo_jax.model import rounding
from gspo_jax.plan import compile as plan_compile
from gspo_jax.plan import lower
from gspo_jax.plan.hlo import module as hlo
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.runtime.mesh_jit import MeshJit

pytestmark = [pytest.mark.slow, needs_libtpu]


@functools.cache
def programs():
  """The texts of compiled programs: three of the sampler, and the trainer's."""
  devices = absent_devices("v5p:2x2x1")
  keys = moe_tpu_v5.get_config()
  keys.model.exact = True
  keys.model.update(
    {
      "num_layers": 2,
      "vocab_size": 4096,
      "embed_dim": 1024,
      "mlp_dim": 256,
      "num_experts": 16,
      "experts_per_token": 4,
      "num_heads": 8,
      "num_kv_heads": 2,
    }
  )
  keys.mesh.data, keys.mesh.fsdp, keys.mesh.expert = 1, 2, 2
  keys.sampler_mesh.expert = 4
  keys.data.prompts, keys.rollout.group_size = 16, 8
  keys.data.max_prompt_length, keys.sampler.max_new_tokens = 256, 256
  keys.learner.micro_batch_size = 4
  keys.continuous_batching.slots = 128
  keys.continuous_batching.num_pages = 0
  config, mesh = parse(keys), sharding.make_mesh(devices, **keys.mesh)
  program = build_program(config, mesh)
  lowered = lower.functions(config, program)
  lowered["trainer"] = _forward(program)
  names = "generate", "prefill", "trainer"
  return {name: plan_compile.compile_one(lowered[name]).text for name in names}


def _forward(program):
  """Log-probs of packed rows, as the update computes them."""
  T = program.learner.packing.width
  rows = NamedSharding(program.mesh, sharding.ROWS)
  tokens = jax.ShapeDtypeStruct((4, T), np.int32, sharding=rows)

  def run(params, *operands):
    out = token_logprobs(params, program.cfg, *operands, response_length=T - 1)
    return out.logps

  jitted = MeshJit(run, program.mesh, compiler_options=rounding.OPTIONS)
  return jitted.lower(program.abstract_params, tokens, tokens, tokens)


def instructions(name):
  module = hlo.parse(programs()[name])
  for computation in module.computations.values():
    for i in computation:
      yield computation, i


@pytest.mark.parametrize("name", ["generate", "prefill", "trainer"])
def test_no_product_and_no_sum_is_of_the_compilers_order(name):
  """Sums of one number and zeros are; and those that choose a token."""
  text = programs()[name]
  assert not re.search(r" (dot|convolution)\(", text)
  sums = re.findall(
    r"= (?:f32|bf16)\S* reduce\(%(\w+)[^\n]*op_name=\"([^\"]*reduce_sum)", text
  )
  chooses = r"log_softmax|vmap\(\)"
  others = [x for x in sums if not re.search(chooses, x[1])]
  assert others or name == "prefill"
  assert {operand for operand, _ in others} <= {"select_n"}


def test_sampler_and_trainer_divide_products_alike():
  """By operands alone, not by rows; experts' tiles are in the programs."""
  found = {}
  for name in ("generate", "prefill", "trainer"):
    products, tiles = set(), set()
    for computation, i in instructions(name):
      if i.name.startswith("exact_product"):
        products.add(computation.operands(i)[1].arrays[0].dims)
      tiles.add(i.find(r'ragged_dot_tiling="(\d+,\d+,\d+)"'))
    found[name] = products, tiles - {None}
  (products, tiles), head = found["trainer"], (1024, 4096)
  assert found["generate"] == (products, tiles)
  assert found["prefill"] == (products - {head}, tiles)
  assert {t.partition(",")[0] for t in tiles} == {"128"}


def test_every_program_attends_by_the_kernel_of_pages():
  for text in programs().values():
    assert "%paged_attention" in text
    assert "splash" not in text
