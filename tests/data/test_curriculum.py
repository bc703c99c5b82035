"""Stages and history resampling, against a simulation in plain Python."""

import functools
import hashlib
import json
import logging

import grain
import numpy as np
import pytest

from gspo_jax.data import pipeline, prompt_batch, sources, tokenizers
from gspo_jax.data.curriculum import Curriculum
from gspo_jax.data.datasets import Stage
from gspo_jax.data.tasks import Chain, Problem
from gspo_jax.runtime.errors import UserError

BYTES = tokenizers.load("bytes")
G = 3


def problems(letter, count):
  # Of 2 to 5 characters: some do not fit where that is asked.
  return [Problem(f"{letter}{i}{'x' * (i % 4)}", "1", "") for i in range(count)]


MATH, CODE, TINY = problems("m", 23), problems("c", 11), problems("t", 5)
BOTH, MIX = sources.mix([MATH, CODE], (2, 1)), sources.mix([TINY, CODE])
SMALL = Chain((3,), size=13)


def start(*stages, batch=4, width=16, seed=0, history=True):
  drop = "drop" if width < 16 else "error"
  cfg = prompt_batch.PromptConfig(BYTES, width, too_long=drop)
  stages = [Stage(*stage) for stage in stages]
  return Curriculum(stages, cfg, batch=batch, seed=seed, history=history)


def correct(texts, iteration):
  """[P, G] verdicts, by chance of a question and an iteration."""

  def verdict(text, g):
    digest = hashlib.sha256(f"{text} {iteration} {g}".encode()).digest()
    return digest[0] < 180  # about a third of the groups are all right

  return np.array([[verdict(t, g) for g in range(G)] for t in texts], float)


def texts(batch):
  return [p.text for p in batch["problems"]]


def run(curriculum, iterations, rounds=1):
  """What is drawn in each iteration, its verdicts recorded at its end."""
  for iteration in iterations:
    batches = [curriculum.draw(iteration) for _ in range(rounds)]
    for batch in batches:
      curriculum.record(batch, correct(texts(batch), iteration))
    yield [texts(batch) for batch in batches]


# The oracle: an endless order, walked with a set in hand.


def whole(part):
  return [part[i] for i in range(len(part))]


def order(source, seed):
  """Questions of one source or a mixture, each epoch shuffled anew."""
  parts = source.sources if isinstance(source, sources.Mixture) else [source]
  shuffled = [
    grain.MapDataset.source(whole(part)).seed(seed + i).shuffle().repeat()
    for i, part in enumerate(parts)
  ]
  if len(parts) == 1:
    return shuffled[0]
  return grain.MapDataset.mix(shuffled, weights=source.weights)


def simulate(stages, iterations, batch, rounds=1, width=16, seed=0):
  """As `run`, and how often all came back."""
  known, back, walks, out = set(), 0, [], []
  for _, source in stages:
    parts = source.sources if isinstance(source, sources.Mixture) else [source]
    every = {p.text for part in parts for p in whole(part)}
    walks.append(
      [order(source, seed), 0, {q for q in every if len(q) <= width}]
    )
    seed += len(parts)
  for iteration in iterations:
    walk = [w for w, s in zip(walks, stages, strict=True) if s[0] <= iteration][
      -1
    ]
    batches = []
    for _ in range(rounds):
      if len(walk[2] - known) < batch:
        known -= walk[2]
        back += 1
      drawn = []
      while len(drawn) < batch:
        question = walk[0][walk[1]].text
        walk[1] += 1
        if question in walk[2] - known:
          drawn.append(question)
      batches.append(drawn)
    for drawn in batches:
      all_right = correct(drawn, iteration).all(1)
      known |= {q for q, right in zip(drawn, all_right, strict=True) if right}
    out.append(batches)
  return out, back, known


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
    "stages": [
      (1, TINY),
      (3, CODE),
      (4, sources.mix([TINY, CODE])),
      (19, MATH),
    ],
    "rounds": 2,
    "width": 4,
    "batch": 2,
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
def test_it_draws_what_the_simulation_draws(case, caplog):
  with caplog.at_level(logging.WARNING):
    curriculum = make(case)
    drawn = list(run(curriculum, STEPS, CASES[case].get("rounds", 1)))
  expected, back, _ = simulated(case)
  assert drawn == expected
  assert caplog.text.count("all questions come back") == back


def test_in_every_case_everything_comes_back():
  """Else they would test less than it seems."""
  back = [simulated(case)[1] for case in CASES]
  assert min(back) > 0
  assert max(back) > 3


@pytest.mark.parametrize("case", CASES)
def test_resumed_is_uninterrupted(case):
  """From every position, in a fresh process that knows of nothing."""
  rounds, states = CASES[case].get("rounds", 1), []
  curriculum = make(case)
  whole = []
  for step in STEPS:
    states.append(json.dumps(curriculum.get_state()))
    whole += run(curriculum, [step], rounds)
  assert whole == simulated(case)[0]
  resumed = make(case)
  for done, state in enumerate(states):
    if done % 5 == 0:
      resumed = make(case)
    # Else what it drew and learnt before is forgotten.
    resumed.set_state(json.loads(state))
    assert resumed.get_state() == json.loads(state)
    some = STEPS[done : done + 3]
    assert list(run(resumed, some, rounds)) == whole[done : done + 3]


