"""What is known of which questions, in and out of a checkpoint."""

import json

import numpy as np
import pytest

from gspo_jax.data.curriculum import SolvedProblems
from gspo_jax.data.tasks import Chain, Problem


def source(letter, count):
  return [Problem(f"{letter}{i}", "1", "") for i in range(count)]


A, B = source("a", 11), source("b", 30)


def test_nothing_is_known_at_first():
  known = SolvedProblems().of(A)
  assert known.shape == (11,)
  assert known.dtype == bool
  assert not known.any()


def test_a_source_has_one_history_by_its_content():
  history = SolvedProblems()
  history.of(A)[3] = True
  assert np.flatnonzero(history.of(list(A))).tolist() == [3]
  assert not history.of(B).any()
  assert not history.of([*A[:-1], B[0]]).any()


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100])
def test_a_state_comes_back_from_json(count):
  rng = np.random.default_rng(count)
  for share in (0.0, 0.5, 1.0):
    history, other = SolvedProblems(), SolvedProblems()
    questions = source("q", count)
    known = rng.random(count) < share
    history.of(questions)[:] = known
    history.of(A)[5] = True
    state = json.loads(json.dumps(history.get_state()))
    # Taken before a state, as by a pipeline, an array shows it all the same.
    again, of_b = other.of(questions), other.of(B)
    again[0] = of_b[2] = True
    other.set_state(state)
    np.testing.assert_array_equal(again, known)
    assert not of_b.any()  # of which the state knows nothing


def test_the_state_of_a_million_questions_is_small():
  history = SolvedProblems()
  known = history.of(Chain((8,)))
  assert len(json.dumps(history.get_state())) < 1000
  known[:] = np.random.default_rng(0).random(len(known)) < 0.5  # the worst
  assert len(json.dumps(history.get_state())) < 170_000
