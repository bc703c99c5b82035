"""What a user can get wrong: one line that begins `error:`, exit code 2."""

import os
import signal
import subprocess
import sys

import jax
import pytest
from absl import flags
from absl.testing import flagsaver
from gspo_jax.program.checks import divides
from repository import ROOT

from gspo_jax import main, train
from gspo_jax.program import command
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError

TINY = f"--config={ROOT}/configs/tiny_cpu.py:debug"
WORKDIR = "--workdir=somewhere"
PROCESSES = ("--coordinator=host:1234", "--num_processes=2")


@pytest.fixture
def parse(monkeypatch):
  """`main.parse` on a command line, the process's flags as they were after."""

  def call(*arguments):
    # ml_collections reads sys.argv itself.
    monkeypatch.setattr(sys, "argv", ["gspo", *arguments])
    with flagsaver.flagsaver():
      command.parse(sys.argv)
      return flags.FLAGS.config, flags.FLAGS.workdir

  return call


def check(config):
  """What `train` does with a config before any work, on one device."""
  mesh = sharding.make_mesh(jax.devices()[:1], **config.mesh)
  build_program(parse(config), mesh)


def assert_one_line(text):
  assert "\n" not in text.strip()
  assert "Traceback" not in text
  assert len(text) < 400


# Flags.


def test_overrides_reach_the_config(parse):
  config, workdir = parse(
    TINY,
    "--config.seed=3",
    "--config.optim.learning_rate",
    "2e-4",
    "--config.model.remat=true",
    "--noconfig.model.remat",
    "--config.data.chain_steps=(1, 3)",
    "--config.objective.name=grpo",
    "--workdir=there",
  )
  assert config.seed == 3
  assert config.optim.learning_rate == 2e-4
  assert config.model.remat is False
  assert config.data.chain_steps == (1, 3)
  assert config.objective.name == "grpo"
  assert workdir == "there"
  check(config)


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ([WORKDIR], "--config is missing; for a start: python -m"),
    ([TINY], "--workdir is missing"),
    ([TINY, WORKDIR, "--config.optim.learning_rat=1"],
     "--config.optim.learning_rat=1: no such key; did you mean "
     "'optim.learning_rate'?"),
    ([TINY, WORKDIR, "--config.learning_rate=1"],
     "did you mean 'optim.learning_rate'?"),
    ([TINY, WORKDIR, "--config.data.batch_size=8"],
     "--config.data.batch_size=8: no such key; did you mean 'data.prompts'"),
    ([TINY, WORKDIR, "-config.sed=1"], "did you mean 'seed'?"),
    ([TINY, WORKDIR, "--noconfig.model.remats"], "mean 'model.remat'?"),
    ([TINY, WORKDIR, "--config.sed", "1"], "did you mean 'seed'?"),
    (["--workdir", "x", TINY, "--config.sed=1"], "did you mean 'seed'?"),
    ([TINY, WORKDIR, "--config.optim=1"], "--config.optim=1: .*optim has b1"),
    ([TINY, WORKDIR, "--config.seed=abc"], "--config.seed=abc: invalid"),
    ([TINY, WORKDIR, "--config.seed=1.5"], "--config.seed=1.5: invalid"),
    ([TINY, WORKDIR, "--config.optim.b1=x"], "--config.optim.b1=x"),
    ([TINY, WORKDIR, "--config.model.remat=maybe"], "maybe"),
    ([TINY, WORKDIR, "--config.seed"], "Missing value"),
    ([TINY, WORKDIR, "--wrokdir=x"],
     "wrokdir.*; see python -m gspo_jax.main --help"),
    ([TINY, WORKDIR, "config.seed=1"], "unexpected argument 'config.seed=1'"),
    ([TINY, WORKDIR, "--coordinator=h:1"], "--num_processes is missing: --c"),
    ([TINY, WORKDIR, "--process_id=0"], "--coordinator is missing: --coord"),
    ([TINY, WORKDIR, *PROCESSES, "--process_id=2"],
     "--process_id=2: expected 0 to 1, under --num_processes"),
    ([TINY, WORKDIR, *PROCESSES, "--process_id=-1"], "process_id.*-1"),
    ([TINY, WORKDIR, *PROCESSES, "--process_id=one"], "process_id=one"),
    ([TINY, WORKDIR, *PROCESSES, "--process_id=0", "--coordinator=h"],
     "--coordinator=h: expected HOST:PORT"),
    (["--config=configs/nope.py", WORKDIR], "No such file.*configs/nope.py"),
    (["--config=/", WORKDIR], "Is a directory: '/'"),
    ([TINY.replace("debug", "fast"), WORKDIR],
     "tiny_cpu.py:fast: expected 'debug' or nothing"),
  ],
)  # fmt: skip
def test_a_mistaken_flag_is_named(parse, arguments, words):
  with pytest.raises(UserError, match=words.replace("?", r"\?")) as error:
    parse(*arguments)
  assert_one_line(str(error.value))


