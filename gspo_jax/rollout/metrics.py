"""Metrics of a rollout: rewards, lengths, cost and staleness."""

from gspo_jax.rollout import dynamic_sampling
from gspo_jax.rollout.batch import (
  RolloutBatch,
  ScoredSamples,
  sampled_tokens,
  slot_steps,
)
from gspo_jax.rollout.config import RolloutConfig
from gspo_jax.rollout.scoring import Rewards
from gspo_jax.runtime import multihost
from gspo_jax.sampler.samples import TRUNCATED, Samples


def rollout_metrics(
  batch: RolloutBatch, rollout: RolloutConfig, step: int
) -> dict[str, float]:
  """`reward/*` and `response/*`, and what is on of the others.

  Those are `conversation/*`, `dynamic_sampling/*` and `rollout/*`.

  Args:
    batch: that an iteration learns from; waits for its rewards.
    rollout: decides which of them are on.
    step: the iteration that learns from the batch.
  """
  scalars = _reward_metrics(batch.samples.rewards.result())
  scalars |= _response_metrics(batch.samples.samples, batch.costs)
  if rollout.environment:
    scalars |= _conversation_metrics(batch.samples)
  if rollout.dynamic_sampling_rounds > 1:
    scalars |= dynamic_sampling.metrics(batch.samples, batch.costs)
  if rollout.is_off_policy:
    # Iterations between the policy that sampled a token and the update.
    scalars["rollout/staleness"] = step - batch.policy_step
    scalars["rollout/resumed_fraction"] = batch.resumed_fraction
  return scalars


def _reward_metrics(rewards: Rewards) -> dict[str, float]:
  parts = rewards.parts if len(rewards.parts) > 1 else {}
  return {
    "reward/mean": float(rewards.total.mean()),
    **{f"reward/{name}": float(part.mean()) for name, part in parts.items()},
    # Groups of equal rewards have no advantage; only a penalty is learnt from.
    "reward/mixed_groups": float(rewards.mixed_groups.mean()),
    "reward/failed": float(rewards.failed.mean()),
  }


def _conversation_metrics(scored: ScoredSamples) -> dict[str, float]:
  """Means over the conversations that an iteration learns from."""
  conversation, samples = scored.conversation, scored.samples
  policy, total = multihost.to_host(
    (samples.num_sampled, samples.lengths.sum())
  )
  count, calls = len(conversation["turns"]), conversation["tool_calls"].sum()
  errors = conversation["tool_errors"].sum()
  return {
    "conversation/turns": float(conversation["turns"].mean()),
    "conversation/tool_calls": float(calls) / count,
    "conversation/tool_use": float((conversation["tool_calls"] > 0).mean()),
    "conversation/tool_errors": float(errors) / max(float(calls), 1.0),
    "conversation/policy_tokens": float(policy) / count,
    "conversation/environment_tokens": float(total - policy) / count,
    "time/environment": scored.environment_seconds,
  }


def _response_metrics(samples: Samples, costs) -> dict[str, float]:
  lengths, finish = multihost.to_host((samples.lengths, samples.finish))
  return {
    "response/length": float(lengths.mean()),
    "response/truncated": float((finish == TRUNCATED).mean()),
    # The others are steps of rows that had finished, of empty slots, and of
    # tokens that were sampled twice.
    "response/useful_steps": sampled_tokens(costs) / slot_steps(costs),
  }
