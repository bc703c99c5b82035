"""Each notebook equals its script, has no outputs, and runs anywhere."""

import json
import os
import subprocess
import sys
import venv

import pytest
from repository import ROOT

jupytext = pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")

SCRIPTS = sorted((ROOT / "colabs").glob("*.py"))
each = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


def cells(notebook) -> list[tuple[str, str]]:
  return [(cell.cell_type, cell.source) for cell in notebook.cells]


def test_every_script_has_its_notebook():
  stems = [path.stem for path in SCRIPTS]
  assert stems == ["finished_run", "hugging_face", "loss", "smollm2", "tiny"]
  notebooks = sorted((ROOT / "colabs").glob("*.ipynb"))
  assert [path.stem for path in notebooks] == stems


@each
def test_notebook_is_its_script(script):
  notebook = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
  # To repair it: `jupytext --update --to ipynb colabs/*.py`.
  assert cells(notebook) == cells(jupytext.read(script, fmt="py:percent"))
  assert jupytext.writes(notebook, fmt="py:percent") == script.read_text()


@each
def test_notebook_holds_source_alone(script):
  # Not with nbformat, which repairs what it reads.
  notebook = json.loads(script.with_suffix(".ipynb").read_text())
  assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
  ids = [cell.get("id") for cell in notebook["cells"]]
  assert all(ids)
  assert len(set(ids)) == len(ids)
  for cell in notebook["cells"]:
    assert set(cell["metadata"]) <= {"lines_to_next_cell"}  # jupytext's own
    if cell["cell_type"] == "code":
      assert (cell["outputs"], cell["execution_count"]) == ([], None)


@each
def test_starts_with_a_title_and_the_installation(script):
  found = cells(jupytext.read(script, fmt="py:percent"))
  first = cells(jupytext.read(SCRIPTS[0], fmt="py:percent"))
  assert found[0][0] == "markdown"
  assert found[0][1].startswith("# ")
  assert f"/colabs/{script.stem}.ipynb)" in found[0][1]  # the badge
  assert found[1] == first[1]  # one installation for all
  assert "pip" in found[1][1]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
  """A new environment with a kernel alone, and the wheel of this checkout."""
  folder = tmp_path_factory.mktemp("kernel")
  pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps")
  subprocess.run([*pip, f"--wheel-dir={folder}", str(ROOT)], check=True)
  venv.create(folder / "venv", with_pip=True)
  python = folder / "venv/bin/python"
  install = (python, "-m", "pip", "install", "-q", "ipykernel", "nbclient")
  subprocess.run(install, check=True)
  (wheel,) = folder.glob("*.whl")
  return python, wheel


@pytest.mark.slow
@each
def test_installs_itself_and_runs(script, kernel, tmp_path):
  """In an empty folder, on one device; the asserts are in the notebooks."""
  python, wheel = kernel
  environment = os.environ | {"PYTHONPATH": ""}
  environment |= {"TMPDIR": str(tmp_path), "GSPO_JAX": wheel.as_uri()}
  ran = tmp_path / "ran.ipynb"
  source = script.with_suffix(".ipynb")
  execute = (python.with_name("jupyter-execute"), source, f"--output={ran}")
  subprocess.run(
    [*execute, "--timeout=1200"], cwd=tmp_path, env=environment, check=True
  )
  notebook = nbformat.read(ran, as_version=4)
  shown = {key for data in outputs(notebook) for key in data}
  assert "image/png" in shown
  errors = [text for text in streams(notebook, "stderr") if "Error" in text]
  assert not errors


def outputs(notebook):
  for cell in notebook.cells:
    for output in cell.get("outputs", ()):
      yield output.get("data", {})


def streams(notebook, name: str):
  for cell in notebook.cells:
    for output in cell.get("outputs", ()):
      if output.get("name") == name:
        yield output.text
