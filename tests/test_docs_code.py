"""The code of docs/: sessions print what they show, commands run."""

import doctest
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from repository import ROOT

from gspo_jax import rewards
from gspo_jax.data.sources import load
from gspo_jax.learner.objective import ObjectiveConfig
from gspo_jax.program import command
from gspo_jax.program.config import all_keys, parse
from gspo_jax.program.config_keys import near
from gspo_jax.rollout import environment

DOCS = ROOT / "docs"
OWN = (DOCS / "own_pieces.md").read_text()
OTHERS = (DOCS / "from_trl_verl.md").read_text()
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]
SESSIONS = [p for p in sorted(DOCS.glob("*.md")) if ">>> " in p.read_text()]


def blocks(text, language):
  return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


@pytest.mark.parametrize("page", SESSIONS, ids=lambda page: page.name)
def test_a_session_prints_what_it_shows(page):
  text = "\n".join(blocks(page.read_text(), "pycon"))
  session = doctest.DocTestParser().get_doctest(text, {}, page.name, "", 0)
  assert session.examples
  assert doctest.DocTestRunner().run(session).failed == 0


@pytest.fixture
def pieces(tmp_path, monkeypatch):
  """A folder with the modules of two pages, on the path."""
  modules = []
  for code in blocks(OWN, "python") + blocks(OTHERS, "python"):
    modules.append(re.match(r"# (\w+)\.py\n", code)[1])
    (tmp_path / f"{modules[-1]}.py").write_text(code)
  monkeypatch.syspath_prepend(tmp_path)
  yield tmp_path
  for module in modules:
    sys.modules.pop(module, None)


def test_own_pieces_are_found_and_do_what_is_said(pieces):
  method = ObjectiveConfig("my_method.RANKED:clip_low=1e-3")
  assert method.loss_numbers == {"clip_low": 1e-3, "clip_high": 4e-4}
  places = method.method.advantages(np.array([[3.0, 1.0, 1.0, 9.0]]))
  np.testing.assert_allclose(places, [[1 / 3, -2 / 3, -2 / 3, 1]])
  assert rewards.named("my_reward.vowels:least=.5")("", "axe", "") > 0.6
  assert load("my_problems.sums")[21].text == "1+1?"
  game = environment.named("my_game.Higher:prize=2")()
  game.reset(environment.Question("", "7"), 0)
  said = [game.step(guess) for guess in ("x", "8", "7")]
  assert [step[2] for step in said] == [0, 0, 2]
  assert said[1][0] == [("user", "-")]
  config = importlib.import_module("my_config").get_config()
  assert config.model.num_layers == 1


def test_rewards_of_other_trainers_are_called_from_ours(pieces):
  verl = rewards.named("my_rewards.from_verl")
  assert verl("", "# 3", "3", data_source="gsm8k") == 1
  trl = rewards.named("my_rewards.from_trl")
  assert trl("", ["# 3", "# 4"], "4", task="sums") == [0, 1]


def test_names_of_other_trainers_lead_to_the_keys_beside_them():
  """The hint of the command agrees with the row, but for products."""
  rows = re.findall(r"^\| (`.*?) \| (.*`.*) \|$", OTHERS, re.M)
  checked, wrong = 0, []
  for theirs, ours in rows:
    section = re.match(r"`(\w+)`: ", theirs)
    names = re.findall(r"`([\w.]+)", theirs.partition(": ")[2] or theirs)
    for name in names if " x " not in ours and " x " not in theirs else ():
      key = f"{section[1]}.{name}" if section else name
      meant = near(key, all_keys())
      checked += bool(meant)
      if meant and meant[0].partition("=")[0] not in ours:
        wrong.append((key, meant, ours))
  assert checked > 80
  assert wrong == []


def test_the_own_loss_is_gspo_near_a_ratio_of_1(pieces):
  """Its gradient is GSPO's where nothing is clipped."""
  import jax

  from gspo_jax import gspo_loss

  objective = ObjectiveConfig("my_loss.soft_gspo:tau=500")
  rng = np.random.default_rng(0)
  logps = rng.normal(size=(3, 4)).astype(np.float32)
  given = logps, rng.normal(size=3).astype(np.float32), np.ones((3, 4))
  own = lambda x: objective.method.loss(x, *given, **objective.loss_numbers)
  gradient = lambda f: jax.grad(lambda x: f(x)[0])(logps)
  wanted = gradient(lambda x: gspo_loss(x, *given))
  np.testing.assert_allclose(gradient(own), wanted, rtol=1e-5)


MAIN = "-m gspo_jax.main "


def typed(code, folder):
  """What bash gives to each `python` of a block; it finds no other command."""
  functions = """
  python() { printf '%q ' "$@"; echo; }
  command_not_found_handle() { :; }
  """
  done = subprocess.run(
    [shutil.which("bash"), "-c", functions + code.replace(".venv/bin/", "")],
    cwd=folder,
    env={"PATH": str(folder / "none")},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout.splitlines()


@pytest.mark.parametrize(
  "page",
  [page for page in PAGES if MAIN in page.read_text()],
  ids=lambda page: page.name,
)
def test_flags_and_keys_of_a_command_fit(pieces, monkeypatch, page):
  """As the command reads them; what they name need not exist."""
  monkeypatch.chdir(pieces)
  starts = [code for code in blocks(page.read_text(), "sh") if MAIN in code]
  lines = [line for code in starts for line in typed(code, pieces)]
  commands = [line for line in lines if line.startswith(MAIN)]
  assert len(commands) == sum(code.count(MAIN) for code in starts)
  for line in commands:
    if "..." in line or "--help" in line:  # not whole, or no run
      continue
    monkeypatch.setattr(sys, "argv", shlex.split(line)[1:])
    with flagsaver.flagsaver():
      command.parse(sys.argv)
      parse(flags.FLAGS.config)


@pytest.mark.slow
@pytest.mark.parametrize("command", blocks(OWN, "sh"), ids=["1", "2", "3"])
def test_a_command_with_own_pieces_runs(pieces, command):
  python = f"{sys.executable} -m"
  done = subprocess.run(
    ["bash", "-c", command.replace("python -m", python)],
    cwd=pieces,
    env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert "4/4 reward" in done.stdout
