"""Stages and solved problems, against a simulation in plain Python."""

import functools
import hashlib
import json
import logging
from unittest import mock

import grain
import numpy as np
import pytest
from grain._src.python.dataset.transformations import shuffle

from gspo_jax.data import pipeline, prompt_batch, sources, tokenizers
from gspo_jax.data.curriculum import Curriculum
from gspo_jax.data.datasets import Stage
from gspo_jax.data.problem import Problem
from gspo_jax.runtime.errors import UserError
from gspo_jax.tasks.chain import Chain

BYTES = tokenizers.load("bytes")
G = 3


@pytest.fixture(scope="module", autouse=True)
def remembered_shuffles():
  """grain takes 9 ms for a place in the order of five problems."""
  places = functools.cache(shuffle.index_shuffle.index_shuffle)
  with mock.patch.object(shuffle.index_shuffle, "index_shuffle", places):
    yield


def problems(letter, count):
  # Of 2 to 5 characters: some do not fit where that is asked.
  return [Problem(f"{letter}{i}{'x' * (i % 4)}", "1", "") for i in range(count)]


MATH, CODE, TINY = problems("m", 23), problems("c", 11), problems("t", 5)
BOTH, MIX = sources.mix([MATH, CODE], (2, 1)), sources.mix([TINY, CODE])
SMALL = Chain((3,), size=13)


def start(*stages, batch=4, width=16, seed=0, drop_solved=True):
  drop = "drop" if width < 16 else "error"
  cfg = prompt_batch.PromptConfig(BYTES, width, too_long=drop)
  stages = [Stage(*stage) for stage in stages]
  return Curriculum(
    stages, cfg, batch=batch, seed=seed, drop_solved=drop_solved
  )


def correct(problem_texts, iteration):
  """[P, G], 1 for a correct response: a hash of problem, iteration and g."""

  def score(text, g):
    digest = hashlib.sha256(f"{text} {iteration} {g}".encode()).digest()
    # About a third of the groups are all correct; 0.9 is not.
    return 1 if digest[0] < 180 else 0.9 * (digest[0] % 2)

  return np.array([[score(t, g) for g in range(G)] for t in problem_texts])


def texts(batch):
  return [p.text for p in batch.problems]


def run(curriculum, iterations, rounds=1):
  """The problems of each iteration; its rewards are recorded at its end."""
  for iteration in iterations:
    batches = [curriculum.next_batch(iteration) for _ in range(rounds)]
    for batch in batches:
      curriculum.record(batch, correct(texts(batch), iteration))
    yield [texts(batch) for batch in batches]


# The oracle: an endless order of problems, and a set of the solved ones.


def whole(part):
  return [part[i] for i in range(len(part))]


def order(source, seed):
  """Problems of one source or a mixture, each epoch shuffled anew."""
  parts = source.sources if isinstance(source, sources.Mixture) else [source]
  shuffled = [
    grain.MapDataset.source(whole(part)).seed(seed + i).shuffle().repeat()
    for i, part in enumerate(parts)
  ]
  if len(parts) == 1:
    return shuffled[0]
  return grain.MapDataset.mix(shuffled, weights=source.weights)


def simulate(stages, iterations, batch, rounds=1, width=16, seed=0):
  """Problems by iteration and round, as `run`; how often all came back."""
  solved, resets, orders, positions, fitting = set(), 0, [], [], []
  for _, source in stages:
    parts = source.sources if isinstance(source, sources.Mixture) else [source]
    every = {p.text for part in parts for p in whole(part)}
    orders.append(order(source, seed))
    positions.append(0)
    fitting.append({text for text in every if len(text) <= width})
    seed += len(parts)
  batches_of_iterations = []
  for iteration in iterations:
    stage = sum(begin <= iteration for begin, _ in stages) - 1
    batches = []
    for _ in range(rounds):
      if len(fitting[stage] - solved) < batch:
        solved -= fitting[stage]
        resets += 1
      batches.append([])
      while len(batches[-1]) < batch:
        text = orders[stage][positions[stage]].text
        positions[stage] += 1
        if text in fitting[stage] - solved:
          batches[-1].append(text)
    for problem_texts in batches:
      all_correct = (correct(problem_texts, iteration) == 1).all(1)
      solved |= {
        t for t, c in zip(problem_texts, all_correct, strict=True) if c
      }
    batches_of_iterations.append(batches)
  return batches_of_iterations, resets


