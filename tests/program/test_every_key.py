"""Every key of a config has an effect, and the expected one.

`ROWS` is a table of keys: what is observed, and what is expected at two values
or more. A key without a row fails, and so does a row without a key.
"""

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import observe_program as built
import observe_run as seen
import pytest
from ml_collections import ConfigDict
from observe_program import B, G, P
from repository import ROOT

from gspo_jax import model
from gspo_jax.configs import tiny_cpu
from gspo_jax.data.tokenizers import plain
from gspo_jax.model import hf
from gspo_jax.program.config import all_keys, parse
from gspo_jax.program.rules import check_training
from gspo_jax.runtime import sharding


@pytest.fixture(scope="module", autouse=True)
def caches():
  """Single operations by the thousand crowd out what later tests count."""
  yield
  jax.clear_caches()


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
  observe: Callable[[ConfigDict], Any]
  # By the key's value: the observation, a function that returns it, or DIFFERS.
  expected: dict[Any, Any]
  given: dict[str, Any] = {}  # noqa: RUF012  # beside the keys of `small`


def key_of(seed, use):
  """The random key that a run derives from its seed."""
  keys = jax.random.split(jax.random.key(seed), 4)
  if use == "init":
    return np.asarray(jax.random.key_data(keys[0]))
  _, shuffle = jax.random.split(jax.random.fold_in(keys[3], 1))
  return np.asarray(jax.random.key_data(shuffle))


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
SHORT = {"sampler.max_new_tokens": 4, "eval.samples": 1}
PAGED = {
  "continuous_batching.slots": 8,
  "continuous_batching.page_size": 4,
  "continuous_batching.prefill_chunk": 8,
}
TALK = PAGED | OF_A | {"reward.names": ()}
GRPO = {"objective.name": "grpo"}
KL = GRPO | {"objective.kl_coef": 0.3}
MICRO = {"learner.micro_batch_size": 4}
KEPT = {"sampler_logps"}  # of a rollout, by every objective
ROUTED = KEPT | {"experts", "router_logps"}
# By axis and size: the sizes of the others, the shards of a query weight and of
# an expert weight.
MESHES = (
  ("data", 4, {"fsdp": 2}, (2, 32, 4, 16), (2, 4, 64, 128)),
  ("fsdp", 4, {"data": 2}, (2, 16, 4, 16), (2, 2, 64, 128)),
  ("context", 4, {"data": 2}, (2, 16, 4, 16), (2, 2, 64, 128)),
  ("expert", 4, {"data": 2}, (2, 64, 4, 16), (2, 2, 64, 128)),
  ("tensor", 2, {"data": 4}, (2, 64, 2, 16), (2, 4, 64, 128)),
)
over = lambda **sizes: dict.fromkeys(sharding.AXES, 1) | sizes
WHOLE = over(data=8), (2, 64, 4, 16), (2, 8, 64, 128)
SAMPLED = [(16, 12), (32, 12), (8, 12)]  # generate, its eval, its greedy

