"""On-policy distillation: teachers are read, refused, and score responses."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import unpacked
from ml_collections import ConfigDict

from gspo_jax import logprobs, model
from gspo_jax.data.problem import Problem
from gspo_jax.data.tokenizers import plain
from gspo_jax.model import hf
from gspo_jax.program import experiment, load_params
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.program.rules import check_training
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.samples import Prompts

P, G, S, R = 4, 2, 3, 4  # prompts, responses to each, tokens of both
B = P * G
LENGTHS = np.resize([4, 2, 3, 1, 4], B).astype(np.int32)
TEMPERATURE = 0.5
# Whose problems are whose; not all of a minibatch.
TEACHER = np.repeat(np.int32([0, 1, 1, 0]), G)
# A dense teacher of other sizes, and one like the student.
CONFIGS = {
  name: model.variant("tiny", num_layers=1, dtype="float32", **sizes)
  for name, sizes in {
    "like": {},
    "wide": {
      "embed_dim": 128,
      "num_experts": 0,
      "experts_per_token": 0,
      "vocab_size": 264,  # padding rows
    },
  }.items()
}


@pytest.fixture(scope="module")
def weights():
  keys = dict(zip(CONFIGS, jax.random.split(jax.random.key(0)), strict=True))
  init = jax.jit(model.init, static_argnums=1)
  return {name: init(keys[name], cfg) for name, cfg in CONFIGS.items()}


@pytest.fixture(scope="module")
def folders(weights, tmp_path_factory):
  """Hugging Face folders of the weights, each with the tokenizer of bytes."""
  root = tmp_path_factory.mktemp("teachers")
  for name, params in weights.items():
    hf.save_hf(params, CONFIGS[name], root / name, dtype="float32")
    plain.Bytes().save(root / name)
  return {name: str(root / name) for name in weights}


@pytest.fixture
def config(debug_config, folders) -> ConfigDict:
  """A student like its first teacher."""
  c = debug_config
  c.model.checkpoint = folders["like"]
  c.objective.name = "gspo_token"
  c.objective.distillation.teachers = tuple(folders.values())
  c.data.source = "jsonl:a.jsonl,jsonl:b.jsonl"
  c.data.prompts, c.rollout.group_size = P, G
  c.data.max_prompt_length, c.sampler.max_new_tokens = S, R
  c.sampler.temperature = TEMPERATURE
  c.learner.minibatches, c.learner.micro_batch_size = 1, B
  c.cold_start.steps = 0
  c.log.instruments = False
  return c


def scored(config, teacher=None, **axes):
  """Program, state, and made-up responses with the teachers' log-probs."""
  devices = jax.devices()[: int(np.prod([*axes.values()] or [1]))]
  mesh = sharding.make_mesh(devices, **axes)
  program = build_program(parse(config), mesh)
  learner, rng = program.learner, np.random.default_rng(0)
  ids = lambda rows, width: rng.integers(0, 256, (rows, width), np.int32)
  prompts = Prompts(ids(P, S), np.full(P, S, np.int32))
  responses = ids(B, R)
  with jax.set_mesh(mesh):
    state = learner.init_state(program.init_params(None))
    teachers = load_params.load_teachers(parse(config), program)
    rows = sharding.batch_sharding(mesh)
    to_device = lambda x: multihost.to_global(x, rows)
    samples = dataclasses.replace(
      program.sampler.empty_samples(),
      tokens=to_device(responses),
      lengths=to_device(LENGTHS),
    )
    where = learner.pack(prompts.lengths, LENGTHS, jax.random.key(1))
    batch = learner.make_train_batch(to_device(prompts), samples, where)
    batch = learner.add_reference_and_values(
      state, batch, teachers, None if teacher is None else to_device(teacher)
    )
  tokens = np.concatenate([prompts.tokens.repeat(G, 0), responses], 1)
  return program, state, batch, tokens


def expected_logps(weights, name, tokens):
  """[B, R], by `token_logprobs` of a teacher on unpacked rows."""
  positions = np.broadcast_to(np.arange(S + R), tokens.shape)
  run = lambda params: logprobs.token_logprobs(
    params,
    CONFIGS[name],
    tokens,
    positions,
    np.ones_like(tokens),
    response_length=R,
    temperature=TEMPERATURE,
  )
  return jax.jit(run)(weights[name]).logps


MASK = np.arange(R) < LENGTHS[:, None]


