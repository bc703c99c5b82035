"""GPUs: what XLA is told of them, and their kernels in a compiled program."""

import importlib.metadata
import json

import pytest
from compilers import needs_cuda
from processes import python

from gspo_jax.plan import gpus, hlo
from gspo_jax.plan import table as plan_table
from gspo_jax.plan.chips import parse
from gspo_jax.runtime.errors import UserError


def test_a_target_describes_the_gpu():
  lines = parse("l4:4").target().split("\n")
  for line in (
    "  cuda_compute_capability { major: 8 minor: 9 }",
    "  core_count: 58",
    "  device_memory_size: 23622320128",
    "  memory_bandwidth: 300000000000",
    "  shared_memory_per_block_optin: 101376",
    'device_description_str: "NVIDIA L4"',
    "runtime_version { major: 12 minor: 9 }",
  ):
    assert line in lines
  assert parse("l4:4").described(1)["topology"] == "1x1x4"


@pytest.mark.parametrize("kind", gpus.GPUS)
def test_all_gpus_have_limits(kind):
  assert "threads_per_core_limit: " in parse(f"{kind}:8").target()


def test_two_hosts_are_an_error():
  with pytest.raises(UserError, match="--slices=2: expected 1, as h100:8 is"):
    parse("h100:8").described(2)


@pytest.mark.parametrize(("set_to", "share"), [(None, 0.75), (".92", 0.92)])
def test_a_program_has_the_share_of_memory_that_jax_takes(
  monkeypatch, set_to, share
):
  name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
  monkeypatch.delenv(name, raising=False)
  if set_to:
    monkeypatch.setenv(name, set_to)
  gpu = parse("a100:1")
  assert gpu.chip.hbm == share * 85_100_068_864
  assert f"JAX takes {share:.0%} of the memory, 79.3 GiB" in gpu.note


def test_between_gpus_each_sends_over_its_own_links():
  host = parse("h100:8")
  assert (
    host.bandwidth(range(8), True) == host.bandwidth((0, 1), False) == 45e10
  )
  assert host.bandwidth_between(range(6), range(2)) == 2 * 45e10


# As XLA of jax 0.10.2 writes them, without what is not read.
TOKAMAX = (
  'metadata={op_name="jit(f)/block/tokamax:{\\"op\\":{\\"__type\\":\\"tokamax.'
  '_src.ops.OP\\",\\"config\\":{\\"block_m\\":64}}}/vmap()/mpmd_map" x=1}'
)
# Of tokamax 0.0.14 and jax 0.12.
NEW_TOKAMAX = (
  'metadata={op_name="jit(f)/block/mpmd_map" x=1 metadata_payload="tokamax:{'
  '\\"op\\":{\\"__type\\":\\"tokamax._src.ops.OP\\",\\"config\\":{'
  '\\"block_m\\":64}}}"}'
)
DOT = (
  '"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions"'
  ':["0","2"],"rhs_contracting_dimensions":["0","1"]},"epilogue":"DEFAULT"}'
)
QKV = "bf16[4,128,16,64], bf16[4,128,8,64], bf16[4,128,8,64], s32[4,1,128]"
PAIRS = 4 * 16 * 128 * 129 // 2  # rows, heads, a query and a key it sees
MOE = "s32[64], bf16[1024,256], bf16[8,256,128]"


def cost(operands, result, target, rest):
  """The cost of one custom call on an H100."""
  operands = operands.split(", ")
  lines = [f"  %p.{n} = {a} parameter({n})" for n, a in enumerate(operands)]
  names = ", ".join(f"%p.{n}" for n in range(len(operands)))
  text = "\n".join(
    [
      "ENTRY %main () -> f32[] {",
      *lines,
      f"  ROOT %call.1 = {result} custom-call({names}), "
      f'custom_call_target="{target}", {rest}',
      "}",
    ]
  )
  return hlo.cost_of(text, gpus.GPUS["h100"], lambda *_: 1.0, 1)


MOSAIC, TRITON = "mosaic_gpu_v2", "__gpu$xla.gpu.triton"
ATTENTION = "attention.pallas_mosaic_gpu.PallasMosaicGpuFlashAttention"