def test_no_question_that_was_all_right_comes_again_before_all_do(caplog):
  curriculum, known = start((1, MATH)), set()
  with caplog.at_level(logging.WARNING):
    for iteration in STEPS:
      batch = curriculum.draw(iteration)
      if caplog.records:
        break
      assert not known & set(texts(batch))
      right = correct(texts(batch), iteration)
      curriculum.record(batch, right)
      known |= {t for t, r in zip(texts(batch), right, strict=True) if r.all()}
      assert curriculum.left_out == len(known)
  assert len(known) > len(MATH) - 4
  (record,) = caplog.records
  left = len(MATH) - len(known)
  assert f"{left} questions are left" in record.getMessage()
  assert "fewer than a batch of 4" in record.getMessage()
  assert curriculum.left_out == 0


def test_mixed_and_all_wrong_questions_stay():
  curriculum = start((1, TINY), batch=5)
  batch = curriculum.draw(1)
  verdicts = np.zeros((5, G))
  verdicts[0], verdicts[1] = [0, 1, 1], [1, 1, 0.9]
  curriculum.record(batch, verdicts)
  assert curriculum.left_out == 0
  assert sorted(texts(curriculum.draw(2))) == sorted(texts(batch))


def test_what_one_stage_learnt_the_next_one_knows():
  curriculum = start((1, MATH), (4, BOTH))
  known = set()
  for iteration in (1, 2, 3):
    batch = curriculum.draw(iteration)
    curriculum.record(batch, np.ones((4, G)))
    known |= set(texts(batch))
  assert len(known) == 12
  later = {t for i in range(4, 14) for t in texts(curriculum.draw(i))}
  assert later == {p.text for p in [*MATH, *CODE]} - known


def test_a_stage_is_not_shuffled_as_the_one_before():
  again = start((1, MATH), (6, MATH), history=False)
  first, second = (
    [t for (b,) in run(again, s) for t in b]
    for s in (range(1, 6), range(6, 11))
  )
  assert set(first) & set(second)
  assert first != second


def test_without_history_it_is_the_plain_pipeline():
  """Questions, order and position; of both, either can resume the other."""
  cfg = prompt_batch.PromptConfig(BYTES, 16)
  plain = pipeline.prompts(BOTH, cfg, batch=4, seed=3)
  curriculum = start((1, BOTH), seed=3, history=False)
  for step in range(1, 12):
    batch = curriculum.draw(step)
    curriculum.record(batch, np.ones((4, G)))
    assert texts(batch) == texts(next(plain))
    assert curriculum.get_state() == {
      "positions": [plain.get_state()],
      "stage": 0,
    }
    assert curriculum.epochs == pipeline.epochs(BOTH, plain.get_state())
  assert curriculum.left_out == 0
  for history in (True, False):
    resumed = start((1, BOTH), seed=3, history=history)
    resumed.set_state(plain.get_state())
    assert texts(resumed.draw(12)) == texts(curriculum.draw(12))
    curriculum.set_state(plain.get_state())


def test_epochs_are_those_of_the_stage():
  curriculum = start((1, TINY), (3, MATH), batch=5, history=False)
  curriculum.draw(1)
  curriculum.draw(2)
  assert curriculum.epochs == 2
  curriculum.draw(3)
  assert curriculum.epochs == 5 / 23


@pytest.mark.parametrize(
  "begins", [(2,), (0,), (1, 1), (1, 5, 3), (0, 1), (1, 0), (1, -2)]
)
def test_stages_out_of_order(begins):
  with pytest.raises(UserError, match=r"begin at iterations \[.*: expected 1"):
    start(*((begin, MATH) for begin in begins))


def test_a_later_stage_is_looked_at_now():
  with pytest.raises(UserError, match=r"5 questions.* batch of 6"):
    start((1, MATH), (100, TINY), batch=6)


def test_any_number_of_questions_and_again_by_their_places():
  """As one stream, however it is cut; two stages in one batch, too."""
  of = lambda: start((1, MIX), (3, MATH), history=False)
  curriculum, whole = of(), of()
  drawn = [curriculum.draw(*args) for args in ((1, 3), (1, 1), (2,), (3, 2))]
  wanted = [whole.draw(1), whole.draw(2), whole.draw(3)]
  asked = [q for batch in drawn for q in texts(batch)]
  assert asked == [q for batch in wanted for q in texts(batch)][:10]
  joined = prompt_batch.pick(prompt_batch.join(drawn), np.array([9, 0, 4]))
  assert joined["stage"].tolist() == [1, 0, 0]
  names = "stage", "part", "index"
  places = np.stack([joined[name] for name in names], axis=1).tolist()
  again = of().recall(json.loads(json.dumps(places)))
  assert again.keys() == joined.keys()
  for name, column in joined.items():
    assert list(map(str, again[name])) == list(map(str, column))
    if name != "problems":
      assert again[name].dtype == column.dtype


def test_a_state_knows_its_stage():
  """A run that draws no more tells of the stage that it is in."""
  first, again = start((1, MATH), (2, CODE)), start((1, MATH), (2, CODE))
  first.record(first.draw(2), np.ones((4, G)))
  again.set_state(json.loads(json.dumps(first.get_state())))
  assert again.left_out == first.left_out == 4
  assert again.epochs == first.epochs > 0


def test_what_is_known_is_known_of_the_stage_that_asked():
  """Also where the next stage has begun meanwhile."""
  curriculum = start((1, MATH), (2, CODE))
  first, second = curriculum.draw(1), curriculum.draw(2)
  curriculum.record(first, np.ones((4, G)))
  assert curriculum.left_out == 0  # of the second stage
  curriculum.draw(1, 1)
  assert curriculum.left_out == 4
  curriculum.record(second, np.ones((4, G)))
  assert curriculum.left_out == 4
