"""launch/: scripts and manifests are linted, run dry and run on a worker."""

import configparser
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from repository import ROOT

from gspo_jax import main
from gspo_jax.plan.chips import parse

LAUNCH = ROOT / "launch"
README = (LAUNCH / "README.md").read_text()
SCRIPTS = sorted(path.name for path in LAUNCH.glob("*.sh"))
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
JOBSET = (LAUNCH / "gke_jobset.yaml").read_text()
BIN = Path(sys.executable).parent  # where shellcheck and yamllint are
CHIPS_A_HOST = 4
# By family: the accelerator of GKE, and the runtime of a TPU VM.
NAMES = {
  "v5p": ("tpu-v5p-slice", "v2-alpha-tpuv5"),
  "v5e": ("tpu-v5-lite-podslice", "v2-alpha-tpuv5-lite"),
  "v6e": ("tpu-v6e-slice", "v2-alpha-tpuv6e"), "tpu7x": ("tpu7x", None),
}  # fmt: skip

HOME = {"name": "n", "project": "p", "zone": "z"}  # where a slice lives
WORKDIR = "gs://b/it's a run"  # what quoting has to survive
TPU_VM_VERBS = {
  "create": {"accelerator-type": "v5p-128"},
  "queue": {"accelerator-type": "v5litepod-64"},
  "run": {"workdir": WORKDIR},
} | {verb: {} for verb in ("setup", "logs", "stop", "delete", "unqueue")}
XPK = HOME | {"cluster": "c"}
XPK_RUN = XPK | {"accelerator-type": "v5p-128", "image": "i"}
XPK_RUN["workdir"] = WORKDIR


# Replaces gcloud and xpk: records its arguments, and acts as worker $WORKER.
TOOL = """#!{python}
import json, os, subprocess, sys
with open({calls!r}, "a") as file:
  print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=file)
command = [a[10:] for a in sys.argv if a.startswith("--command=")]
worker = os.environ.get("WORKER")
if worker and command:
  os.environ["HOME"] = worker
  sys.exit(subprocess.run(["bash", "-c", *command], cwd=worker).returncode)
"""

# Replaces the training process: records its arguments and waits for SIGTERM.
PYTHON = """#!{python}
import json, os, signal, sys
with open("argv.part", "w") as file:
  json.dump([*sys.argv[1:], os.environ["JAX_COMPILATION_CACHE_DIR"],
             os.environ.get("A")], file)
def save(*_):
  print("saved", flush=True)
  sys.exit(75)
signal.signal(signal.SIGTERM, save)
os.rename("argv.part", "argv.json")
while True:
  signal.pause()
"""


@pytest.fixture
def shell(tmp_path):
  """Runs a script with fakes of gcloud and xpk, whose `calls()` it returns."""
  calls, tools = tmp_path / "calls", tmp_path / "bin"
  calls.touch()
  tools.mkdir()
  for name in ("gcloud", "xpk"):
    text = TOOL.format(python=sys.executable, calls=str(calls))
    (tools / name).write_text(text)
    (tools / name).chmod(0o755)
  clean = {k: v for k, v in os.environ.items() if not k.startswith("GSPO_")}
  clean["PATH"] = f"{tools}{os.pathsep}{clean['PATH']}"

  def run(script, *arguments, env=None):
    command = ["bash", LAUNCH / script, *arguments]
    return captured(command, env=clean | (env or {}), timeout=60)

  run.calls = lambda: [*map(json.loads, calls.read_text().splitlines())]
  run.env = clean
  return run


def captured(command, cwd=ROOT, **options):
  return subprocess.run(
    command, cwd=cwd, capture_output=True, text=True, **options
  )


def flags(settings):
  return [f"--{key}={value}" for key, value in settings.items()]


def printed(done):
  """The commands of a dry run, as a shell would split them."""
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  return [shlex.split(line) for line in lines if not line.startswith("#")]


