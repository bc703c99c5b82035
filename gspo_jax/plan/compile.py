"""Compiles functions for a TPU slice or for GPUs, on any machine.

Nothing runs on a device. Call `prepare` before JAX starts a backend.
"""

import dataclasses
import functools
import importlib.metadata
import os
import re
import tempfile
import time
from pathlib import Path

import jax
from jax.experimental import topologies

from gspo_jax.plan.chips import Topology
from gspo_jax.plan.hlo import bundles
from gspo_jax.runtime.errors import UserError, install
from gspo_jax.runtime.multihost import NO_TPU

# No metadata server, no lock against a second process, only fatal errors.
_ENVIRONMENT = NO_TPU | {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TF_CPP_MIN_LOG_LEVEL": "3",
  "TPU_LOG_DIR": "disabled",
  "TPU_MIN_LOG_LEVEL": "3",
  "TPU_STDERR_LOG_LEVEL": "3",
}

# What each operation issues; libtpu dumps it only as it is told at its start.
_BUNDLES = (
  "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true "
  "--xla_jf_dump_llo_pass_label_regex=final_bundles"
)

# The compiled programs that they dump.
_DUMPS = {"tpu": "*after_codegen.txt", "cuda": "*gpu_after_optimizations.txt"}
# With a GPU at hand XLA tries which Triton kernels beat cuBLAS. Without
# one it takes arbitrary ones, and fails for some shapes.
_OPTIONS = {"tpu": {}, "cuda": {"xla_gpu_enable_triton_gemm": False}}
# The package of each compiler, and the extra that installs it.
_PACKAGES = {
  "tpu": ("libtpu", "plan"),
  "cuda": ("jax-cuda12-plugin", "plan-gpu"),
}


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of HBM that a program needs on each device."""

  arguments: int
  outputs: int
  aliased: int  # outputs that reuse the memory of donated arguments
  temporaries: int
  code: int
  peak: int  # the compiler's estimate

  @property
  def needed(self) -> int:
    parts = self.arguments + self.outputs - self.aliased + self.temporaries
    return max(self.peak, parts + self.code)


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A compiled program, or the reason why it does not fit into HBM."""

  seconds: float  # to compile
  memory: Memory | None  # None if the program does not fit
  text: str | None  # the compiler's dump; None if it does not fit
  buffers: list[tuple[float, str]]  # in HBM: bytes and shapes, largest first
  reason: str = ""  # the compiler's message if it does not fit
  too_much: int = 0  # bytes of HBM that it would need if it does not fit
  # What TPU kernels issue, by the name of their first instruction.
  kernels: dict[str, bundles.Kernel] = dataclasses.field(default_factory=dict)


def prepare(platform: str = "tpu") -> str:
  """Sets this process up to compile; returns the compiler and its version."""
  package, extra = _PACKAGES[platform]
  try:
    version = importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError as error:
    raise UserError(
      f"{package}, the compiler, is not installed: {install(extra)}"
    ) from error
  os.environ.update(_ENVIRONMENT)
  if platform == "tpu":
    arguments = os.environ.get("LIBTPU_INIT_ARGS", "")
    dumping = _BUNDLES.format(_bundles_folder().name)
    if dumping not in arguments:
      os.environ["LIBTPU_INIT_ARGS"] = f"{arguments} {dumping}".strip()
  jax.config.update("jax_platforms", "cpu")  # do not open a local TPU or GPU
  # Programs for absent devices cannot be cached; JAX would warn about each.
  jax.config.update("jax_enable_compilation_cache", False)
  return f"{package} {version}"


def devices(topology: Topology, slices: int) -> list:
  try:
    described = topologies.get_topology_desc(
      str(topology), topology.platform, **topology.described(slices)
    )
  except jax.errors.JaxRuntimeError as error:
    reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
    raise UserError(f"--topology={topology}: {reason}") from error
  return list(described.devices)


