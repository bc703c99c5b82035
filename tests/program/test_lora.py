"""Updates of adapters: what moves, what is saved, one device and eight."""

import dataclasses
import math
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from safetensors.numpy import load_file, save_file

from gspo_jax.configs import tiny_cpu
from gspo_jax.model import hf, lora, parameters
from gspo_jax.program import load_params
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.record.checkpoint import Checkpoints, checksums
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.samples import STOPPED, Prompts, Samples

SIZES = {"num_layers": 1, "embed_dim": 16, "head_dim": 8, "mlp_dim": 8}
P, G, S, R = 4, 4, 8, 5


def config_of(**keys):
  c = tiny_cpu.get_config("debug")
  c.model.update(SIZES)
  c.model.lora.rank = 2
  c.cold_start.steps = 0
  c.objective.kl_coef = 0.1
  c.optim.update({"learning_rate": 1e-2, "warmup_steps": 0})
  c.learner.update({"minibatches": 1, "micro_batch_size": 8})
  c.log.instruments = False
  c.update_from_flattened_dict(keys)
  return c


def program_of(config, **axes):
  devices = jax.devices() if axes else jax.devices()[:1]
  return build_program(parse(config), sharding.make_mesh(devices, **axes))


def first_state(program):
  """With its adapters off zero, for the first gradient of A would be zero."""
  with jax.set_mesh(program.mesh):
    params = program.init_params(jax.random.key(0))
    base, adapters = lora.split(program.new_policy(params))
    moved = jax.tree.map(lambda x: x + 0.1, adapters)
    return program.learner.init_state(lora.join(base, moved))


def responses(program):
  """Of no meaning, with the batch that they make."""
  learner, rng = program.learner, np.random.default_rng(0)
  tokens = lambda *shape: rng.integers(0, 256, shape).astype(np.int32)
  prompts = Prompts(tokens(P, S), np.full(P, S, np.int32))
  B, lengths = P * G, rng.integers(2, R + 1, P * G).astype(np.int32)
  samples = Samples(
    np.where(np.arange(R) < lengths[:, None], tokens(B, R), 0),
    np.zeros((B, R), np.float32),
    lengths,
    np.full(B, STOPPED, np.int8),
    np.int32(0),
  )
  packing = learner.pack(prompts.lengths, lengths, jax.random.key(0))
  return samples, learner.make_train_batch(prompts, samples, packing)


def update(program, state):
  """One update on responses and rewards of no meaning; the log-probs, too."""
  learner, rng = program.learner, np.random.default_rng(1)
  samples, batch = responses(program)
  batch = learner.add_reference_and_values(state, batch)
  rewards = rng.standard_normal(P * G).astype(np.float32)
  batch = learner.assign_advantages(batch, rewards, samples.finish)
  reference = np.array(batch.rows.reference_logps)
  state, _, metrics = learner.update(state, batch)
  return state, reference, metrics


@pytest.fixture(scope="module")
def on_one_device():
  """The state before an update and after, what it returned, the program."""
  program = program_of(config_of())
  state = first_state(program)
  before = jax.tree.map(np.array, state)  # copies: the state is donated
  after, reference, metrics = update(program, state)
  return before, after, reference, metrics, program


def paths(tree):
  return set(sharding.leaves_by_path(tree))


def test_adapters_move_and_the_weights_below_stay(on_one_device):
  before, after, _, metrics, _ = on_one_device
  jax.tree.map(np.testing.assert_array_equal, after.base, before.base)
  for path, x in sharding.leaves_by_path(before.params).items():
    moved = np.abs(x - sharding.leaves_by_path(after.params)[path]).max()
    assert 1e-4 < moved < 0.05, path
  assert metrics["kl/reference"].value() > 1e-4
  # The reference is the weights without adapters: it needs no copy.
  assert jax.tree.leaves(after.reference) == []


def test_only_adapters_have_moments(on_one_device):
  before, after, _, _, program = on_one_device
  names = {"q", "k", "v", "o", "gate_up", "down"}
  expected = {f"{name}{end}" for name in names for end in (lora.A, lora.B)}
  assert {path.split("/")[-1] for path in paths(after.params)} == expected
  arrays = {p for p in paths(after.opt_state) if not p.endswith("count")}
  assert {path.split("/")[-1] for path in arrays} == expected
  assert len(arrays) == 2 * len(expected)
  assert not any(map(lora.is_adapter, paths(after.base)))
  assert paths(before) == paths(program.learner.abstract)


def products(**keys):
  """The shapes of the matrices that a compiled update multiplies for."""
  # No product of activations has the shape of a weight.
  sizes = {"num_layers": 2, "embed_dim": 22, "head_dim": 14, "mlp_dim": 14}
  sizes |= {"unroll": 1, "remat": "full"}
  keys |= {f"model.{name}": x for name, x in sizes.items()}
  program = program_of(config_of(**keys))
  _, batch = responses(program)
  learner = program.learner
  text = learner.step.lower(learner.abstract, batch, np.bool_(True))
  found = re.findall(r"\[(\d+),(\d+)\]\S* dot\(", text.compile().as_text())
  weights = {
    tuple(
      sorted(
        math.prod(row.shape(program.cfg)[i] for i in axes)
        for axes in row.groups[1:]
      )
    )
    for row in parameters.rows(program.cfg)
    if row.decays and row.path != "embed"
  }
  return weights, {tuple(sorted(map(int, pair))) for pair in found}


