"""Which weights a command means, and whose it refuses."""

import jax
import numpy as np
import pytest

from gspo_jax.model import hf
from gspo_jax.program import load_params
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.runtime.checkpoint import Checkpoints
from gspo_jax.runtime.errors import UserError


@pytest.fixture
def made(debug_config):
  debug_config.data.prompts = debug_config.learner.micro_batch_size = 8
  return build_program(parse(debug_config), sharding.make_mesh(data=8))


def fresh(made, seed):
  with jax.set_mesh(made.mesh):
    return made.learner.init_state(made.init_params(jax.random.key(seed)))


@pytest.fixture
def run(made, tmp_path):
  """A workdir with steps 1 and 2."""
  with Checkpoints(tmp_path / "checkpoints", every=1, keep=2) as checkpoints:
    for step in (1, 2):
      saved = {"identity": load_params.identity(made) | {"seed": 7}}
      checkpoints.save(step, fresh(made, step), saved)
  return tmp_path


def load(config, made, checkpoint):
  load_params.adopt(config, str(checkpoint))
  with jax.set_mesh(made.mesh):
    return load_params.load(config, made, str(checkpoint))


def require_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_of_a_workdir_the_newest_and_of_a_step_that_one(
  debug_config, made, run
):
  newest = load(debug_config, made, run)
  require_equal(newest, fresh(made, 2).params)
  first = load(debug_config, made, run / "checkpoints/1")
  require_equal(first, fresh(made, 1).params)
  with pytest.raises(UserError, match="checkpoint 5: not in"):
    load(debug_config, made, run / "checkpoints/5")


def test_a_hugging_face_folder(debug_config, made, tmp_path):
  wanted = fresh(made, 3).params
  hf.save_hf(wanted, made.cfg, tmp_path / "hf")
  load_params.adopt(debug_config, str(tmp_path / "hf"))
  assert debug_config.model.checkpoint == str(tmp_path / "hf")
  debug_config.data.tokenizer = "bytes"
  again = build_program(parse(debug_config), made.mesh)
  require_equal(load(debug_config, again, tmp_path / "hf"), wanted)


@pytest.mark.parametrize(
  ("section", "changes", "words"),
  [
    ("model", {"norm_eps": 1e-5}, "model.norm_eps=1e-06"),
    ("model", {"variant": "small"}, "model.vocab_size=258"),
  ],
)
def test_another_model(debug_config, made, run, section, changes, words):
  debug_config[section].update(changes)
  other = build_program(parse(debug_config), made.mesh)
  with pytest.raises(UserError, match=words):
    load(debug_config, other, run)


def test_other_settings_of_the_same_model(debug_config, made, run):
  debug_config.model.remat = True
  debug_config.model.dtype = "bfloat16"
  debug_config.sampler.max_new_tokens = 9
  other = build_program(parse(debug_config), made.mesh)
  require_equal(load(debug_config, other, run), fresh(made, 2).params)


def test_nothing_there(debug_config, made, tmp_path):
  with pytest.raises(UserError, match="no such folder"):
    load(debug_config, made, tmp_path)
  (tmp_path / "checkpoints").mkdir()
  with pytest.raises(UserError, match=r"no config.json .* no checkpoints"):
    load(debug_config, made, tmp_path)
