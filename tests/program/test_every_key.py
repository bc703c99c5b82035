"""Every key of a config has a row in `ROWS`: its effect at two values."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import observed
import pytest
from ml_collections import ConfigDict
from observed import Observed, first_step
from repository import ROOT

from gspo_jax import model
from gspo_jax.configs import tiny_cpu
from gspo_jax.data.tokenizers import plain
from gspo_jax.model import hf
from gspo_jax.program.config import all_keys, parse
from gspo_jax.program.rules import check_training
from gspo_jax.record import run_files

P, G = 8, 2  # prompts of an iteration, responses to each
B = P * G


def small() -> ConfigDict:
  """The config that rows change: two iterations of one optimizer step."""
  c = tiny_cpu.get_config("debug")
  c.num_steps = 2
  c.data.prompts, c.rollout.group_size = P, G
  c.learner.minibatches, c.learner.micro_batch_size = 1, B
  c.optim.warmup_steps = 0
  c.optim.learning_rate = 1e-3
  c.optim.clip_norm = 1e9
  c.cold_start.steps, c.cold_start.batch = 0, 8
  c.eval.every = c.checkpoint.every = 10
  c.log.instruments = False  # they take time
  return c


def same(one, other) -> bool:
  """Whether two observations are equal; numbers, up to rounding."""
  parts = one if isinstance(one, tuple) else (one,)
  if type(one) is type(other) and all(
    isinstance(x, float | np.ndarray) for x in parts
  ):
    return np.allclose(one, other, rtol=2e-3, atol=1e-6)
  return one == other


DIFFERS = object()  # expected: another one at each value


class Row(NamedTuple):
  """The effect of a key."""

  key: str
  observe: Callable[[Observed], Any]
  # By the key's value: the observation, a function that returns it, or DIFFERS.
  expected: dict[Any, Any]
  given: dict[str, Any] = {}  # noqa: RUF012  # beside the keys of `small`


def initial_key(seed):
  """The random key of a run's first weights."""
  keys = jax.random.split(jax.random.key(seed), 4)
  return np.asarray(jax.random.key_data(keys[0]))


# Files of `files`: problems "A12?" and so on, whose reference is "7".
FILE_A, FILE_B = "jsonl:{files}/A.jsonl", "jsonl:{files}/B.jsonl"
OF_A = {"data.source": FILE_A, "data.eval_source": FILE_B}
COLD = {"cold_start.steps": 2, "cold_start.gate": 0.0}
COLD_A = COLD | OF_A
BEFORE = {"num_steps": 0}  # the first evaluation, and no iteration
# The first half of the problems of half.jsonl is solved.
HALF = OF_A | {
  "data.source": "jsonl:{files}/half.jsonl",
  "data.drop_solved": True,
  "num_steps": 4,
}
LENGTH = {"reward.names": ("length",)}
GATE = {"cold_start.steps": 51, "cold_start.gate": 0.5}
PAGED = {
  "continuous_batching.slots": 8,
  "continuous_batching.page_size": 4,
  "continuous_batching.prefill_chunk": 8,
}
NOTHING = {"num_steps": 0, "eval.every": 0}  # happens after the start
TALK = (
  PAGED
  | NOTHING
  | {
    "reward.names": (),
    "data.source": "gspo_jax.tasks.games.guessing_problems",
  }
)
GRPO = {"objective.name": "grpo"}
KL = GRPO | {"objective.kl_coef": 0.3}

WIDTHS = lambda c: c.packings("width")
SEQUENCES = lambda c: c.program.learner.group_size
COLD_UPDATES = lambda c: len(c.run.given("cold_start"))
BY_BYTES = lambda c: c.tokenizer.fingerprint == "bytes"

