"""What runs on this machine, and new processes of the tests' Python."""

import contextlib
import io
import os
import socket
import subprocess
import sys
from unittest import mock

import pytest
from absl.testing import flagsaver
from repository import ROOT, xla_flags


def commands():
  """Command lines of all processes of this machine."""
  for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
      with open(f"/proc/{pid}/cmdline") as file:
        yield file.read().replace("\0", " ")
    except OSError:
      pass


def python(*arguments, timeout=300, **options):
  """Runs Python in the repository's root, and keeps its output as text."""
  return subprocess.run(
    [sys.executable, *map(str, arguments)],
    **{"cwd": ROOT, "timeout": timeout, "capture_output": True, "text": True}
    | options,
  )


def start(*arguments, devices=1, **options):
  """Python in the background, with so many virtual devices; one output."""
  env = os.environ | {"PYTHONUNBUFFERED": "1", "XLA_FLAGS": xla_flags(devices)}
  return subprocess.Popen(
    [sys.executable, *map(str, arguments)],
    **{"cwd": ROOT, "env": env, "stdout": subprocess.PIPE, "text": True}
    | {"stderr": subprocess.STDOUT}
    | options,
  )


def mistake(main, *arguments):
  """The line with which a command ends, with exit code 2, in this process."""
  stderr, argv = io.StringIO(), ["command", *map(str, arguments)]
  with (
    mock.patch.object(sys, "argv", argv),
    flagsaver.flagsaver(),
    contextlib.redirect_stderr(stderr),
    pytest.raises(SystemExit) as ended,
  ):
    main()
  (line,) = stderr.getvalue().splitlines()
  assert ended.value.code == 2, line
  assert line.startswith("error: ")
  return line


def free_port() -> int:
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]
