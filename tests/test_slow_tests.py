"""The order of slow tests, and the record of their last pass."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from slow_tests import in_turn


def item(file, name):
  return SimpleNamespace(path=Path(file), nodeid=f"{file}::{name}")


def test_what_ran_longest_ago_comes_first():
  items = [item("a", 1), item("a", 2), item("b", 1), item("c", 1)]
  record = {
    "a::1": {"ran": 9},
    "a::2": {"ran": 3},
    "b::1": {"ran": 2},
  }
  ordered = in_turn(items, record, "2026-01-01")
  assert [i.nodeid for i in ordered] == ["c::1", "b::1", "a::2", "a::1"]


def test_without_a_record_every_file_is_first_on_some_day():
  items = [item(name, 1) for name in "abcde"]
  days = [f"2026-01-{day:02}" for day in range(1, 32)]
  assert {in_turn(items, {}, day)[0].path.name for day in days} == {*"abcde"}


SLOW = """
import pytest
pytestmark = pytest.mark.slow
def test_right(): pass
def test_wrong(): assert False
def test_skipped(): pytest.skip('no browser')
"""


def run(folder, monkeypatch, *arguments):
  monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
  (folder / "test_made.py").write_text(SLOW)
  support = Path(__file__).parent / "support"
  (folder / "conftest.py").write_text(
    "import sys\n"
    f"sys.path.insert(0, {str(support)!r})\n"
    "from slow_tests import pytest_addoption, pytest_configure\n"
  )
  done = subprocess.run(
    [sys.executable, "-m", "pytest", "-m", "slow", *arguments],
    cwd=folder,
    capture_output=True,
    text=True,
  )
  return done.stdout


def test_the_record_has_the_commit_of_a_pass(tmp_path, monkeypatch):
  shown = run(tmp_path, monkeypatch)
  assert "1 failed, 1 passed, 1 skipped" in shown
  record = json.loads((tmp_path / "gspo_jax/slow_tests.json").read_text())
  assert {name.split("_")[-1] for name in record} == {"right", "skipped"}
  assert record["test_made.py::test_right"]["commit"] in shown
  assert record["test_made.py::test_skipped"]["commit"] == "never"
  shown = run(tmp_path, monkeypatch, "--minutes=0")
  assert "3 skipped" in shown
  assert shown.index("::test_wrong") < shown.index("::test_right")
