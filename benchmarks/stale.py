"""Lists the records that are older than the code that they measure.

  python -m benchmarks.stale

A record names its command and the commit of the code. A script of this folder
measures what it imports of gspo_jax, itself or by other scripts; one that
trains, or starts a command of gspo_jax, measures all of it. Printed are the
commits since then that changed this code, most first. Most of them change no
number: the list says which records to make again before others.
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.record import ROOT

PACKAGE = "gspo_jax"


def main() -> None:
  if git(ROOT, "rev-parse", "--is-shallow-repository") != "false":
    sys.exit("expected a clone with its history")
  print("commits since | commit | record | code")
  for row in sorted(stale(ROOT), reverse=True):
    print(" | ".join(map(str, row)))


def stale(root: Path) -> list[tuple[int, str, str, str]]:
  """Of each older record: commits since, its commit, its name, the code."""
  found = []
  for path in (root / "benchmarks").glob("*.json"):
    record = json.loads(path.read_text())
    commit = record.get("commit", "none").split()[0]
    if git(root, "cat-file", "-t", commit) != "commit":
      sys.exit(f"{path.name}: expected a commit of this clone, got {commit}")
    code = measured(root, re.search(r"-m ([\w.]+)", record["command"])[1])
    changes = git(root, "log", "--format=%h", f"{commit}..HEAD", "--", *code)
    if changes:
      number = len(changes.split())
      found.append((number, commit, path.stem, ", ".join(code)))
  return found


def measured(root: Path, module: str) -> list[str]:
  """Paths in gspo_jax that a module measures, without those within others."""
  if module.startswith(f"{PACKAGE}."):  # a command
    return [PACKAGE]
  paths, scripts, left = set(), set(), {module}
  while left:
    name = left.pop()
    if name.startswith(f"{PACKAGE}.train"):
      return [PACKAGE]
    if name.split(".")[0] == PACKAGE:
      paths.add(_path(root, name))
    elif name not in scripts:
      scripts.add(name)
      left |= _names(root, (root / _path(root, name)).read_text())
  within = lambda path: any(path.startswith(f"{other}/") for other in paths)
  return sorted(path for path in paths if not within(path))


def _names(root: Path, source: str) -> set[str]:
  """Modules that are imported, and commands, of the package and the scripts."""
  names = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.ImportFrom):
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
    elif isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
      names |= _commands(root, node.value)
  return {n for n in names if n.split(".")[0] in (PACKAGE, "benchmarks")}


def _commands(root: Path, text: str) -> set[str]:
  """What an argument behind -m names, whole or up to the braces of f""."""
  if re.fullmatch(rf"{PACKAGE}\.\w*", text):
    return {PACKAGE}
  if not re.fullmatch(r"benchmarks\.\w+", text):
    return set()
  scripts = root.glob(f"{text.replace('.', '/')}*.py")
  return {f"benchmarks.{script.stem}" for script in scripts}


def _path(root: Path, name: str) -> str:
  """Of the module or folder that has the name, or is it."""
  path = name.replace(".", "/")
  if (root / f"{path}.py").exists():
    return f"{path}.py"
  return (
    path if (root / path).is_dir() else _path(root, name.rpartition(".")[0])
  )


def git(root: Path, *words: str) -> str:
  return subprocess.run(
    ["git", *words], cwd=root, capture_output=True, text=True
  ).stdout.strip()


if __name__ == "__main__":
  main()
