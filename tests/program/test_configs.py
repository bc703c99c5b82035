"""Every config: only the keys of common.py, and it builds."""

import importlib
import math

import jax
import pytest
from repository import ROOT

from gspo_jax import model
from gspo_jax.configs import common
from gspo_jax.program import settings
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.runtime.identity import flatten
from gspo_jax.sampler.samples import SamplerConfig

FOLDER = ROOT / "configs"
NAMES = sorted(
  p.stem for p in FOLDER.glob("*.py") if p.stem not in ("__init__", "common")
)
each_config = pytest.mark.parametrize("name", NAMES)
each_mode = pytest.mark.parametrize("mode", ["", "debug"])


def load(name, mode):
  if name in ("hugging_face", "srpo"):
    mode = mode or "./folder"  # they have no default
  return importlib.import_module(f"gspo_jax.configs.{name}").get_config(mode)


def types_of(config):
  """The type of each key's value."""
  return {k: type(v) for k, v in flatten(config.to_dict()).items()}


@each_mode
@each_config
def test_no_config_adds_a_key_or_changes_a_type(name, mode):
  assert types_of(load(name, mode)) == types_of(common.get_config())


@each_config
def test_debug_builds_a_program_for_one_device(name):
  mesh = sharding.make_mesh(jax.devices()[:1])
  program = build_program(parse(load(name, "debug")), mesh)
  assert program.cfg.vocab_size >= 258


@each_config
def test_debug_is_small(name):
  config = load(name, "debug")
  rows = config.data.prompts * config.rollout.group_size
  assert config.num_steps <= 5
  assert rows * config.sampler.max_new_tokens <= 1024


@each_config
def test_other_modes_are_refused(name):
  with pytest.raises(ValueError, match="fast"):
    load(name, "fast")


@each_config
def test_a_config_opens_with_its_own_command(name):
  module = importlib.import_module(f"gspo_jax.configs.{name}")
  assert f"--config=configs/{name}.py" in module.__doc__


def test_configs_share_no_state():
  first = common.get_config()
  first.optim.learning_rate = 5.0
  assert common.get_config().optim.learning_rate != 5.0


def topologies():
  """The slices that the TPU configs name: config, argument and mesh shape."""
  yield "dense_tpu_v5e", "", (1, 32, 2, 1)
  from gspo_jax.configs import moe_tpu_v5

  for (variant, topology), where in moe_tpu_v5._SLICES.items():
    argument = f"variant={variant},topology={topology}"
    data = where.chips // (where.fsdp * where.expert)
    yield "moe_tpu_v5", argument, (data, where.fsdp, where.expert, 1)
    sides = topology.split(":")[1].split("x")
    assert math.prod(map(int, sides)) == where.chips


@pytest.mark.parametrize(("name", "mode", "shape"), list(topologies()))
def test_a_pods_config_divides_on_its_slice(name, mode, shape):
  """As `build_program` checks, without that many devices."""
  keys = load(name, mode)
  sizes = tuple(keys.mesh[axis] for axis in sharding.AXES)
  assert sizes[1:] == shape[1:]
  assert sizes[0] in (-1, shape[0])
  config = parse(keys)
  cfg = settings.model_config(config)
  params = jax.eval_shape(lambda key: model.init(key, cfg), jax.random.key(0))
  decoding = config.sampler_mesh
  groups = math.prod(shape) // (decoding.expert * decoding.tensor)
  for sizes in (shape, (groups, 1, decoding.expert, decoding.tensor)):
    mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
    sharding.state_shardings(params, mesh)
    config.check_training(mesh.size // mesh.shape["tensor"])
  batching = settings.continuous_batching(config)
  shards = math.prod(shape) // decoding.tensor
  sizes = batching.shard_sizes(
    SamplerConfig(
      config.rollout.group_size, config.sampler.max_new_tokens, (0,)
    ),
    config.data.max_prompt_length,
    shards,
  )
  # No response waits for a slot, and the pool holds a quarter of the longest.
  assert batching.slots == config.data.prompts * config.rollout.group_size
  assert sizes.num_pages * 4 >= sizes.slots * sizes.pages_per_slot


def test_an_unknown_slice_is_refused_with_those_there_are():
  with pytest.raises(
    ValueError, match="variant=qwen3-30b-a3b,topology=v5p:4x4x4"
  ):
    load("moe_tpu_v5", "topology=v5p:3x3x3")


@pytest.mark.parametrize(
  ("questions", "source"),
  [
    ("q.jsonl", "jsonl:q.jsonl"),
    ("q.parquet", "parquet:q.parquet"),
    ("hf:a/b", "hf:a/b"),
  ],
)
def test_the_flagship_takes_a_checkpoint_and_questions(questions, source):
  c = load("moe_tpu_v5", f"checkpoint=./folder,questions={questions}")
  assert (c.model.checkpoint, c.data.source) == ("./folder", source)
  assert c.reward.names == ("math", "overlong:buffer=3276")
  with pytest.raises(ValueError, match="checkpoint= and questions="):
    load("moe_tpu_v5", "checkpoint=./folder")