ROWS = (
  Row("seed", Observed.initial_key,
   {n: partial(initial_key, n) for n in (0, 1)}),
  Row("seed", lambda c: (c.data.stages[0].source.seed, c.data.held_out.seed),
   {0: (0, 0), 1: (1, 1)}),
  Row("seed", Observed.problems, {0: DIFFERS, 1: DIFFERS}, OF_A),
  Row("seed", lambda c: c.demonstrations()[0], {0: DIFFERS, 1: DIFFERS},
   COLD_A),
  Row("num_steps", lambda c: c.run.rows(), {1: [0, 1], 2: [0, 1, 2]}),
  # model
  Row("model.checkpoint", Observed.first_weight,
   {"": "random", "{files}/hf": 0.125}),
  Row("model.checkpoint", BY_BYTES, {"": True, "{files}/hf": False}),
  Row("model.variant",
   lambda c: (*c.program.abstract_params["embed"].shape, c.cfg.num_layers),
   {"tiny": (258, 64, 2), "small": (2048, 128, 4)}),
  *(Row(f"model.{name}", lambda c, name=name: getattr(c.cfg, name),
        {value: value for value in values})
    for name, values in (
      ("dtype", ("float32", "bfloat16")), ("float32_head", (False, True)),
      ("float32_router", (False, True)),
      ("remat", ("none", "full", "attention, stream")))),
  Row("model.exact", lambda c: c.program.learner.needs_old_logps,
   {False: True, True: False},
   PAGED | {"learner.minibatches": 2, "learner.micro_batch_size": B // 2}),
  Row("mesh.fsdp",
   lambda c: [*c.run.experiment.program.mesh.shape.values()][:2],
   {1: [8, 1], 4: [2, 4]}, BEFORE),
  # data
  Row("data.source", Observed.kinds, {"chain:steps=1": {"0": 8},
   FILE_A: {"A": 8}, f"{FILE_A},{FILE_B}": {"A": 4, "B": 4}}),
  Row("data.weights", Observed.kinds,
   {(): {"A": 4, "B": 4}, (3.0, 1.0): {"A": 6, "B": 2}},
   {"data.source": f"{FILE_A},{FILE_B}"}),
  Row("data.demonstration_field",
   lambda c: {text[:2] for text in c.demonstrations()[1]},
   {"": {"##"}, "worked": {"so"}}, COLD_A),
  Row("data.tokenizer", BY_BYTES, {"": False, "bytes": True},
   {"model.checkpoint": "{files}/hf"}),
  Row("data.template_args",
   lambda c: c.tokenizer.decode(c.tokenizer.prompt("7")),
   {"": "7!", "aloud=False": "7."},
   {"model.checkpoint": "{files}/hf", "data.tokenizer": "{files}/chat"}),
  Row("data.prompts", lambda c: len(c.problems()), {8: 8, 16: 16}),
  Row("data.drop_solved", Observed.repeats_of_solved, {False: 2, True: 1},
   {k: v for k, v in HALF.items() if k != "data.drop_solved"}),
  Row("data.max_prompt_length", WIDTHS, {8: [20, 20], 9: [21, 21]}),
  Row("rollout.group_size", SEQUENCES, {2: 2, 8: 8}),
  Row("sampler.max_new_tokens", WIDTHS, {12: [20, 20], 8: [16, 16]}),
  Row("sampler.max_new_tokens",
   lambda c: c.run.given("cold_start")[0][1].shape, {12: (8, 12), 9: (8, 9)},
   COLD_A),
  Row("sampler.temperature",
   lambda c: c.given("add_reference_and_values", "temperature"),
   {1.0: 1.0, 0.5: 0.5}, KL),
  Row("sampler.kept_ids", lambda c: c.samplers("kept_ids"),
   {0: [0, 0], 9: [9, 0]}, {"sampler.top_p": 0.9}),
  Row("objective.score_centering", lambda c: c.samplers("head_ids"),
   {0: [0, 0], 4: [4, 0]}),
  Row("objective.replay", lambda c: c.samplers("record_routing"),
   {"r2": [False, False], "r3": [True, False]}),
  Row("rollout.environment", lambda c: c.run.pools[0].name,
   {x: f"environment '{x}'" for x in ("calculator", "guessing")}, TALK),
  Row("rollout.max_turns",
   lambda c: c.run.experiment.conversations.limits.turns, {1: 1, 2: 2},
   TALK | {"rollout.environment": "calculator"}),
  Row("rollout.max_sequences", SEQUENCES, {1: G, 3: 3 * G},
   TALK | {"rollout.environment": "calculator"}),
  # reward: the responses are "#7", which is correct
  Row("reward.names", Observed.mean_reward,
   {("final_answer",): 1.0, ("number",): 0.0}, OF_A),
  Row("reward.weights", Observed.mean_reward, {(1.0,): 1.0, (0.25,): 0.25},
   OF_A),
  Row("reward.workers", lambda c: len(c.run.pools), {1: 1, 3: 3}),
  Row("reward.concurrency", lambda c: c.run.pools[0].concurrency,
   {32: 32, 4: 4}),
  Row("reward.seconds", lambda c: c.run.pools[0].seconds, {5.0: 5.0, 9.0: 9.0}),
  # A response is 3 of 12 tokens long, and `length` is .75.
  Row("reward.pass_threshold", COLD_UPDATES, {0.75: 50, 0.76: 51},
   COLD_A | GATE | LENGTH),
  Row("reward.pass_threshold", Observed.repeats_of_solved, {1.0: 1, 1.1: 2},
   HALF),
  # objective
  Row("objective.reference_every",
   lambda c: c.given("step", "reference_every"), {1: 1, 2: 2}, KL),
  Row("objective.distillation.teacher_key", Observed.teachers_of_held_out,
   {"result": {0}, "worked": {1}},
   BEFORE | OF_A | {"objective.name": "gspo_token",
    "objective.distillation.teachers":
    ("3={files}/hf", "so #### 7={files}/hf")}),
  Row("objective.name", lambda c: first_step(c.critic().optimizer),
   {"ppo:critic_learning_rate=1e-3": 1e-3,
   "ppo:critic_learning_rate=5e-3": 5e-3,
   "ppo:critic_learning_rate=1e-3,critic_warmup_steps=4": 2.5e-4}),
  Row("learner.micro_batch_size", lambda c: c.packings("micro_batch_size"),
   {16: [16, 8], 4: [4, 4]}),
  Row("optim.learning_rate", lambda c: first_step(c.policy().optimizer),
   {1e-3: 1e-3, 5e-3: 5e-3}),
  # cold_start
  Row("cold_start.steps", COLD_UPDATES, {0: 0, 1: 1, 3: 3}, COLD),
  Row("cold_start.batch", lambda c: c.demonstrations()[0].shape,
   {8: (8, 8), 16: (16, 8)}, COLD),
  Row("cold_start.learning_rate", Observed.cold_start_step,
   {1e-3: 1e-3, 5e-3: 5e-3}),
  # eval
  Row("eval.every", Observed.evaluated_at, {1: [0, 1, 2], 10: [0, 2], 0: []}),
  Row("eval.prompts", lambda c: [*map(len, c.run.given("respond")[:2])],
   {8: [8, 8], 16: [16, 16]}),
  Row("eval.samples", Observed.samples_averaged, {4: [4], 3: [3]}, BEFORE),
  # checkpoint
  Row("checkpoint.every", Observed.saved_steps, {1: [1, 2, 3], 2: [2, 3]},
   {"num_steps": 3, "checkpoint.keep": 9}),
  Row("checkpoint.keep", Observed.saved_steps, {1: [3], 2: [2, 3]},
   {"num_steps": 3, "checkpoint.every": 1}),
  # log
  Row("log.instruments", lambda c: [c.given("make_train_batch", "instruments"),
                                    c.policy().loss.keywords["instruments"]],
   {True: [True, True], False: [False, False]}),
  Row("log.samples", lambda c: [
    *map(len, run_files.read_samples(c.run.folder / "samples").values())],
   {2: [2], 4: [4]}),
  Row("log.wandb", Observed.wandb,
   {"": ([], []), "reasoning": (["reasoning"], [0, 1, 2])}),
  Row("log.profile", Observed.traced, {(): ([], set()),
   (1, 2): ([1, 2], {"profile"}), (2, 2): ([2], {"profile"})}),
)  # fmt: skip


# Keys whose section is an argument of what reads it, as a row of another key of
# the section shows; by the tests of their effect.
ELSEWHERE = {
  # The gradient is held against loops in float64.
  "program/test_wiring": "objective.entropy_coef objective.kl_estimator "
  "objective.mismatch objective.truncated objective.off_policy_mask_threshold "
  "objective.old_logps objective.kl_coef objective.distillation.coef "
  "objective.distillation.reward_weight",
  "program/test_settings": "data.system_prompt data.instruction data.too_long "
  "sampler.stop optim.decay",
  "program/test_functions": "continuous_batching.slots sampler_mesh.expert "
  "sampler_mesh.tensor learner.minibatches",
  "program/test_distillation": "objective.distillation.teachers",
  "program/test_lora": "model.lora.rank model.lora.checkpoint",
  "program/test_packed_update": "objective.router_aux_loss_coef "
  "objective.router_z_loss_coef",
  "test_iteration": "objective.advantage_estimator objective.credit "
  "rollout.dynamic_sampling_rounds reward.max_failed",
  "test_train": "rollout.max_staleness rollout.max_tokens_per_iteration "
  "sampler_mesh.devices",
  "runtime/test_sharding": "mesh.data mesh.context mesh.expert mesh.tensor",
  "sampler/test_next_token": "sampler.top_k sampler.top_p sampler.min_p",
  "sampler/test_continuous_config": "continuous_batching.page_size "
  "continuous_batching.num_pages continuous_batching.prefill_chunk",
  "sampler/test_speculation": "continuous_batching.speculation",
  "learner/test_optimizer": "optim.name optim.freeze_moe_router "
  "optim.warmup_steps optim.clip_norm",
  "learner/test_cold_start": "cold_start.gate",
  "data/test_datasets": "data.curriculum data.eval_source data.problem_field "
  "data.reference_field",
  "model/test_lora": "model.lora.alpha model.lora.targets",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """A folder with files of problems, and a checkpoint with a tokenizer."""
  folder = tmp_path_factory.mktemp("files")
  right = {"answer": "#### 7", "result": "3", "worked": "so #### 7"}
  wrong = right | {"answer": "#### 8"}

  def write(name, rows):
    text = "\n".join(map(json.dumps, rows))
    (folder / f"{name}.jsonl").write_text(text)

  ask = lambda letter, n: {"question": f"{letter}{n:03}?"}
  for letter in "AB":
    write(letter, [ask(letter, n) | right for n in range(200)])
  half = [ask("K", n) | (right if n < P else wrong) for n in range(2 * P)]
  write("half", half)
  _write_checkpoint(folder / "hf")
  plain.Bytes().save(folder / "chat")
  (folder / "chat/chat_template.jinja").write_text(
    "{{ messages[0].content }}{{ '.' if aloud is false else '!' }}"
  )
  return folder


def _write_checkpoint(folder):
  """A model of one layer whose weights are 0.125; its tokens are bytes."""
  cfg = model.variant("tiny", num_layers=1, dtype="float32")
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), cfg))
  weights = jax.tree.map(lambda x: np.full(x.shape, 0.125, x.dtype), shapes)
  hf.save_hf(weights, cfg, folder)
  plain.Bytes().save(folder)


