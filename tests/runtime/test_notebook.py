"""The first cell of a notebook, on machines that are made up."""

import json
import subprocess
import sys
import types

import pytest

from gspo_jax.runtime import notebook
from gspo_jax.runtime.errors import UserError

NEW = {"jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4.6"}
OLD = {"jax": "0.7.2", "jaxlib": "0.7.2", "numpy": "2.0.2"}
PLUGIN = {"jax-cuda12-plugin": "0.7.2", "jax-cuda12-pjrt": "0.7.2"}
CPU = {"platform": "cpu", "devices": "a CPU, 4.0 GiB", "dtype": "float32"}
T4 = {"platform": "gpu", "devices": "1 x Tesla T4", "dtype": "float32"}


@pytest.mark.parametrize(
  ("files", "env", "expected"),
  [((), {}, ("cpu", "")),
   (("accel", "nvidiactl", "vfio/vfio"), {}, ("cpu", "")),
   (("nvidia0",), {}, ("gpu", "an NVIDIA GPU")),
   (("accel0",), {}, ("tpu", "a TPU")), (("vfio/0",), {}, ("tpu", "a TPU")),
   ((), {"TPU_ACCELERATOR_TYPE": "v5e-1"}, ("tpu", "a TPU v5e-1"))],
)  # fmt: skip
def test_finds_a_gpu_or_tpu_by_its_files(
  files, env, expected, tmp_path, monkeypatch
):
  monkeypatch.setenv("PATH", str(tmp_path))  # without an nvidia-smi
  for name in files:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
  assert notebook.accelerator(str(tmp_path), env) == expected


@pytest.mark.parametrize(
  ("script", "expected"),
  [("echo 'Tesla T4'; echo 'Tesla T4'", ("gpu", "Tesla T4")),
   ("echo 'NVIDIA-SMI has failed'; exit 9", ("cpu", ""))],
)  # fmt: skip
def test_takes_the_name_from_nvidia_smi(
  script, expected, tmp_path, monkeypatch
):
  command = tmp_path / "nvidia-smi"
  command.write_text(f"#!/bin/sh\n{script}\n")
  command.chmod(0o755)
  monkeypatch.setenv("PATH", str(tmp_path))
  assert notebook.accelerator(str(tmp_path), {}) == expected


def imported(monkeypatch, *modules):
  """What the kernel has imported."""
  kernel = types.SimpleNamespace(
    executable=sys.executable, modules=dict.fromkeys(modules)
  )
  monkeypatch.setattr(notebook, "sys", kernel)


@pytest.fixture
def machine(monkeypatch):
  """Makes a machine; returns the commands that `prepare` runs on it."""

  def make(accelerator, before, after, finds):
    commands, versions = [], iter((before, after, after))

    def run(*arguments, **_):
      commands.append(" ".join(arguments))
      return json.dumps(finds)

    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(notebook, "accelerator", lambda: accelerator)
    monkeypatch.setattr(notebook, "_versions", lambda: next(versions))
    monkeypatch.setattr(notebook, "_python", run)
    imported(monkeypatch)
    return commands

  return make


FIND = "-m gspo_jax.runtime.notebook"


@pytest.mark.parametrize(
  ("accelerator", "extras", "finds"),
  [(("cpu", ""), "colab", CPU), (("gpu", "Tesla T4"), "colab,gpu", T4),
   (("tpu", "a TPU"), "colab,tpu", CPU | {"platform": "tpu"})],
)  # fmt: skip
def test_installs_the_jax_of_the_machine(machine, accelerator, extras, finds):
  commands = machine(accelerator, OLD, NEW, finds)
  assert notebook.prepare() == finds["dtype"]
  assert commands == [f"-m pip install -q gspo_jax[{extras}]", FIND]


def test_removes_a_plugin_of_another_jaxlib(machine, capsys):
  commands = machine(("cpu", ""), OLD | PLUGIN, NEW | PLUGIN, CPU)
  notebook.prepare()
  _, removed, _ = commands
  assert removed == ("-m pip uninstall -q -y jax-cuda12-plugin jax-cuda12-pjrt")
  assert capsys.readouterr().out == (
    "Runs on a CPU, 4.0 GiB; models compute in float32.\n"
  )


def test_does_not_take_a_cpu_for_an_accelerator(machine, monkeypatch, capsys):
  gpu = "gpu", "Tesla T4"
  machine(gpu, OLD, NEW, CPU)
  with pytest.raises(UserError, match="has Tesla T4, but jax finds only a CPU"):
    notebook.prepare()
  commands = machine(gpu, OLD, NEW, CPU)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  notebook.prepare()
  assert commands[0].endswith("gspo_jax[colab]")
  assert "Tesla T4 of this machine is not used" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("loaded", "before", "restarts"),
  [("jax", OLD, True), ("jax", NEW, False),
   ("jax", NEW | {"libtpu": "0.0.21"}, True), ("numpy", OLD, True),
   ("numpy", OLD | {"numpy": NEW["numpy"]}, False), ("json", OLD, False)],
)  # fmt: skip
def test_restarts_a_kernel_whose_packages_were_replaced(
  machine, monkeypatch, capsys, loaded, before, restarts
):
  commands, asked = machine(("cpu", ""), before, NEW, CPU), []
  kernel = types.SimpleNamespace(do_shutdown=asked.append)
  shell = types.SimpleNamespace(kernel=kernel)
  ipython = types.SimpleNamespace(get_ipython=lambda: shell)
  monkeypatch.setitem(sys.modules, "IPython", ipython)
  imported(monkeypatch, loaded)
  if not restarts:
    assert notebook.prepare() == "float32"
    return
  with pytest.raises(SystemExit):
    notebook.prepare()
  assert asked == [True]  # a restart
  assert FIND not in commands
  assert "Then run all cells again" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("platform", "capability", "flags", "dtype"),
  [
    ("cpu", None, "fma avx512_bf16", "float32"),
    ("cpu", None, "fma amx_bf16", "bfloat16"),
    ("tpu", None, "", "bfloat16"),
    ("gpu", "7.5", "amx_bf16", "float32"),  # T4
    ("gpu", "8.9", "", "bfloat16"),  # L4
    ("gpu", "12.0", "", "bfloat16"),
  ],
)
def test_computes_in_bfloat16_where_it_is_fast(
  platform, capability, flags, dtype, tmp_path
):
  cpuinfo = tmp_path / "cpuinfo"
  cpuinfo.write_text(f"flags : {flags}\n")
  device = types.SimpleNamespace(
    platform=platform, compute_capability=capability
  )
  assert notebook.fast_dtype(device, str(cpuinfo)) == dtype


def test_describes_devices(monkeypatch):
  gpu = types.SimpleNamespace(
    platform="gpu",
    device_kind="NVIDIA L4",
    memory_stats=lambda: {"bytes_limit": 3 * 2**29},
  )
  assert notebook.describe([gpu, gpu]) == "2 x NVIDIA L4, 1.5 GiB"
  found = json.loads(notebook._python(*FIND.split(), stdout=subprocess.PIPE))
  assert found["platform"] == "cpu"
  assert found["dtype"] in ("float32", "bfloat16")
  assert found["devices"].startswith("a CPU with ")
