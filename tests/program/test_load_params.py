"""Which weights a command loads, and which it refuses."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.configs import tiny_cpu
from gspo_jax.model import hf
from gspo_jax.program import load_params
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.record.checkpoint import Checkpoints
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError


def program_of(keys):
  keys.data.prompts = 8  # eight devices
  mesh = sharding.make_mesh(data=8)
  return build_program(parse(keys), mesh, training=False)


@pytest.fixture(scope="module")
def program():
  return program_of(tiny_cpu.get_config("debug"))


@pytest.fixture(scope="module")
def params(program):
  """Weights of the two steps that the run saved."""
  with jax.set_mesh(program.mesh):
    return {n: program.init_params(jax.random.key(n)) for n in (1, 2)}


@pytest.fixture(scope="module")
def run(program, params, tmp_path_factory):
  """A workdir with steps 1 and 2."""
  folder = tmp_path_factory.mktemp("run")
  saved = {"identity": load_params.identity(program) | {"seed": 7}}
  with (
    jax.set_mesh(program.mesh),
    Checkpoints(folder / "checkpoints", keep=2) as checkpoints,
  ):
    for step, weights in params.items():
      checkpoints.save(step, {"params": weights, "moments": weights}, saved)
  return folder


def load(keys, program, checkpoint):
  config = load_params.with_checkpoint(parse(keys), str(checkpoint))
  with jax.set_mesh(program.mesh):
    return load_params.load(config, program, str(checkpoint))


def require_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_workdir_gives_its_newest_step_and_a_step_itself(
  debug_config, program, params, run
):
  require_equal(load(debug_config, program, run), params[2])
  require_equal(load(debug_config, program, run / "checkpoints/1"), params[1])
  with pytest.raises(UserError, match="checkpoint 5: not in"):
    load(debug_config, program, run / "checkpoints/5")


def test_a_hugging_face_folder(debug_config, program, params, tmp_path):
  folder = str(tmp_path / "hf")
  hf.save_hf(params[1], program.cfg, folder)
  config = load_params.with_checkpoint(parse(debug_config), folder)
  assert config.model.checkpoint == folder
  debug_config.model.checkpoint = folder
  debug_config.data.tokenizer = "bytes"
  again = program_of(debug_config)
  require_equal(load(debug_config, again, folder), params[1])


@pytest.mark.parametrize(
  ("changes", "words"),
  [({"norm_eps": 1e-5}, "model.norm_eps=1e-06"),
   ({"vocab_size": 2048}, "model.vocab_size=258")],
)  # fmt: skip
def test_weights_of_another_model_are_refused(
  debug_config, program, run, changes, words
):
  cfg = dataclasses.replace(program.cfg, **changes)
  with pytest.raises(UserError, match=words):
    load(debug_config, dataclasses.replace(program, cfg=cfg), run)


@pytest.mark.parametrize("name", ["llama3.1-8b", "gpt-oss-20b"])
def test_what_identifies_a_model_is_the_same_in_a_file(name):
  """Else a run of it would not find its own checkpoints."""
  tokenizer = SimpleNamespace(fingerprint="")
  program = SimpleNamespace(cfg=model.variant(name), tokenizer=tokenizer)
  identity = load_params.identity(program)
  assert json.loads(json.dumps(identity)) == identity


def test_runs_saved_before_layers_differed_are_found(program):
  """The identity of a uniform model has the keys that it had then."""
  assert load_params.identity(program)["model"].keys() == {
    *("vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads"),
    *("head_dim", "mlp_dim", "num_experts", "experts_per_token"),
    *("norm_topk_prob", "rope_theta", "rope_scaling", "attention_bias"),
    *("qk_norm", "qk_norm_over_heads", "norm_eps", "tie_embeddings", "dtype"),
  }


def test_other_settings_of_the_same_model(debug_config, params, run):
  debug_config.model.remat = "full"
  debug_config.model.update(dtype="bfloat16", exact=True)
  debug_config.continuous_batching.slots = 8
  debug_config.sampler.max_new_tokens = 9
  other = program_of(debug_config)
  require_equal(load(debug_config, other, run), params[2])


def test_a_folder_without_weights(debug_config, program, tmp_path):
  with pytest.raises(UserError, match="no such folder"):
    load(debug_config, program, tmp_path)
  (tmp_path / "checkpoints").mkdir()
  with pytest.raises(UserError, match=r"no config.json .* no checkpoints"):
    load(debug_config, program, tmp_path)
