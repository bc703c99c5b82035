"""Compiles functions for a TPU slice with libtpu, on any machine.

Nothing runs on a device. Call `prepare` before JAX starts a backend.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import tempfile
import time
from pathlib import Path

import jax
from jax.experimental import topologies

from gspo_jax.plan.chips import Slice
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

_DUMP = "*after_codegen.txt"
_DUMPING_VERSION = "0.0.51"  # of libtpu


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
  text: str | None  # libtpu's dump of it; None if it does not fit
  buffers: list[tuple[float, str]]  # in HBM: bytes and shapes, largest first
  reason: str = ""  # the compiler's message if it does not fit


def prepare() -> str:
  """Sets this process up to compile for TPUs; returns libtpu's version."""
  if importlib.util.find_spec("libtpu") is None:
    raise UserError(
      f"libtpu, the TPU compiler, is not installed: {install('plan')}"
    )
  os.environ.update(_ENVIRONMENT)
  jax.config.update("jax_platforms", "cpu")  # do not open a local TPU
  # Programs for absent devices cannot be cached; JAX would warn about each.
  jax.config.update("jax_enable_compilation_cache", False)
  return importlib.metadata.version("libtpu")


def devices(tpu_slice: Slice, slices: int) -> list:
  more = {"num_slices": slices} if slices > 1 else {}
  try:
    topology = topologies.get_topology_desc(
      platform="tpu", topology_name=str(tpu_slice), **more
    )
  except jax.errors.JaxRuntimeError as error:
    reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
    raise UserError(f"--topology={tpu_slice}: {reason}") from error
  return list(topology.devices)


def compile_one(lowered: jax.stages.Lowered) -> Compiled:
  start = time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    # `as_text` crashes on many modules; the compiler's dump is complete.
    options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
    try:
      compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      seconds = time.monotonic() - start
      reason = str(error).splitlines()[0]
      return Compiled(seconds, None, None, _buffers(folder), reason)
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
    return Compiled(seconds, memory, _text(folder), _buffers(folder))


def _text(folder) -> str:
  text = _largest(folder, _DUMP)
  if not text:
    version = importlib.metadata.version("libtpu")
    raise UserError(
      f"libtpu {version} does not dump {_DUMP}, from which a plan is read; "
      f"expected libtpu {_DUMPING_VERSION}"
    )
  return text


def _largest(folder, pattern) -> str:
  files = sorted(Path(folder).glob(pattern), key=lambda f: f.stat().st_size)
  return files[-1].read_text() if files else ""


_BUFFER = re.compile(
  r"\(\s*\S+%\);\s+([\d.]+)(B|KiB|MiB|GiB);[^;]*;[^;]*; (.*)"
)
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _buffers(folder) -> list[tuple[float, str]]:
  """The buffers in HBM by the compiler's memory report, largest first."""
  report = _largest(folder, "*memory-usage-report.txt")
  hbm = re.search(
    r"^Memory Space: default.*?(?=^Memory Space:|\Z)", report, re.M | re.S
  )
  buffers = []
  for line in hbm[0].splitlines() if hbm else ():
    if buffer := _BUFFER.search(line):
      size, unit, shapes = buffer.groups()
      buffers.append((float(size) * _UNITS[unit], shapes))
  return sorted(buffers, reverse=True)