def assert_error(done, *words):
  assert done.returncode == 2
  assert done.stderr.startswith("error: ")
  assert done.stderr.count("\n") == 1
  for word in words:
    assert word in done.stderr


def table():
  """{accelerator type: (family, topology, chips, hosts)} of the README."""
  row = r"\| (v5p|v5e|v6e|tpu7x) ([\dx]+) \| (\d+) \| (\d+) \| (\S+) \|"
  found = re.findall(row, README)
  return {name: (f, t, int(n), int(h)) for f, t, n, h, name in found}


# The files.


YAML_RULES = "{extends: default, rules: {line-length: {max: 80}}}"


@pytest.mark.parametrize(
  "command",
  [*([BIN / "shellcheck", "-x", script] for script in SCRIPTS),
   [BIN / "yamllint", "--strict", "-d", YAML_RULES, "gke_jobset.yaml"]],
)  # fmt: skip
def test_the_files_are_clean(command):
  done = captured(command, cwd=LAUNCH)
  assert done.returncode == 0, done.stdout + done.stderr


def parts_of(text):
  """A JobSet, its job, the job's spec, a pod and its container."""
  jobset = yaml.safe_load(text)
  (job,) = jobset["spec"]["replicatedJobs"]
  spec = job["template"]["spec"]
  pod = spec["template"]["spec"]
  (container,) = pod["containers"]
  return jobset, job, spec, pod, container


def test_the_jobset_fills_its_slices_exactly():
  jobset, job, spec, pod, container = parts_of(JOBSET)
  topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
  accelerator = pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"]
  chips = math.prod(map(int, topology.split("x")))
  a_host = container["resources"]["limits"]["google.com/tpu"]
  assert spec["parallelism"] == spec["completions"]
  assert spec["parallelism"] * a_host == chips
  assert a_host == CHIPS_A_HOST
  rows = [(NAMES[f][0], t, n) for f, t, _, n in table().values()]
  assert (accelerator, topology, spec["parallelism"]) in rows
  # `replicas` slices, each a node pool of its own.
  assert job["replicas"] >= 1
  exclusive = "alpha.jobset.sigs.k8s.io/exclusive-topology"
  pool = jobset["metadata"]["annotations"][exclusive]
  assert pool == "cloud.google.com/gke-nodepool"


def test_the_jobset_restarts_all_but_user_errors():
  jobset, _, spec, pod, container = parts_of(JOBSET)
  assert pod["restartPolicy"] == "Never"  # podFailurePolicy asks for it
  assert spec["backoffLimit"] == 0
  assert spec["completionMode"] == "Indexed"
  (rule,) = spec["podFailurePolicy"]["rules"]
  assert rule["action"] == "FailJob"
  name, codes = container["name"], [2]  # not main.INTERRUPTED
  assert rule["onExitCodes"] == {
    "containerName": name, "operator": "In", "values": codes
  }  # fmt: skip
  policy = jobset["spec"]["failurePolicy"]
  assert policy["maxRestarts"] > 0
  (rule,) = policy["rules"]
  assert rule["action"] == "FailJobSet"
  assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]


def test_sigterm_reaches_python_and_leaves_it_time():
  *_, pod, container = parts_of(JOBSET)
  assert container["command"] == ["python", "-m", "gspo_jax.main"]
  keys = [word.split("=")[0] for word in container["args"]]
  assert keys == ["--config", "--workdir"]
  # 23 GB a host (README) at 100 MB/s, and an iteration of minutes.
  assert pod["terminationGracePeriodSeconds"] >= 600


def test_the_readme_fills_in_every_placeholder(shell):
  command = next(
    line for line in README.splitlines() if "kubectl apply" in line
  )
  filled = captured(
    ["bash", "-c", command.rsplit(" | ", 1)[0]],
    env=shell.env | {"GSPO_IMAGE": "r/i:1", "GSPO_WORKDIR": "gs://b/run"},
    check=True,
  ).stdout
  assert "REPLACE" not in filled
  *_, container = parts_of(filled)
  assert container["image"] == "r/i:1"
  assert "--workdir=gs://b/run" in container["args"]
  assert {each["name"]: each["value"] for each in container["env"]} == {
    "JAX_COMPILATION_CACHE_DIR": "gs://b/run/compilation_cache",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }


def test_the_image_holds_what_the_command_needs():
  lines = (LAUNCH / "Dockerfile").read_text().splitlines()
  after = lambda verb: [x[len(verb) + 1 :] for x in lines if x.startswith(verb)]
  *_, container = parts_of(JOBSET)
  (entry,) = after("ENTRYPOINT")
  assert json.loads(entry) == container["command"]  # JSON: no shell around it
  copies = [x.split() for x in after("COPY") if not x.startswith("--from")]
  copied = [word for words in copies for word in words[:-1]]
  assert {"gspo_jax", "configs", "setup.cfg", "pyproject.toml"} <= set(copied)
  assert all((ROOT / name).exists() for name in copied)
  ignore = (LAUNCH / "Dockerfile.dockerignore").read_text().splitlines()
  assert ignore[0] == "*"
  assert {f"!{name}" for name in copied} <= set(ignore)
  # Each image has its packages; without --target it is the last one, for TPUs.
  for image, file in ("gpu", "requirements_gpu"), ("tpu", "requirements"):
    stage = lines[lines.index(f"FROM base AS {image}") :]
    packages, own = (x for x in stage[:8] if x.startswith("RUN"))
    assert packages.endswith(f"--no-deps -r /tmp/{file}.txt")
    assert own.endswith("--no-deps /tmp/wheels/*.whl")
    assert f"COPY launch/{file}.txt /tmp/" in stage
  assert not [x for x in stage[1:] if x.startswith("FROM")]


@pytest.mark.parametrize(
  ("file", "extra", "beside"),
  [("requirements", "tpu", "plan"), ("requirements_gpu", "gpu", "gpu")],
)
def test_an_image_has_the_versions_that_setup_cfg_asks_for(file, extra, beside):
  """If not, make the file anew: launch/README.md."""
  lines = (LAUNCH / f"{file}.txt").read_text().splitlines()
  pins = dict(x.split("==") for x in lines if not x.startswith("#"))
  extras = SETUP["options.extras_require"]
  names = "hf", "tfds", "datasets", "wandb", extra
  asked = SETUP["options"]["install_requires"]
  asked += "".join(extras[name] for name in names)
  assert "gspo_jax[hf,tfds,datasets,wandb]" in asked
  # libtpu against the pin of jax[tpu]: launch/README.md.
  for line in (asked + extras[beside]).split():
    requirement = Requirement(line)
    if requirement.name != "gspo_jax":
      version = pins[canonicalize_name(requirement.name)]
      assert requirement.specifier.contains(version), line


def test_the_wheels_for_a_gpu_are_what_setup_cfg_asks_for():
  """Except for `there`, the packages that the machine has beside JAX."""
  script = re.sub("#.*", "", (LAUNCH / "offline_gpu.sh").read_text())
  extras = SETUP["options.extras_require"]
  asked = SETUP["options"]["install_requires"] + extras["gpu"] + extras["hf"]
  there = "jax", "flax", "optax", "orbax-checkpoint", "numpy", "absl-py"
  there += "sentencepiece", "transformers", "safetensors", "tokenizers"
  there += ("jinja2",)
  for line in asked.split():
    requirement = Requirement(line)
    if requirement.name not in (*there, "gspo_jax"):
      pin = re.search(rf"\b{requirement.name}(?:==([\d.]+))?[\s']", script)
      assert pin, line
      assert not pin[1] or requirement.specifier.contains(pin[1]), line


# The table and the sizes.


def test_a_plan_knows_the_slices_of_the_table():
  assert len(table()) > 20
  for name, (family, topology, chips, _) in table().items():
    found = parse(name)
    assert str(found) == f"{family}:{topology}"
    assert math.prod(found.shape) == chips