def compile_one(lowered: jax.stages.Lowered, platform: str = "tpu") -> Compiled:
  start = time.monotonic()
  for file in Path(_bundles_folder().name).iterdir():
    file.unlink()
  with tempfile.TemporaryDirectory() as folder:
    # `as_text` crashes on many modules; the compiler's dump is complete.
    options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
    options |= _OPTIONS[platform]
    if jax.__version_info__ >= (0, 11):  # else operands such as %tuple#1
      options["xla_dump_compact_gte"] = False
    try:
      compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      seconds = time.monotonic() - start
      reason = str(error).splitlines()[0]
      buffers, total = _buffers(folder)
      return Compiled(seconds, None, None, buffers, reason, total)
    seconds = time.monotonic() - start
    m = compiled.memory_analysis()
    memory = Memory(
      arguments=m.argument_size_in_bytes,
      outputs=m.output_size_in_bytes,
      aliased=m.alias_size_in_bytes,
      temporaries=m.temp_size_in_bytes,
      code=m.generated_code_size_in_bytes,
      peak=m.peak_memory_in_bytes,
    )
    text = _text(folder, platform)
    kernels = _kernels(text) if platform == "tpu" else {}
    buffers, _ = _buffers(folder)
    return Compiled(seconds, memory, text, buffers, kernels=kernels)


def _text(folder, platform: str = "tpu") -> str:
  text = _largest(folder, _DUMPS[platform])
  if not text:
    package, extra = _PACKAGES[platform]
    version = importlib.metadata.version(package)
    raise UserError(
      f"{package} {version} does not dump {_DUMPS[platform]}, from which a "
      f"plan is read; one that does: {install(extra)}"
    )
  return text


@functools.cache
def _bundles_folder() -> tempfile.TemporaryDirectory:
  """The folder of this process's bundles: libtpu reads its name once."""
  return tempfile.TemporaryDirectory()


_KERNEL = re.compile(
  r'%([\w.\-]+) = [^\n]*custom_call_target="tpu_custom_call"'
)


def _kernels(text: str) -> dict[str, bundles.Kernel]:
  """What the last program's kernels issue; equal ones are dumped once."""
  names, kernels = set(_KERNEL.findall(text)), {}
  of_kind = lambda names: {name.rpartition(".")[0] or name for name in names}
  for file in Path(_bundles_folder().name).glob("*-final_bundles.txt"):
    name = re.fullmatch(r"\d+-(.+)-\d+-final_bundles\.txt", file.name)
    if name and name[1] in names:
      kernels[name[1]] = bundles.parse(file.read_text())
  if missing := sorted(of_kind(names) - of_kind(kernels)):
    raise UserError(
      f"libtpu did not dump what {missing[0]} issues: expected a process in "
      "which nothing else has loaded libtpu, and LIBTPU_INIT_ARGS without "
      "--xla_jf_dump_to"
    )
  return kernels


def _largest(folder, pattern) -> str:
  files = sorted(Path(folder).glob(pattern), key=lambda f: f.stat().st_size)
  return files[-1].read_text() if files else ""


_BUFFER = re.compile(
  r"\(\s*\S+%\);\s+([\d.]+)(B|KiB|MiB|GiB);[^;]*;[^;]*; (.*)"
)
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _buffers(folder) -> tuple[list[tuple[float, str]], int]:
  """The buffers in HBM by the compiler's report, largest first; their bytes."""
  report = _largest(folder, "*memory-usage-report.txt")
  hbm = re.search(
    r"^Memory Space: default.*?(?=^Memory Space:|\Z)", report, re.M | re.S
  )
  if not hbm:
    return [], 0
  buffers = []
  for line in hbm[0].splitlines():
    if buffer := _BUFFER.search(line):
      size, unit, shapes = buffer.groups()
      buffers.append((float(size) * _UNITS[unit], shapes))
  total = re.search(r"^Total bytes: (\d+)", hbm[0], re.M)
  return sorted(buffers, reverse=True), int(total[1]) if total else 0
