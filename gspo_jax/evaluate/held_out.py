"""Rewards on the held-out problems of a run: the metrics `eval/*`."""

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.evaluate import estimators
from gspo_jax.program.experiment import Experiment
from gspo_jax.record.progress import Progress
from gspo_jax.rollout.scoring import (
  decode_responses,
  score_responses,
  wait_scored,
)
from gspo_jax.runtime import sharding
from gspo_jax.sampler.functions import Sampler
from gspo_jax.sampler.many_prompts import sample_many
from gspo_jax.sampler.samples import Prompts


def evaluate(experiment: Experiment, params: model.Params) -> dict[str, float]:
  """`eval/*` of sampled and greedy responses; the key is always the same."""
  sampler, key = experiment.program.sampler, experiment.keys.evaluate
  config = experiment.config
  sampled = first_rewards(
    experiment, sampler.generate_eval, params, key, config.eval.samples
  )
  return summarize(
    sampled, greedy(experiment, params, key), config.reward.pass_threshold
  )


def greedy(
  experiment: Experiment, params: model.Params, key: jax.Array
) -> np.ndarray:
  generate = experiment.program.sampler.generate_greedy
  return first_rewards(experiment, generate, params, key, 1)


def first_rewards(
  experiment: Experiment,
  generate: Sampler,
  params: model.Params,
  key: jax.Array,
  group_size: int,
) -> np.ndarray:
  """The first reward of G responses to each of N held-out problems, [N, G].

  Raises AgreedError if more than `reward.max_failed` could not be scored.
  """
  sample = _conversations if experiment.conversations else _responses
  params = experiment.program.sampler.weights(params)
  pending = sample(experiment, generate, params, key, group_size)
  max_failed = experiment.config.reward.max_failed
  rewards = wait_scored(pending, max_failed, label="the held-out problems")
  scores = np.concatenate([batch.first for batch in rewards])
  return scores[: len(experiment.held_out)]


def _responses(experiment, generate, params, key, group_size) -> list:
  problems, program, pending = experiment.held_out, experiment.program, []
  count = len(problems) * group_size
  with Progress("evaluation", count, "responses") as progress:
    for batch in sample_many(
      generate,
      params,
      Prompts(problems.tokens, problems.lengths),
      key,
      batch_size=program.sampler.eval_prompts,
      batch_sharding=sharding.batch_sharding(program.sampler.mesh),
      progress=progress,
    ):
      responses = decode_responses(
        batch.samples,
        problems.pick(batch.index),
        program.tokenizer,
        program.sampler.stop,
      )
      lengths = batch.samples.lengths
      pending.append(
        score_responses(experiment.reward_pool, responses, group_size, lengths)
      )
  return pending


def _conversations(experiment, generate, params, key, group_size) -> list:
  problems, size = experiment.held_out, experiment.program.sampler.eval_prompts
  rewards = []
  for i, start in enumerate(range(0, len(problems), size)):
    index = np.arange(start, start + size) % len(problems)
    sampled = experiment.conversations(
      generate,
      params,
      problems.pick(index),
      jax.random.fold_in(key, i),
      label="evaluation",
    )
    rewards.append(sampled.rewards)
  return rewards


def summarize(
  sampled: np.ndarray, greedy: np.ndarray, threshold: float
) -> dict[str, float]:
  """`eval/*` of rewards [N, n] of sampled and [N, 1] of greedy responses.

  A reward of at least `threshold` passes; `pass@k` is for k = 1, 2, 4, ... and
  n. With rewards of 0 and 1, `avg@n` is `pass@1`.
  """
  correct, n = estimators.correct(sampled, threshold), sampled.shape[1]
  return {
    f"eval/avg@{n}": float(sampled.mean()),
    "eval/greedy": float(greedy.mean()),
    **{
      f"eval/pass@{k}": estimators.pass_at_k(correct, k)
      for k in estimators.ladder(n)
    },
  }