@pytest.mark.parametrize("kind", table())
def test_the_script_has_the_slices_of_the_table(shell, kind):
  family, _, chips, hosts = table()[kind]
  settings = HOME | {"accelerator-type": kind}
  if family == "tpu7x":
    assert_error(shell("tpu_vm.sh", "create", *flags(settings)), "xpk.sh")
    settings = XPK_RUN | {"accelerator-type": kind}
    done = shell("xpk.sh", "run", "--dry-run", *flags(settings))
    assert f"x {kind}: chips {chips}, hosts {hosts}," in done.stdout
    return
  done = shell("tpu_vm.sh", "create", "--dry-run", *flags(settings))
  assert f"# {kind}: chips {chips}, hosts {hosts}," in done.stdout
  (command,) = printed(done)
  assert f"--version={NAMES[family][1]}" in command
  assert f"--accelerator-type={kind}" in command


# Dry runs.


# The beginning of the one command that each verb is; of `setup` there are more.
WORDS = {
  "create": "tpu-vm create n --accelerator-type=v5p-128",
  "queue": "queued-resources create n --node-id=n", "setup": "",
  "logs": "tpu-vm ssh n --worker=0", "stop": "tpu-vm ssh n --worker=all",
  "run": "tpu-vm ssh n --worker=all", "delete": "tpu-vm delete n",
  "unqueue": "queued-resources delete n --force",
}  # fmt: skip


def dry(shell, verb, *more):
  settings = flags(HOME | TPU_VM_VERBS[verb])
  return printed(shell("tpu_vm.sh", verb, "--dry-run", *settings, *more))


@pytest.mark.parametrize(
  ("script", "verb", "settings"),
  [("tpu_vm.sh", verb, HOME | TPU_VM_VERBS[verb]) for verb in WORDS]
  + [("xpk.sh", verb, XPK) for verb in ("list", "delete")]
  + [("xpk.sh", "run", XPK_RUN)],
)
def test_what_a_dry_run_prints_is_what_runs(shell, script, verb, settings):
  dry = printed(shell(script, verb, "--dry-run", *flags(settings)))
  assert shell.calls() == []  # nothing ran
  if verb == "setup":  # leave this checkout alone
    settings = settings | {"git-url": "u"}
    dry = printed(shell(script, verb, "--dry-run", *flags(settings)))
  elif script == "tpu_vm.sh":
    (command,) = dry
    assert " ".join(command).startswith(f"gcloud compute tpus {WORDS[verb]}")
    assert command[-2:] == ["--project=p", "--zone=z"]
  done = shell(script, verb, *flags(settings))
  assert done.returncode == 0, done.stderr
  assert shell.calls() == dry


@pytest.mark.parametrize("capacity", ["--spot", "--reserved"])
@pytest.mark.parametrize("verb", ["create", "queue"])
def test_capacity_is_passed_on(shell, verb, capacity):
  assert capacity in dry(shell, verb, capacity)[0]
  assert not {"--spot", "--reserved"} & set(dry(shell, verb)[0])


def test_setup_copies_then_installs_then_renews_libtpu(shell):
  directory, tar, scp, *remote = dry(shell, "setup")
  assert directory[:2] == ["mkdir", "-p"]
  assert {"configs", "gspo_jax", "pyproject.toml", "setup.cfg"} <= set(tar)
  archive = tar[tar.index("-czf") + 1]
  assert archive.startswith(directory[-1])
  assert scp[3:8] == ["tpu-vm", "scp", archive, "n:", "--worker=all"]
  unpack, install, libtpu = [command[7] for command in remote]
  assert all("--worker=all" in command for command in remote)
  assert "tar -xzf gspo_jax.tar.gz -C gspo_jax/src" in unpack
  assert "pip install './src[tpu]'" in install
  assert "pip install --upgrade 'libtpu>=0.0.48,<0.0.52'" in libtpu