CASES = {
  "one source": {"stages": [(1, MATH)]},
  "embedded": {"stages": [(1, SMALL)], "batch": 3},
  "batch of the whole": {"stages": [(1, TINY)], "batch": 5},
  "single questions": {"stages": [(1, TINY)], "batch": 1},
  "mixture": {"stages": [(1, BOTH)], "batch": 5},
  "too long": {"stages": [(1, BOTH)], "width": 4},
  "rounds": {"stages": [(1, BOTH)], "rounds": 3},
  "stages": {"stages": [(1, MATH), (7, BOTH)]},
  "many stages": {
    "stages": [(1, TINY), (3, CODE), (4, MIX), (19, MATH)],
    **{"rounds": 2, "width": 4, "batch": 2},
  },
}
STEPS = range(1, 25)


@functools.cache
def simulated(case):
  return simulate(iterations=STEPS, **{"batch": 4} | CASES[case])


def make(case):
  rest = {k: v for k, v in CASES[case].items() if k not in ("stages", "rounds")}
  return start(*CASES[case]["stages"], **rest)


@pytest.mark.parametrize("case", CASES)
def test_batches_are_those_of_the_simulation(case, caplog):
  with caplog.at_level(logging.WARNING):
    curriculum = make(case)
    batches = list(run(curriculum, STEPS, CASES[case].get("rounds", 1)))
  expected, resets = simulated(case)
  assert batches == expected
  assert caplog.text.count("all problems come back") == resets


def test_in_every_case_all_problems_come_back():
  """Else the cases would test less than it seems."""
  resets = [simulated(case)[1] for case in CASES]
  assert min(resets) > 0
  assert max(resets) > 3


@pytest.mark.parametrize("case", ["embedded", "many stages"])
def test_resumed_is_uninterrupted(case):
  """In a fresh curriculum, and in one that has gone on elsewhere."""
  rounds, states, seen = CASES[case].get("rounds", 1), [], []
  curriculum, (expected, _) = make(case), simulated(case)
  for step in STEPS:
    states.append(json.dumps(curriculum.get_state()))
    seen.append((curriculum.num_solved, curriculum.epochs))
    list(run(curriculum, [step], rounds))
  for done in range(0, len(STEPS), 5):
    for resumed in (make(case), curriculum):
      resumed.set_state(json.loads(states[done]))
      assert resumed.get_state() == json.loads(states[done])
      # A run reports them before its next batch.
      assert (resumed.num_solved, resumed.epochs) == seen[done]
      after = slice(done, done + 3)
      assert list(run(resumed, STEPS[after], rounds)) == expected[after]


def test_without_drop_solved_it_is_the_plain_pipeline():
  """The same problems, order and position."""
  cfg = prompt_batch.PromptConfig(BYTES, 16)
  plain = pipeline.prompts(BOTH, cfg, batch=4, seed=3)
  curriculum = start((1, BOTH), seed=3, drop_solved=False)
  for step in range(1, 12):
    batch = curriculum.next_batch(step)
    curriculum.record(batch, np.ones((4, G)))
    assert texts(batch) == texts(next(plain))
    assert curriculum.get_state() == {
      "positions": [plain.get_state()],
      "stage": 0,
    }
    assert curriculum.epochs == pipeline.epochs(BOTH, plain.get_state())
  assert curriculum.num_solved == 0
  # A run that turns drop_solved on later begins with nothing solved.
  resumed = start((1, BOTH), seed=3)
  resumed.record(resumed.next_batch(1), np.ones((4, G)))
  resumed.set_state(curriculum.get_state())
  assert resumed.num_solved == 0
  assert texts(resumed.next_batch(12)) == texts(curriculum.next_batch(12))