ROWS = (
  Row(
    "seed",
    seen.initial_key,
    {n: functools.partial(key_of, n, "init") for n in (0, 1)},
  ),
  Row(
    "seed",
    seen.shuffle_key,
    {n: functools.partial(key_of, n, "shuffle") for n in (0, 1)},
  ),
  Row("seed", seen.chain_seed, {0: (0, 0), 1: (1, 1)}),
  Row("seed", seen.problems, {0: DIFFERS, 1: DIFFERS}, OF_A),
  Row("seed", seen.cold_start_tokens, {0: DIFFERS, 1: DIFFERS}, COLD_A),
  Row("num_steps", seen.steps_run, {1: [0, 1], 2: [0, 1, 2]}),
  # model
  Row(
    "model.checkpoint",
    built.embedding,
    {"": (258, 64, 2), "{files}/hf": (258, 64, 1)},
  ),
  Row(
    "model.checkpoint", built.first_weights, {"": "random", "{files}/hf": 0.125}
  ),
  Row(
    "model.checkpoint",
    built.tokens_of_seven,
    {"": ([55], True), "{files}/hf": ([55], False)},
  ),
  Row(
    "model.variant",
    built.embedding,
    {"tiny": (258, 64, 2), "small": (2048, 128, 4)},
  ),
  Row(
    "model.dtype",
    built.types_of_products,
    {"float32": [False, False], "bfloat16": [True, True]},
    {"model.remat": "stream"},
  ),
  *(
    Row(
      f"model.float32_{part}",
      lambda config, part=part: getattr(
        built.built(config).cfg, f"float32_{part}"
      ),
      {False: False, True: True},
    )
    for part in ("head", "router")
  ),
  Row(
    "model.remat",
    built.kept_names,
    {
      "none": None,
      "full": set(),
      "stream": {"stream"},
      "attention, stream": {"attention", "stream"},
    },
  ),
  # mesh
  *(
    Row(
      f"mesh.{axis}",
      built.mesh_of_run,
      {
        (8 if axis == "data" else 1): WHOLE,
        size: (over(**{axis: size}, **others), *shards),
      },
      BEFORE | ({"mesh.fsdp": -1} if axis == "data" else {}),
    )
    for axis, size, others, *shards in MESHES
  ),
  # In the order of `sharding.AXES`.
  Row("sampler_mesh.devices", built.devices_of_each, {0: (8, 8), 4: (4, 4)}),
  Row(
    "sampler_mesh.expert",
    built.decoding_mesh,
    {0: (8, 1, 1, 1, 1), 4: (2, 1, 1, 4, 1)},
  ),
  Row(
    "sampler_mesh.tensor",
    built.decoding_mesh,
    {0: (8, 1, 1, 1, 1), 2: (4, 1, 1, 1, 2)},
  ),
  # data
  Row(
    "data.source",
    seen.trained_kinds,
    {
      "chain:steps=1": {"0": 8},
      FILE_A: {"A": 8},
      f"{FILE_A},{FILE_B}": {"A": 4, "B": 4},
    },
  ),
  Row(
    "data.weights",
    seen.trained_kinds,
    {(): {"A": 4, "B": 4}, (3.0, 1.0): {"A": 6, "B": 2}},
    {"data.source": f"{FILE_A},{FILE_B}"},
  ),
  Row(
    "data.demonstration_field",
    seen.demonstration_starts,
    {"": {"##"}, "worked": {"so"}},
    COLD_A,
  ),
  Row(
    "data.tokenizer",
    built.tokens_of_seven,
    {"": ([55], False), "bytes": ([55], True)},
    {"model.checkpoint": "{files}/hf"},
  ),
  Row(
    "data.system_prompt",
    seen.problem_forms,
    {"": {"AN?"}, "Add:": {"Add:\n\nAN?"}},
    OF_A | {"data.max_prompt_length": 11},
  ),
  Row(
    "data.template_args",
    built.prompt_of_seven,
    {"": "7!", "aloud=False": "7."},
    {"model.checkpoint": "{files}/hf", "data.tokenizer": "{files}/chat"},
  ),
  Row(
    "data.instruction",
    seen.problem_forms,
    {"{problem}": {"AN?"}, "Q: {problem}!": {"Q: AN?!"}},
    OF_A | {"data.max_prompt_length": 10},
  ),
  Row("data.prompts", seen.prompts_of_a_call, {8: (8, {8}), 16: (16, {8})}),
  Row(
    "rollout.dynamic_sampling_rounds",
    seen.rollouts_of_a_step,
    {1: 1, 3: 3},  # all responses of a group are alike
    {"num_steps": 1},
  ),
  Row(
    "data.drop_solved",
    seen.repeats_of_solved,
    {False: 2, True: 1},
    {k: v for k, v in HALF.items() if k != "data.drop_solved"},
  ),
  Row(
    "data.max_prompt_length", seen.prompts_of_a_call, {8: (8, {8}), 9: (8, {9})}
  ),
  Row("data.max_prompt_length", built.row_widths, {8: {20}, 9: {21}}),
  Row(
    "data.too_long",
    seen.too_long,
    {"error": "problem", "drop": ""},
    OF_A | {"data.source": "jsonl:{files}/long.jsonl"},
  ),
  # sampler: of an iteration, and of sampled and greedy evaluations
  Row(
    "rollout.group_size",
    built.sample_shapes,
    {2: SAMPLED, 8: [(64, 12), (32, 12), (8, 12)]},
  ),
  Row(
    "sampler.max_new_tokens",
    built.sample_shapes,
    {12: SAMPLED, 8: [(16, 8), (32, 8), (8, 8)]},
  ),
  Row("sampler.max_new_tokens", built.row_widths, {12: {20}, 8: {16}}),
  Row(
    "sampler.max_new_tokens",
    lambda config: seen.cold_start_batch(config)[1].shape,
    {12: (8, 12), 9: (8, 9)},
    COLD_A,
  ),
  Row(
    "sampler.temperature",
    built.all_likeliest,
    {1.0: [False, False, True], 0.01: [True] * 3},
    SHORT,
  ),
  Row(
    "sampler.temperature", built.reference_temperature, {1.0: 1.0, 0.5: 0.5}, KL
  ),
  Row(
    "sampler.kept_ids",
    built.kept_of_a_token,
    {0: [None] * 3, 9: [9, None, None]},
    SHORT | {"sampler.top_p": 0.9},
  ),
  Row(
    "sampler.stop",
    built.end_at_letters,
    {(): [False] * 3, tuple(map(chr, range(128))): [True] * 3},
    SHORT,
  ),
  # continuous batching: slots, pages, tokens of a page; segments, prefill
  Row(
    "continuous_batching.slots",
    built.pool,
    {0: None, 4: (4, 4 * 6, 4), 8: (8, 8 * 6, 4)},
    PAGED,
  ),
  # rollout
  Row("rollout.max_staleness", seen.order_of_phases, {0: "gugu", 1: "gguu"}),
  Row(
    "rollout.max_tokens_per_iteration",
    seen.token_limits,
    {2: {2}, 3: {3}},
    PAGED,
  ),
  Row(
    "rollout.environment",
    seen.scored_by,
    {
      "calculator": ("environment 'calculator'", 1.0),
      # One for each turn.
      "made_run.Endless": ("environment 'made_run.Endless'", 3.0),
    },
    TALK,
  ),
  Row(
    "rollout.max_turns",
    seen.turns,
    {1: (1.0, 1.0), 2: (2.0, 2.0)},
    TALK | {"rollout.environment": "made_run.Endless"},
  ),
  Row(
    "rollout.max_sequences",
    built.sequences_of_a_prompt,
    {1: G, 3: 3 * G},
    TALK | {"rollout.environment": "made_run.Endless"},
  ),
  # reward: the responses are "#7", which is correct
  Row(
    "reward.names",
    seen.mean_reward,
    {("final_answer",): 1.0, ("number",): 0.0},
    OF_A,
  ),
  Row("reward.weights", seen.mean_reward, {(1.0,): 1.0, (0.25,): 0.25}, OF_A),
  Row("reward.workers", seen.processes, {1: 1, 3: 3}),
  Row("reward.concurrency", seen.reward_concurrency, {32: 32, 4: 4}),
  Row("reward.seconds", seen.reward_seconds, {5.0: 5.0, 9.0: 9.0}),
  Row(
    "reward.max_failed",
    seen.stopped_by_failures,
    {0.25: ("the held-out problems", 8), 1.0: None},
    OF_A | {"reward.names": ("made_run.broken:of=B",)},
  ),
  *(
    Row("reward.pass_threshold", observe, found, given)
    for observe, found, given in (
      # A response is 3 of 12 tokens long, and `length` is .75.
      (seen.passes, {0.75: 1.0, 0.76: 0.0}, BEFORE | LENGTH),
      (seen.cold_start_updates, {0.75: 50, 0.76: 51}, COLD_A | GATE | LENGTH),
      (seen.repeats_of_solved, {1.0: 1, 1.1: 2}, HALF),
    )
  ),
  # objective
  Row(
    "objective.name",
    built.batch_fields,
    {
      "gspo": KEPT,
      "gspo:router_shift_floor=0.1": ROUTED,
      "ppo": KEPT | {"values", "returns"},
      "rspo": ROUTED,
    },
  ),
  Row(
    "objective.kl_coef",
    built.batch_fields,
    {0.0: KEPT, 0.3: KEPT | {"reference_logps"}},
  ),
  Row(
    "objective.reference_every",
    built.reference_after,
    {0: "old", 1: "new", 2: "old"},
    KL,
  ),
  Row(
    "objective.replay",
    built.records_routing,
    {"r2": [False, False, False], "r3": [True, False, False]},
    SHORT,
  ),
  Row(
    "objective.distillation.teachers",
    built.batch_fields,
    {
      (): KEPT,
      ("{files}/hf",): KEPT | {"teacher_logps"},
      ("{files}/hf",) * 2: KEPT | {"teacher_logps", "teacher"},
    },
    {"objective.name": "gspo_token", "data.source": f"{FILE_A},{FILE_B}"},
  ),
  Row(
    "objective.distillation.teacher_key",
    seen.teachers,
    {"result": {0}, "worked": {1}},
    BEFORE
    | OF_A
    | {
      "objective.name": "gspo_token",
      "objective.distillation.teachers": (
        "3={files}/hf",
        "so #### 7={files}/hf",
      ),
    },
  ),
  Row(
    "objective.name",
    built.value_step,
    {
      "ppo:critic_learning_rate=1e-3": 1e-3,
      "ppo:critic_learning_rate=5e-3": 5e-3,
      "ppo:critic_learning_rate=1e-3,critic_warmup_steps=4": 2.5e-4,
    },
  ),
  # learner: optimizer steps, and rows of a forward pass
  Row("learner.minibatches", built.optimizer_steps, {1: 1, 4: 4}, MICRO),
  Row(
    "learner.minibatches",
    seen.order_of_phases,
    {1: "gugu", 2: "gsugsu"},
    {"learner.micro_batch_size": 8},
  ),
  Row(
    "learner.micro_batch_size",
    built.rows_per_pass,
    {16: [{16}, {16}, {8}], 4: [{4}, {4}, {4}]},
    KL,
  ),
  # optim
  Row("optim.learning_rate", built.step_size, {1e-3: 1e-3, 5e-3: 5e-3}),
  Row(
    "optim.decay",
    built.second_rate,
    {"constant": 1e-3, "linear": 7.5e-4, "cosine": 8.536e-4},
    {"num_steps": 4},
  ),
  # cold_start
  Row("cold_start.steps", seen.cold_start_updates, {0: 0, 1: 1, 3: 3}, COLD),
  Row(
    "cold_start.batch",
    lambda config: seen.cold_start_batch(config)[0].tokens.shape,
    {8: (8, 8), 16: (16, 8)},
    COLD,
  ),
  Row(
    "cold_start.learning_rate",
    built.cold_start_step,
    {1e-3: 1e-3, 5e-3: 5e-3},
    {"cold_start.batch": B},
  ),
  # eval
  Row("eval.every", seen.evaluated_at, {1: [0, 1, 2], 10: [0, 2], 0: []}),
  Row("eval.prompts", seen.problems_evaluated, {8: (8, 8), 16: (16, 16)}),
  Row(
    "eval.samples",
    built.sample_shapes,
    {4: SAMPLED, 3: [(16, 12), (24, 12), (8, 12)]},
  ),
  # checkpoint
  Row(
    "checkpoint.every",
    seen.saved_steps,
    {1: [1, 2, 3], 2: [2, 3]},
    {"num_steps": 3, "checkpoint.keep": 9},
  ),
  Row(
    "checkpoint.keep",
    seen.saved_steps,
    {1: [3], 2: [2, 3]},
    {"num_steps": 3, "checkpoint.every": 1},
  ),
  # log
  Row(
    "log.instruments", built.instruments, {True: [True] * 3, False: [False] * 3}
  ),
  Row("log.instruments", built.batch_fields, {True: ROUTED, False: KEPT}),
  Row("log.samples", seen.samples_written, {2: 2, 4: 4}),
  Row(
    "log.wandb",
    seen.wandb_projects,
    {"": ([], []), "reasoning": (["reasoning"], [0, 1, 2])},
  ),
  Row(
    "log.profile",
    seen.traced_iterations,
    {
      (): ([], set()),
      (1, 2): ([1, 2], {"profile"}),
      (2, 2): ([2], {"profile"}),
    },
  ),
)