def test_xpk_gets_a_command_that_passes_sigterm_on(shell):
  settings = flags(XPK_RUN | {"slices": 2})
  more = ["--env=A=b c", "--env=JAX_COMPILATION_CACHE_DIR=gs://c", "--"]
  more.append("--config.seed=3")
  assert shell("xpk.sh", "run", *settings, *more).returncode == 0
  (words,) = shell.calls()
  assert words[:3] == ["xpk", "workload", "create"]
  assert {
    *("--workload=n", "--tpu-type=v5p-128", "--num-slices=2"),
    *("--docker-image=i", "--max-restarts=10", "--cluster=c"),
    f"--restart-on-exit-codes=1,{main.INTERRUPTED}",
    "--termination-grace-period-seconds=900",
  } <= set(words)
  (command,) = [w[10:] for w in words if w.startswith("--command=")]
  assert shlex.split(command) == [
    *("exec", "env", f"JAX_COMPILATION_CACHE_DIR={WORKDIR}/compilation_cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0",
    *("A=b c", "JAX_COMPILATION_CACHE_DIR=gs://c"),  # env takes the last one
    *("python", "-m", "gspo_jax.main"),
    *("--config=configs/moe_tpu_v5.py", f"--workdir={WORKDIR}"),
    "--config.seed=3",
  ]


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["wet", "dry"])
@pytest.mark.parametrize(
  ("script", "settings"),
  [("tpu_vm.sh", HOME | {"workdir": WORKDIR}), ("xpk.sh", XPK_RUN)],
)
def test_secrets_are_passed_on_and_not_printed(shell, script, settings, more):
  secret = "--env=WANDB_API_KEY=0a1b2c"
  done = shell(script, "run", *flags(settings), secret, "--env=A=b", *more)
  assert done.returncode == 0
  shown = done.stdout + done.stderr
  assert "WANDB_API_KEY=... A=... " in shown
  assert "0a1b2c" not in shown
  called = ["WANDB_API_KEY=0a1b2c A=b" in str(c) for c in shell.calls()]
  assert called == ([] if more else [True])


@pytest.mark.parametrize(
  ("word", "shown"),
  [("--env=wandb_api_key=0a1b2c", "wandb_api_key=... python"),
   ("--env=HEADERS=Bearer: 'it's 0a1b2c'", "HEADERS=... python"),
   ("--env=A=& --env=B=0a1b2c", "A=... python"),
   ("--config=db://u:p@0a1b2c@h/x", "db://...@h/x"),
   ("--env=WANDB-API-KEY=0a1b2c", "error: --env=..."),
   ("--env=hf_0a1b2c", "error: --env=..."),
   ("0a1b2c", "error: ...: no such setting"),
   ("--evn=WANDB_API_KEY=0a1b2c", "error: --evn: no such setting")],
)  # fmt: skip
@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["wet", "dry"])
def test_a_secret_by_another_name_is_not_printed(shell, word, shown, more):
  done = shell("xpk.sh", "run", *flags(XPK_RUN), word, *more)
  assert shown in done.stdout + done.stderr
  assert "0a1b2c" not in done.stdout + done.stderr


@pytest.mark.parametrize(
  "line",
  [x for x in README.splitlines() if x.startswith("launch/")],
  ids=lambda line: " ".join(line.split()[:2]),
)
def test_the_commands_of_the_readme_are_valid(shell, line):
  exports = re.findall(r"^export (.*)$", README, re.MULTILINE)
  words = [word for line in exports for word in line.split()]
  env = dict(shlex.split(word)[0].split("=") for word in words)
  script, *words = shlex.split(line, comments=True)
  assert printed(shell(script[7:], *words, "--dry-run", env=env))


# Mistakes.


