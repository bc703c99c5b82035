"""The house: which wing imports which, by the arrows of setup.cfg."""

import ast
import configparser
import functools
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from repository import ROOT

PACKAGE = ROOT / "gspo_jax"
# Files that users copy and change, not a wing.
CONFIGS = PACKAGE / "configs"
WINGS = sorted(
  p.parent.name for p in PACKAGE.glob("*/__init__.py") if p.parent != CONFIGS
)


def module_name(path: Path) -> str:
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
  module_name(path): path
  for path in PACKAGE.rglob("*.py")
  if CONFIGS not in path.parents
}


@functools.cache
def imported(path: Path) -> set[tuple[str, str]]:
  """(module, name) of what a file imports, anywhere in it."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found |= {(alias.name, "") for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      module = "." * node.level + (node.module or "")
      found |= {(module, alias.name) for alias in node.names}
  return found


def external(path: Path) -> set[str]:
  """Top-level modules beyond the standard library."""
  tops = {module.split(".")[0] for module, _ in imported(path)}
  return tops - {*sys.stdlib_module_names}


def test_a_wing_imports_only_wings_below_it(tmp_path):
  """And a contract that train.py breaks is found broken."""
  house = (ROOT / "setup.cfg").read_text()
  contracts = house.count("[importlinter:contract:")
  config = tmp_path / "setup.cfg"
  config.write_text(
    f"{house}\n[importlinter:contract:wrong]\nname = wrong\ntype = forbidden\n"
    "source_modules = gspo_jax.train\nforbidden_modules = gspo_jax.model\n"
  )
  command = "from importlinter.cli import *; lint_imports_command()"
  done = subprocess.run(
    [sys.executable, "-c", command, f"--config={config}", "--no-cache"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )
  expected = f"Contracts: {contracts} kept, 1 broken"
  assert expected in done.stdout, done.stdout + done.stderr


def dependencies(name: str) -> set[str]:
  found = set()
  for module, symbol in imported(MODULES[name]):
    full = f"{module}.{symbol}"
    found |= {m for m in (full, module) if m in MODULES and m != name}
    if full in MODULES:
      found.discard(module)
  return found


def test_no_circular_imports():
  graph = {name: dependencies(name) for name in MODULES}
  # A package's __init__ may import its modules, which import one another.
  packages = {name for name, path in MODULES.items() if path.stem == "__init__"}
  done, path = set(), []

  def visit(name):
    assert name not in path, f"circle: {path[path.index(name) :]}"
    if name in done:
      return
    path.append(name)
    for other in graph[name] - packages:
      visit(other)
    path.pop()
    done.add(name)

  for name in graph:
    visit(name)


def public(wing: str) -> set[str]:
  """What the wing's __init__ offers: `__all__`, or modules in a table."""
  tree = ast.parse((PACKAGE / wing / "__init__.py").read_text())
  for node in tree.body:
    if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
      return set(ast.literal_eval(node.value))
  table = re.findall(
    r"^ *(\w+(?:, \w+)*)(?:  |$)", ast.get_docstring(tree), re.M
  )
  assert table, f"gspo_jax/{wing}/__init__.py has no __all__ and no table"
  return {name for names in table for name in names.split(", ")}


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_offers_what_others_take(wing):
  """Others import its public names and modules, and nothing with a _."""
  offered, prefix = public(wing), f"gspo_jax.{wing}"
  for name, path in MODULES.items():
    if name == prefix or name.startswith(f"{prefix}."):
      continue
    for module, symbol in imported(path):
      if module == prefix:
        assert symbol in offered, f"{name} imports {module}.{symbol}"
      elif module.startswith(f"{prefix}."):
        part = module.removeprefix(f"{prefix}.").split(".")[0]
        assert part in offered, f"{name} imports {module}"
        assert not symbol.startswith("_"), f"{name} imports {module}.{symbol}"


