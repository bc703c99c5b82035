"""Held-out accuracy: avg@k and pass@k of sampled answers, and greedy."""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from gspo_jax import data, hosts, model, rewards
from gspo_jax.sampler import STOPPED, Prompts, Samples
from gspo_jax.tasks import Problem

# Draws answers to a fixed number of prompts.
Generate = Callable[[model.Params, Prompts, jax.Array], Samples]


def pass_at_k(correct: np.ndarray, k: int) -> float:
  """Chance that one of k answers is right, without bias.

  Mean over problems of `1 - C(n - c, k) / C(n, k)`, with c of n answers right:
  Chen et al. 2021, arXiv 2107.03374, eq. 1.

  Args:
    correct: [N, n] bool, n answers to N problems.
    k: 1 to n.
  """
  n = correct.shape[1]
  if not 1 <= k <= n:
    raise ValueError(f"{k=} must lie in 1..{n}, the answers a problem has")
  wrong = n - correct.sum(1)
  return float(np.mean([1 - math.comb(w, k) / math.comb(n, k) for w in wrong]))


def texts(samples: Samples) -> dict[int, str]:
  """The answers of this host's rows, by row, without their stop tokens."""
  lengths, finish = hosts.own(samples.lengths), hosts.own(samples.finish)
  return {
    i: data.decode(tokens[: lengths[i] - (finish[i] == STOPPED)])
    for i, tokens in hosts.own(samples.tokens).items()
  }


def verify(
  answers: Mapping[int, str], problems: Sequence[Problem], rows: jax.Array
) -> np.ndarray:
  """Rewards of all rows, on every host; each scores its own.

  Args:
    answers: from `texts`; the G answers to a problem stand side by side.
    problems: P of them.
    rows: [P * G], any array that lies over the hosts as the answers do.

  Returns:
    [P, G] float32.
  """
  group = rows.shape[0] // len(problems)
  own = {
    i: rewards.final_answer(answer, problems[i // group].answer)
    for i, answer in answers.items()
  }
  return hosts.join(own, rows).reshape(-1, group)


def answer_all(
  generate: Generate,
  params,
  questions: dict,
  batch: int,
  key: jax.Array,
  rows: jax.sharding.Sharding,
) -> np.ndarray:
  """Rewards [N, G] for all questions (of `data.take`), `batch` at a time.

  The last batch is filled up with the first questions, so that one compiled
  `generate` serves; what it answers to those again is dropped.
  """
  count = len(questions["problems"])
  scores = []
  for i, start in enumerate(range(0, count, batch)):
    index = np.arange(start, start + batch) % count
    prompts = Prompts(questions["tokens"][index], questions["length"][index])
    prompts = hosts.lay(prompts, rows)
    samples = generate(params, prompts, jax.random.fold_in(key, i))
    problems = [questions["problems"][j] for j in index]
    scores.append(verify(texts(samples), problems, samples.lengths))
  return np.concatenate(scores)[:count]


def summarize(sampled: np.ndarray, greedy: np.ndarray) -> dict[str, float]:
  """`eval/*` of rewards [N, n] of sampled and [N, 1] of greedy answers.

  `pass@k` for k = 1, 2, 4, ... and n; with rewards of 0 and 1, `avg@n` is
  `pass@1`.
  """
  n = sampled.shape[1]
  ks = {2**i for i in range(n.bit_length())} | {n}
  return {
    f"eval/avg@{n}": float(sampled.mean()),
    "eval/greedy": float(greedy.mean()),
    **{f"eval/pass@{k}": pass_at_k(sampled > 0.5, k) for k in sorted(ks)},
  }
