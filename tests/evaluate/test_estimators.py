"""Estimates against enumeration of subsets, a grid and simulated contests."""

import collections
import itertools
import math
import time

import numpy as np
import pytest

from gspo_jax.evaluate import estimators, held_out


def subsets(n, k):
  return [list(s) for s in itertools.combinations(range(n), k)]


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response(n):
  correct = np.array(list(itertools.product([False, True], repeat=n)))
  for k in range(1, n + 1):
    share = np.mean([[r[s].any() for s in subsets(n, k)] for r in correct])
    np.testing.assert_allclose(estimators.pass_at_k(correct, k), share)


@pytest.mark.parametrize("k", [-1, 0, 4])
def test_k_of_n_needs_n_responses(k):
  with pytest.raises(ValueError, match=rf"k={k}: .*1\.\.3"):
    estimators.pass_at_k(np.ones((2, 3), bool), k)
  with pytest.raises(ValueError, match=rf"k={k}: .*1\.\.3"):
    estimators.majority_at_k(["abc"] * 2, np.ones((2, 3), bool), k)


def vote(results, worth):
  """The share of one subset's winners that are correct."""
  counts = collections.Counter(r for r in results if r is not None)
  if not counts:
    return 0.0
  top = max(counts.values())
  return np.mean([worth[a] for a, count in counts.items() if count == top])


@pytest.mark.parametrize("n", [1, 2, 5, 7, 9])
def test_majority_at_k_is_the_mean_over_subsets(n):
  rng = np.random.default_rng(n)
  for keys in (2, 4, 9):
    votes = rng.integers(-1, keys, size=(6, n))
    votes = [[None if v < 0 else int(v) for v in row] for row in votes]
    right = [[v in (0, 3) for v in row] for row in votes]
    for k in range(1, n + 1):
      worth = collections.defaultdict(float, {0: 1.0, 3: 1.0})
      expected = np.mean(
        [
          vote([row[i] for i in s], worth)
          for row in votes
          for s in subsets(n, k)
        ]
      )
      found = estimators.majority_at_k(votes, np.array(right), k)
      assert found == pytest.approx(expected, abs=1e-12), (keys, k)


def test_a_vote_is_worth_the_share_of_its_correct_responses():
  right = np.array([[True, False, False]])
  assert estimators.majority_at_k(["aab"], right, 3) == 0.5


def test_majority_of_a_thousand_responses_is_fast():
  # Each right with chance 1/4 where all differ, whatever k. It took 15 s.
  votes, right = [list(range(1000))], np.arange(1000)[None] % 4 == 0
  start = time.process_time()
  for k in estimators.ladder(1000):
    found = estimators.majority_at_k(votes, right, k)
    assert found == pytest.approx(0.25, abs=1e-9)
  # 600 to 400: more right ones among k is a hypergeometric event.
  votes, right = [["a"] * 600 + ["b"] * 400], np.arange(1000)[None] < 600
  ways = [math.comb(600, i) * math.comb(400, 128 - i) for i in range(129)]
  expected = (sum(ways[65:]) + ways[64] / 2) / math.comb(1000, 128)
  found = estimators.majority_at_k(votes, right, 128)
  assert found == pytest.approx(expected, abs=1e-9)
  assert time.process_time() - start < 5


def test_the_error_of_an_average_is_over_problems():
  rng = np.random.default_rng(2)
  share = rng.random((4000, 5))  # 4000 benchmarks of 5 problems
  scores = (rng.random((4000, 5, 4)) < share[..., None]).astype(np.float32)
  found = [estimators.avg(s) for s in scores]
  means, errors = map(np.array, zip(*found, strict=True))
  assert means.std() == pytest.approx(np.sqrt((errors**2).mean()), rel=0.05)
  assert estimators.avg(np.array([[0.0, 1.0]]))[0] == 0.5
  assert math.isnan(estimators.avg(np.array([[0.0, 1.0]]))[1])


