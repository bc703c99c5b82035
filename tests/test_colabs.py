"""Each notebook equals its script, has no outputs, and runs anywhere."""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import venv

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding
from pythons import environment
from repository import ROOT

from gspo_jax.configs import tiny_cpu
from gspo_jax.model.hf.families import FAMILIES, WITH_IMAGES
from gspo_jax.plan import chips, plan
from gspo_jax.plan import compile as plan_compile
from gspo_jax.runtime import notebook

jupytext = pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")
plt = pytest.importorskip("matplotlib.pyplot")

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
  assert "notebook.prepare()" in found[1][1]


# By model_type.
NAMES = {
  "deepseek_v3": "DeepSeek-V3, Moonlight", "dots1": "dots1",
  "glm4_moe": "GLM-4.5 to 4.7",
  "glm4_moe_lite": "GLM-4.7-Flash", "gpt_oss": "gpt-oss", "kimi_k2": "Kimi K2",
  "llama": "Llama 3, SmolLM2", "minimax_m2": "MiniMax-M2",
  "mixtral": "Mixtral", "olmoe": "OLMoE", "qwen2": "Qwen2, Qwen2.5",
  "qwen2_moe": "Qwen2, MoE", "qwen3": "Qwen3", "qwen3_5": "Qwen3.5",
  "qwen3_5_moe": "Qwen3.5, Qwen3.6, MoE",
  "qwen3_5_moe_text": "Qwen3.5, Qwen3.6, MoE", "qwen3_5_text": "Qwen3.5",
  "qwen3_moe": "Qwen3, MoE", "qwen3_next": "Qwen3-Next",
  "internlm3": "InternLM3", "iquestcoder": "IQuest-Coder",
  "mistral": "Mistral", "mistral3": "Mistral Small", "phi3": "Phi-4",
  "qwen2_5_vl": "Qwen2.5-VL", "qwen3_vl": "Qwen3-VL", "sarvam_mla": "Sarvam",
  "qwen3_vl_moe": "Qwen3-VL", "seed_oss": "Seed-OSS", "smollm3": "SmolLM3",
}  # fmt: skip


def test_all_list_the_families():
  assert set(NAMES) == {*FAMILIES, *WITH_IMAGES}
  titles = [cells(jupytext.read(path, fmt="py:percent"))[0] for path in SCRIPTS]
  (families,) = {title.rpartition("\n\n")[2] for _, title in titles}
  words = " ".join(families.split())
  for names in NAMES.values():
    for name in names.split(", "):
      assert re.search(rf"\b{re.escape(name)}[,;\s]", words), name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  folder = tmp_path_factory.mktemp("wheel")
  pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps")
  subprocess.run([*pip, f"--wheel-dir={folder}", str(ROOT)], check=True)
  (wheel,) = folder.glob("*.whl")
  return wheel


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
  """The Python of a new environment with a kernel alone."""
  folder = tmp_path_factory.mktemp("kernel")
  venv.create(folder, with_pip=True)
  pip_install(folder / "bin/python", "ipykernel", "nbclient")
  return folder / "bin/python"


def pip_install(python, *packages):
  subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)


def execute(python, source, wheel, folder, timeout=1200):
  """Runs a notebook in `folder`; the process, and the notebook with outputs."""
  environment = os.environ | {"PYTHONPATH": "", "GSPO_JAX": wheel.as_uri()}
  environment |= {"TMPDIR": str(folder)}
  ran = folder / "ran.ipynb"
  command = (python.with_name("jupyter-execute"), source, f"--output={ran}")
  done = subprocess.run(
    [*command, f"--timeout={timeout}"],
    cwd=folder,
    env=environment,
    stderr=subprocess.PIPE,
    text=True,
  )
  return done, nbformat.read(ran, as_version=4) if ran.exists() else None


@pytest.mark.slow
@each
def test_installs_itself_and_runs(script, kernel, wheel, tmp_path):
  """In an empty folder, on one device; the asserts are in the notebooks."""
  done, notebook = execute(
    kernel, script.with_suffix(".ipynb"), wheel, tmp_path
  )
  assert done.returncode == 0, done.stderr
  shown = {key for data in outputs(notebook) for key in data}
  assert "image/png" in shown
  errors = [text for text in streams(notebook, "stderr") if "Error" in text]
  assert not errors


