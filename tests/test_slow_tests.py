"""The order of slow tests, their time, and the record of their last pass."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import python
from slow_tests import in_turn

HOUR = 3600


def item(file, name):
  return SimpleNamespace(path=Path(file), nodeid=f"{file}::{name}")


def test_what_ran_longest_ago_comes_first_whatever_its_file():
  items = [item("a", 1), item("a", 2), item("b", 1), item("c", 1)]
  hours = {"a::1": 9, "a::2": 3, "b::1": 5}
  record = {name: {"ran": hour * HOUR} for name, hour in hours.items()}
  ordered = in_turn(items, record, "96a312e")
  assert [i.nodeid for i in ordered] == ["c::1", "a::2", "b::1", "a::1"]


def test_without_a_record_files_stay_whole_and_the_commit_decides():
  items = [item(file, name) for name in (1, 2) for file in "abcde"]
  firsts = set()
  for commit in map(str, range(50)):
    ordered = in_turn(items, {}, commit)
    assert len({i.path for i in ordered[:2]}) == 1
    firsts.add(ordered[0].path.name)
  assert firsts == {*"abcde"}


SLOW = """
import pytest
pytestmark = pytest.mark.slow
def test_right(): pass
def test_wrong(): assert False
def test_skipped(): pytest.skip('no browser')
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
  """Runs pytest on three slow tests; the record is in the same folder."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  (tmp_path / "test_made.py").write_text(SLOW)
  support = Path(__file__).parent / "support"
  (tmp_path / "conftest.py").write_text(
    "import sys\n"
    f"sys.path.insert(0, {str(support)!r})\n"
    "from slow_tests import pytest_addoption, pytest_configure\n"
  )

  def run(*arguments):
    command = "-m", "pytest", "-m", "slow", *arguments
    return python(*command, cwd=tmp_path).stdout

  return run


def test_the_record_has_the_commit_of_a_pass(run, tmp_path):
  shown = run()
  assert "1 failed, 1 passed, 1 skipped" in shown
  record = json.loads((tmp_path / "gspo_jax/slow_tests.json").read_text())
  right, wrong, skipped = (
    record[f"test_made.py::test_{name}"]
    for name in ("right", "wrong", "skipped")
  )
  assert right["commit"] in shown
  assert right["ran"] == pytest.approx(skipped["ran"], abs=60)
  assert wrong["ran"] == 0
  assert wrong["commit"] == skipped["commit"] == "never"


def test_a_test_that_would_end_too_late_is_left_out(run, tmp_path):
  """By both processes of xdist."""
  names = ("right", "wrong", "skipped")
  record = {
    f"test_made.py::test_{name}": {"ran": 0, "commit": "no", "seconds": seconds}
    for name, seconds in zip(names, (1, 70, 1), strict=True)
  }
  (tmp_path / "gspo_jax").mkdir()
  file = tmp_path / "gspo_jax/slow_tests.json"
  file.write_text(json.dumps(record))
  shown = run("--minutes=1", "-n2")
  assert "1 passed, 2 skipped" in shown
  assert "no time no             70  test_made.py::test_wrong" in shown
  assert json.loads(file.read_text())["test_made.py::test_wrong"]["ran"] == 0