# Values that the flags' types allow.


@pytest.mark.parametrize(
  ("override", "words"),
  [
    ("objective.name=gpso", "objective.name='gpso': did you mean 'gspo'"),
    ("objective.name=x", "choose one of cispo, dapo, dr_grpo, gmpo, grpo"),
    ("objective.old_logps=sampled", "did you mean 'sampler'"),
    ("model.variant=qwen3-8", "model.variant='qwen3-8': did you mean 'qwen3-"),
    ("model.variant=qwen3-14b", "'qwen3-14b': choose one of llama3.1-8b, "),
    ("model.dtype=float16", "did you mean 'bfloat16'"),
    ("rollout.group_size=1", "rollout.group_size=1: expected at least 2"),
    ("rollout.group_size=0", "rollout.group_size=0: expected at least 2"),
    ("sampler.temperature=0", "sampler.temperature=0.0: expected more than 0"),
    ("sampler.top_p=1.5", "sampler.top_p=1.5"),
    ("sampler.max_new_tokens=0", "sampler.max_new_tokens=0"),
    ("data.prompts=6", "data.prompts = 6 is not divisible by learner.minib"),
    ("learner.minibatches=3", "= 4 is not divisible by .*nearest divisor is 2"),
    ("learner.minibatches=0", "divisible by learner.minibatches = 0"),
    (
      "learner.micro_batch_size=3",
      "= 4 is not divisible by learner.micro_batch_size = 3",
    ),
    (
      "learner.micro_batch_size=64",
      "learner.micro_batch_size = 64; the nearest divisor",
    ),
    ("cold_start.batch=6", "cold_start.batch = 6 is not divisible by learner"),
    ("eval.samples=0", "eval.samples=0: expected at least 1"),
    ("eval.every=0", "eval.every=0"),
    ("log.samples_every=0", "log.samples_every=0"),
    ("optim.learning_rate=-1", "optim.learning_rate=-1.0: expected 0 or more"),
    ("optim.learning_rate=nan", "optim.learning_rate=nan"),
    ("optim.clip_norm=0", "optim.clip_norm=0.0"),
    ("optim.warmup_steps=-3", "optim.warmup_steps=-3: expected 0 or more"),
    ("optim.b2=1.5", "optim.b2=1.5: expected 0 or more, under 1"),
    ("cold_start.learning_rate=0", "cold_start.learning_rate=0.0: expected"),
    ("cold_start.check_every=0", "cold_start.check_every=0"),
    ("cold_start.gate=7", "cold_start.gate=7.0: expected 0 to 1"),
    ("checkpoint.every=0", "checkpoint.every=0"),
    ("objective.clip_low=-0.5", "clip_low=-0.5: expected .* -1 for the method"),
    ("sampler.temperature=inf", "sampler.temperature=inf"),
    ("sampler.min_new_tokens=99", "min_new_tokens=99: expected 0 to max_new"),
    ("data.prompts=0", "data.prompts = 0: expected at least 1"),
    ("num_steps=-3", "num_steps=-3"),
    ("log.samples=-1", "log.samples=-1"),
    ("seed=-1", "seed=-1: expected 0 or more, under"),
    ("seed=99999999999999999999", "seed=9+: expected 0 or more, under"),
    ("data.too_long=cut", "data.too_long='cut': choose one of drop, error"),
    ("data.instruction=Go", "data.instruction='Go': expected {problem} in it"),
    ("data.tokenizer=nope", "tokenizer 'nope': no such folder"),
    ("reward.seconds=0", "reward.seconds=0.0: expected more than 0"),
    ("reward.max_failed=1.5", "reward.max_failed=1.5: expected 0 to 1"),
    ("reward.workers=0", "reward.workers=0: expected at least 1"),
    ("model.checkpoint=nope", "nope"),
    ("mesh.data=3", "does not multiply to the 1 devices here"),
    ("mesh.fsdp=2", "does not multiply to the 1 devices here"),
    ("mesh.tensor=-1", "does not multiply to the 1 devices here"),
  ],
)
def test_a_value_that_cannot_work_is_named(parse, override, words):
  config, _ = parse(TINY, WORKDIR, f"--config.{override}")
  with pytest.raises(UserError, match=words) as error:
    check(config)
  assert_one_line(str(error.value))


