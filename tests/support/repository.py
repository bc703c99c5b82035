"""Where the repository lies, and how its tests compile."""

from pathlib import Path

import jaxlib

ROOT = Path(__file__).parent.parent.parent


def xla_flags(devices: int) -> str:
  """XLA_FLAGS of a process with virtual CPU devices, which compiles quickly."""
  # XLA ends a process whose flags it does not know, and 0.11 dropped this one.
  old = jaxlib.version.__version_info__ < (0, 11)
  emitters = " --xla_cpu_use_fusion_emitters=false" if old else ""
  return (
    f"--xla_force_host_platform_device_count={devices}"
    # These spare more than half of the time of a compilation.
    " --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true"
    f" --xla_cpu_parallel_codegen_split_count=1{emitters}"
  )
