"""The lengths that `--lengths` describes, and its mistakes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from gspo_jax.data import tokenizers
from gspo_jax.plan.iteration import lengths
from gspo_jax.record.run_files import Sample
from gspo_jax.runtime.errors import UserError


def sizes(P, G, S, R):
  """The keys of a config that lengths depend on."""
  part = SimpleNamespace
  return part(
    data=part(prompts=P, max_prompt_length=S),
    rollout=part(group_size=G),
    sampler=part(max_new_tokens=R),
  )


LARGE, SMALL = sizes(64, 8, 100, 1000), sizes(2, 2, 8, 9)
BYTES = tokenizers.load("bytes")


def draw(spec, config=LARGE):
  return lengths.draw(str(spec), config, BYTES)


@pytest.mark.parametrize("mean", [0.02, 0.9])
@pytest.mark.parametrize("sigma", [0.1, 3])
def test_the_mean_is_that_after_the_cut(mean, sigma):
  """What a run writes as response/length."""
  drawn = draw(f"lognormal:mean={mean},sigma={sigma}").responses
  assert drawn.shape == (512,)
  assert drawn.min() >= 1
  assert drawn.max() <= 1000
  assert drawn.mean() == pytest.approx(1000 * mean, rel=0.01)


def test_lengths_are_the_same_every_time_and_in_no_order():
  spec = "lognormal:mean=.25,sigma=1"
  one, again = draw(spec), draw(spec)
  np.testing.assert_array_equal(one.responses, again.responses)
  np.testing.assert_array_equal(one.prompts, again.prompts)
  for values in one:
    halves = np.split(values, 2)
    assert halves[0].mean() == pytest.approx(halves[1].mean(), rel=0.25)


@pytest.mark.parametrize(
  ("option", "mean", "least", "most"),
  [("", 50, 1, 100), (",prompt_mean=.8", 80, 60, 100),
   (",prompt_mean=1", 100, 100, 100)],
)  # fmt: skip
def test_prompts_are_even_around_their_mean(option, mean, least, most):
  prompts = draw(f"lognormal:mean=.25,sigma=1{option}").prompts
  assert prompts.shape == (64,)
  assert prompts.mean() == pytest.approx(mean, rel=0.01)
  assert least <= prompts.min() <= least + 1
  assert most - 1 <= prompts.max() <= most


@pytest.mark.parametrize(
  "lines",
  [
    "3\n9\n\n5\n12\n",
    '{"length": 3}\n{"length": 9}\n{"length": 5.0}\n{"length": 12}\n',
    "\n".join(  # samples of a run
      json.dumps(Sample(3, "q?", "x" * n, "r", 0.5)._asdict())
      for n in (2, 8, 4, 11)
    ),
  ],
)
def test_as_many_lines_as_responses_keep_their_order(tmp_path, lines):
  """A text is followed by its stop token; 12 tokens are cut to 9."""
  (tmp_path / "some.txt").write_text(lines)
  drawn = draw(tmp_path / "some.txt", SMALL)
  assert drawn.responses.tolist() == [3, 9, 5, 9]
  other = draw(f"{tmp_path}/some.txt:prompt_mean=1", SMALL)
  assert other.prompts.tolist() == [8, 8]


def test_other_numbers_of_lines_give_whole_groups(tmp_path):
  """Of 125 groups of 8 lines, 64 evenly spaced ones."""
  (tmp_path / "some.txt").write_text("".join(f"{n}\n" for n in range(1, 1001)))
  drawn = np.sort(draw(tmp_path / "some.txt").responses.reshape(64, 8))
  np.testing.assert_allclose(drawn - drawn[:, :1], [range(8)] * 64, atol=1)
  first = np.sort(drawn[:, 0])
  np.testing.assert_allclose(first, np.arange(64) * 1000 / 64, atol=9)


def test_groups_of_the_same_size_stay_as_they_are(tmp_path):
  group = [1, 1, 2, 3, 5, 8, 300, 511]
  (tmp_path / "some.txt").write_text("\n".join(map(str, group * 3)))
  drawn = draw(tmp_path / "some.txt").responses.reshape(64, 8)
  np.testing.assert_array_equal(np.sort(drawn), [group] * 64)


def test_prompts_are_the_groups_of_a_file(tmp_path):
  """Two groups of three in place of two of two: even quantiles of each."""
  lines = [("a", 1), ("a", 3), ("a", 2), ("b", 9), ("b", 9), ("b", 9)]
  text = "".join(
    json.dumps({"prompt": p, "length": n}) + "\n" for p, n in lines
  )
  (tmp_path / "some.jsonl").write_text(text)
  drawn = draw(tmp_path / "some.jsonl", SMALL).responses.reshape(2, 2)
  groups = sorted(sorted(group) for group in drawn.tolist())
  assert groups == [[1, 3], [9, 9]]  # 1.25 and 2.75, rounded


@pytest.mark.parametrize("correlation", [0.5, 0.9])
def test_lengths_of_a_group_correlate(correlation):
  spec = "lognormal:mean=.02,sigma=1"
  plain = draw(spec).responses
  drawn = draw(f"{spec},group={correlation}").responses
  np.testing.assert_array_equal(np.sort(drawn), np.sort(plain))
  logs = np.log(drawn.reshape(64, 8))
  logs = (logs - logs.mean()) / logs.std()
  sums = logs.sum(1) ** 2 - (logs**2).sum(1)
  assert sums.mean() / (8 * 7) == pytest.approx(correlation, abs=0.15)
  same = draw(f"{spec},group=0").responses
  np.testing.assert_array_equal(same, plain)


@pytest.mark.parametrize(
  ("spec", "words"),
  [("lognormal", "lognormal: mean is missing; expected a file, or lognormal:"),
   ("lognormal:mean=.2", "sigma is missing"),
   ("lognormal:men=.2,sigma=1", "men: did you mean 'mean'?"),
   ("lognormal:mean=a,sigma=1", "mean=a: expected a number"),
   ("lognormal:mean=1,sigma=1", "mean=1: expected a share of sampler.max_new"),
   ("lognormal:mean=nan,sigma=1", "mean=nan: expected a share"),
   ("lognormal:mean=.2,sigma=0", "sigma=0: expected a number above 0"),
   ("lognormal:mean=.2,sigma=1,group=2", "group=2: expected a correlation"),
   ("lognormal:mean=.2,sigma=1,prompt_mean=2", "prompt_mean=2: expected a s"),
   ("nowhere.txt", "cannot read 'nowhere.txt': No such file"),
   ("nowhere.txt:mean=.2", "mean: choose one of prompt_mean")],
)  # fmt: skip
def test_a_mistaken_spec_is_named(spec, words):
  with pytest.raises(UserError) as error:
    draw(spec)
  assert f"--lengths={spec}: " in str(error.value)
  assert words in str(error.value)


@pytest.mark.parametrize(
  "line", ["0", "-1", "many", "true", "[3]", "Infinity", "NaN",
           json.dumps({"step": 1}), json.dumps({"length": "3"})]
)  # fmt: skip
def test_a_mistaken_line_is_named(tmp_path, line):
  path = tmp_path / "some.txt"
  path.write_text(f"3\n{line}\n")
  with pytest.raises(UserError) as error:
    draw(path)
  assert f"{path}:2: expected a number of tokens" in str(error.value)
  assert repr(line) in str(error.value)


def test_a_file_without_lengths(tmp_path):
  (tmp_path / "some.txt").write_text("\n")
  with pytest.raises(UserError, match="has no line with a length"):
    draw(tmp_path / "some.txt")
