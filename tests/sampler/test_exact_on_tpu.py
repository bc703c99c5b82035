"""`model.exact`, compiled for TPU v5p: who decides in which order to add.

In the programs of the sampler, and in the forward pass of the update, no
product and no sum is XLA's own, and kernels divide a row's terms alike.
"""

import functools
import re

import pytest
from compilers import absent_devices, needs_libtpu

from gspo_jax.configs import moe_tpu_v5
from gspo_jax.plan import compile as plan_compile
from gspo_jax.plan import lower
from gspo_jax.plan.hlo import module as hlo
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding

pytestmark = [pytest.mark.slow, needs_libtpu]
NAMES = "generate", "prefill", "update"


@functools.cache
def programs():
  """The texts of compiled programs."""
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
  return {name: plan_compile.compile_one(lowered[name]).text for name in NAMES}


def forward(name):
  """The lines of a program, without those of a backward pass."""
  lines = programs()[name].splitlines()
  return [line for line in lines if "transpose(" not in line]


def instructions(name):
  module = hlo.parse(programs()[name])
  for computation in module.computations.values():
    for i in computation:
      if not i.find(r'op_name="([^"]*transpose\([^"]*)"'):
        yield computation, i


@pytest.mark.parametrize("name", NAMES)
def test_no_product_and_no_sum_is_of_the_compilers_order(name):
  """Sums of one number and zeros are, and those that choose a token.

  In the update also an entropy's, which no log-prob reads, and those of losses
  and of the optimizer.
  """
  text = "\n".join(forward(name))
  assert not re.search(r" (dot|convolution)\(", text)
  sums = re.findall(
    r"= (?:f32|bf16)\S* reduce\(%(\w+)[^\n]*op_name=\"([^\"]*)/reduce_sum", text
  )
  others = r"log_softmax|vmap\(\)|closed_call$|branch_1_fun$|policy_loss\)+$"
  own = [operand for operand, at in sums if not re.search(others, at)]
  entropies = [x for x, at in sums if "wanted_tokens" in at and x != "select_n"]
  assert own or name == "prefill"
  assert set(own) <= {"select_n"}
  assert entropies == (["mul"] if name == "update" else [])


def test_sampler_and_trainer_divide_products_alike():
  """By operands alone, not by rows; experts' tiles are in the programs."""
  found = {}
  for name in NAMES:
    products, tiles = set(), set()
    for computation, i in instructions(name):
      if i.name.startswith("exact_product"):
        products.add(computation.operands(i)[1].arrays[0].dims)
      tiles.add(i.find(r'ragged_dot_tiling="(\d+,\d+,\d+)"'))
    found[name] = products, tiles - {None}
  (products, tiles), head = found["update"], (1024, 4096)
  assert found["generate"] == (products, tiles)
  assert found["prefill"] == (products - {head}, tiles)
  assert {t.partition(",")[0] for t in tiles} == {"128"}


def test_every_program_attends_by_the_kernel_of_pages():
  """Splash attention gives gradients alone: each of its forward calls one."""
  for text in programs().values():
    assert "%paged_attention" in text
    calls = [
      len(re.findall(f"  %splash_mha_{x}\\S* = ", text)) for x in ("fwd", "dkv")
    ]
    assert calls[0] == calls[1]
  assert "splash" not in programs()["generate"] + programs()["prefill"]
