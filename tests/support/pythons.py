"""Environments of the Pythons that stand beside the one that runs the tests."""

import shutil
import subprocess
from pathlib import Path

import pytest


def environment(versions: tuple[str, ...], folder: Path) -> Path:
  """The Python of a new environment, of the first version here, or a skip."""
  for version in versions:
    managed = Path.home().glob(f".pyenv/versions/{version}.*/bin/python3")
    for python in shutil.which(f"python{version}"), *managed:
      make = [python, "-m", "venv", "--clear", folder]
      if python and subprocess.run(make).returncode == 0:
        return folder / "bin" / "python"
  pytest.skip(f"no Python {' or '.join(versions)} here")
