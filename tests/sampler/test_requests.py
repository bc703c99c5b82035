"""What is left to draw, against plain Python."""

import dataclasses

import numpy as np

from gspo_jax.sampler import scheduler
from gspo_jax.sampler.samples import STOPPED, UNFINISHED, Samples

P, S, G, R = 3, 4, 4, 6
PROMPTS = np.arange(P * S, dtype=np.int32).reshape(P, S)
LENGTHS = np.array([4, 1, 2])


def samples(drawn, finish):
  tokens = 100 + np.arange(P * G * R, dtype=np.int32).reshape(-1, R)
  rest = np.array(drawn, np.int32), np.array(finish, np.int8)
  return Samples(tokens, None, *rest, None)


def whole(found, begun):
  """The text of each answer to be drawn, and how many tokens it may draw."""
  return {
    a: (found.tokens[owner].tolist(), int(until - drawn))
    for a, (owner, drawn, until) in enumerate(
      zip(found.owner, found.drawn, found.until, strict=True)
    )
    if until > drawn
  }


def expected(begun, until):
  found = {}
  for a in range(P * G):
    p, drawn = a // G, begun.lengths[a]
    if begun.finish[a] == UNFINISHED and drawn < until[a]:
      prompt = PROMPTS[p].tolist()[S - LENGTHS[p] :]
      row = begun.tokens[a].tolist()[:drawn]
      found[a] = prompt + row, until[a] - drawn
  return found


def test_new_answers_share_their_prompt():
  begun = samples([0] * P * G, [UNFINISHED] * P * G)
  until = np.full(P * G, R)
  found = scheduler.pending_requests(PROMPTS, LENGTHS, begun, until)
  assert found.owner.tolist() == np.repeat(np.arange(P), G).tolist()
  assert len(found.tokens) == P
  assert whole(found, begun) == expected(begun, until)


def test_any_mixture_of_new_begun_and_ended():
  rng = np.random.default_rng(0)
  for _ in range(50):
    drawn = rng.integers(0, R + 1, P * G) * (rng.random(P * G) < 0.6)
    ended = (drawn > 0) & (rng.random(P * G) < 0.5)
    begun = samples(drawn, np.where(ended, STOPPED, UNFINISHED))
    until = rng.integers(0, R + 1, P * G)
    found = scheduler.pending_requests(PROMPTS, LENGTHS, begun, until)
    assert whole(found, begun) == expected(begun, until)
    assert (np.diff(found.owner) >= 0).all()
    # Each text is of some answer that is to be drawn.
    used = found.owner[found.until > found.drawn]
    assert set(used.tolist()) == set(range(len(found.tokens)))


def test_nothing_is_left():
  begun = samples([3] * P * G, [STOPPED] * P * G)
  found = scheduler.pending_requests(PROMPTS, LENGTHS, begun, np.full(P * G, R))
  assert found.tokens == []
  assert whole(found, begun) == {}


def test_no_prompt():
  begun = dataclasses.replace(
    samples([0] * P * G, [UNFINISHED] * P * G),
    tokens=np.zeros((0, R), np.int32),
    lengths=np.zeros(0, np.int32),
    finish=np.zeros(0, np.int8),
  )
  found = scheduler.pending_requests(
    PROMPTS[:0], LENGTHS[:0], begun, np.zeros(0, int)
  )
  assert found.tokens == []
