"""Every config: only the keys of common.py, and it builds."""

import dataclasses
import importlib
import importlib.util
import math

import jax
import pytest
from compilers import needs_libtpu
from repository import ROOT

from gspo_jax import model
from gspo_jax.configs import common, gpu, moe_tpu
from gspo_jax.plan import chips
from gspo_jax.plan.planner import plan
from gspo_jax.program import settings
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.program.rules import check_training
from gspo_jax.record.identity import flatten
from gspo_jax.runtime import sharding
from gspo_jax.sampler.samples import SamplerConfig

FOLDER = ROOT / "configs"
NAMES = sorted(
  p.stem
  for p in FOLDER.glob("*.py")
  if p.stem not in ("__init__", "common", "recipes")
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
def test_debug_is_small_and_builds_for_one_device(name):
  mesh = sharding.make_mesh(jax.devices()[:1])
  config = load(name, "debug")
  assert build_program(parse(config), mesh).cfg.vocab_size >= 258
  rows = config.data.prompts * config.rollout.group_size
  assert config.num_steps <= 5
  assert rows * config.sampler.max_new_tokens <= 1024


@each_config
def test_a_config_opens_with_its_own_command(name):
  module = importlib.import_module(f"gspo_jax.configs.{name}")
  assert f"--config=configs/{name}.py" in module.__doc__


RECIPES = {"dapo": ("dapo", 3, False), "srpo": ("grpo", 1, True)}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
  ("name", "folder", "argument"),
  [("hugging_face", "./d", "./d"),
   ("moe_tpu", "./d", "checkpoint=./d,questions=q")],
)  # fmt: skip
def test_a_recipe_goes_with_a_model(name, folder, argument, recipe):
  plain, c = load(name, argument), load(name, f"{argument},recipe={recipe}")
  method = (
    c.objective.name,
    c.rollout.dynamic_sampling_rounds,
    c.data.drop_solved,
  )
  assert method == RECIPES[recipe]
  assert c.model.checkpoint == folder
  assert c.data.source == plain.data.source
  assert c.cold_start.steps == 0
  assert c.reward.names[0] == plain.reward.names[0]
  parse(c)


def test_the_configs_of_recipes_are_these_recipes():
  dapo = load("hugging_face", "./d,recipe=dapo")
  assert load("dapo", "./d").to_dict() == dapo.to_dict()
  srpo, given = load("hugging_face", "./d,recipe=srpo"), load("srpo", "./d")
  given.data = srpo.data  # its two stages
  assert given.to_dict() == srpo.to_dict()


@pytest.mark.parametrize(
  ("name", "argument"),
  [("hugging_face", "./d,recipe=grpo"),
   ("hugging_face", "./d,recipe=dapo,recipe=srpo"),
   ("hugging_face", "./d,dapo"),
   ("moe_tpu", "checkpoint=./d,questions=q,recipe=grpo")],
)  # fmt: skip
def test_a_recipe_that_there_is_not_is_refused(name, argument):
  words = rf"configs/{name}.py:{argument}: .*expected .*dapo.*srpo"
  with pytest.raises(ValueError, match=words):
    load(name, argument)


@pytest.mark.parametrize("name", RECIPES)
def test_the_folder_of_a_recipe_may_have_a_comma(name):
  assert load(name, "./d,debug").model.checkpoint == "./d,debug"


@each_config
def test_an_argument_is_refused_in_the_name_of_the_file(name):
  file = "moe_tpu" if name == "moe_tpu_v5" else name  # another name of it
  with pytest.raises(ValueError, match=rf"configs/{file}\.py:fast"):
    load(name, "fast")


