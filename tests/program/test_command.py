"""Flags of the command: mistakes are one line, and the exit code is 2."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from absl import flags
from absl.testing import flagsaver
from processes import python
from repository import ROOT

from gspo_jax import main, train
from gspo_jax.program import command, config
from gspo_jax.runtime import multihost
from gspo_jax.runtime.errors import UserError

TINY = f"--config={ROOT}/configs/tiny_cpu.py:debug"
WORKDIR = "--workdir=somewhere"
PROCESSES = ("--coordinator=host:1234", "--num_processes=2")


@pytest.fixture
def parse(monkeypatch):
  """Parses a command line, and restores the flags of the process."""

  def call(*arguments):
    # ml_collections reads sys.argv itself.
    monkeypatch.setattr(sys, "argv", ["gspo", *arguments])
    with flagsaver.flagsaver():
      command.parse(sys.argv)
      return flags.FLAGS.config, flags.FLAGS.workdir

  return call


def assert_one_line(text):
  assert "\n" not in text.strip()
  assert "Traceback" not in text
  assert len(text) < 400


# Flags.


@pytest.mark.parametrize(
  ("text", "words"),
  [("c.beta = 8", "mine.py:7: beta: no .* 'objective.kl_coef'"),
   ("c.optim.lr = 2", "mine.py:7: lr: no .* 'optim.learning_rate'"),
   ("c.reward.names = 'number'", r"mine.py:7: c.reward.names = 'number': "
    r"expected tuple, got str, as in \(.name.,\)"),
   ("c.num_steps = '3'", "mine.py:7: .* expected int, got str"),
   ("c.seed = 1 / 0", "mine.py:7: ZeroDivisionError: division by zero"),
   ("c.seed = json.loads('{')", "mine.py:7: JSONDecodeError: "),
   ("c.seed = ", "mine.py:7: invalid syntax"),
   ("return", r"--config: get_config\(\) of the file returned None"),
   ("return {}", r"--config: get_config\(\) of the file returned {}"),
   ("open('nowhere')", "mine.py:7: FileNotFoundError: .* 'nowhere'"),
   ("json.get_config()", "mine.py:7: AttributeError: module 'json' has no"),
   ("{}['MY_DATA']", "mine.py:7: KeyError: 'MY_DATA'"),
   ("c.optim.lr + 1", "mine.py:7: lr: no such key; .*optim.learning_rate"),
   ("compile('[1,', '', 'eval')", "mine.py:7: SyntaxError: "),
   ("raise UserError('no data')", "^no data$")],
)  # fmt: skip
def test_a_mistake_in_a_config_file_is_one_line(parse, tmp_path, text, words):
  (tmp_path / "mine.py").write_text(
    "import json\nfrom gspo_jax.configs import tiny_cpu\n"
    "from gspo_jax.runtime.errors import UserError\n\ndef get_config():\n"
    f"  c = tiny_cpu.get_config().lock()\n  {text}\n  return c\n"
  )
  with pytest.raises(UserError, match=words) as error:
    parse(f"--config={tmp_path}/mine.py", WORKDIR)
  assert_one_line(str(error.value))


def test_a_config_file_without_its_function_is_one_line(
  parse, tmp_path, monkeypatch
):
  (tmp_path / "mine.py").write_text("import numppy\n")
  with pytest.raises(UserError, match=r"mine\.py:1: ModuleNotFoundError: "):
    parse(f"--config={tmp_path}/mine.py", WORKDIR)
  (tmp_path / "mine.py").write_text("seed = 3\n")
  monkeypatch.delitem(sys.modules, "config_config")  # of the test before
  with pytest.raises(UserError, match="the file has no function get_config"):
    parse(f"--config={tmp_path}/mine.py", WORKDIR)


def test_overrides_reach_the_config(parse):
  typed, workdir = parse(
    TINY,
    "--config.seed=3",
    "--config.optim.learning_rate",
    "2e-4",
    "--config.log.instruments=true",
    "--noconfig.log.instruments",
    "--config.reward.weights=(1.0, 3)",
    "--config.objective.name=grpo",
    "--workdir=there",
  )
  parsed = config.parse(typed)
  assert parsed.seed == 3
  assert parsed.optim.learning_rate == 2e-4
  assert parsed.log.instruments is False
  assert parsed.reward.weights == (1, 3)
  assert parsed.objective.name == "grpo"
  assert workdir == "there"


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ([WORKDIR], "--config is missing; for a start: python -m"),
    ([TINY], "--workdir is missing"),
    ([TINY, WORKDIR, "--config.optim.learning_rat=1"],
     "--config.optim.learning_rat=1: no such key; did you mean "
     "'optim.learning_rate'?"),
    ([TINY, WORKDIR, "--config.sampler.group_size", "4"],
     "did you mean 'rollout.group_size'?"),
    ([TINY, WORKDIR, "-config.sed=1"], "did you mean 'seed'?"),
    ([TINY, WORKDIR, "--noconfig.log.instrument"], "'log.instruments'?"),
    (["--workdir", "x", TINY, "--config.sed=1"], "did you mean 'seed'?"),
    ([TINY, WORKDIR, "--config.seed=abc"], "--config.seed=abc: invalid"),
    ([TINY, WORKDIR, "--config.seed"], "Missing value"),
    ([TINY, WORKDIR, "--config.reward.weights=1,x"],
     "--config.reward.weights=1,x: expected numbers with commas between"),
    ([TINY, WORKDIR, "--config.reward.names", "1"],
     "--config.reward.names=1: expected names with commas between"),
    ([TINY, WORKDIR, "--num_generations=8"],
     "--num_generations: no such flag; did you mean "
     "'--config.rollout.group_size'?; see python -m gspo_jax.main --help"),
    ([TINY, WORKDIR, "--learner.minibatches=1"],
     "did you mean '--config.learner.minibatches' .optimizer steps an iter"),
    ([TINY, WORKDIR, "--wrokdir=x"],
     "wrokdir.*; see python -m gspo_jax.main --help"),
    ([TINY, WORKDIR, "config.seed=1"],
     "unexpected argument 'config.seed=1': did you mean '--config.seed'"),
    ([TINY, WORKDIR, "x"], "unexpected argument 'x': flags are --name=value"),
    (["--num_generations=8"], "mean '--config.rollout.group_size'"),
    ([TINY, WORKDIR, "--coordinator=h:1"], "--num_processes is missing: --c"),
    ([TINY, WORKDIR, "--process_id=0"], "--coordinator is missing: --coord"),
    ([TINY, WORKDIR, *PROCESSES, "--process_id=2"],
     "--process_id=2: expected 0 to 1, under --num_processes"),
    ([TINY, WORKDIR, *PROCESSES, "--process_id=-1"], "process_id.*-1"),
    ([TINY, WORKDIR, *PROCESSES, "--process_id=0", "--coordinator=h"],
     "--coordinator=h: expected HOST:PORT"),
    (["--config=configs/nope.py", WORKDIR],
     "--config=configs/nope.py: no such file; choose one of configs/calc"),
    (["--config", "elsewhere/dapo.py"], "elsewhere/dapo.py: no such file"),
    (["--config=configs/tiny_cp.py:debug", WORKDIR],
     "tiny_cp.py:debug: no such file; did you mean 'configs/tiny_cpu.py'?"),
    ([TINY.replace("debug", "fast"), WORKDIR],
     "tiny_cpu.py:fast: expected 'debug' or nothing"),
  ],
)  # fmt: skip
def test_a_mistaken_flag_is_named(parse, arguments, words):
  with pytest.raises(UserError, match=words.replace("?", r"\?")) as error:
    parse(*arguments)
  assert_one_line(str(error.value))


@pytest.mark.parametrize(
  "name", ["configs/tiny_cpu.py:debug", "tiny_cpu.py:debug", "tiny_cpu:debug"]
)
@pytest.mark.parametrize("flag", ["--config={}", "-config {}"])
def test_a_config_of_the_package_is_found_where_no_such_file_is(
  parse, monkeypatch, tmp_path, name, flag
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "tiny_cpu").mkdir()  # a workdir, say
  typed, _ = parse(*flag.format(name).split(), WORKDIR, "--config.seed=3")
  assert (typed.num_steps, typed.seed) == (4, 3)


def test_a_file_here_goes_before_that_of_the_package(
  parse, monkeypatch, tmp_path
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").mkdir()
  (tmp_path / "configs/tiny_cpu.py").write_text(
    "from gspo_jax.configs import common\n\n\ndef get_config():\n"
    "  c = common.get_config()\n  c.num_steps = 7\n  return c\n"
  )
  assert parse("--config=configs/tiny_cpu.py", WORKDIR)[0].num_steps == 7


@pytest.mark.parametrize(
  ("typed", "value"),
  [
    ("reward.names=gsm8k,format", ("gsm8k", "format")),
    ("reward.names gsm8k,format", ("gsm8k", "format")),
    ("reward.names=my.rewards.a,length:scale=.1,unit=8,format",
     ("my.rewards.a", "length:scale=.1,unit=8", "format")),
    ("reward.names=('gsm8k','format')", ("gsm8k", "format")),
    ("reward.names=(gsm8k,format)", ("gsm8k", "format")),
    ("reward.weights=1,.5", (1, 0.5)),
    ("sampler.stop=[END],a=b,4", ("[END]", "a=b", "4")),
    ("sampler.stop=('a,b',)", ("a,b",)),
    ("sampler.stop=", ()),
    ("reward.weights=2", (2,)),
    ("data.weights=", ()),
    ("data.curriculum=((3,'chain'),)", ((3, "chain"),)),
  ],
)  # fmt: skip
def test_a_tuple_needs_no_quotes(parse, typed, value):
  key, _, _ = typed.replace(" ", "=").partition("=")
  config_, _ = parse(TINY, WORKDIR, *f"--config.{typed}".split())
  assert config_[key] == value


def test_help_lists_every_key_as_it_can_be_typed(parse, capsys):
  with pytest.raises(SystemExit) as end:
    parse(TINY, "--help")
  assert end.value.code == 0
  text = capsys.readouterr().out
  assert max(map(len, text.splitlines())) <= 80
  assert "--config.num_steps=4\n" in text  # of :debug
  assert "--config.reward.names=final_answer\n" in text
  assert "largest global norm of the gradient [more than 0]" in text
  assert "--workdir=" in text
  assert "logtostderr" not in text  # absl's own
  typed = re.findall(
    r"^  (--config\.[^=]+=(?:\S+|(?= |$)))", text, re.MULTILINE
  )
  assert len(typed) == len(config.all_keys())
  assert parse(TINY, WORKDIR, *typed)[0] == parse(TINY, WORKDIR)[0]


# Several processes.


@pytest.fixture
def run_main(monkeypatch):
  """Runs `main` without other processes, with `train` replaced: its code."""

  def call(train_and_evaluate):
    monkeypatch.setattr(multihost, "start", lambda *_: None)
    monkeypatch.setattr(train, "train_and_evaluate", train_and_evaluate)
    monkeypatch.setattr(command.logging, "set_verbosity", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["gspo", TINY, WORKDIR])
    with flagsaver.flagsaver():
      command.parse(sys.argv)
      return command.on_hosts(main._train)

  return call


@pytest.mark.parametrize(
  ("kind", "is_primary", "prints"),
  [
    (multihost.AgreedError, True, True),
    (multihost.AgreedError, False, False),
    (UserError, True, True),
    (UserError, False, True),  # other processes may not have raised it
  ],
)
def test_which_process_prints_an_error(
  monkeypatch, capsys, run_main, kind, is_primary, prints
):
  def fail(*_):
    raise kind("a\nmistake")

  monkeypatch.setattr(multihost, "is_primary", lambda: is_primary)
  assert run_main(fail) == 2
  assert capsys.readouterr() == ("", "error: a mistake\n" if prints else "")


@pytest.mark.parametrize(("state", "code"), [("trained", 0), (None, 75)])
def test_a_run_that_sigterm_stopped_exits_with_75(run_main, state, code):
  both = signal.SIGTERM, signal.SIGINT
  before = [signal.getsignal(number) for number in both]
  try:
    assert run_main(lambda *_: state) == code
    for number in both:
      signal.raise_signal(number)  # one that comes too late
  finally:
    for number, handler in zip(both, before, strict=True):
      signal.signal(number, handler)


# The command itself.


# SIGINT is ignored if a shell started the tests in the background.
EARLY = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from gspo_jax import main
"""
TRAINING = """
from gspo_jax import train
from gspo_jax.program import command
from gspo_jax.runtime import multihost
from gspo_jax.runtime.preemption import Preemption
def train_and_evaluate(*_):
  with Preemption() as preemption:
    print("training", file=sys.stderr, flush=True)
    while not preemption.reached() or "2" in os.environ["SIGNALS"]:
      time.sleep(.01)  # SIGNALS=2: an iteration that does not end
train.train_and_evaluate = train_and_evaluate
"""