@pytest.mark.parametrize(
  "axes", [{}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=["1", "8"]
)
def test_each_teacher_scores_the_problems_of_its_source(config, weights, axes):
  """On one device and on eight; an odd mesh changes nothing."""
  _, _, batch, tokens = scored(config, TEACHER, **axes)
  found = unpacked.by_response(batch, LENGTHS, R)
  expected = np.where(
    TEACHER[:, None] == 0,
    *(expected_logps(weights, name, tokens) for name in ("like", "wide")),
  )
  np.testing.assert_allclose(
    found["teacher_logps"][MASK], expected[MASK], rtol=2e-5
  )
  np.testing.assert_array_equal(
    found["teacher"][MASK], np.broadcast_to(TEACHER[:, None], MASK.shape)[MASK]
  )


def test_a_teacher_like_the_student_gives_no_advantage(config, weights):
  """In the first minibatch the reverse KL is 0, and the gradient, too."""
  config.objective.distillation.teachers = (config.model.checkpoint,)
  program, state, batch, _ = scored(config)
  before = jax.tree.map(np.array, state.params)
  with jax.set_mesh(program.mesh):
    state, _, metrics = program.learner.update(state, batch)
  assert float(metrics["distill/reverse_kl"].value()) == 0
  assert float(metrics["grad/norm"].value()) == 0
  jax.tree.map(np.testing.assert_array_equal, before, state.params)


K1 = {"objective.kl_coef": 0.1, "objective.kl_estimator": "k1"}
TEACHERS = "objective.distillation.teachers"
BY_DOMAIN = {"objective.distillation.teacher_key": "domain"}


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"objective.name": "gspo"},
     r"objective.name='gspo': expected 'gspo_token' or another .*teachers="),
    (K1, "kl_estimator='k1': expected 'k2' or 'k3', for k1 is a part of the"),
    ({"data.source": "jsonl:a.jsonl"}, "data.source='jsonl:a.jsonl': expected"),
    ({"data.curriculum": ((2, "jsonl:c.jsonl"),)},
     r"data.curriculum=.*: expected \(\) without .*teacher_key"),
    ({"rollout.dynamic_sampling_rounds": 2},
     "dynamic_sampling_rounds=2: expected 1 with .*reward_weight=0"),
    (BY_DOMAIN,
     "teachers='.*like': expected NAME=FOLDER with .*teacher_key='domain'"),
    (BY_DOMAIN | {TEACHERS: ("a=x", "a=y")}, "expected each NAME once"),
    ({"objective.distillation.coef": -1.0}, "distillation.coef=-1.0: expected"),
    ({TEACHERS: ("nowhere",)},
     "teachers='nowhere': expected a Hugging Face folder, .*run_config.json"),
  ],
)  # fmt: skip
def test_mistakes_are_refused(config, changes, words):
  config.update_from_flattened_dict(changes)
  with pytest.raises(UserError, match=words):
    build_program(parse(config), sharding.make_mesh(jax.devices()[:1]))


def test_a_response_has_no_group_where_rewards_do_not_count(config):
  config.rollout.group_size, config.learner.micro_batch_size = 1, P
  check_training(parse(config), 1)
  config.objective.distillation.reward_weight = 0.1
  with pytest.raises(UserError, match="group_size=1: expected at least 2"):
    check_training(parse(config), 1)


def test_a_teacher_with_other_tokens_is_refused(config, folders, tmp_path):
  """Its files may differ; its ids may not."""
  other = shutil.copytree(folders["like"], tmp_path / "other")
  config.objective.distillation.teachers = (str(other),)
  mesh = sharding.make_mesh(jax.devices()[:1])
  path = other / "tokenizer.json"
  words = path.read_text()
  path.write_text(words + "\n")
  assert len(build_program(parse(config), mesh).teachers) == 1
  swapped = json.loads(words)
  vocab = swapped["model"]["vocab"]
  vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
  path.write_text(json.dumps(swapped))
  with pytest.raises(UserError, match=r"teachers=.*token 97 .*b'b', .*b'a'"):
    build_program(parse(config), mesh)


def test_a_column_names_the_teacher(config):
  config.objective.distillation.teacher_key = "domain"
  config.objective.distillation.teachers = ("math=a", "code=b")
  c = parse(config).objective.distillation
  of = lambda **columns: experiment.teacher_of(c, Problem("q", "", "", columns))
  assert [of(domain="code"), of(domain="math")] == [1, 0]
  with pytest.raises(UserError, match=r"'q' has domain='law': .*math.*code"):
    of(domain="law")
  with pytest.raises(UserError, match="'q' has no column 'domain'"):
    of()
