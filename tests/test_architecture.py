"""The arrows of the design: setup.cfg draws them, import-linter holds them."""

import ast
import subprocess
import sys

import pytest
from repository import ROOT


def imports(path):
  """Top-level names that a file imports, anywhere in it."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      names.add("." * node.level + (node.module or ""))
  return names


def beyond_the_standard_library(names):
  return {n for n in names if n.split(".")[0] not in sys.stdlib_module_names}


def lint_imports(config):
  command = "from importlinter.cli import *; lint_imports_command()"
  return subprocess.run(
    [sys.executable, "-c", command, f"--config={config}", "--no-cache"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )


def test_the_arrows():
  done = lint_imports("setup.cfg")
  assert done.returncode == 0, done.stdout + done.stderr
  assert " 0 broken" in done.stdout


def test_a_wrong_arrow_is_seen(tmp_path):
  (tmp_path / "wrong.cfg").write_text(
    "[importlinter]\nroot_package = gspo_jax\n"
    "[importlinter:contract:wrong]\nname = wrong\ntype = forbidden\n"
    "source_modules = gspo_jax.train\nforbidden_modules = gspo_jax.model\n"
  )
  done = lint_imports(tmp_path / "wrong.cfg")
  assert done.returncode == 1
  assert "Contracts: 0 kept, 1 broken" in done.stdout


@pytest.mark.parametrize(
  ("module", "allowed"),
  [
    ("advantages", {"jax", "jax.numpy"}),
    ("rewards/numbers", set()),
    ("rewards/format", set()),
    ("tasks", {"gspo_jax.runtime.errors"}),
    ("errors", set()),
    ("model/config", {"gspo_jax.runtime.errors"}),
  ],
)
def test_the_lowest_modules_import_these_and_nothing_else(module, allowed):
  found = imports(ROOT / f"gspo_jax/{module}.py")
  assert beyond_the_standard_library(found) <= allowed


@pytest.mark.parametrize(
  "path",
  sorted((ROOT / "gspo_jax/losses").glob("*.py")),
  ids=lambda path: path.stem,
)
def test_losses_need_jax_and_one_another(path):
  found = beyond_the_standard_library(imports(path))
  beyond = {name for name in found if not name.startswith("gspo_jax.losses")}
  assert beyond <= {"jax", "jax.numpy", "numpy"}


@pytest.mark.parametrize(
  "path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem
)
def test_configs_know_nothing_of_the_program(path):
  found = beyond_the_standard_library(imports(path))
  assert found <= {"ml_collections", "configs"}