# Keys whose section is an argument of what reads it, as a row of another key of
# the section shows; by the tests of their effect.
ELSEWHERE = {
  # The gradient is held against loops in float64.
  "tests/program/test_wiring.py": (
    *("objective.entropy_coef", "objective.kl_estimator", "objective.mismatch"),
    *("objective.truncated", "objective.off_policy_mask_threshold"),
    "objective.old_logps",
    "objective.distillation.coef",
    "objective.distillation.reward_weight",
  ),
  "tests/sampler/test_next_token.py": (
    *("sampler.top_k", "sampler.top_p", "sampler.min_p"),
  ),
  "tests/sampler/test_continuous_config.py": (
    "continuous_batching.page_size",
    "continuous_batching.num_pages",
    "continuous_batching.prefill_chunk",
  ),
  "tests/learner/test_optimizer.py": (
    *("optim.name", "optim.freeze_moe_router"),
    *("optim.warmup_steps", "optim.clip_norm"),
  ),
  "tests/data/test_datasets.py": (
    *("data.curriculum", "data.eval_source"),
    *("data.problem_field", "data.reference_field"),
  ),
  "tests/model/test_lora.py": ("model.lora.alpha", "model.lora.targets"),
  "tests/program/test_lora.py": ("model.lora.rank", "model.lora.checkpoint"),
  "tests/sampler/test_speculation.py": ("continuous_batching.speculation",),
  "tests/program/test_packed_update.py": (
    *("objective.router_aux_loss_coef", "objective.router_z_loss_coef"),
  ),
  "tests/test_iteration.py": (
    *("objective.advantage_estimator", "objective.credit"),
  ),
  "tests/learner/test_cold_start.py": ("cold_start.gate",),
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
  write(
    "long",
    [ask("A", n) | right for n in range(2 * P)] + [ask("A", 10**9) | right],
  )
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
  elsewhere = {key for keys in ELSEWHERE.values() for key in keys}
  assert {row.key for row in ROWS} ^ elsewhere == {*all_keys()}
  for file, keys in ELSEWHERE.items():
    text = (ROOT / file).read_text()
    assert [key for key in keys if key.rpartition(".")[2] not in text] == []


@pytest.mark.parametrize(
  "row", ROWS, ids=[f"{row.key} {row.observe.__name__}" for row in ROWS]
)
def test_a_key_has_the_effect_of_its_row(row, files):
  observed = []
  for value, expected in row.expected.items():
    config = small()
    changes = {k: fill(v, files) for k, v in row.given.items()}
    config.update_from_flattened_dict(changes | {row.key: fill(value, files)})
    check_training(parse(config), 1)
    found = row.observe(config)
    if expected is not DIFFERS:
      expected = expected() if callable(expected) else expected
      assert same(found, expected), (value, found, expected)
    observed.append(found)
  assert not all(same(observed[0], other) for other in observed[1:])