def fill(value, files):
  """A value with the folder's name in it."""
  if isinstance(value, tuple):
    return tuple(fill(part, files) for part in value)
  if isinstance(value, str):
    return value.replace("{files}", str(files))
  return value


def test_every_key_has_a_row_and_every_row_a_key():
  elsewhere = {key for keys in ELSEWHERE.values() for key in keys.split()}
  assert {row.key for row in ROWS} ^ elsewhere == {*all_keys()}
  for file, keys in ELSEWHERE.items():
    text = (ROOT / f"tests/{file}.py").read_text()
    for key in keys.split():
      assert key.rpartition(".")[2] in text, key


@pytest.mark.parametrize(
  "row", ROWS, ids=[f"{row.key} {i}" for i, row in enumerate(ROWS)]
)
def test_a_key_has_the_effect_of_its_row(row, files):
  seen = []
  for value, expected in row.expected.items():
    config = small()
    changes = {k: fill(v, files) for k, v in row.given.items()}
    config.update_from_flattened_dict(changes | {row.key: fill(value, files)})
    check_training(parse(config), 1)
    found = row.observe(observed.of(config))
    if expected is not DIFFERS:
      expected = expected() if callable(expected) else expected
      assert same(found, expected), (value, found, expected)
    seen.append(found)
  assert not all(same(seen[0], other) for other in seen[1:])
