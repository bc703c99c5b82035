"""The sandbox: the output of a program, and no program without a sandbox."""

import os
import time

import pytest
from processes import commands

from gspo_jax.runtime.errors import UserError
from gspo_jax.workers import sandbox, sandbox_files


@pytest.fixture
def bwrap():
  try:
    return sandbox.bwrap_path()
  except UserError as e:
    pytest.skip(str(e))


def run(program, stdin="", *, seconds=10):
  return sandbox.run(
    program, stdin, seconds=seconds, memory=256, max_output=100
  )


def test_output_of_a_program(bwrap):
  assert run("print(input()[::-1])", "ab\u00e9\n") == "\u00e9ba\n"
  assert run("print('x' * 99)") == "x" * 99 + "\n"
  assert run("print('x' * 100)") is None  # one byte more than allowed
  assert run("print(1); raise SystemExit(2)") is None
  assert run("import time; time.sleep(60)", seconds=0.2) is None
  assert run("import sys; sys.stdout.buffer.write(b'\\xff')") == "\ufffd"


def test_input_of_megabytes_that_is_not_read(bwrap):
  assert run("print(1)", "x" * 5_000_000) == "1\n"
  assert run("print(len(input()))", "x" * 5_000_000) == "5000000\n"


def test_stdin_has_a_path_too(bwrap):
  program = "print(input())\nprint(open('/dev/stdin').read())"
  assert run(program, "a\nb\n") == "a\na\nb\n\n"


def test_a_sandbox_that_is_ended_while_it_starts_is_gone(bwrap):
  memory = 200 + os.getpid() % 1000  # MiB, by which processes are found
  for i in range(40):
    seconds = i / 500
    sandbox.run("", "", seconds=seconds, memory=memory, max_output=1)
  time.sleep(0.2)  # of those that were killed
  assert [c for c in commands() if str(memory << 20) in c] == []


@pytest.mark.parametrize(
  ("path", "is_hidden"),
  [(os.path.dirname(os.__file__), False),
   (os.path.dirname(os.__file__) + "/json/train.jsonl", False),
   (os.path.dirname(os.__file__) + "/site-packages/train.jsonl", True),
   (os.path.dirname(os.__file__) + "/../train.jsonl", True),
   ("train.jsonl", True), ("/usr/src/app", True)],
)  # fmt: skip
def test_files_that_programs_could_read_are_an_error(path, is_hidden):
  if is_hidden:
    sandbox_files.require_hidden("--workdir", path)
  else:
    with pytest.raises(UserError, match=r"^--workdir: .*outside of /"):
      sandbox_files.require_hidden("--workdir", path)


def test_the_program_is_the_main_module_and_knows_no_launcher(bwrap):
  program = """
import sys
names = sorted(n for n in globals() if not n.startswith("__"))
print(sys.argv, names, sys.modules["__main__"].__dict__ is globals())
"""
  assert run(program) == "['/program.py'] ['program', 'sys'] True\n"


def script(folder, text):
  path = folder / "bwrap"
  path.write_text("#!/bin/sh\n" + text)
  path.chmod(0o755)


@pytest.mark.parametrize(
  ("names", "message"),
  [(["bwrap"], r"bubblewrap.*No permissions to create"),
   ([], r"no bwrap found.*pip install"), (["."], "Permission denied")],
)  # fmt: skip
def test_without_a_bwrap_that_starts_nothing_runs(
  tmp_path, monkeypatch, names, message
):
  script(tmp_path, "echo 'bwrap: No permissions to create new namespace' >&2")
  candidates = [str(tmp_path / name) for name in names]
  monkeypatch.setattr(sandbox, "_candidates", lambda: candidates)
  with pytest.raises(UserError, match=message):
    sandbox.bwrap_path.__wrapped__()


def test_the_first_that_works_is_taken(bwrap, tmp_path, monkeypatch):
  script(tmp_path, "exit 1")
  monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
  assert next(sandbox._candidates()) == str(tmp_path / "bwrap")
  candidates = [str(tmp_path / "bwrap"), bwrap]
  monkeypatch.setattr(sandbox, "_candidates", lambda: candidates)
  assert sandbox.bwrap_path.__wrapped__() == bwrap


def test_a_machine_without_a_filter_is_an_error_at_the_start(monkeypatch):
  monkeypatch.setattr(sandbox.seccomp.platform, "machine", lambda: "riscv64")
  with pytest.raises(UserError, match=r"x86_64 and aarch64 only.*'riscv64'"):
    sandbox.bwrap_path.__wrapped__()