# What Colab had in 2026 beside jax and jaxlib 0.7.2, by runtime.
IMAGES = {
  "cpu": (),
  "gpu": ("jax-cuda12-plugin==0.7.2", "jax-cuda12-pjrt==0.7.2"),
  "tpu": ("libtpu=={libtpu}",),
}
# By Python; numpy 2.0.2 and libtpu 0.0.21 are not there for 3.13.
VERSIONS = {
  "3.12": {"numpy": "2.0.2", "libtpu": "0.0.21"},
  "3.13": {"numpy": "2.2.6", "libtpu": "0.0.21.1"},
}
CLOCK = """
import resource, time
start = time.monotonic()
"""
FIRST_STEP = """
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(f"first cell: {time.monotonic() - start:.0f} s, ", end="")
print(f"{used.ru_utime + used.ru_stime:.0f} s of CPU")
from gspo_jax.configs import tiny_cpu
from gspo_jax.train import train_and_evaluate
config = tiny_cpu.get_config("debug")
config.num_steps = config.cold_start.steps = config.eval.every = 1
train_and_evaluate(config, "run")
import jax, importlib.metadata
names = "jax", "jaxlib", "jax-cuda12-plugin", "libtpu", "numpy"
found = {d.name: d.version for d in importlib.metadata.distributions()}
print(*(f"{name} {found[name]}" for name in names if name in found))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ("version", "image", "imports"),
  [*((v, image, "") for v in VERSIONS for image in IMAGES),
   ("3.12", "gpu", "import jax")],
)  # fmt: skip
def test_a_step_in_an_image_of_colab(version, image, imports, wheel, tmp_path):
  """Without an accelerator. `-s` prints the numbers of colabs/README.md."""
  python = environment((version,), tmp_path / "venv")
  old = VERSIONS[version]
  numpy = f"numpy=={old['numpy']}"
  usual = (numpy, "matplotlib", "ipykernel", "nbclient")
  pip_install(python, "jax==0.7.2", "jaxlib==0.7.2", *usual)
  for package in IMAGES[image]:
    pip_install(python, "--no-deps", package.format(**old))
  first = cells(jupytext.read(SCRIPTS[0], fmt="py:percent"))[1][1]
  new_cell, source = nbformat.v4.new_code_cell, tmp_path / "source.ipynb"

  def run(*parts):
    notebook = nbformat.v4.new_notebook(cells=list(map(new_cell, parts)))
    nbformat.write(notebook, source)
    return execute(python, source, wheel, tmp_path)

  if imports:
    done, _ = run(imports, first, FIRST_STEP)
    assert "the kernel restarts; then run all cells" in done.stderr
  done, ran = run(CLOCK, first, FIRST_STEP)
  assert done.returncode == 0, done.stderr
  said = "".join(streams(ran, "stdout"))
  print(f"\n{version} {image} {imports}\n{said}")
  assert "Runs on a CPU" in said
  assert re.search(r"^jax 0\.1\d\.", said, re.MULTILINE)
  assert "jax-cuda12-plugin" not in said  # there is no GPU


TOPOLOGIES = ("t4:1", "l4:1", "a100:1", "v5e:1x1", "v6e:1x1")


@pytest.mark.slow
@each
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_fits_a_device_of_colab(script, topology, tmp_path, monkeypatch):
  """The programs of its run, compiled; `-s` shows those of colabs/README.md."""
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  monkeypatch.setattr(plt, "show", plt.close)
  # What a notebook asks for: the folder's weights are made on the CPU.
  monkeypatch.setattr(jax, "default_backend", lambda: "not a CPU")
  dtype = "float32" if topology == "t4:1" else "bfloat16"
  monkeypatch.setattr(notebook, "prepare", lambda: dtype)
  found, target = what_runs(script), chips.parse(topology)
  monkeypatch.undo()
  if callable(found):  # the training of `loss`
    plan_compile.prepare(target.platform)
    (device,) = plan_compile.devices(target, 1)
    seeds = jax.ShapeDtypeStruct(
      (3,), jnp.int32, sharding=SingleDeviceSharding(device)
    )
    lowered = jax.jit(jax.vmap(found)).lower(seeds)
    done = plan_compile.compile_one(lowered, target.platform)
    needed = {"train": done.memory.needed}
  else:
    report = plan(found, target)
    assert report["fits"]
    functions = report["functions"].items()
    needed = {name: one["memory"]["needed"] for name, one in functions}
  print(f"\n{script.stem} {topology} {dtype}")
  print(*(f"  {name} {size / 2**30:.3f} GiB" for name, size in needed.items()))


def what_runs(script):
  """The config that a notebook trains with, or what it compiles itself."""
  names = {}
  for kind, source in cells(jupytext.read(script, fmt="py:percent")):
    if kind == "code":
      exec(source, names)
    if "config" in names:
      return names["config"]
    if "LONGER" in names:
      config = tiny_cpu.get_config("debug")
      for flag in names["SMALL"] + names["LONGER"]:
        key, value = flag.removeprefix("--config.").split("=", 1)
        kind = type(functools.reduce(getattr, key.split("."), config))
        config.update_from_flattened_dict({key: kind(value)})
      return config
    if "train" in names:
      return functools.partial(names["train"], names["gspo_loss"])
  raise ValueError(f"{script}: found nothing that runs")


def outputs(notebook):
  for cell in notebook.cells:
    for output in cell.get("outputs", ()):
      yield output.get("data", {})


def streams(notebook, name: str):
  for cell in notebook.cells:
    for output in cell.get("outputs", ()):
      if output.get("name") == name:
        yield output.text
