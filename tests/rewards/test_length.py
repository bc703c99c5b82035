"""Length: the punishment's three pieces, and a share of the limit."""

import pytest

from gspo_jax import rewards
from gspo_jax.rewards.length import overlong, short
from gspo_jax.rewards.reward import Response


@pytest.mark.parametrize(
  ("tokens", "expected"),
  [(16_384, 0), (16_385, -1 / 4096), (18_432, -0.5), (20_479, -4095 / 4096),
   (20_480, -1), (30_000, -1)],
)  # fmt: skip
def test_overlong_at_the_numbers_of_the_paper(tokens, expected):
  more = {"tokens": tokens, "limit": 20_480, "buffer": 4096}
  assert overlong("", "", "", **more) == pytest.approx(expected)


def test_overlong_takes_its_limit_from_the_sampler_or_the_name():
  reward = rewards.named("overlong:buffer=4")
  assert reward("", "", "", tokens=8, limit=10) == -0.5
  response = Response("", "", "", tokens=7, limit=9)
  assert reward.keywords([response]) == {"tokens": 7, "limit": 9}
  fixed = rewards.named("overlong:buffer=4,limit=8")
  assert fixed("", "", "", tokens=8) == -1.0
  assert fixed.keywords([response]) == {"tokens": 7}


def test_a_buffer_that_punishes_every_response_is_an_error():
  assert overlong("", "", "", tokens=4, limit=8, buffer=8) == -0.5
  with pytest.raises(ValueError, match=r"buffer up to the 8 tokens.*got 9"):
    overlong("", "", "", tokens=0, limit=8, buffer=9)


def test_short_is_the_share_not_used():
  shares = [short("", "", "", tokens=n, limit=8) for n in (0, 2, 8, 9)]
  assert shares == [1.0, 0.75, 0.0, 0.0]
