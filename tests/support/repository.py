"""Where the repository lies, and how its tests compile."""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def xla_flags(devices: int) -> str:
  """XLA_FLAGS of a process with virtual CPU devices, which compiles quickly."""
  return (
    f"--xla_force_host_platform_device_count={devices}"
    # These spare more than half of the time of a compilation.
    " --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false"
    " --xla_cpu_parallel_codegen_split_count=1"
  )
