"""The default tests with the newest JAX, by a newer Python, once a session."""

import fcntl
import os
import subprocess
from pathlib import Path

import pytest
from pythons import environment
from repository import ROOT
from slow_tests import CACHE

pytestmark = pytest.mark.slow

FILES = sorted((ROOT / "tests").rglob("test_*.py"))


@pytest.fixture(scope="session")
def python(testrun_uid) -> Path:
  """That of the environment, which the workers of a call share."""
  folder = CACHE / "gspo_jax" / "newest_jax"
  folder.mkdir(parents=True, exist_ok=True)
  made_by = folder / "made_by"
  with open(folder / "lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if made_by.exists() and made_by.read_text() == testrun_uid:
      return folder / "venv" / "bin" / "python"
    python = environment(("3.13", "3.12"), folder / "venv")
    install = "-m", "pip", "install", "--quiet", "-e", f"{ROOT}[test]"
    subprocess.run([python, *install], check=True)
    made_by.write_text(testrun_uid)
  return python


@pytest.mark.parametrize(
  "file",
  [p.relative_to(ROOT) for p in FILES if p.name != Path(__file__).name],
  ids=str,
)
def test_file(file, python):
  done = subprocess.run(
    [python, "-m", "pytest", "-n", "0", file],
    cwd=ROOT,
    env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
    capture_output=True,
    text=True,
  )
  nothing = 5  # all tests of the file are slow
  assert done.returncode in (0, nothing), (
    done.stdout[-5000:] + done.stderr[-2000:]
  )