@pytest.mark.parametrize(
  ("operands", "result", "target", "operation", "flops"),
  [(QKV, "bf16[4,128,16,64]", MOSAIC, ATTENTION, 2 * PAIRS * 128),
   (QKV, "bf16[4,128,16,64]", MOSAIC, f"{ATTENTION}Vjp", 3 * PAIRS * 128),
   (QKV.replace("[4,", "["), "bf16[]", MOSAIC, ATTENTION, PAIRS * 64),
   (*(QKV, "(bf16[4,128,8,64], bf16[4,128,8,64])"),
    *(MOSAIC, f"{ATTENTION}Vjp", 4 * PAIRS * 128)),
   (*(QKV, "(bf16[4,128,16,64], bf16[4,128,8,64], bf16[4,128,8,64])"),
    *(TRITON, f"{ATTENTION}Vjp", 7 * PAIRS * 128))],
)  # fmt: skip
def test_attention_is_the_causal_half(
  operands, result, target, operation, flops
):
  found = cost(operands, result, target, TOKAMAX.replace("OP", operation))
  assert found.flops == found.attention_flops == flops
  assert not found.unknown_kernels
  assert list(found.by_source) == ["jit(f)/block"]


@pytest.mark.parametrize("written", [TOKAMAX, NEW_TOKAMAX])
def test_a_product_of_experts_pads_the_last_block_of_each_group(written):
  operation = written.replace("OP", "ragged_dot.x.PallasTritonRaggedDot")
  found = cost(MOE, "bf16[1024,128]", TRITON, operation)
  assert found.flops == 2 * 1024 * 256 * 128
  assert found.padding_flops == 2 * 7 * 64 * 256 * 128
  sizes = 64 * 4 + 2 * (1024 * 256 + 8 * 256 * 128 + 1024 * 128)
  assert found.hbm_bytes == sizes


def test_the_gradient_of_experts():
  name = 'backend_config={name = "grouped_weight_gradient", num_stages = 3}'
  rows = "bf16[1024,256], bf16[1024,128], s32[8], s32[8]"
  found = cost(rows, "bf16[8,256,128]", TRITON, name)
  assert found.flops == 2 * 1024 * 256 * 128


def test_a_product_by_cublas_does_not_write_its_scratch():
  found = cost(
    *("bf16[4,8,16], bf16[4,16,32]", "(f32[8,32], s8[4194304])"),
    *("__cublas$lt$matmul", f"backend_config={{{DOT}}}"),
  )
  assert found.flops == 2 * 8 * 32 * 4 * 16
  assert found.hbm_bytes == 2 * 4 * (8 * 16 + 16 * 32) + 4 * 8 * 32


def test_a_kernel_without_a_rule_is_listed():
  pages = "bf16[256,8,16,128], bf16[8,99,64,128], bf16[8,99,64,128]"
  paged = 'backend_config={name = "paged_attention_block_h_16", num_warps = 2}'
  found = cost(pages, "bf16[256,8,128]", TRITON, paged)
  assert found.unknown_kernels == {"paged_attention": 1}
  found = cost(pages, "bf16[4]", MOSAIC, 'metadata={op_name="jit(f)/other"}')
  assert found.unknown_kernels == {"call.1": 1}


@needs_cuda
@pytest.mark.slow  # compiles three functions: 30 s of CPU
@pytest.mark.parametrize("topology", ["l4:1", "h100:1"])
def test_a_config_compiled_for_a_gpu(topology):
  done = python(
    *("-m", "gspo_jax.plan", "--json", f"--topology={topology}"),
    "--config=configs/tiny_cpu.py:debug",
    # Rows of 64 tokens: attention pads others on an H100.
    "--config.sampler.max_new_tokens=56",
    *("--config.model.dtype=bfloat16", "--lengths=lognormal:mean=.4,sigma=1"),
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  lines = done.stderr.splitlines()
  assert all(line.startswith(("compiling", "scheduling")) for line in lines)
  told = json.loads(done.stdout)
  version = importlib.metadata.version("jax-cuda12-plugin")
  assert told["compiled_by"] == f"jax-cuda12-plugin {version}"
  assert list(told["functions"]) == ["update", "old_logps", "generate"]
  for function in told["functions"].values():
    assert function["compiler"] is None
    assert function["branches"] == [] == function["loops"]
    assert function["memory"]["free"] > 0.99 * told["hbm"]
    # Tokens without a response, and the last product of each prompt.
    assert 0.9 < function["flops"] / function["model_flops"] < 1.2
  update = told["functions"]["update"]
  assert update["attention_flops"] > 0
  assert 0 < told["iteration"]["seconds"] < 1
  # The table has no column for what is not known.
  told["config"] = "tiny"
  table = plan_table.render(told, top=2)
  assert max(map(len, table.splitlines())) <= 100
  assert "libtpu" not in table