def test_epochs_are_those_of_the_stage():
  curriculum = start((1, TINY), (3, MATH), batch=5, drop_solved=False)
  curriculum.next_batch(1)
  curriculum.next_batch(2)
  assert curriculum.epochs == 2
  curriculum.next_batch(3)
  assert curriculum.epochs == 5 / 23


@pytest.mark.parametrize(
  "begins", [(2,), (0,), (1, 1), (1, 5, 3), (0, 1), (1, 0), (1, -2)]
)
def test_stages_out_of_order(begins):
  with pytest.raises(UserError, match=r"begin at iterations \[.*: expected 1"):
    start(*((begin, MATH) for begin in begins))


def test_a_later_stage_is_checked_at_the_start():
  with pytest.raises(UserError, match=r"5 problems.* batch of 6"):
    start((1, MATH), (100, TINY), batch=6)


def test_any_number_of_prompts_and_recall_by_their_positions():
  """One stream, however it is cut; also two stages in one batch."""
  begin = lambda: start((1, MIX), (3, MATH), drop_solved=False)
  curriculum, by_batch = begin(), begin()
  batches = [
    curriculum.next_batch(*args) for args in ((1, 3), (1, 1), (2,), (3, 2))
  ]
  expected = [by_batch.next_batch(step) for step in (1, 2, 3)]
  problem_texts = [text for batch in batches for text in texts(batch)]
  assert problem_texts == [t for batch in expected for t in texts(batch)][:10]
  joined = prompt_batch.join(batches).pick(np.array([9, *range(8)]))
  stages, parts, _ = joined.positions.T.tolist()
  assert (stages, {*parts}) == ([1, *[0] * 8], {0, 1})
  positions = joined.positions.tolist()
  assert joined.steps.tolist() == [3, 1, 1, 1, 1, 2, 2, 2, 2]
  recalled = begin().prompts_at(
    json.loads(json.dumps(positions)), joined.steps.tolist()
  )
  assert recalled.problems == joined.problems
  for name in ("tokens", "lengths", "positions", "steps"):
    column, expected = getattr(recalled, name), getattr(joined, name)
    np.testing.assert_array_equal(column, expected)
    assert column.dtype == expected.dtype == np.int32


def test_rewards_count_for_the_stage_of_their_prompts():
  """Also if the next stage has begun meanwhile."""
  curriculum = start((1, MATH), (2, CODE))
  first, second = curriculum.next_batch(1), curriculum.next_batch(2)
  curriculum.record(first, np.ones((4, G)))
  assert curriculum.num_solved == 0  # of the second stage
  curriculum.next_batch(1, 1)
  assert curriculum.num_solved == 4
  curriculum.record(second, np.ones((4, G)))
  assert curriculum.num_solved == 4


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100])
def test_solved_problems_are_restored_from_json_by_the_content_of_sources(
  count,
):
  source = problems("q", count)
  stages = (1, source), (2, [*source]), (3, [*source[:-1], CODE[0]])
  saved, restored = (start(*stages, batch=1) for _ in range(2))
  for stage in (2, 3):  # else the positions say that batches were taken
    restored.record(restored.next_batch(stage), np.ones((1, G)))
  for stage in (1, 2):
    saved.record(saved.next_batch(stage), np.ones((1, G)))
  restored.set_state(json.loads(json.dumps(saved.get_state())))
  solved = min(2, count)
  assert restored.num_solved == saved.num_solved == solved
  for curriculum in (saved, restored):
    curriculum.next_batch(3)
    assert curriculum.num_solved == 0  # of other content


def test_the_state_of_a_million_problems_is_small():
  curriculum = start((1, Chain((8,))))
  assert len(json.dumps(curriculum.get_state())) < 1000
  ((solved,),) = curriculum._solved
  # The worst case.
  solved[:] = np.random.default_rng(0).random(len(solved)) < 0.5
  assert len(json.dumps(curriculum.get_state())) < 170_000