@pytest.mark.parametrize(
  ("modules", "allowed"),
  [("configs/*", {"ml_collections", "gspo_jax"}),
   ("losses/*", {"jax", "numpy", "gspo_jax"}),
   ("rewards/numbers", {"gspo_jax"}), ("rewards/format", {"gspo_jax"}),
   ("rewards/thinking", set()), ("rewards/reward", {"gspo_jax"}),
   ("rollout/environment", {"gspo_jax"}), ("data/problem", set()),
   ("runtime/errors", set()), ("model/config", {"gspo_jax"})],
)  # fmt: skip
def test_the_lowest_modules_import_nothing_else(modules, allowed):
  found = [*PACKAGE.glob(f"{modules}.py")]
  assert found
  assert set().union(*map(external, found)) <= allowed


# What a release may move or rename, and the modules that hide it.
UNSTABLE = {
  "jax._src": "runtime.multihost",
  "jax.experimental.pallas.ops.gpu": "model.paged_attention",
  "jax.experimental.pallas.ops.tpu": "model.attention",
  "jax.experimental.pallas.tpu": "model.exact_kernels model.paged_kernel",
  "jax.experimental.pallas.triton": "model.gpu",
  "orbax": "record.checkpoint",
  "tokamax": "model.gpu",
}


def names_of(library: str, path: Path) -> set[str]:
  """What a file takes of a library: dotted names, attributes included."""
  tree, modules = ast.parse(path.read_text()), {}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import | ast.ImportFrom):
      source = getattr(node, "module", None)
      for alias in node.names:
        full = f"{source}.{alias.name}" if source else alias.name
        if f"{full}.".startswith(f"{library}."):
          modules[alias.asname or alias.name] = full
  used = {
    f"{modules[node.value.id]}.{node.attr}"
    for node in ast.walk(tree)
    if isinstance(node, ast.Attribute)
    and isinstance(node.value, ast.Name)
    and node.value.id in modules
  }
  return used | {*modules.values()}


@pytest.mark.parametrize("library", UNSTABLE)
def test_few_modules_take_unstable_names_and_they_exist(library):
  found = {name: names_of(library, path) for name, path in MODULES.items()}
  modules = {f"gspo_jax.{name}" for name in UNSTABLE[library].split()}
  assert {name for name in found if found[name]} == modules
  for name in set().union(*found.values()):
    try:
      pkgutil.resolve_name(name)
    except AttributeError:  # a module that its package does not import
      importlib.import_module(name)


def test_only_two_modules_read_a_config_dict():
  readers = {
    name for name, path in MODULES.items() if "ml_collections" in external(path)
  }
  assert readers == {"gspo_jax.program.command", "gspo_jax.program.config"}


def public_functions(node: ast.AST):
  """Functions and methods without a leading underscore, of public classes."""
  for child in getattr(node, "body", ()):
    if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
      if not child.name.startswith("_") or child.name == "__call__":
        yield child
    elif isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
      yield from public_functions(child)


def test_public_functions_have_types():
  """In the files that mypy checks: it alone allows a parameter without."""
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  for name in setup["mypy"]["files"].replace(",", " ").split():
    path = ROOT / name
    for file in [path] if path.is_file() else path.rglob("*.py"):
      for function in public_functions(ast.parse(file.read_text())):
        a = function.args
        named = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
        untyped = {x.arg for x in named if x and not x.annotation}
        assert untyped <= {"self", "cls"}, f"{file}: {function.name}"
        assert function.returns, f"{file}: {function.name}"


# Most lines of Python in the package: a change that needs more says so here.
MOST_LINES = 44_000


def test_the_package_does_not_grow_unseen():
  lines = sum(len(p.read_text().splitlines()) for p in MODULES.values())
  # Where much went, the number goes down as well.
  assert MOST_LINES - 500 < lines <= MOST_LINES


def test_few_functions_are_long():
  lengths = {}
  for path in MODULES.values():
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        length = node.end_lineno - node.lineno + 1
        lengths[path, node.lineno, node.name] = length
  assert max(lengths.values()) <= 100, max(lengths, key=lengths.get)
  assert np.percentile(list(lengths.values()), 95) <= 36
