"""Rewards on the held-out problems of a run: the metrics `eval/*`."""

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.evaluate import estimators
from gspo_jax.program.experiment import Experiment
from gspo_jax.record.progress import Progress
from gspo_jax.rollout.scoring import ResponseDecoder, Scorer, wait_scored
from gspo_jax.runtime import sharding
from gspo_jax.sampler.samples import Prompts, SamplingParams


def evaluate(experiment: Experiment, params: model.Params) -> dict[str, float]:
  """`eval/*` of sampled and greedy responses; the key is always the same."""
  config, key = experiment.config, experiment.keys.evaluate
  sampled = first_rewards(
    experiment,
    params,
    key,
    config.eval.samples,
    experiment.program.sampler.respond.config.params,
  )
  return summarize(
    sampled, greedy(experiment, params, key), config.reward.pass_threshold
  )


def greedy(
  experiment: Experiment, params: model.Params, key: jax.Array
) -> np.ndarray:
  sampling = SamplingParams(temperature=0.0)
  return first_rewards(experiment, params, key, 1, sampling)


def first_rewards(
  experiment: Experiment,
  params: model.Params,
  key: jax.Array,
  group_size: int,
  sampling: SamplingParams,
) -> np.ndarray:
  """The first reward of G responses to each of N held-out problems, [N, G].

  Raises AgreedError if more than `reward.max_failed` could not be scored.
  """
  sampler, held_out = experiment.program.sampler, experiment.held_out
  batch = held_out.pick(sampler.padded(len(held_out)))
  params = sampler.weights(params)
  options = {"group_size": group_size, "sampling": sampling}
  if experiment.conversations:
    pending = experiment.conversations(
      sampler.respond, params, batch, key, label="evaluation", **options
    ).rewards
  else:
    count = len(batch) * group_size
    decode = ResponseDecoder(
      batch, experiment.program.tokenizer, group_size, sampler.stop
    )
    scorer = Scorer(experiment.reward_pool, decode)
    with Progress("evaluation", count, "responses") as progress:
      samples = sampler.respond(
        params,
        Prompts(batch.tokens, batch.lengths),
        sharding.key_beside(sampler.respond.batch_sharding, key),
        on_finished=scorer.add,
        progress=progress,
        **options,
      )
    pending = scorer.scored(samples).rewards
  max_failed = experiment.config.reward.max_failed
  (rewards,) = wait_scored([pending], max_failed, label="the held-out problems")
  return rewards.first[: len(held_out)]


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
