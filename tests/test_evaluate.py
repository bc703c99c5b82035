"""Accuracy against enumeration, and the bookkeeping of whole batches."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import data, evaluate, sharding
from gspo_jax.sampler import TRUNCATED, Samples
from gspo_jax.tasks import Chain

QUESTIONS = data.take(Chain((3,)), 10, 16)


@pytest.fixture(scope="module")
def rows():
  """One device: the batches below divide by no other number."""
  return sharding.rows(sharding.make_mesh(jax.devices()[:1]))


def samples(answers, width=8):
  """Samples that say `answers`, garbage after the stop."""
  tokens = np.full((len(answers), width), ord("9"), np.int32)
  lengths = np.zeros(len(answers), np.int32)
  for i, answer in enumerate(answers):
    ids = [*data.encode(answer), data.EOS]
    tokens[i, : len(ids)], lengths[i] = ids, len(ids)
  zeros = np.zeros_like(tokens, np.float32)
  drawn = Samples(tokens, zeros, lengths, lengths > 0, np.int32(width))
  return jax.tree.map(jnp.asarray, drawn)


class Pupil:
  """A `generate` that knows some answers: each right once, then wrong."""

  def __init__(self, known):
    self.known = {p.question: p.answer for p in known}
    self.shapes, self.keys = [], []

  def __call__(self, params, prompts, key):
    assert params == "params"
    self.shapes.append((prompts.tokens.shape, prompts.lengths.shape))
    self.keys.append(tuple(jax.random.key_data(key).tolist()))
    tokens = np.asarray(prompts.tokens)
    asked = [data.decode(row).lstrip("\ufffd") for row in tokens]
    answers = [[f"#{self.known.get(q, 'x')}", "#wrong"] for q in asked]
    return samples(list(itertools.chain(*answers)))


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n):
  correct = np.array(list(itertools.product([False, True], repeat=n)))
  for k in range(1, n + 1):
    subsets = [list(s) for s in itertools.combinations(range(n), k)]
    share = np.mean([[r[s].any() for s in subsets] for r in correct])
    np.testing.assert_allclose(evaluate.pass_at_k(correct, k), share)


@pytest.mark.parametrize("k", [-1, 0, 4])
def test_pass_at_k_needs_k_answers(k):
  with pytest.raises(ValueError, match=rf"k={k} .*1\.\.3"):
    evaluate.pass_at_k(np.ones((2, 3), bool), k)


def test_texts_end_before_the_stop():
  drawn = samples(["#1", "", "#é"])
  cut = jnp.full((1, 8), ord("7"), jnp.int32)
  assert evaluate.texts(drawn) == {0: "#1", 1: "", 2: "#é"}
  one = Samples(cut, cut, jnp.array([3]), jnp.array([TRUNCATED]), jnp.int32(8))
  assert evaluate.texts(one) == {0: "777"}


def test_verify_keeps_the_answers_of_a_question_together():
  problems = QUESTIONS["problems"][:2]
  right, other = (f"#{p.answer}" for p in problems)
  assert right != other
  answers = dict(enumerate([right, "", "x", other, right, other]))
  rewards = evaluate.verify(answers, problems, jnp.zeros(6))
  assert rewards.dtype == np.float32
  np.testing.assert_array_equal(rewards, [[1, 0, 0], [1, 0, 1]])


@pytest.mark.parametrize("batch", [1, 3, 4, 5, 10, 13, 25])
def test_answer_all_answers_each_question_once(batch, rows):
  known = [p for i, p in enumerate(QUESTIONS["problems"]) if i in (2, 8, 9)]
  pupil = Pupil(known)
  rewards = evaluate.answer_all(
    pupil, "params", QUESTIONS, batch, jax.random.key(0), rows
  )
  right = np.isin(np.arange(10), (2, 8, 9))
  np.testing.assert_array_equal(rewards, np.stack([right, 0 * right], 1))
  # One compiled function serves, and no two of its calls share a key.
  assert set(pupil.shapes) == {((batch, 16), (batch,))}
  assert len(pupil.shapes) == -(-10 // batch)
  assert len(set(pupil.keys)) == len(pupil.keys)


def test_summary():
  sampled = np.float32([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
  greedy = np.float32([[1], [1], [0]])
  row = evaluate.summarize(sampled, greedy)
  assert row == {
    "eval/pass@1": pytest.approx(5 / 12),
    "eval/avg@4": pytest.approx(5 / 12),
    # One of four right: two draws hold it in 3 of 6 pairs.
    "eval/pass@2": pytest.approx((1 / 2 + 1 + 0) / 3),
    "eval/pass@4": pytest.approx(2 / 3),
    "eval/greedy": pytest.approx(2 / 3),
  }
  assert set(evaluate.summarize(greedy, greedy)) == {
    "eval/pass@1",
    "eval/avg@1",
    "eval/greedy",
  }
