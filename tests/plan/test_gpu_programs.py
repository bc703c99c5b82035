"""The programs of a run, compiled for GPUs: kernels, temporaries, FLOPs.

Two layers of Qwen3-30B-A3B, with all experts. Nothing runs.
"""

import functools
import importlib.util
import re

import pytest

from gspo_jax.configs import common
from gspo_jax.plan import chips, lower, roofline
from gspo_jax.plan import compile as plan_compile
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs the extra `plan-gpu`",
  ),
]

TRITON, MOSAIC = "__gpu$xla.gpu.triton", "mosaic_gpu_v2"
GPUS = {"a100:1": TRITON, "l4:1": TRITON, "h100:1": MOSAIC}
EXPERTS = {TRITON: "PallasTritonRaggedDot", MOSAIC: "PallasMosaicGpuRaggedDot"}
FLASH = {
  TRITON: "PallasTritonFlashAttention",
  MOSAIC: "PallasMosaicGpuFlashAttention",
}


def config():
  c = common.get_config()
  c.model.variant, c.model.num_layers = "qwen3-30b-a3b", 2
  c.model.vocab_size = 4096
  c.data.prompts, c.data.max_prompt_length = 32, 512
  c.rollout.group_size, c.sampler.max_new_tokens = 8, 1536
  c.learner.minibatches, c.learner.micro_batch_size = 2, 4
  c.continuous_batching.slots, c.continuous_batching.page_size = 128, 64
  return parse(c)


@functools.cache
def lowered(gpu):
  plan_compile.prepare("cuda")
  devices = plan_compile.devices(chips.parse(gpu), 1)
  program = build_program(config(), sharding.make_mesh(devices, data=1))
  return program, lower.functions(config(), program)


@functools.cache
def compiled(gpu, name):
  program, functions = lowered(gpu)
  done = plan_compile.compile_one(functions[name], "cuda")
  work = roofline.work(name, done.text, config(), program, chips.parse(gpu))
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


def test_an_update_and_old_log_probs_are_one_program():
  """An unmoved policy has a ratio of 1 in every bit."""
  _, functions = lowered("h100:1")
  assert functions["update"] is functions["old_logps"]
