"""From drawn tokens to marks, and the bookkeeping of whole batches."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax.data import pipeline, prompt_batch, tokenizers
from gspo_jax.data.tasks import Chain, Problem
from gspo_jax.evaluate import held_out
from gspo_jax.rewards.pool import RewardPool, Scores
from gspo_jax.rollout import scoring
from gspo_jax.rollout.scoring import ResponseDecoder, Rewards, StreamingScorer
from gspo_jax.runtime import multihost, sharding
from gspo_jax.sampler.samples import TRUNCATED, FinishedResponse, Samples

BYTES = tokenizers.load("bytes")
QUESTIONS = pipeline.take(Chain((3,)), prompt_batch.PromptConfig(BYTES, 16), 10)


@pytest.fixture(scope="module")
def scorer():
  with RewardPool(("final_answer",), (1.0,), workers=1) as pool:
    yield pool


@pytest.fixture(scope="module")
def rows():
  """One device: the batches below divide by no other number."""
  return sharding.batch_sharding(sharding.make_mesh(jax.devices()[:1]))


def samples(answers, width=8):
  """Samples that say `answers`, garbage after the stop."""
  tokens = np.full((len(answers), width), ord("9"), np.int32)
  lengths = np.zeros(len(answers), np.int32)
  for i, text in enumerate(answers):
    ids = [*BYTES.encode(text), *BYTES.stop_ids]
    tokens[i, : len(ids)], lengths[i] = ids, len(ids)
  zeros = np.zeros_like(tokens, np.float32)
  drawn = Samples(tokens, zeros, lengths, lengths > 0, np.int32(width))
  return jax.tree.map(jnp.asarray, drawn)


def asked(problems):
  return pipeline.take(
    problems, prompt_batch.PromptConfig(BYTES, 16), len(problems)
  )


class Pupil:
  """A `generate` that knows some answers: each right once, then wrong."""

  def __init__(self, known):
    self.known = {p.text: p.reference for p in known}
    self.shapes, self.keys = [], []

  def __call__(self, params, prompts, key):
    assert params == "params"
    self.shapes.append((prompts.tokens.shape, prompts.lengths.shape))
    self.keys.append(tuple(jax.random.key_data(key).tolist()))
    tokens = np.asarray(prompts.tokens)
    asked = [BYTES.decode(row).lstrip("\ufffd") for row in tokens]
    answers = [[f"#{self.known.get(q, 'x')}", "#wrong"] for q in asked]
    return samples(list(itertools.chain(*answers)))


def test_texts_end_before_the_stop():
  three = asked([Problem("q", "1", "")] * 3)
  read = scoring.decode_responses(samples(["#1", "", "#é"]), three, BYTES)
  assert {i: a.text for i, a in read.items()} == {0: "#1", 1: "", 2: "#é"}
  assert [a.tokens for a in read.values()] == [3, 1, 4]
  assert {a.limit for a in read.values()} == {8}
  cut = jnp.full((1, 8), ord("7"), jnp.int32)
  one = Samples(cut, cut, jnp.array([3]), jnp.array([TRUNCATED]), jnp.int32(8))
  lone = asked([Problem("q", "1", "")])
  assert scoring.decode_responses(one, lone, BYTES)[0].text == "777"


def test_a_prompt_is_what_the_policy_read():
  system = prompt_batch.PromptConfig(BYTES, 16, "Sum. ", "{problem}<think>")
  batch = pipeline.take([Problem("1+1?", "2", "")], system, 1)
  read = scoring.decode_responses(samples(["#2"]), batch, BYTES)
  assert read[0].prompt == "Sum. 1+1?<think>"[-16:]


def test_answers_stand_beside_their_own_question(scorer):
  problems = QUESTIONS["problems"][:2]
  batch = asked(problems)
  right, other = (f"#{p.reference}" for p in problems)
  assert right != other
  drawn = samples([right, "", "x", other, right, other])
  answers = scoring.decode_responses(drawn, batch, BYTES)
  assert answers[2].prompt == problems[0].text
  assert answers[3].reference == problems[1].reference
  marks = scoring.score_responses(scorer, answers, 3, drawn.lengths)()
  assert marks.total.dtype == np.float32
  np.testing.assert_array_equal(marks.correct, [[1, 0, 0], [1, 0, 1]])
  assert not marks.failed.any()


def test_answers_told_of_one_by_one_have_the_same_marks(scorer):
  problems = QUESTIONS["problems"][:2]
  right, other = (f"#{p.reference}" for p in problems)
  drawn = samples([right, "", "x", other, right, other])
  stream = StreamingScorer(scorer, ResponseDecoder(asked(problems), BYTES, 3))
  rows, lengths = np.asarray(drawn.tokens), drawn.lengths.tolist()
  for which in ([4, 1], [], [5, 0, 3], [2]):
    stream.tell({i: FinishedResponse(rows[i], lengths[i], True) for i in which})
  at_once = scoring.decode_responses(drawn, asked(problems), BYTES)
  assert dict(sorted(stream.answers.items())) == at_once
  marks = stream.marks(3, drawn.lengths)()
  assert list(marks.parts) == ["final_answer"]
  np.testing.assert_array_equal(marks.correct, [[1, 0, 0], [1, 0, 1]])
  np.testing.assert_array_equal(marks.total, marks.correct)


def test_a_host_without_answers_knows_the_rewards(scorer):
  """The hosts join each reward in turn: none may leave one out."""
  stream = StreamingScorer(scorer, ResponseDecoder({}, BYTES, 3))
  marks = stream.marks(3, jnp.zeros(0))()
  assert list(marks.parts) == ["final_answer"]
  assert marks.total.shape == (0, 3)


def test_the_first_reward_is_the_verdict_and_all_of_them_are_paid():
  problems = QUESTIONS["problems"][:1]
  drawn = samples([f"#{problems[0].reference}", "#wrong"])
  names = ("final_answer", "length")
  with RewardPool(names, (1.0, 0.5), workers=1) as pool:
    answers = scoring.decode_responses(drawn, asked(problems), BYTES)
    marks = scoring.score_responses(pool, answers, 2, drawn.lengths)()
  np.testing.assert_array_equal(marks.correct, [[1, 0]])
  assert list(marks.parts) == ["final_answer", "length"]
  paid = marks.parts["final_answer"] + 0.5 * marks.parts["length"]
  np.testing.assert_allclose(marks.total, paid)
  assert marks.parts["length"].any()


@pytest.mark.parametrize("batch", [1, 3, 4, 5, 10, 13, 25])
def test_answer_all_answers_each_question_once(batch, rows, scorer):
  known = [p for i, p in enumerate(QUESTIONS["problems"]) if i in (2, 8, 9)]
  pupil = Pupil(known)
  rewards = held_out.verdicts(
    pupil,
    "params",
    QUESTIONS,
    batch=batch,
    key=jax.random.key(0),
    rows=rows,
    tokenizer=BYTES,
    scorer=scorer,
    max_failed=0.5,
  )
  right = np.isin(np.arange(10), (2, 8, 9))
  np.testing.assert_array_equal(rewards, np.stack([right, 0 * right], 1))
  # One compiled function serves, and no two of its calls share a key.
  assert set(pupil.shapes) == {((batch, 16), (batch,))}
  assert len(pupil.shapes) == -(-10 // batch)
  assert len(set(pupil.keys)) == len(pupil.keys)


class Broken:
  """A scorer that fails on the answers that say "wrong"."""

  def submit(self, answers):
    self.answers = answers
    return self

  def result(self):
    failed = np.array(["wrong" in a.text for a in self.answers])
    zeros = np.zeros(len(failed), np.float32)
    return Scores(zeros, {"broken": zeros}, failed, ("why", "and why"))


@pytest.mark.parametrize("max_failed", [0.5, 0.4])
def test_answer_all_stops_where_too_many_fail(rows, max_failed):
  """One of two answers to each of ten; two questions fill up the batch."""

  def call():
    return held_out.verdicts(
      Pupil([]),
      "params",
      QUESTIONS,
      batch=4,
      key=jax.random.key(0),
      rows=rows,
      tokenizer=BYTES,
      scorer=Broken(),
      max_failed=max_failed,
    )

  if max_failed == 0.5:
    assert call().shape == (10, 2)
  else:
    with pytest.raises(
      multihost.AgreedError, match=r"12 of 24 responses .* reason: why$"
    ):
      call()


def test_a_reason_of_another_host_is_told(monkeypatch):
  """And all of them stop: the marks of all are known to each."""
  none = np.zeros((2, 4), np.float32)
  marks = Rewards(none, {"math": none}, none == 0, ())
  monkeypatch.setattr(multihost, "tell", lambda own: [own, "theirs", "others"])
  with pytest.raises(
    multihost.AgreedError, match=r"it: 8 of 8 .* first reason: theirs$"
  ):
    scoring.require_scored([marks], 1.0, of="it")
  scoring.require_scored([marks._replace(failed=none > 0)], 0.0, of="it")