@pytest.mark.parametrize(
  ("at", "signals", "code", "words"),
  [("loading jax", [signal.SIGTERM], 75, "stopped before training"),
   ("loading jax", [signal.SIGINT], 75, "stopped before training"),
   ("training", [signal.SIGINT], 75, "saves after this iteration"),
   ("training", [signal.SIGINT] * 2, 130, "a second Ctrl-C")],
)  # fmt: skip
def test_a_signal_ends_a_run_in_one_line(tmp_path, at, signals, code, words):
  code_of = EARLY + TRAINING * (at == "training") + "main.main()"
  process = subprocess.Popen(
    [sys.executable, "-c", code_of, TINY, f"--workdir={tmp_path / 'run'}"],
    env=os.environ | {"SIGNALS": str(len(signals))},
    stderr=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    cwd=ROOT,
  )
  assert any(line.startswith(at) for line in process.stderr)
  for number in signals:
    process.send_signal(number)
    time.sleep(0.3)  # two of a kind at once are one
  _, err = process.communicate(timeout=60)
  assert process.returncode == code, err
  lines = err.splitlines()
  assert "Traceback" not in err
  assert len(lines) == len(signals), err
  assert words in lines[-1]


@pytest.mark.parametrize(
  ("workdir", "arguments", "words", "loads_jax"),
  [
    ("run", ["--config.learning_rate=1"], "mean 'optim.learning_rate'?", False),
    ("run", ["--config.data.source=jsonl:nope.jsonl"],
     "'nope.jsonl': No such file", True),
    ("file/below", ["--config.seed=1"], "cannot be written: Not a directory",
     True),
  ],
)  # fmt: skip
def test_the_command_prints_one_line_and_exits_with_2(
  tmp_path, workdir, arguments, words, loads_jax
):
  (tmp_path / "file").write_text("")
  flags = TINY, f"--workdir={tmp_path}/{workdir}", *arguments
  done = python("-m", "gspo_jax.main", *flags)
  assert done.returncode == 2
  assert "rror" not in done.stdout
  line = done.stderr.removeprefix("loading jax\n")
  assert line.startswith("error: ")
  assert words in line
  assert_one_line(line)
  # Before it is imported; a mistaken flag does not wait for it.
  assert (line != done.stderr) == loads_jax
