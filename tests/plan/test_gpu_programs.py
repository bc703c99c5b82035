"""Programs of two layers of Qwen3-30B-A3B, compiled for GPUs; nothing runs."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from compilers import absent_devices, needs_cuda

from gspo_jax.configs import common
from gspo_jax.model import attention, grouped_matmul
from gspo_jax.model.gpu import for_absent
from gspo_jax.plan import chips, lower, roofline
from gspo_jax.plan import compile as plan_compile
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding

pytestmark = [pytest.mark.slow, needs_cuda]

TRITON, MOSAIC = "__gpu$xla.gpu.triton", "mosaic_gpu_v2"
GPUS = {"a100:1": TRITON, "l4:1": TRITON, "h100:1": MOSAIC}
EXPERTS = {TRITON: "PallasTritonRaggedDot", MOSAIC: "PallasMosaicGpuRaggedDot"}
FLASH = {
  TRITON: "PallasTritonFlashAttention",
  MOSAIC: "PallasMosaicGpuFlashAttention",
}


def config(dtype="bfloat16"):
  c = common.get_config()
  c.model.dtype = dtype
  c.model.variant, c.model.num_layers = "qwen3-30b-a3b", 2
  c.model.vocab_size = 4096
  c.data.prompts, c.data.max_prompt_length = 32, 512
  c.rollout.group_size, c.sampler.max_new_tokens = 8, 1536
  c.learner.minibatches, c.learner.micro_batch_size = 2, 4
  c.continuous_batching.slots, c.continuous_batching.page_size = 128, 64
  return parse(c)


@functools.cache
def lowered(gpu, dtype="bfloat16"):
  mesh = sharding.make_mesh(absent_devices(gpu), data=1)
  configured = config(dtype)
  program = build_program(configured, mesh)
  return program, lower.functions(configured, program)


@functools.cache
def compiled(gpu, name):
  program, functions = lowered(gpu)
  done = plan_compile.compile_one(functions[name], "cuda")
  planned = lower.Planned(config(), program, chips.parse(gpu))
  work = roofline.work(name, done, planned)
  return done, work


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", ["update", "prefill", "generate"])
def test_kernels_temporaries_and_flops(gpu, name):
  done, work = compiled(gpu, name)
  kernels = [f"tokamax.*{EXPERTS[GPUS[gpu]]}"]
  kernels += ["paged_attention"] if name == "generate" else []
  kernels += [f"tokamax.*{FLASH[GPUS[gpu]]}"] if name == "update" else []
  calls = [line for line in done.text.splitlines() if "custom-call(" in line]
  for kernel in kernels:
    assert any(re.search(kernel, line) for line in calls), kernel
  assert "ragged-dot" not in done.text
  # Two gradients of all weights, and the rows of the experts of a micro-batch.
  limit = {"update": 13, "prefill": 1, "generate": 1}[name]
  assert done.memory.temporaries < limit * 2**30
  # With the recomputed ones; 16 times as many, were the products dense.
  assert work["flops"] < 1.5 * work["model_flops"]


@pytest.mark.parametrize("gpu", GPUS)
def test_lengths_that_are_no_multiple_of_a_tile(gpu):
  """Mosaic refuses them only while it compiles."""
  (device,) = absent_devices(gpu)
  mesh = sharding.make_mesh([device], data=1)
  everywhere = sharding.replicated(mesh)
  shape = lambda dtype, *dims: jax.ShapeDtypeStruct(
    dims, dtype, sharding=everywhere
  )
  numbers = functools.partial(shape, jnp.bfloat16)
  ints = functools.partial(shape, jnp.int32)

  def attend(q, k, segments):
    total = lambda *x: attention.attend(*x, segments).sum()
    return jax.grad(total, (0, 1, 2))(q, k, k)

  def multiply(x, weights, sizes):
    total = lambda *x: grouped_matmul.matmul(*x, sizes).sum()
    return jax.grad(total, (0, 1))(x, weights)

  queries, keys = numbers(2, 176, 4, 64), numbers(2, 176, 2, 64)
  operands = numbers(70, 128), numbers(5, 128, 64), ints(5)
  with jax.set_mesh(mesh), for_absent(device):
    for function, args in (
      (attend, (queries, keys, ints(2, 176))),
      (multiply, operands),
    ):
      text = jax.jit(function).lower(*args).compile().as_text()
      assert "tokamax" in text


def test_a_t4_has_no_kernels():
  program, functions = lowered("t4:1", dtype="float32")
  done = plan_compile.compile_one(functions["generate"], "cuda")
  assert TRITON not in done.text
  planned = lower.Planned(config("float32"), program, chips.parse("t4:1"))
  work = roofline.work("generate", done, planned)
  assert work["flops"] < 1.5 * work["model_flops"]