def likelihood(rating, solved, ratings):
  chance = 1 / (1 + 10 ** ((ratings - rating) / 400))
  return np.sum(solved * np.log(chance) + (1 - solved) * np.log1p(-chance))


@pytest.mark.parametrize("seed", range(8))
def test_elo_is_the_likeliest_rating_of_a_grid(seed):
  rng = np.random.default_rng(seed)
  ratings = rng.choice(np.arange(800, 3600, 100), size=20).astype(float)
  solved = rng.integers(0, 5, size=20) / 4
  grid = np.arange(-2000, 6000.0)
  best = grid[np.argmax([likelihood(r, solved, ratings) for r in grid])]
  found = estimators.elo(solved, ratings)
  assert not found.bounded
  assert found.rating == pytest.approx(best, abs=0.51)
  assert found.low < found.rating < found.high


def test_elo_by_hand():
  even = estimators.elo(np.array([1, 0.0]), np.array([1500, 1500.0]))
  assert even.rating == pytest.approx(1500, abs=1e-3)
  # Odds of ten to one are 400 points.
  odds = estimators.elo(np.array([10 / 11]), np.array([1200.0]))
  assert odds.rating == pytest.approx(1200)
  assert odds.bounded
  ten = estimators.elo(np.array([10 / 11] * 11), np.array([1200.0] * 11))
  assert ten.rating == pytest.approx(1600, abs=1e-3)
  # Wilson's interval of 10 in 11, of which `elo` is the logarithm of the odds.
  n, p, z = 11, 10 / 11, 1.96
  middle, spread = (
    p + z * z / 2 / n,
    z * math.sqrt(p * (1 - p) / n + (z / 2 / n) ** 2),
  )
  for end, share in ((ten.low, middle - spread), (ten.high, middle + spread)):
    share /= 1 + z * z / n
    assert end == pytest.approx(1200 + 400 * math.log10(share / (1 - share)))


def test_elo_of_all_and_of_none_is_bounded_and_says_so():
  ratings = np.array([1000.0, 1500, 2000])
  none, all_ = (estimators.elo(np.full(3, x), ratings) for x in (0.0, 1.0))
  assert none.bounded
  assert all_.bounded
  assert none.low == -math.inf
  assert all_.high == math.inf
  some = [estimators.elo(np.full(3, x), ratings) for x in (0.2, 0.5, 0.8)]
  order = [none.rating, *(s.rating for s in some), all_.rating]
  assert order == sorted(set(order))
  assert 0 < none.rating < none.high < all_.high
  assert none.low < all_.low < all_.rating < 3000
  with pytest.raises(ValueError, match="finite ratings"):
    estimators.elo(np.array([]), np.array([]))


def test_summary():
  sampled = np.float32([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
  greedy = np.float32([[1], [1], [0]])
  row = held_out.summarize(sampled, greedy, 0.5)
  assert row == {
    "eval/pass@1": pytest.approx(5 / 12),
    "eval/avg@4": pytest.approx(5 / 12),
    # One of four right: two draws hold it in 3 of 6 pairs.
    "eval/pass@2": pytest.approx((1 / 2 + 1 + 0) / 3),
    "eval/pass@4": pytest.approx(2 / 3),
    "eval/greedy": pytest.approx(2 / 3),
  }
  assert set(held_out.summarize(greedy, greedy, 0.5)) == {
    "eval/pass@1",
    "eval/avg@1",
    "eval/greedy",
  }


@pytest.mark.parametrize(
  ("threshold", "passes"), [(0.7, 2 / 4), (0.71, 1 / 4), (-1.0, 1.0)]
)
def test_a_pass_is_a_reward_of_at_least_the_threshold(threshold, passes):
  """0.7 in float32 is under 0.7 in float64."""
  sampled = np.float32([[0.7, 1.5], [0.3, -1]])
  row = held_out.summarize(sampled, sampled[:, :1], threshold)
  assert row["eval/pass@1"] == passes
  assert row["eval/avg@2"] == pytest.approx(0.375)
