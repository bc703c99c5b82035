"""The embedded task: references, the held-out split, noise."""

import re

import pytest

from gspo_jax.data.problem import held_out
from gspo_jax.rewards import final_answer
from gspo_jax.runtime.errors import UserError
from gspo_jax.tasks.chain import Chain

MANY = 2000


def problems(count=MANY, **options):
  chain = Chain(**{"steps": (2, 4, 8)} | options)
  return [chain[i] for i in range(count)]


def apply(left, operation, right):
  if operation == "*":
    return int(left) * int(right) % 10
  return (int(left) + int(operation + right)) % 10


def evaluate(question):
  """Left to right, modulo 10, from the text alone."""
  assert re.fullmatch(r"\d([a-z][-+*]\d)+\?", question), question
  value = question[0]
  for label, operation, operand in re.findall(r"(.)(.)(.)", question[1:-1]):
    assert label.isalpha()
    value = str(apply(value, operation, operand))
  return value


def steps_of(problem):
  """(label, left, operation, right, result) of each step, and the end."""
  text, end = problem.demonstration.split("#")
  pattern = r"([a-z])(\d)([-+*])(\d)=(\d);"
  assert re.fullmatch(f"({pattern})+", text), text
  return re.findall(pattern, text), end


def test_the_reference_is_the_value_of_the_chain():
  assert evaluate("8a+3b-5c+4?") == "0"
  for problem in problems():
    assert problem.reference == evaluate(problem.text)


def test_lengths_and_labels():
  lengths = set()
  for problem in problems():
    labels = re.sub("[^a-z]", "", problem.text)
    assert "abcdefgh".startswith(labels)
    lengths.add(len(labels))
  assert lengths == {2, 4, 8}


def test_without_noise_a_demonstration_is_right_and_verifies():
  for problem in problems():
    steps, end = steps_of(problem)
    assert all(int(s[4]) == apply(*s[1:4]) for s in steps)
    assert end == problem.reference
    assert final_answer("", problem.demonstration, problem.reference) == 1


@pytest.mark.parametrize("noise", [0.0, 0.12, 1.0])
def test_a_demonstration_goes_on_with_its_own_results(noise):
  for problem in problems(noise=noise):
    steps, end = steps_of(problem)
    operations = [tuple(s) for s in re.findall("([a-z])(.)(.)", problem.text)]
    assert [(s[0], s[2], s[3]) for s in steps] == operations
    lefts = [s[1] for s in steps] + [end]
    assert lefts == [problem.text[0]] + [s[4] for s in steps]


@pytest.mark.parametrize("noise", [0.12, 0.5, 1.0])
def test_noise_corrupts_its_share_and_never_the_reference(noise):
  sampled = problems(steps=(8,), noise=noise)
  wrong = [int(s[4]) != apply(*s[1:4]) for p in sampled for s in steps_of(p)[0]]
  share = noise * 0.9  # a random digit is right one time in ten
  deviation = (share * (1 - share) / len(wrong)) ** 0.5
  assert abs(sum(wrong) / len(wrong) - share) < 4 * deviation
  assert all(p.reference == evaluate(p.text) for p in sampled)


def test_an_index_is_a_problem_for_ever():
  chain, again = Chain((3, 5), seed=7), Chain((3, 5), seed=7)
  forwards = [chain[i] for i in range(50)]
  assert [again[i] for i in reversed(range(50))] == forwards[::-1]
  assert len({problem.text for problem in forwards}) > 45
  assert [Chain((3, 5), seed=8)[i] for i in range(50)] != forwards


def test_the_problems_of_a_seed_never_change():
  """Runs resume on them, and their checkpoints name parameters, not rows."""
  assert Chain((8,))[0].text == "9a*9b+4c-9d+9e+5f*3g+3h-8?"


def test_training_never_sees_a_held_out_problem():
  # Short chains: few enough that two independent draws would overlap.
  train = {p.text for p in problems(6000, steps=(1, 2))}
  tested = {p.text for p in problems(6000, steps=(1, 2), evaluation=True)}
  noisy = {p.text for p in problems(6000, steps=(1, 2), noise=0.5, seed=3)}
  assert len(train) > 2000
  assert len(tested) > 500
  assert not (train | noisy) & tested


def test_one_problem_in_eight_is_held_out():
  share = sum(held_out(f"question {i}") for i in range(8000)) / 8000
  assert abs(share - 1 / 8) < 4 * (7 / 64 / 8000) ** 0.5


@pytest.mark.parametrize("steps", [(), (0,), (3, 27), (-1,), ("a",), (2.0,)])
def test_bad_steps(steps):
  with pytest.raises(UserError, match=r"steps=.*1\.\.26"):
    Chain(steps)


@pytest.mark.parametrize("noise", [-0.1, 1.01, float("nan"), "abc"])
def test_bad_noise(noise):
  with pytest.raises(UserError, match=f"noise={noise}"):
    Chain((1,), noise=noise)