def topologies():
  """The slices that the TPU configs name: config, argument and mesh shape."""
  yield "dense_tpu_v5e", "", (1, 32, 1, 2, 1)
  seen = []
  for flag, variants in ("", moe_tpu.SLICES), ("long,", moe_tpu.LONG):
    for variant, slices in variants.items():
      for topology, where in slices.items():
        if (topology, where) in seen:  # of a variant with the same sizes
          continue
        seen.append((topology, where))
        argument = f"{flag}variant={variant},topology={topology}"
        inner = where.fsdp, where.context, where.expert, 1
        devices = moe_tpu.num_devices(topology)
        yield "moe_tpu", argument, (devices // math.prod(inner), *inner)


@pytest.mark.parametrize(("name", "mode", "shape"), list(topologies()))
def test_a_pods_config_divides_on_its_slice(name, mode, shape):
  """As `build_program` checks, without that many devices."""
  keys = load(name, mode)
  sizes = tuple(keys.mesh[axis] for axis in sharding.AXES)
  assert sizes[1:] == shape[1:]
  assert sizes[0] in (-1, shape[0])
  config = parse(keys)
  cfg = settings.model_config(config.model)
  params = jax.eval_shape(lambda key: model.init(key, cfg), jax.random.key(0))
  decoding = config.sampler_mesh
  groups = math.prod(shape) // (decoding.expert * decoding.tensor)
  for sizes in (shape, (groups, 1, 1, decoding.expert, decoding.tensor)):
    mesh = jax.sharding.AbstractMesh(sizes, sharding.AXES)
    model.shardings(params, mesh)
  mesh = jax.sharding.AbstractMesh(shape, sharding.AXES)
  check_training(config, sharding.batch_shards(mesh), mesh.shape["context"])
  batching = config.continuous_batching
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


@pytest.mark.parametrize(
  ("variant", "memory"),
  [(name, memory) for name, cards in gpu.CARDS.items() for memory in cards],
)
def test_a_config_for_gpus_divides_on_its_cards(variant, memory):
  cards = gpu.CARDS[variant][memory].cards
  config = parse(load("gpu", f"variant={variant},memory={memory}"))
  inner = config.mesh.fsdp * config.mesh.expert
  assert cards % inner == 0
  shape = (cards // inner, config.mesh.fsdp, 1, config.mesh.expert, 1)
  mesh = jax.sharding.AbstractMesh(shape, sharding.AXES)
  check_training(config, sharding.batch_shards(mesh), 1)
  sizes = config.continuous_batching.shard_sizes(
    SamplerConfig(8, config.sampler.max_new_tokens, (0,)),
    config.data.max_prompt_length,
    cards,
  )
  # A page for each slot, and a twentieth of the longest responses.
  assert sizes.num_pages * 20 >= sizes.slots * sizes.pages_per_slot
  assert sizes.num_pages > sizes.slots


@pytest.mark.parametrize(
  ("argument", "message"),
  [("variant=qwen3-8b", "variant=qwen3-8b: expected one of qwen3-0.6b, "),
   ("memory=40", "memory=40: expected 24 or 80 with variant=qwen3-0.6b"),
   ("variant=olmoe-1b-7b,memory=24", "memory=24: expected 80 with variant=ol")],
)  # fmt: skip
def test_gpus_that_a_model_has_no_config_for_are_refused(argument, message):
  with pytest.raises(
    ValueError, match=rf"configs/gpu.py:{argument}: {message}"
  ):
    load("gpu", argument)


def test_a_qwen3_of_the_gpu_configs_is_told_not_to_think():
  given = "checkpoint=./d,questions=q.jsonl"
  assert load("gpu", given).data.template_args == "enable_thinking=False"
  assert not load("gpu", f"variant=olmoe-1b-7b,{given}").data.template_args


@pytest.mark.parametrize("variant", moe_tpu.SLICES)
def test_releases_of_one_size_have_one_slice(variant):
  sizes = dataclasses.replace(model.variant(variant), rope_theta=0.0)
  for topology, where in moe_tpu.SLICES[variant].items():
    # What fits for one release fits for the others of its sizes.
    twin = variant.replace("coder-30b", "30b").removesuffix("-2507")
    assert where is moe_tpu.SLICES[twin][topology]
    twin_sizes = dataclasses.replace(model.variant(twin), rope_theta=0.0)
    assert twin_sizes == sizes


def test_the_first_slice_of_a_variant_is_its_default():
  for variant, slices in moe_tpu.SLICES.items():
    default = load("moe_tpu", f"variant={variant}")
    first = load("moe_tpu", f"variant={variant},topology={next(iter(slices))}")
    assert default.to_dict() == first.to_dict()
  # By its first name, too.
  assert load("moe_tpu_v5", "").to_dict() == load("moe_tpu", "").to_dict()


@pytest.mark.parametrize(
  ("argument", "message"),
  [("variant=qwen3-moe", "variant=qwen3-moe: expected one of qwen3-30b-a3b,"),
   ("topology=v5p:3x3x3", "topology=v5p:3x3x3: expected one of v5p:4x4"),
   ("variants=qwen3-30b-a3b",
    "variants: expected one of debug, long, checkpoint"),
   ("long,variant=qwen3-30b-a3b", "qwen3-coder-30b-a3b with long"),
   ("checkpoint=./folder", "checkpoint= and questions="),
   ("questions=q.jsonl", "checkpoint= and questions="),
   ("eval=q.jsonl", "no eval=")],
)  # fmt: skip
def test_a_wrong_argument_is_refused_with_those_there_are(argument, message):
  with pytest.raises(ValueError, match=message):
    load("moe_tpu", argument)


@pytest.mark.parametrize(
  ("file", "source"),
  [("q.jsonl", "jsonl:q.jsonl"),
   ("gs://bucket/q.jsonl", "jsonl:gs://bucket/q.jsonl"),
   ("gs://bucket/q.parquet", "parquet:gs://bucket/q.parquet"),
   ("parquet:gs://bucket/q", "parquet:gs://bucket/q")],
)  # fmt: skip
def test_a_recipe_takes_a_checkpoint_and_questions(file, source):
  c = load("moe_tpu", f"checkpoint=./folder,questions={file}")
  assert (c.model.checkpoint, c.data.source) == ("./folder", source)
  assert c.data.eval_source == ""
  assert c.reward.names == ("math", "overlong:buffer=3276")
  c = load("moe_tpu", f"checkpoint=./folder,questions=q.jsonl,eval={file}")
  assert c.data.eval_source == source


def test_a_hybrid_release_thinks_only_where_responses_have_room_for_it():
  """Other releases have templates that refuse the argument."""
  for variant, slices in moe_tpu.SLICES.items():
    for topology, where in slices.items():
      c = load(
        "moe_tpu",
        f"checkpoint=./d,questions=q,variant={variant},topology={topology}",
      )
      hybrid = variant in (
        *("qwen3-30b-a3b", "qwen3-235b-a22b", "glm-4.5-air"),
        "qwen3.6-35b-a3b",
      )
      short = where.new_tokens < 8192
      expected = "enable_thinking=False" if hybrid and short else ""
      if variant == "gpt-oss-20b" and short:
        expected = "reasoning_effort=low"
      assert c.data.template_args == expected


def test_responses_of_olmoe_end_within_its_context():
  """Its max_position_embeddings is 4,096."""
  for topology in moe_tpu.SLICES["olmoe-1b-7b"]:
    c = load("moe_tpu", f"variant=olmoe-1b-7b,topology={topology}")
    assert c.data.max_prompt_length + c.sampler.max_new_tokens <= 4096


def test_debug_builds_a_recipe_with_adapters():
  mesh = sharding.make_mesh(jax.devices()[:1])
  keys = load("moe_tpu", "debug,topology=v5p:2x2x2")
  assert build_program(parse(keys), mesh).cfg.lora.rank == 16


@pytest.mark.slow
@needs_libtpu
def test_olmoe_fits_on_eight_chips_with_the_pages_of_its_recipe():
  keys = load("moe_tpu", "variant=olmoe-1b-7b")
  report = plan(
    keys,
    chips.parse("v6e:2x4"),
    functions=("decode_params", "prefill", "generate"),
  )
  assert report["fits"]
  room = report["functions"]["generate"]["pages"]
  pages = keys.continuous_batching.num_pages
  assert room["num_pages"] == pages
  # Not many more would fit.
  assert pages <= room["largest"] <= pages * 1.1