def test_more_devices_than_rows(debug_config):
  mesh = sharding.make_mesh(data=8)
  with pytest.raises(UserError, match=r"prompts = 4 .*share rows = 8"):
    build_program(parse(debug_config), mesh)
  debug_config.data.prompts = 8
  with pytest.raises(UserError, match=r"micro_batch_size = 4 .*share rows = 8"):
    build_program(parse(debug_config), mesh)


@pytest.mark.parametrize(
  ("size", "divisor", "nearest"), [(4, 3, 2), (12, 5, 4), (7, 3, 1), (4, 0, 1)]
)
def test_divides_tells_the_nearest_divisor(size, divisor, nearest):
  with pytest.raises(
    UserError, match=f"a = {size} .* b = {divisor};.* {nearest}$"
  ):
    divides("a", size, "b", divisor)
  divides("a", size, "b", nearest)


# Of many processes.


@pytest.mark.parametrize(
  ("kind", "first", "told"),
  [
    (multihost.AgreedError, True, True),
    (multihost.AgreedError, False, False),
    (UserError, True, True),
    (UserError, False, True),  # the others may know nothing of it
  ],
)
def test_who_tells_a_mistake(monkeypatch, capsys, kind, first, told):
  def fail(*_):
    raise kind("a\nmistake")

  monkeypatch.setattr(multihost, "start", lambda *_: None)
  monkeypatch.setattr(multihost, "first", lambda: first)
  monkeypatch.setattr(train, "train_and_evaluate", fail)
  monkeypatch.setattr(main.logging, "set_verbosity", lambda _: None)
  monkeypatch.setattr(sys, "argv", ["gspo", TINY, WORKDIR])
  with flagsaver.flagsaver():
    command.parse(sys.argv)
    assert main._main([]) == 2
  assert capsys.readouterr() == ("", "error: a mistake\n" if told else "")


@pytest.mark.parametrize(("state", "code"), [("trained", 0), (None, 75)])
def test_a_run_that_sigterm_stopped_has_its_own_code(monkeypatch, state, code):
  monkeypatch.setattr(multihost, "start", lambda *_: None)
  monkeypatch.setattr(train, "train_and_evaluate", lambda *_: state)
  monkeypatch.setattr(main.logging, "set_verbosity", lambda _: None)
  monkeypatch.setattr(sys, "argv", ["gspo", TINY, WORKDIR])
  before = signal.getsignal(signal.SIGTERM)
  try:
    with flagsaver.flagsaver():
      command.parse(sys.argv)
      assert main._main([]) == code
    signal.raise_signal(signal.SIGTERM)  # one that comes too late
  finally:
    signal.signal(signal.SIGTERM, before)


# The command itself.


@pytest.mark.parametrize(
  ("workdir", "arguments", "words"),
  [
    ("run", ["--config.learning_rate=1"], "mean 'optim.learning_rate'?"),
    ("run", ["--config.data.source=json"], "expected chain, jsonl:FILE"),
    ("run", ["--config.data.source=jsonl:nope.jsonl"],
     "'nope.jsonl': No such file"),
    ("run", ["--config.mesh.fsdp=3"], "does not multiply to the 1 devices"),
    ("run", ["--coordinator=host:1", "--num_processes=2"], "--process_id is"),
    ("file/below", ["--config.seed=1"], "cannot be written: NotADirectory"),
  ],
)  # fmt: skip
def test_the_command_complains_in_one_line(tmp_path, workdir, arguments, words):
  (tmp_path / "file").write_text("")
  done = subprocess.run(
    [
      sys.executable,
      "-m",
      "gspo_jax.main",
      TINY,
      f"--workdir={tmp_path}/{workdir}",
      *arguments,
    ],
    cwd=ROOT,
    env=os.environ | {"XLA_FLAGS": ""},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 2
  assert done.stdout == ""
  assert done.stderr.startswith("error: ")
  assert words in done.stderr
  assert_one_line(done.stderr)