@pytest.mark.parametrize(
  ("script", "verb", "missing"),
  [("tpu_vm.sh", "stop", ["name", "project", "zone"]),
   ("tpu_vm.sh", "create", ["accelerator-type"]),
   ("tpu_vm.sh", "queue", ["accelerator-type"]),
   ("tpu_vm.sh", "run", ["workdir"]),
   ("xpk.sh", "list", ["cluster", "project", "zone"]),
   ("xpk.sh", "delete", ["name"]),
   ("xpk.sh", "run", ["name", "accelerator-type", "image", "workdir"])],
)  # fmt: skip
@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["wet", "dry"])
def test_missing_settings_are_named(shell, script, verb, missing, more):
  other = {"tpu_vm.sh": {"cluster", "image"}, "xpk.sh": set()}[script]
  settings = {k: XPK_RUN[k] for k in XPK_RUN.keys() - missing - other}
  done = shell(script, verb, *flags(settings), *more)
  assert_error(done, *(f"--{key}=" for key in missing))
  variable = f"$GSPO_{missing[0].upper().replace('-', '_')}"
  assert variable in done.stderr
  assert done.stderr.count("$GSPO_") == len(missing)
  assert shell.calls() == []


# (accelerator type, what the error has)
IMPOSSIBLE = (
  ("v5p-72", "64 or a multiple of 128"), ("v5p-0", "a number"),
  ("v5e-64", "v5litepod-64"), ("v5litepod-48", "1, 4, 8, 16"),
  ("v6e-512", "128 or 256"), ("v4-64", "--runtime-version"),
)  # fmt: skip


@pytest.mark.parametrize(
  ("script", "words", "named"),
  [
    *(("tpu_vm.sh", [verb, *flags(HOME | {"accelerator-type": kind})], words)
      for verb in ("create", "queue") for kind, words in IMPOSSIBLE),
    ("tpu_vm.sh", ["start"], "start"),
    ("tpu_vm.sh", ["run", "--wrkdir=gs://b"], "--wrkdir"),
    ("tpu_vm.sh", ["run", *flags(HOME), "--workdir=runs/x"], "runs/x"),
    ("tpu_vm.sh", ["stop", *flags(HOME), "--grace=soon"], "soon"),
    ("xpk.sh", ["start"], "start"),
    ("xpk.sh", ["run", "--spot"], "--spot"),
    ("xpk.sh", ["run", *flags(XPK_RUN), "--env=1A=b"], "--env=..."),
    ("tpu_vm.sh", ["run", *flags(HOME), f"--workdir={WORKDIR}", "--env=A"],
     "--env=..."),
    ("xpk.sh", ["run", *flags(XPK_RUN), "--workdir=/tmp/x"], "/tmp/x"),
    ("xpk.sh", ["run", *flags(XPK_RUN), "--accelerator-type=v5p-9"], "v5p-9"),
  ],
)  # fmt: skip
def test_invalid_words_are_named(shell, script, words, named):
  assert_error(shell(script, *words), named)
  assert shell.calls() == []


@pytest.mark.parametrize("script", ["tpu_vm.sh", "xpk.sh"])
def test_help_names_every_verb_and_setting(shell, script):
  text = shell(script, "--help").stdout
  source = (LAUNCH / script).read_text()
  settings = re.findall(r"^ +(--[a-z-]+=)\*\)", source, re.MULTILINE)
  verbs = re.search(r"^  ([a-z |]+)\) shift", source, re.MULTILINE)[1]
  assert len(settings) >= 10
  for word in [*settings, *verbs.split(" | "), "--dry-run"]:
    assert word in text


# On a worker.


class Worker:
  """A home directory as after `setup`, with a replacement of Python."""

  def __init__(self, home, shell):
    self.home, self._shell = home / "gspo_jax", shell
    self._env = {"WORKER": str(home)}
    (self.home / "src").mkdir(parents=True)
    (self.home / ".venv/bin").mkdir(parents=True)
    self.install(PYTHON)

  def install(self, text):
    python = self.home / ".venv/bin/python"
    python.write_text(text.format(python=sys.executable))
    python.chmod(0o755)

  def tpu_vm(self, verb, *more):
    settings = flags(HOME | TPU_VM_VERBS[verb])
    return self._shell("tpu_vm.sh", verb, *settings, *more, env=self._env)

  def run(self, *more):
    """The arguments with which the training process has started."""
    assert self.tpu_vm("run", *more).returncode == 0
    path, deadline = self.home / "src/argv.json", time.monotonic() + 20
    while not path.exists():
      assert time.monotonic() < deadline, f"{path} never came"
      time.sleep(0.02)
    text = path.read_text()
    path.unlink()
    return json.loads(text)


