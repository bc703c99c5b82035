"""The pipeline: tokens of prompts, and batches that a resumed run repeats."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from gspo_jax.data import pipeline, prompt_batch, sources, tokenizers
from gspo_jax.data.problem import Problem
from gspo_jax.runtime.errors import UserError
from gspo_jax.tasks.chain import Chain

SMALL = Chain((6,), size=12)
BYTES = tokenizers.load("bytes")


def config(width=32, **changes):
  return prompt_batch.PromptConfig(BYTES, width, **changes)


def batches(source=SMALL, batch=4, seed=0, **changes):
  return pipeline.prompts(source, config(**changes), batch=batch, seed=seed)


def demonstrations(source, batch=8, width=24, **changes):
  cfg = config(**changes)
  return pipeline.demonstrations(source, cfg, batch=batch, width=width, seed=0)


def texts(iterator, count):
  batches = [next(iterator).problems for _ in range(count)]
  return [[p.text for p in problems] for problems in batches]


def problems(*problem_texts):
  return [Problem(text, "1", "1") for text in problem_texts]


LONG = problems(*(f"{'x' * (n % 7)}{n}" for n in range(23)))


def write(path, *problem_texts):
  records = [{"question": text, "answer": "7"} for text in problem_texts]
  path.write_text("\n".join(map(json.dumps, records)))
  return sources.load(f"jsonl:{path}")


def test_a_prompt_is_its_problem_padded_on_the_left():
  batch = next(batches(Chain((1, 5, 9)), batch=8))
  assert batch.tokens.shape == (8, 32)
  assert batch.lengths.shape == (8,)
  assert batch.tokens.dtype == batch.lengths.dtype == np.int32
  assert len(set(batch.lengths.tolist())) > 1
  for problem, tokens, n in zip(
    batch.problems, batch.tokens, batch.lengths, strict=True
  ):
    assert (tokens[:-n] == BYTES.pad_id).all()
    assert BYTES.decode(tokens[-n:]) == problem.text
    assert n == len(problem.text)


def test_system_prompt_and_instruction():
  brace = problems("What is {x} {problem}?")
  cfg = config(64, system="Add. ", instruction="Q: {problem} {A}: ")
  batch = pipeline.take(brace, cfg, 1)
  text = BYTES.decode(batch.tokens[0][-batch.lengths[0] :])
  assert text == "Add. \n\nQ: What is {x} {problem}? {A}: "
  assert batch.problems == brace


SYSTEM = ("system", "Be brief.")


def text_of(problem, cfg):
  batch = pipeline.take([problem], cfg, 1)
  return BYTES.decode(batch.tokens[0][-batch.lengths[0] :])


@pytest.mark.parametrize(
  ("history", "text"),
  [((), "Add.\n\nQ: 2+2?"), ((SYSTEM,), "Be brief.\n\nQ: 2+2?"),
   ((("user", "1+1?"), ("assistant", " 2")), "Add.\n\n1+1? 2\n\nQ: 2+2?"),
   ((SYSTEM, ("user", "Hi")), "Be brief.\n\nHi\n\nQ: 2+2?")],
)  # fmt: skip
def test_the_prompt_of_a_conversation(history, text):
  cfg = config(64, system="Add.", instruction="Q: {problem}")
  assert text_of(Problem("2+2?", "4", "", {}, history), cfg) == text


def test_a_demonstration_ends_in_a_stop():
  batch = next(demonstrations(Chain((1, 3)), width=24))
  assert batch.turns is None
  for problem, tokens, response, n in zip(
    batch.problems,
    batch.tokens,
    batch.responses,
    batch.response_lengths,
    strict=True,
  ):
    assert BYTES.decode(tokens).lstrip("\ufffd") == problem.text
    assert BYTES.decode(response[: n - 1]) == problem.demonstration
    assert response[n - 1] == BYTES.stop_ids[0]
    assert (response[n:] == BYTES.pad_id).all()


# Solved problems.


@pytest.mark.parametrize("source", [SMALL, sources.mix([problems("z"), SMALL])])
def test_a_batch_has_the_places_of_its_problems(source):
  parts = pipeline.parts(source)
  batch = next(batches(source, batch=6))
  stages, numbers, _ = batch.positions.T.tolist()
  assert (stages, {*numbers}) == ([0] * 6, {*range(len(parts))})
  problems = [parts[part][index] for _, part, index in batch.positions]
  assert problems == batch.problems


def test_num_fitting():
  fit = sum(len(p.text) <= 5 for p in LONG)
  assert pipeline.num_fitting(LONG, config(5, too_long="drop")) == fit
  assert pipeline.num_fitting(LONG, config(5)) == len(LONG)


# Dropping and mixing.


def test_prompts_that_are_too_long_are_dropped_and_nothing_else():
  fit = [p.text for p in LONG if len(p.text) <= 5]
  assert 5 < len(fit) < len(LONG)
  iterator = batches(LONG, batch=1, width=5, too_long="drop")
  sampled = list(itertools.chain(*texts(iterator, 2 * len(fit))))
  assert Counter(sampled) == Counter(fit * 2)
  kept = pipeline.take(LONG, config(5, too_long="drop"), len(fit))
  assert [p.text for p in kept.problems] == fit
  more = pipeline.take(LONG, config(5, too_long="drop"), len(fit) + 1)
  assert [p.text for p in more.problems] == fit
  with pytest.raises(UserError, match=r"prompts=2: no problem that fits data"):
    pipeline.take(problems("123456"), config(5, too_long="drop"), 2)


def test_demonstrations_that_are_too_long_are_dropped():
  rows = [Problem(f"q{n}", "7", "z" * n) for n in range(1, 20)]
  rows[2] = Problem("long question", "7", "zz")
  cfg = config(10, too_long="drop")
  iterator = pipeline.demonstrations(rows, cfg, batch=4, width=10, seed=0)
  sampled = Counter(itertools.chain(*texts(iterator, 4)))
  assert sampled == Counter([f"q{n}" for n in (1, 2, 4, 5, 6, 7, 8, 9)] * 2)


def test_picked_demonstrations_keep_their_responses():
  rows = [Problem(f"q{n}", "7", "z" * n) for n in range(1, 4)]
  batches = pipeline.demonstrations(rows, config(10), batch=3, width=10, seed=0)
  batch = next(batches)
  picked = batch.pick(np.array([2, 0]))
  assert picked.problems == [batch.problems[2], batch.problems[0]]
  for name in ("tokens", "positions", "responses", "response_lengths"):
    expected = getattr(batch, name)[[2, 0]]
    np.testing.assert_array_equal(getattr(picked, name), expected)


def test_take_of_a_mixture_takes_from_each_source_in_turn():
  sizes = {"a": 9, "b": 3}.items()
  parts = [problems(*(f"{c}{i}" for i in range(n))) for c, n in sizes]
  taken = pipeline.take(sources.mix(parts, (3, 1)), config(), 12).problems
  names = [p.text for p in taken]
  assert names[:6] == ["a0", "b0", "a1", "b1", "a2", "b2"]
  assert names[6:] == [f"a{i}" for i in range(3, 9)]  # the rest
  assert len(pipeline.take(sources.mix(parts), config(), 13)) == 12


def test_epochs_include_dropped_problems():
  iterator = batches(SMALL, batch=4)
  assert pipeline.epochs(SMALL, iterator.get_state()) == 0
  texts(iterator, 3)
  assert pipeline.epochs(SMALL, iterator.get_state()) == 1
  fit = sum(len(p.text) <= 5 for p in LONG)
  iterator = batches(LONG, batch=1, width=5, too_long="drop")
  texts(iterator, fit)
  assert 0.8 < pipeline.epochs(LONG, iterator.get_state()) <= 1
  texts(iterator, 1)
  assert pipeline.epochs(LONG, iterator.get_state()) > 1


def test_the_epoch_of_a_mixture_is_that_of_its_most_repeated_source():
  source = sources.mix(
    [problems(*"ab"), problems(*map(str, range(99)))], (1, 3)
  )
  iterator = batches(source, batch=8)
  texts(iterator, 1)  # 2 of "ab" and 6 of the other
  assert pipeline.epochs(source, iterator.get_state()) == 1


# Mistakes.


def test_a_problem_that_is_too_long():
  source = Chain((8,))
  tokens = len(source[0].text)
  assert next(batches(source, width=tokens)).lengths.max() == tokens
  words = (
    f"has {tokens} tokens, more than data.max_prompt_length={tokens - 1}: .*"
    "data.too_long=drop"
  )
  with pytest.raises(UserError, match=words):
    next(batches(source, width=tokens - 1))


def test_a_file_is_searched_for_long_problems_at_once(tmp_path):
  short = [f"question {i}?" for i in range(500)]
  source = write(tmp_path / "a", *short, "long" * 9)
  with pytest.raises(UserError, match="has 36 tokens"):
    batches(source)
  with pytest.raises(UserError, match="has 36 tokens"):
    batches(sources.mix([SMALL, source]))
  batches(source, too_long="drop")


def test_a_demonstration_that_is_too_long():
  with pytest.raises(UserError, match=r"more than sampler.max_new_tokens=20"):
    next(demonstrations(Chain((8,)), batch=2, width=20))


def test_a_problem_without_a_demonstration():
  with pytest.raises(UserError, match="demonstration_field"):
    next(demonstrations([Problem("a", "b", "")] * 3, batch=2))


def test_fewer_problems_than_a_batch():
  assert next(batches(batch=12)).tokens.shape == (12, 32)
  with pytest.raises(
    UserError, match=r"data.source has 12 .* batch of 13 .data.p"
  ):
    batches(batch=13)


def test_fewer_problems_that_fit_than_a_batch():
  """Else the pipeline would look for one forever."""
  for source, width in (
    (SMALL, 3), (problems("a", "b", "long", "long"), 2),
    (sources.mix([problems(*"abcdef"), problems("long")]), 2),
  ):  # fmt: skip
    with pytest.raises(UserError, match=f"max_prompt_length={width}: fewer"):
      batches(source, batch=4, width=width, too_long="drop")
