"""The embedded games: their rules, and demonstrations that keep to them."""

import pytest

from gspo_jax.data.problem import held_out
from gspo_jax.rollout import environment
from gspo_jax.rollout.environment import Question, Step
from gspo_jax.tasks import games

CALCULATOR = environment.named("calculator")
GAMES = {
  "calculator": (CALCULATOR, games.calculator_problems),
  "guessing": (games.Guessing, games.guessing_problems),
}


def play(game, problem, policy, most=4):
  """The steps of a game; `policy` answers the last message."""
  game.reset(Question(problem.text, problem.reference), 0)
  steps, message = [], problem.text
  while len(steps) < most and not (steps and steps[-1].done):
    steps.append(Step(*game.step(policy(message))))
    message = steps[-1].messages[0][1] if steps[-1].messages else ""
  return steps


@pytest.mark.parametrize("name", GAMES)
def test_a_demonstration_hears_what_the_environment_says(name):
  make, problems = GAMES[name]
  problems, ended = problems(), []
  for problem in problems[::37]:
    said = [problem.demonstration]
    said += [text for role, text in problem.turns if role == "assistant"]
    heard = [turn for turn in problem.turns if turn[0] != "assistant"]
    steps = play(
      make(), problem, lambda _, said=said: said.pop(0), most=len(said)
    )
    found = [message[:2] for step in steps for message in step.messages]
    assert found[: len(heard)] == heard
    ended.append(steps[-1].reward)
  # RL has something to do, and something to start from.
  assert 0.1 < sum(ended) / len(ended) < 0.3
  sides = {held_out(problem.text) for problem in problems}
  assert sides == {True, False}


@pytest.mark.parametrize("name", GAMES)
def test_an_evaluation_is_of_many_problems(name):
  """`eval.prompts` takes the first ones that are held out."""
  texts = [problem.text for problem in GAMES[name][1]()]
  first = [text for text in texts if held_out(text)][:128]
  assert len(set(first)) >= min(128, len({*filter(held_out, texts)}))


@pytest.mark.parametrize("size", [8, 12])
def test_halving_finds_the_letter_and_other_guesses_do_not(size):
  def halve(message):
    low, high = message.lstrip("<>")[0], message.lstrip("<>")[2]
    return chr((ord(low) + ord(high)) // 2)

  ranges = [p for p in games.guessing_problems()
            if ord(p.text[2]) - ord(p.text[0]) == size - 1]  # fmt: skip
  first = lambda message: message.lstrip("<>")[0]
  for problem in ranges[::20]:
    assert play(games.Guessing(), problem, halve)[-1].reward == 1
    steps = play(games.Guessing(), problem, first)
    assert not any(step.reward for step in steps)
    left = [step.messages[0][1] for step in steps]
    assert left[0][0] == ">"  # all but the first letter


def test_what_is_no_letter_ends_the_game():
  for response in ("", "ab", "?", "A", "3", "z"):
    (step,) = play(
      games.Guessing(), games.guessing_problems()[0], lambda _, r=response: r
    )
    assert (step.done, step.reward) == (True, 0.0)


@pytest.mark.parametrize(
  ("call", "reply", "errors"),
  [("calc(37*48)", "1776", 0), ("calc(3-48)", "-45", 0),
   ("calc(37**48)", "error", 1), ("calc(9999999*9)", "error", 1),
   ("calc(__import__('os'))", "error", 1), ("calc()", "error", 1),
   ("calc(1\n+1)", "error", 1)],
)  # fmt: skip
def test_the_calculator_takes_one_operation(call, reply, errors):
  game = CALCULATOR()
  game.reset(Question("37*48?", "1776"), 0)
  step = Step(*game.step(call))
  assert step == Step(
    [("tool", reply, "calc")], tool_calls=1, tool_errors=errors
  )
  assert Step(*game.step("#1776")) == Step(done=True, reward=1.0)
  for wrong in ("1776", "#1775", "#", "", "# 1776", "#1776 ", "x#1776#"):
    answer = Step(*game.step(wrong))
    assert (answer.done, answer.reward) == (True, 0.0), wrong
