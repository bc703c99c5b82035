"""Thinking tags: once, at the start, and a response after them."""

import pytest

from gspo_jax.rewards.format import thinks


@pytest.mark.parametrize(
  ("prompt", "response"),
  [("", "<think>2 + 3</think>5"), ("", " \n<think>\n2 + 3\n</think>\n\n5\n"),
   ("", "<think>a < b</thin></think>5"), ("Q<think>\n", "2 + 3</think>5"),
   ("Q<think> mid", "<think>2 + 3</think>5")],
)  # fmt: skip
def test_right(prompt, response):
  assert thinks(prompt, response, "") == 1.0


@pytest.mark.parametrize(
  ("prompt", "response"),
  [("", ""), ("", "<think>2 + 3</think> \n"), ("", "<think>2 + 3"),
   ("", "<think> \n</think>5"), ("Q<think>\n", "\n</think>5"),
   ("", "2 + 3</think>5"), ("", "So <think>2 + 3</think>5"),
   ("", "</think><think>5"), ("", "<think><think>2 + 3</think>5"),
   ("", "<think>2 + 3</think></think>5"),
   ("", "<think>2</think>5<think>3</think>"), ("", "<THINK>2 + 3</THINK>5"),
   ("Q<think>\n", "<think>2 + 3</think>5"), ("Q<think>\n", "5")],
)  # fmt: skip
def test_wrong(prompt, response):
  assert thinks(prompt, response, "") == 0.0
