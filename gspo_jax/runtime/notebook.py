"""What the first cell of a notebook does: it installs, checks, and says where.

  python -m gspo_jax.runtime.notebook

prints what jax finds here. Nothing but the standard library is imported before
the packages are there.
"""

import contextlib
import glob
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from gspo_jax.runtime.errors import UserError

# What a machine has -> the extras that bring the jax for it.
_EXTRAS = {"gpu": "colab,gpu", "tpu": "colab,tpu", "cpu": "colab"}
_JAX = {"gpu": "jax[cuda12]", "tpu": "jax[tpu]"}
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt")
_PLUGINS += ("jax-cuda13-plugin", "jax-cuda13-pjrt")


def prepare() -> str:
  """Installs packages, prints what jax runs on; returns the dtype for it.

  Restarts the kernel if it holds a jax that was replaced. UserError if jax does
  not find the machine's GPU or TPU, unless JAX_PLATFORMS is cpu.
  """
  platform, name = accelerator()
  if name and os.environ.get("JAX_PLATFORMS") == "cpu":
    print(f"JAX_PLATFORMS=cpu: {name} of this machine is not used")
    platform = "cpu"
  before = _versions()
  package = f"gspo_jax[{_EXTRAS[platform]}]"
  _python("-m", "pip", "install", "-q", package)
  # jax would not use them, and say so at length.
  if stale := _stale_plugins(_versions()):
    _python("-m", "pip", "uninstall", "-q", "-y", *stale)
  importlib.invalidate_caches()
  if _needs_restart(before, _versions(), sys.modules):
    _restart()
  # A separate process gives the device back: a notebook may start others.
  printed = _python("-m", __name__, stdout=subprocess.PIPE)
  found = json.loads(printed.splitlines()[-1])
  if platform not in ("cpu", found["platform"]):
    raise UserError(
      f"this machine has {name}, but jax finds only {found['devices']}: "
      f"{sys.executable} -m pip install --force-reinstall "
      f"'{_JAX[platform]}=={importlib.metadata.version('jax')}', then restart; "
      "to use the CPU, restart with JAX_PLATFORMS=cpu"
    )
  print(f"Runs on {found['devices']}; models compute in {found['dtype']}.")
  return found["dtype"]


def accelerator(
  dev: str = "/dev", env: Mapping[str, str] = os.environ
) -> tuple[str, str]:
  """Platform and name of what the machine has: ("cpu", "") if nothing."""
  command = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
  try:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    gpu = done.stdout.partition("\n")[0]
  except (OSError, subprocess.CalledProcessError):  # none, or no driver
    gpu = ""
  if gpu or glob.glob(f"{dev}/nvidia[0-9]*"):
    return "gpu", gpu or "an NVIDIA GPU"
  kind = env.get("TPU_ACCELERATOR_TYPE", "")  # v5e-1; Colab sets it
  chips = glob.glob(f"{dev}/accel[0-9]*") + glob.glob(f"{dev}/vfio/[0-9]*")
  return ("tpu", f"a TPU {kind}".strip()) if kind or chips else ("cpu", "")


def describe(devices) -> str:
  """Number, kind and memory of devices."""
  first = devices[0]
  if first.platform == "cpu":
    what = f"a CPU with {len(os.sched_getaffinity(0))} cores"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  else:
    what = f"{len(devices)} x {first.device_kind}"
    memory = (first.memory_stats() or {}).get("bytes_limit", 0)
  return f"{what}, {memory / 2**30:.1f} GiB"


def fast_dtype(device, cpuinfo: str = "/proc/cpuinfo") -> str:
  """float32 on a device without bfloat16 products: a T4, a CPU without AMX."""
  if device.platform == "gpu":
    fast = float(device.compute_capability) >= 8.0
  elif device.platform == "cpu":
    fast = "amx_bf16" in Path(cpuinfo).read_text()
  else:
    fast = True
  return "bfloat16" if fast else "float32"


def _python(*arguments: str, **options) -> str | None:
  command = [sys.executable, *arguments]
  return subprocess.run(command, check=True, text=True, **options).stdout


def _versions() -> dict[str, str]:
  """The installed versions of packages that must agree with one another."""
  found = {}
  for name in ("jax", "jaxlib", "libtpu", "ml_dtypes", "numpy", *_PLUGINS):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


def _stale_plugins(versions: Mapping[str, str]) -> list[str]:
  """The plugins of another jaxlib, and those of CUDA 13 beside CUDA 12."""
  twice = "jax-cuda12-plugin" in versions
  return [
    name
    for name in _PLUGINS
    if name in versions
    and (versions[name] != versions["jaxlib"] or (twice and "13" in name))
  ]


def _needs_restart(before, after, loaded: Collection[str]) -> bool:
  """Whether modules in memory and packages on the disk disagree."""
  if "jax" in loaded:
    return before != after
  return "numpy" in loaded and before.get("numpy") != after.get("numpy")


def _restart() -> None:
  """Restarts the kernel; SystemExit, so that no further cell runs in this one.

  `do_shutdown` ends it after the cell, with all that it printed; a kill would
  look like a crash.
  """
  print(
    "A package that this kernel had imported was replaced: the kernel restarts "
    "now. Then run all cells again; nothing is installed a second time."
  )
  from IPython import get_ipython

  if kernel := getattr(get_ipython(), "kernel", None):  # none in a terminal
    kernel.do_shutdown(True)
  raise SystemExit("the kernel restarts; then run all cells again")


def _main() -> None:
  import jax

  devices = jax.devices()
  found = {"platform": devices[0].platform, "devices": describe(devices)}
  print(json.dumps(found | {"dtype": fast_dtype(devices[0])}))


if __name__ == "__main__":
  _main()
