"""NVIDIA GPUs of one host: peak rates, and what XLA needs to compile for them.

Sources:
  FLOPs, bandwidth and NVLink: NVIDIA's data sheets of H100 (SXM), H200, A100
    (SXM), L4 and T4. FLOPs are dense: sheets that count sparse products are
    halved. NVLink is one way, half of what they state; L4 and T4 have PCIe, of
    generation 4 and 3. A T4 has no bfloat16: FLOPs in float32
  Memory: what CUDA reports on H100, H200 and A100, from the target
    configurations of github.com/openxla/xla; about that on L4 and T4
  Multiprocessors and clock: NVIDIA's white papers of these architectures
  Limits of a compute capability: CUDA C++ Programming Guide, technical
    specifications
"""

import dataclasses
import math
import os
from collections.abc import Sequence

from gspo_jax.runtime.errors import UserError

_GIB = 2**30
_MOST = 8  # GPUs of a host
# Seconds that a collective takes at least, over NVLink or a data centre's
# network: assumed.
LATENCY = 1e-5


@dataclasses.dataclass(frozen=True)
class Gpu:
  """One GPU. XLA states no cycles of its operations, so no clock is needed."""

  name: str
  flops: float  # a second in bfloat16, in float32 on a T4
  memory: float  # bytes
  hbm_bandwidth: float  # bytes a second
  link: float  # bytes a second that it sends to the other GPUs of the host
  capability: tuple[int, int]
  cores: int  # streaming multiprocessors
  gigahertz: float
  cache: int  # bytes of level 2

  clock = None
  on_chip = 1
  # Not estimated: a sort counts only the bytes of its operands and results.
  vector_bandwidth = math.inf

  @property
  def hbm(self) -> float:
    """Bytes that a program may use."""
    return memory_share() * self.memory


GPUS = {
  "h100": Gpu(
    *("NVIDIA H100 80GB HBM3", 989e12, 84_942_979_072, 3352e9, 450e9),
    *((9, 0), 132, 1.98, 50 * 2**20),
  ),
  "h200": Gpu(
    *("NVIDIA H200", 989e12, 151_397_597_184, 4800e9, 450e9),
    *((9, 0), 132, 1.98, 50 * 2**20),
  ),
  "a100": Gpu(
    *("NVIDIA A100-SXM4-80GB", 312e12, 85_100_068_864, 2039e9, 300e9),
    *((8, 0), 108, 1.41, 40 * 2**20),
  ),
  "a100-40gb": Gpu(
    *("NVIDIA A100-SXM4-40GB", 312e12, 42_331_013_120, 1555e9, 300e9),
    *((8, 0), 108, 1.41, 40 * 2**20),
  ),
  "l4": Gpu(
    *("NVIDIA L4", 121e12, 22.0 * _GIB, 300e9, 32e9),
    *((8, 9), 58, 2.04, 48 * 2**20),
  ),
  "t4": Gpu(
    *("Tesla T4", 8.1e12, 14.74 * _GIB, 320e9, 16e9),
    *((7, 5), 40, 1.59, 4 * 2**20),
  ),
}

# Of a multiprocessor: threads, float32 units, and bytes of shared memory, of
# which a block may have all but 1 KiB, on a T4 all.
_LIMITS = {
  (7, 5): (1024, 64, 65_536, 65_536),
  (8, 0): (2048, 64, 167_936, 166_912),
  (8, 9): (1536, 128, 102_400, 101_376),
  (9, 0): (2048, 128, 233_472, 232_448),
}

# The programs are compiled for CUDA 12.9; wheels of other versions do as well.
_TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {gpu.cores}
  clock_rate_ghz: {gpu.gigahertz}
  device_memory_size: {gpu.memory:.0f}
  memory_bandwidth: {gpu.hbm_bandwidth:.0f}
  l2_cache_size: {gpu.cache}
  threads_per_core_limit: {limits[0]}
  fpus_per_core: {limits[1]}
  shared_memory_per_core: {limits[2]}
  shared_memory_per_block_optin: {limits[3]}
  shared_memory_per_block: 49152
  threads_per_block_limit: 1024
  threads_per_warp: 32
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
device_description_str: "{gpu.name}"
runtime_version {{ major: 12 minor: 9 }}
dnn_version_info {{ major: 9 minor: 10 }}
"""


def memory_share() -> float:
  """The share of a GPU's memory that JAX takes, which bounds a program."""
  names = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
  return float(next(filter(None, map(os.environ.get, names)), 0.75))


@dataclasses.dataclass(frozen=True)
class Host:
  """GPUs of one kind in one host."""

  kind: str
  count: int

  platform = "cuda"

  def __str__(self) -> str:
    return f"{self.kind}:{self.count}"

  @property
  def chip(self) -> Gpu:
    return GPUS[self.kind]

  @property
  def note(self) -> str:
    return (
      "compiler roofline, nothing ran on a GPU;\n"
      f"JAX takes {memory_share():.0%} of the memory, "
      f"{self.chip.memory / _GIB:.1f} GiB (XLA_PYTHON_CLIENT_MEM_FRACTION)"
    )

  def target(self) -> str:
    """The GPU as XLA describes it, a text of GpuTargetConfigProto."""
    (major, minor), limits = self.chip.capability, _LIMITS[self.chip.capability]
    return _TARGET.format(
      gpu=self.chip, major=major, minor=minor, limits=limits
    )

  def described(self, slices: int) -> dict:
    """Arguments of `topologies.get_topology_desc` without such a GPU."""
    if slices > 1:
      raise UserError(f"--slices={slices}: expected 1, as {self} is one host")
    return {
      "target_config": self.target(),
      "topology": f"1x1x{self.count}",
    }

  def bandwidth(self, devices: Sequence, to_all: bool) -> float:
    """Bytes a second that each device of a group can send to the others."""
    return self.chip.link

  def latency(self, devices: Sequence) -> float:
    return LATENCY

  def bandwidth_between(self, here: Sequence, there: Sequence) -> float:
    """Bytes a second that all of `here` together can send to `there`."""
    return min(len(here), len(there)) * self.chip.link


def parse(topology: str) -> Host:
  """Parses KIND:COUNT with a KIND of `GPUS`."""
  kind, _, count = topology.partition(":")
  if not (count.isdecimal() and 1 <= int(count) <= _MOST):
    raise UserError(
      f"--topology={topology!r}: expected {kind}:1 to {kind}:{_MOST}, the GPUs "
      "of one host"
    )
  return Host(kind, int(count))
