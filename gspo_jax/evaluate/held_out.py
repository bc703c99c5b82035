"""Evaluation on the held-out problems."""

from collections.abc import Callable

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.evaluate.estimators import ladder, pass_at_k
from gspo_jax.rewards.pool import RewardPool
from gspo_jax.rollout.scoring import (
  decode_responses,
  require_scored,
  score_responses,
)
from gspo_jax.runtime import multihost
from gspo_jax.sampler.samples import Prompts, Samples

# Draws answers to a fixed number of prompts.
Generate = Callable[[model.Params, Prompts, jax.Array], Samples]


def verdicts(
  generate: Generate,
  params,
  questions: dict,
  *,
  batch: int,
  key: jax.Array,
  rows: jax.sharding.Sharding,
  tokenizer: Tokenizer,
  scorer: RewardPool,
  max_failed: float,
) -> np.ndarray:
  """Whether answers are right, [N, G], for all questions (of `data.take`).

  `batch` questions at a time. The last batch is filled up with the first
  questions, so that one compiled `generate` serves; what it answers to those
  again is dropped.

  Raises:
    AgreedError: more than `max_failed` of the answers could not be scored.
  """
  count = len(questions["problems"])
  marks = []
  for i, start in enumerate(range(0, count, batch)):
    index = np.arange(start, start + batch) % count
    asked = {k: questions[k][index] for k in ("tokens", "length")}
    prompts = multihost.to_global(
      Prompts(asked["tokens"], asked["length"]), rows
    )
    samples = generate(params, prompts, jax.random.fold_in(key, i))
    asked["problems"] = [questions["problems"][j] for j in index]
    answers = decode_responses(samples, asked, tokenizer)
    group = samples.lengths.shape[0] // batch
    marks.append(score_responses(scorer, answers, group, samples.lengths))
  marks = [collect() for collect in marks]
  require_scored(marks, max_failed, of="the held-out questions")
  return np.concatenate([each.correct for each in marks])[:count]


def summarize(sampled: np.ndarray, greedy: np.ndarray) -> dict[str, float]:
  """`eval/*` of rewards [N, n] of sampled and [N, 1] of greedy answers.

  `pass@k` for k = 1, 2, 4, ... and n; with rewards of 0 and 1, `avg@n` is
  `pass@1`.
  """
  n = sampled.shape[1]
  return {
    f"eval/avg@{n}": float(sampled.mean()),
    "eval/greedy": float(greedy.mean()),
    **{f"eval/pass@{k}": pass_at_k(sampled > 0.5, k) for k in ladder(n)},
  }
