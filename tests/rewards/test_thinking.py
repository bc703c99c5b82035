"""Rewards of a result read what is behind the thinking."""

import json

import pytest

from gspo_jax.evaluate import summary
from gspo_jax.rewards import named, thinking
from gspo_jax.tasks import instructions

HARMONY = "<|channel|>analysis<|message|>{}<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
# The prompt, how a response begins, how its thinking ends.
SHAPES = {
  "Qwen3": ("Q", "<think>\n", "\n</think>\n\n"),
  "Qwen3.5": ("Q<think>\n", "", "\n</think>\n\n"),
  "GLM": ("Q", "\n<think>", "</think>\n"),
  "DeepSeek": ("Q<think>", "", "</think>"),
  "gpt-oss": ("Q", "<|channel|>analysis<|message|>", f"<|end|>{FINAL}"),
}
# A right and a wrong response of each reward that reads a result.
RESULTS = {
  "math": (r"\boxed{5}", r"\boxed{6}"),
  "gsm8k": ("#### 5", "#### 6"),
  "final_answer": ("so #5", "so #6"),
  "number": ("#### 5", "none"),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", RESULTS)
def test_a_result_counts_behind_the_thinking_alone(name, shape):
  reward, (right, wrong) = named(name), RESULTS[name]
  prompt, begin, end = SHAPES[shape]
  score = lambda text: reward(prompt, begin + text, "5")
  assert score(f"maybe {wrong}{end}{right}") == 1.0
  assert score(f"maybe {right}{end}{wrong}") == 0.0
  assert score(f"maybe {right}") == 0.0
  assert score(f"maybe {right} no wait{end.rstrip()[:-1]}") == 0.0
  if begin:  # nobody began to think
    assert reward(prompt, right, "5") == 1.0
    assert reward(prompt, f"</think> {right}", "5") == 1.0


@pytest.mark.parametrize("shape", SHAPES)
def test_thinking_and_the_text_behind_it_are_all_there_is(shape):
  prompt, begin, end = SHAPES[shape]
  opened = thinking.opening(prompt) + begin
  assert thinking.split(f"{opened}a </thin>{end}b <think>\n") == (
    "a </thin>",
    "b <think>\n",
  )
  assert thinking.split(f"{opened}a") == ("a", "")
  assert thinking.split(f" {prompt} a") == ("", f" {prompt} a")


def test_gpt_oss_thinks_in_several_messages_and_answers_in_the_final_one():
  call = " to=functions.f<|channel|>commentary json<|message|>{}"
  said = HARMONY.format("a") + "<|start|>assistant" + HARMONY.format("b")
  assert thinking.split(f"{said}<|start|>assistant{call}") == ("a\nb", "")
  assert thinking.split(call) == ("", "")
  told = HARMONY.format("5").replace("analysis", "commentary")
  assert thinking.split(f"\n{said}{told}{FINAL}c <|end|>") == ("a\nb", "c ")
  assert thinking.split(told) == ("", "")
  cut = f"{FINAL[len('<|start|>assistant') :]}4<|end|>{FINAL[:-1]}"
  assert thinking.split(cut) == ("", "4")
  for plain in ("4. <|channel|>", "a <|channel|>analysis<|message|> is 4"):
    assert thinking.split(plain) == ("", plain)
  # What thinking quotes is thinking.
  quoted = "a<|channel|>final<|message|>7"
  assert thinking.split(HARMONY.format(quoted)) == (quoted, "")
  for header in (" json", "<|constrain|>json", " "):
    said = f"<|channel|>final{header}<|message|>5"
    assert thinking.split(said) == ("", "5")


def test_thinking_that_begins_again_goes_on():
  thoughts = "<think>a</think>\n<think>b"
  assert thinking.split(f"{thoughts} 5")[1] == ""
  assert thinking.split(f"{thoughts}</think>5")[1] == "5"


def test_programs_and_rules_and_votes_too():
  rules = {"subject": "dogs", "rules": {"avoid": "hm"}}
  text = "Dogs are loyal animals that love people and need long walks."
  follows = lambda said: instructions.follows(
    "", said, json.dumps(rules), tokens=9, limit=99
  )
  assert follows(f"<think>Well, hm, so,</think>\n{text}") == 1.0
  assert follows(f"<think>{text}") == 0.0
  assert summary.vote("math", r"<think>\boxed{5}") is None
  assert summary.vote("math", r"<think>\boxed{5}</think>\boxed{6}") == (
    summary.vote("math", r"\boxed{6}")
  )


def test_the_time_is_linear_in_the_length():
  for part in (
    "<think>",
    "</think>",
    " ",
    "\n<",
    "<|channel|>analysis<|message|>",
  ):
    for begin in ("", "<think>", "<|channel|>analysis<|message|>"):
      thinking.split(begin + part * (10**6 // len(part)))
      thinking.opening(begin + part * (10**6 // len(part)))