@pytest.fixture
def worker(tmp_path, shell):
  if not Path("/proc/self").exists():
    pytest.skip("as a worker, Linux")
  worker = Worker(tmp_path / "a home", shell)
  yield worker
  pid = worker.home / "train.pid"
  if pid.exists():
    path = Path(f"/proc/{pid.read_text().strip()}/cmdline")
    if path.exists() and b"gspo_jax.main" in path.read_bytes():
      os.kill(int(pid.read_text()), signal.SIGKILL)


def test_run_and_stop_on_a_worker(worker):
  done = worker.tpu_vm("stop")
  assert (done.returncode, done.stdout) == (0, "not running\n")

  assert worker.run("--env=A=b c", "--", "--config.note=a b") == [
    *("-u", "-m", "gspo_jax.main", "--config=configs/moe_tpu_v5.py"),
    *(f"--workdir={WORKDIR}", "--config.note=a b"),
    *(f"{WORKDIR}/compilation_cache", "b c"),
  ]
  assert "already running" in worker.tpu_vm("run").stderr

  # The process itself gets the signal, and time to save.
  done = worker.tpu_vm("stop", "--grace=20")
  assert (done.returncode, done.stdout) == (0, "stopped\n")
  assert (worker.home / "train.log").read_text() == "saved\n"

  # The same command again appends to the same log.
  worker.run()
  assert worker.tpu_vm("stop", "--grace=20").returncode == 0
  assert (worker.home / "train.log").read_text() == "saved\nsaved\n"


def test_stop_reports_that_the_grace_was_too_short(worker):
  worker.install(PYTHON.replace("TERM, save", "TERM, signal.SIG_IGN"))
  worker.run()
  done = worker.tpu_vm("stop", "--grace=1")
  assert done.returncode == 1
  assert "still running after 1 s" in done.stderr


# On Slurm.


# Replaces scontrol, srun and Python: two nodes, a task on each.
SCONTROL = """#!/bin/sh
if [ "$1" = requeue ]; then echo "requeue $2" >>"$CALLS"
else printf 'n1\\nn2\\n'; fi
"""
SRUN = """#!/bin/sh
SLURM_PROCID=0 "$@" && SLURM_PROCID=1 "$@"
"""
TASK = """#!/bin/sh
echo "$*" >>"$CALLS"
[ "$SLURM_PROCID" = 0 ] || exit "$CODE"
"""


@pytest.mark.parametrize(
  ("code", "after"), [(0, []), (75, ["requeue 12345"]), (2, [])]
)
def test_slurm_starts_a_process_on_each_node_and_requeues_a_stopped_run(
  shell, tmp_path, code, after
):
  """`code`: of its last process."""
  for name, text in {"scontrol": SCONTROL, "srun": SRUN, "task": TASK}.items():
    (tmp_path / "bin" / name).write_text(text)
    (tmp_path / "bin" / name).chmod(0o755)
  env = {
    "CALLS": str(tmp_path / "tasks"),
    "CODE": str(code),
    "GSPO_PYTHON": "task",
    "GSPO_WORKDIR": "/w",
    "SLURM_JOB_ID": "12345",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "2",
  }
  assert shell("slurm.sh", "--config=a b.py", env=env).returncode == code
  command = (
    "-u -m gspo_jax.main --workdir=/w --coordinator=n1:22345 "
    "--config=a b.py --num_processes=2 --process_id="
  )
  calls = (tmp_path / "tasks").read_text().splitlines()
  assert calls == [f"{command}0", f"{command}1", *after]


def test_slurm_needs_a_workdir(shell):
  done = shell("slurm.sh")
  assert done.returncode != 0
  assert "GSPO_WORKDIR" in done.stderr
