"""Compiles for a TPU slice that is not there: libtpu does it on any machine.

Nothing here runs on a device. jax must not have started a backend before
`prepare`.
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
from gspo_jax.plan.hlo import module as hlo_module
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.multihost import NO_TPU

# No question to a metadata server, no lock against a second process, and only
# what kills the process on stderr.
_ENVIRONMENT = NO_TPU | {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TF_CPP_MIN_LOG_LEVEL": "3",
  "TPU_LOG_DIR": "disabled",
  "TPU_MIN_LOG_LEVEL": "3",
  "TPU_STDERR_LOG_LEVEL": "3",
}

_DUMP = "*after_codegen.txt"


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of HBM that a program takes on each device.

  Attributes:
    arguments: what it is given.
    outputs: what it returns.
    aliased: the part of the outputs that takes the place of donated arguments.
    temporaries: all it needs in between.
    code: the program.
    peak: the compiler's own account of the fullest moment.
  """

  arguments: int
  outputs: int
  aliased: int
  temporaries: int
  code: int
  peak: int

  @property
  def needed(self) -> int:
    """The larger of the two accounts."""
    parts = self.arguments + self.outputs - self.aliased + self.temporaries
    return max(self.peak, parts + self.code)


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the compiler made, or why it could not.

  Attributes:
    seconds: it took.
    memory: None where it does not fit.
    module: None where it does not fit.
    buffers: the largest in HBM, (bytes, what they hold), the largest first.
    reason: the compiler's, where the program does not fit.
  """

  seconds: float
  memory: Memory | None
  module: hlo_module.Module | None
  buffers: list[tuple[float, str]]
  reason: str = ""


def prepare() -> str:
  """Makes this process one that compiles for TPUs; gives libtpu's version.

  Raises:
    UserError: there is no libtpu.
  """
  if importlib.util.find_spec("libtpu") is None:
    raise UserError(
      "libtpu, the TPU compiler, is not installed: pip install 'gspo_jax[plan]'"
    )
  os.environ.update(_ENVIRONMENT)
  jax.config.update("jax_platforms", "cpu")  # leaves a TPU that is here alone
  return importlib.metadata.version("libtpu")


def devices(where: Slice, slices: int) -> list:
  """The devices of `slices` slices, as JAX would see them.

  Raises:
    UserError: the compiler knows no such slice.
  """
  more = {"num_slices": slices} if slices > 1 else {}
  try:
    found = topologies.get_topology_desc(
      platform="tpu", topology_name=str(where), **more
    )
  except jax.errors.JaxRuntimeError as error:
    reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
    raise UserError(f"--topology={where}: {reason}") from error
  return list(found.devices)


def compile_one(lowered: jax.stages.Lowered) -> Compiled:
  """Compiles a lowered function; too large a one comes back with a reason.

  Raises:
    UserError: this libtpu does not dump what it compiled.
  """
  start = time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    # `as_text` crashes on many modules; what the compiler dumps is whole.
    options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
    try:
      done = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      seconds = time.monotonic() - start
      reason = str(error).splitlines()[0]
      return Compiled(seconds, None, None, _buffers(folder), reason)
    seconds = time.monotonic() - start
    return Compiled(seconds, _memory(done), _module(folder), _buffers(folder))


def _module(folder) -> hlo_module.Module:
  text = _largest(folder, _DUMP)
  if not text:
    version = importlib.metadata.version("libtpu")
    raise UserError(
      f"libtpu {version} dumps no {_DUMP}, out of which a plan is read; "
      "0.0.51 does"
    )
  return hlo_module.parse(text)


def _memory(done) -> Memory:
  m = done.memory_analysis()
  return Memory(
    arguments=m.argument_size_in_bytes,
    outputs=m.output_size_in_bytes,
    aliased=m.alias_size_in_bytes,
    temporaries=m.temp_size_in_bytes,
    code=m.generated_code_size_in_bytes,
    peak=m.peak_memory_in_bytes,
  )


def _largest(folder, pattern) -> str:
  files = sorted(Path(folder).glob(pattern), key=lambda f: f.stat().st_size)
  return files[-1].read_text() if files else ""


_BUFFER = re.compile(
  r"\(\s*\S+%\);\s+([\d.]+)(B|KiB|MiB|GiB);[^;]*;[^;]*; (.*)"
)
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _buffers(folder) -> list[tuple[float, str]]:
  """Out of the compiler's report of its allocations."""
  report = _largest(folder, "*memory-usage-report.txt")
  hbm = re.search(
    r"^Memory Space: default.*?(?=^Memory Space:|\Z)", report, re.M | re.S
  )
  found = []
  for line in hbm[0].splitlines() if hbm else ():
    row = _BUFFER.search(line)
    if row:
      found.append((float(row[1]) * _UNITS[row[2]], row[3]))
  return sorted(found, reverse=True)