def test_an_update_has_no_gradients_of_the_weights_below():
  """Whose products are a third of an update without rematerialisation."""
  weights, found = products(**{"model.lora.rank": 0})
  assert found >= weights
  assert len(weights) == 5
  for targets in ("attention", "all-linear"):
    keys = {"model.lora.rank": 3, "model.lora.targets": targets}
    weights, found = products(**keys)
    assert not found & weights


def test_the_reference_is_the_policy_without_adapters(on_one_device):
  before, _, reference, _, program = on_one_device
  # Adapters of zeros are no adapters.
  off = jax.tree.map(np.zeros_like, before.params)
  state = dataclasses.replace(
    jax.tree.map(jnp.array, before), params=jax.tree.map(jnp.array, off)
  )
  _, again, metrics = update(program, state)
  np.testing.assert_array_equal(again, reference)
  assert metrics["kl/reference"].value() < 1e-10


def test_the_weights_below_have_the_dtype_of_the_model():
  config = config_of(**{"model.dtype": "bfloat16"})
  config.objective.reference_every = 3
  state = program_of(config).learner.abstract
  dtypes = lambda tree: {x.dtype for x in jax.tree.leaves(tree)}
  assert dtypes(state.base) == {jnp.dtype("bfloat16")}
  assert dtypes(state.params) == {jnp.dtype("float32")}
  # A reference that follows the policy is a copy of the adapters alone.
  assert paths(state.reference) == paths(state.params)
  assert dtypes(state.reference) == {jnp.dtype("bfloat16")}


def test_a_run_begins_with_the_adapters_of_a_folder(tmp_path, capsys):
  config = config_of()
  program = program_of(config)
  _, adapters = lora.split(first_state(program).policy)
  hf.save_peft(adapters, program.cfg, tmp_path / "peft", base="")
  config.model.lora.checkpoint = str(tmp_path / "peft")
  with jax.set_mesh(program.mesh):
    params = program.init_params(jax.random.key(0))
    policy = load_params.first_policy(parse(config).model, program, params)
  base, found = lora.split(policy)
  jax.tree.map(np.testing.assert_array_equal, found, adapters)
  jax.tree.map(np.testing.assert_array_equal, base, params)
  assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(
    lambda x: x.sharding, adapters
  )
  # Weights that the folder does not adapt get new adapters.
  file = tmp_path / "peft/adapter_model.safetensors"
  stored = {k: x for k, x in load_file(file).items() if "k_proj" not in k}
  save_file({k: x + 1 for k, x in stored.items()}, file)
  with jax.set_mesh(program.mesh):
    policy = load_params.first_policy(parse(config).model, program, params)
    new = lora.split(program.new_policy(params))[1]["layers"]["attention"]
  found = lora.split(policy)[1]["layers"]["attention"]
  assert found.keys() == new.keys()
  for name, x in found.items():
    assert np.array_equal(x, new[name]) == name.startswith("k_"), name
  assert "no adapters of layers/attention/k_lora_a" in capsys.readouterr().out


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A workdir with a checkpoint; its config, program and policy."""
  tmp_path, config = tmp_path_factory.mktemp("run"), config_of()
  program = program_of(config)
  state = first_state(program)
  identity = load_params.identity(program) | load_params.lora_identity(program)
  saved = {"identity": identity, "base": checksums(state.base)}
  with jax.set_mesh(program.mesh):
    load_params.save_base(state.base, parse(config), epath.Path(tmp_path))
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
      unsaved = dataclasses.replace(state, base=None)
      checkpoints.save(1, vars(unsaved), saved)
  return tmp_path, config, program, state.policy


def load(run, **keys):
  folder, config, program, _ = run
  if keys:
    config = config_of(**keys)
    program = program_of(config)
  with jax.set_mesh(program.mesh):
    return program, load_params.load(parse(config), program, str(folder))


def test_a_run_gives_its_adapters_and_the_weights_below(run):
  program, policy = load(run)
  jax.tree.map(np.testing.assert_array_equal, policy, run[3])
  merged = load_params.merged(program, policy)
  expected = lora.merge(policy, program.cfg.lora)
  jax.tree.map(np.testing.assert_array_equal, merged, expected)
  assert paths(merged) == paths(program.abstract_params)


@pytest.mark.parametrize(
  ("keys", "words"),
  [({"model.lora.alpha": 3.0}, "model.lora.alpha=32.0, this run .*=3.0"),
   ({"model.lora.rank": 0}, "model.lora.*, this run model.lora.*=None"),
   ({"model.dtype": "bfloat16"}, "model.dtype='float32', this run")],
)  # fmt: skip
def test_adapters_of_another_kind_are_refused(run, keys, words):
  with pytest.raises(UserError, match=words):
    load(run, **keys)


def test_other_weights_below_are_refused(run, tmp_path):
  folder, config, program, policy = run
  folder = shutil.copytree(folder, tmp_path / "run")
  base, _ = lora.split(policy)
  with jax.set_mesh(program.mesh):
    moved = jax.tree.map(lambda x: x + 1, base)
    load_params.save_base(moved, parse(config), epath.Path(folder))
    changed = folder, config, program, policy
    with pytest.raises(UserError, match=r"/base: expected the weights below"):
      load(changed)
    epath.Path(folder / "base").rmtree()
    with pytest.raises(UserError, match=r"model.checkpoint='': expected"):
      load(changed)
