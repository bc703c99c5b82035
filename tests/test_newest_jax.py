"""The default tests with the newest JAX, in an environment of their own.

Python 3.11 has no JAX after 0.10. A newer Python beside it gets the newest
releases that setup.cfg admits, once in a call of pytest.
"""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from repository import ROOT
from slow_tests import CACHE

pytestmark = pytest.mark.slow

VERSIONS = "3.13", "3.12"
TESTS = ROOT / "tests"
PARTS = sorted(
  {p.relative_to(TESTS).parts[0] for p in TESTS.rglob("test_*.py")}
)


def newer_python() -> str | None:
  """The newest of `VERSIONS` that starts, from the PATH or pyenv."""
  for version in VERSIONS:
    managed = Path.home().glob(f".pyenv/versions/{version}.*/bin/python3")
    for path in shutil.which(f"python{version}"), *managed:
      if path and subprocess.run([path, "-c", "import venv"]).returncode == 0:
        return str(path)
  return None


@pytest.fixture(scope="session")
def python(testrun_uid) -> Path:
  """That of the environment, which the workers of a call share."""
  newer = newer_python()
  if newer is None:
    pytest.skip(f"needs a Python of {' or '.join(VERSIONS)}")
  folder = CACHE / "gspo_jax" / "newest_jax"
  folder.mkdir(parents=True, exist_ok=True)
  environment, made_by = folder / "venv", folder / "made_by"
  with open(folder / "lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not made_by.exists() or made_by.read_text() != testrun_uid:
      subprocess.run([newer, "-m", "venv", "--clear", environment], check=True)
      install = "-m", "pip", "install", "--quiet", "-e", f"{ROOT}[test]"
      subprocess.run([environment / "bin/python", *install], check=True)
      made_by.write_text(testrun_uid)
  return environment / "bin" / "python"


@pytest.mark.parametrize("part", [p for p in PARTS if p != Path(__file__).name])
def test_part(part, python):
  done = subprocess.run(
    [python, "-m", "pytest", "-n", "0", TESTS / part],
    cwd=ROOT,
    env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
    capture_output=True,
    text=True,
  )
  nothing = 5  # all tests of the part are slow
  assert done.returncode in (0, nothing), (
    done.stdout[-5000:] + done.stderr[-2000:]
  )
