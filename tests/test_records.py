"""The records of benchmarks/: each names the commit that it measured."""

import json
import re
import shutil
import subprocess

import pytest
from repository import ROOT

from benchmarks import record, stale

RECORDS = sorted((ROOT / "benchmarks").glob("*.json"))
HAS_HISTORY = (
  (ROOT / ".git").exists()
  and shutil.which("git")
  and stale.git(ROOT, "rev-parse", "--is-shallow-repository") == "false"
)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_names_its_command_and_the_commit(path):
  found = json.loads(path.read_text())
  commit = re.fullmatch(r"([0-9a-f]{7,40})( and changes)?", found["commit"])
  assert commit
  if HAS_HISTORY:
    assert stale.git(ROOT, "cat-file", "-t", commit[1]) == "commit"
  module = re.search(r"-m ([\w.]+)", found["command"])[1]
  code = stale.measured(ROOT, module)
  assert code
  assert [c for c in code if not (ROOT / c).exists()] == []


def test_a_command_names_no_folder_of_this_machine(tmp_path, monkeypatch):
  words = "--tunix=/a/b/bin/python", "--out", "/c/d/e.json", "--quick"
  monkeypatch.setattr("sys.argv", ["peers.py", *words])
  record.write("peers", {}, tmp_path / "e.json")
  command = json.loads((tmp_path / "e.json").read_text())["command"]
  assert command == (
    "python -m benchmarks.peers --tunix=DIR/bin/python --out DIR/e.json --quick"
  )


@pytest.fixture
def git(tmp_path):
  """A command in a new repository."""
  if not shutil.which("git"):
    pytest.skip("no git")
  who = ("-c", "user.name=a", "-c", "user.email=a@example.com")

  def git(*words):
    command = ["git", *who, *words]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

  git("init")
  return git


def write(folder, files):
  for name, text in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def commit(git, folder, files):
  write(folder, files)
  git("add", ".")
  git("commit", "--message=a")
  return record.commit(folder)


def test_a_record_is_stale_when_code_that_it_measures_has_changed(
  git, tmp_path
):
  """By its script, by one that this imports or starts; or all, by a command."""
  benchmarks = {
    "imports": "from gspo_jax.a import f",
    "helped": "from benchmarks import imports",
    "starts": "x = f'benchmarks.imp{y}'",
    "folder": "from gspo_jax import b",
    "commands": "x = ['-m', 'gspo_jax.main']",
    "trains": "from gspo_jax.train import train_and_evaluate",
  }
  code = {f"benchmarks/{name}.py": text for name, text in benchmarks.items()}
  code |= {f"gspo_jax/{x}.py": "" for x in ("a", "b/one", "b/two", "c")}
  first = commit(git, tmp_path, code)
  records = {
    f"benchmarks/{name}.json": {"command": f"python -m benchmarks.{name} --x"}
    for name in benchmarks
  } | {"benchmarks/plan.json": {"command": "python -m gspo_jax.plan --json"}}
  texts = {n: json.dumps(r | {"commit": first}) for n, r in records.items()}
  commit(git, tmp_path, texts)
  found = lambda: {row[2]: row[0] for row in stale.stale(tmp_path)}
  assert found() == {}
  commit(git, tmp_path, {"gspo_jax/c.py": "1"})
  all_of_it = "plan", "commands", "trains"
  assert found() == dict.fromkeys(all_of_it, 1)
  commit(git, tmp_path, {"gspo_jax/b/two.py": "1"})
  assert found() == dict.fromkeys(all_of_it, 2) | {"folder": 1}
  commit(git, tmp_path, {"gspo_jax/a.py": "1"})
  by_imports = "imports", "helped", "starts", "folder"
  assert found() == dict.fromkeys(all_of_it, 3) | dict.fromkeys(by_imports, 1)


def test_a_record_without_a_commit_is_named(git, tmp_path):
  command = json.dumps({"command": "python -m benchmarks.a"})
  commit(git, tmp_path, {"benchmarks/a.json": command})
  with pytest.raises(SystemExit, match=r"a\.json: expected a commit"):
    stale.stale(tmp_path)


def test_results_are_no_change_of_the_commit_and_all_else_is(git, tmp_path):
  results = "studies/one/result.json", "studies/one/figure.png"
  results += "benchmarks/a.json", "benchmarks/a.png"
  made = dict.fromkeys(results, "1")
  clean = commit(git, tmp_path, {"studies/one/run.py": "1"} | made)
  assert "changes" not in clean
  write(tmp_path, dict.fromkeys((*results, "benchmarks/new.json"), "2"))
  assert record.commit(tmp_path) == clean
  write(tmp_path, {"studies/one/run.py": "2"})
  assert record.commit(tmp_path) == f"{clean} and changes"


def test_a_record_is_written_with_command_machine_and_commit(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(record, "commit", lambda: "abc")
  monkeypatch.setattr(record.sys, "argv", ["x.py", "--out=a"])
  record.finish("x", {"seconds": 1}, tmp_path / "a.json")
  found = json.loads((tmp_path / "a.json").read_text())
  assert list(found) == ["command", "machine", "commit", "seconds"]
  assert found["command"] == "python -m benchmarks.x --out=a"
  assert found["commit"] == "abc"
