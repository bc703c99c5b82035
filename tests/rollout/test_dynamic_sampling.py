"""Batches that are drawn until their groups differ, against plain Python."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.data.tasks import Problem
from gspo_jax.losses.advantages import group_relative_advantages
from gspo_jax.rewards.pool import Response
from gspo_jax.rollout import dynamic_sampling
from gspo_jax.rollout.batch import ScoredSamples
from gspo_jax.rollout.scoring import Rewards
from gspo_jax.sampler.samples import Samples, merge_groups

P, G = 4, 3
MERGE = jax.jit(merge_groups)


def name(number, p, g):
  """What tells an answer from all others."""
  return 100 * number + 10 * p + g


class Draws:
  """Scripted: for each round and question, whether its group is mixed.

  Every second row is another host's.
  """

  def __init__(self, *script):
    self.script, self.asked, self.marked = script, [], []

  def __call__(self, number):
    self.asked.append(number)
    names = [name(number, p, g) for p in range(P) for g in range(G)]
    tokens = jnp.array(names, jnp.int32)[:, None] * jnp.ones((1, 2), jnp.int32)
    lengths = jnp.array(names, jnp.int32) % 10 + 1
    logps = tokens.astype(jnp.float32)
    finish = (tokens[:, 0] % 2).astype(jnp.int8)
    samples = Samples(tokens, logps, lengths, finish, jnp.int32(number + 2))
    problems = [Problem(f"{number}/{p}", str(p), "") for p in range(P)]
    batch = {
      "problems": problems,
      "tokens": np.array([[number, p] for p in range(P)], np.int32),
      "index": np.array([10 * number + p for p in range(P)], np.int32),
    }
    answers = {
      i: Response("", str(n), "", 1, 2)
      for i, n in enumerate(names)
      if i % 2 == 0
    }
    return ScoredSamples(batch, samples, answers, lambda: self.mark(number))

  def mark(self, number):
    """Rewards: 0 and some 1 for mixed groups, else all 0 or all 1."""
    self.marked.append(number)
    total = np.zeros((P, G), np.float32)
    for p, mixed in enumerate(self.script[number]):
      total[p] = [0, 1, 1] if mixed else p % 2
    failed = total + number > 2
    reasons = (f"reason {number}",)
    return Rewards(total, {"a": total, "b": total * 2 + p}, failed, reasons)


def expected(script, rounds):
  """The groups to keep, (round, question), and how many rounds it takes."""
  if rounds == 1:  # as they come
    return [(0, p) for p in range(P)], 1
  mixed, equal = [], []
  for number in range(rounds):
    for p, is_mixed in enumerate(script[number]):
      (mixed if is_mixed else equal).append((number, p))
    if len(mixed) >= P:
      break
  return (mixed + equal)[:P], number + 1


def scripts():
  """A few corners, and some by chance."""
  none, every = (0,) * P, (1,) * P
  yield every, none, none
  yield none, none, none
  yield none, every, none
  yield none, none, every
  yield (1, 0, 0, 0), every, every
  yield (0, 1, 1, 1), (0, 0, 0, 1), every
  rng = np.random.default_rng(0)
  for share in (0.2, 0.5, 0.8, 0.3, 0.4):
    yield tuple(map(tuple, (rng.random((3, P)) < share).astype(int).tolist()))


@pytest.mark.parametrize("script", list(scripts()))
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_the_first_mixed_groups_and_then_the_first_others(script, rounds):
  draws = Draws(*script)
  kept, drawn = dynamic_sampling.sample_until_mixed(draws, MERGE, rounds=rounds)
  places, took = expected(script, rounds)
  assert draws.asked == list(range(took)) == list(range(len(drawn)))
  # Everything that belongs to a group came along with it.
  want = [name(*place, g) for place in places for g in range(G)]
  marks = kept.marks()
  assert kept.samples.tokens[:, 0].tolist() == want
  assert kept.samples.logps[:, 1].tolist() == want
  assert kept.samples.lengths.tolist() == [n % 10 + 1 for n in want]
  assert kept.samples.finish.tolist() == [n % 2 for n in want]
  assert [p.text for p in kept.batch["problems"]] == [
    f"{number}/{p}" for number, p in places
  ]
  assert kept.batch["tokens"].tolist() == [list(place) for place in places]
  assert kept.batch["index"].tolist() == [10 * n + p for n, p in places]
  scored = [draws.mark(number) for number in range(took)]
  for field, a in (("total", marks.total), ("failed", marks.failed)):
    want = [getattr(scored[number], field)[p] for number, p in places]
    np.testing.assert_array_equal(a, want)
  for part, a in marks.parts.items():
    want = [scored[number].parts[part][p] for number, p in places]
    np.testing.assert_array_equal(a, want)
  assert marks.reasons == tuple(f"reason {n}" for n in range(took))
  assert kept.samples.slot_steps == sum(n + 2 for n in range(took))


@pytest.mark.parametrize("script", list(scripts()))
def test_an_answer_stands_at_its_new_row(script):
  kept, _ = dynamic_sampling.sample_until_mixed(Draws(*script), MERGE, rounds=3)
  tokens = kept.samples.tokens[:, 0].tolist()
  # Of even rows, as they were drawn, and so of this host.
  mine = {
    i: n for i, n in enumerate(tokens) if (n // 10 % 10 * G + n % 10) % 2 == 0
  }
  assert {i: int(a.text) for i, a in kept.answers.items()} == mine


def test_what_fills_up_has_no_advantage():
  script = [(0, 1, 0, 0), (0, 0, 1, 0)]
  kept, _ = dynamic_sampling.sample_until_mixed(Draws(*script), MERGE, rounds=2)
  advantages = np.asarray(group_relative_advantages(kept.marks().total))
  assert (np.abs(advantages).max(1) > 0).tolist() == [True, True, False, False]


def test_one_round_waits_for_no_mark():
  """The device works on while answers are verified."""
  draws = Draws((0,) * P)
  kept, drawn = dynamic_sampling.sample_until_mixed(draws, MERGE, rounds=1)
  assert draws.marked == []
  assert kept.samples.slot_steps == 2
  kept.marks()
  drawn[0].marks()
  dynamic_sampling.metrics(kept, drawn)
  assert draws.marked == [0]  # a collective, as often on every host


def test_marks_are_computed_once():
  draws = Draws((0,) * P, (0,) * P, (1,) * P)
  kept, drawn = dynamic_sampling.sample_until_mixed(draws, MERGE, rounds=3)
  dynamic_sampling.metrics(kept, drawn)
  [cost.marks() for cost in drawn]
  assert draws.marked == [0, 1, 2]


def test_the_cost_is_told():
  script = [(0, 1, 0, 0), (0, 0, 1, 0), (1, 1, 1, 1)]
  kept, drawn = dynamic_sampling.sample_until_mixed(
    Draws(*script), MERGE, rounds=3
  )
  told = dynamic_sampling.metrics(kept, drawn)
  each = [
    name(0, p, g) % 10 + 1 for p, g in itertools.product(range(P), range(G))
  ]
  assert told["refill/tokens_drawn"] == 3 * sum(each)
  kept_tokens = sum(n % 10 + 1 for n in kept.samples.tokens[:, 0].tolist())
  assert told["refill/tokens_discarded_share"] == pytest.approx(
    1 - kept_tokens / (3 * sum(each))
  )
  assert told["refill/rounds"] == 3
  assert told["refill/groups_drawn"] == 12
  assert told["refill/groups_discarded"] == 8
  # Of the first batch: 2 of 3 in one group, and all in one of the others.
  assert told["refill/mixed_groups"] == 0.25
  assert told["refill/reward"] == pytest.approx((2 + 0 + 0 + 3) / 12)


def test_one_compiled_function_serves_all_rounds():
  # A function of its own, so that no other use of `merge` counts.
  merge = jax.jit(functools.partial(merge_groups))
  dynamic_sampling.sample_until_mixed(Draws(*[(0,) * P] * 6), merge, rounds=6)
  assert merge._cache_size() == 1


def test_all_drawn_batches_are_told():
  """History hears of those that were thrown away, too."""
  script = [(0, 0, 0, 0), (0, 0, 1, 0), (1, 1, 1, 1)]
  _, drawn = dynamic_sampling.sample_until_mixed(
    Draws(*script), MERGE, rounds=3
  )
  index = [cost.batch["index"].tolist() for cost in drawn]
  assert index == [[10 * n + p for p in range(P)] for n in range(3)]
  mixed = [
    dynamic_sampling.has_mixed_rewards(cost.marks()).tolist() for cost in drawn
  ]
  assert mixed == [[bool(m) for m in row] for row in script]
