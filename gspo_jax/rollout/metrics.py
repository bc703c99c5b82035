"""Metrics of an iteration: rewards, lengths, times, memory and staleness."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gspo_jax.rewards.pool import Rewards
from gspo_jax.rollout import dynamic_sampling
from gspo_jax.rollout.batch import (
  RolloutBatch,
  RolloutCost,
  ScoredSamples,
  sampled_tokens,
  slot_steps,
)
from gspo_jax.rollout.config import RolloutConfig
from gspo_jax.runtime import multihost
from gspo_jax.sampler.samples import TRUNCATED, Samples


def rollout_metrics(
  batch: RolloutBatch, rollout: RolloutConfig, step: int
) -> dict[str, float]:
  """The metrics of the batch of iteration `step`; waits for the rewards.

  `reward/*`, `response/*`, and if `rollout` needs them `conversation/*`,
  `dynamic_sampling/*` and `rollout/*`.
  """
  scalars = _reward_metrics(batch.samples.rewards.result())
  scalars |= _response_metrics(
    batch.samples.samples, batch.costs, rollout.max_sequences
  )
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
  parts = {}
  if len(rewards.parts) > 1:  # of the responses that have the reward
    parts = {k: part[~np.isnan(part)] for k, part in rewards.parts.items()}
  return {
    "reward/mean": float(rewards.total.mean()),
    **{
      f"reward/{k}": float(part.mean())
      for k, part in parts.items()
      if len(part)
    },
    # Groups of equal rewards have no advantage; only a penalty is learnt from.
    "reward/mixed_groups": float(rewards.mixed_groups.mean()),
    "reward/failed": float(rewards.failed.mean()),
  }


def _conversation_metrics(scored: ScoredSamples) -> dict[str, float]:
  conversation, samples = scored.conversation, scored.samples
  policy, total = multihost.to_host(
    (samples.num_sampled, samples.lengths.sum())
  )
  sequences = multihost.to_host((samples.lengths > 0).sum())
  count, calls = len(conversation["turns"]), conversation["tool_calls"].sum()
  errors = conversation["tool_errors"].sum()
  return {
    "conversation/turns": float(conversation["turns"].mean()),
    "conversation/sequences": float(sequences) / count,
    "conversation/tool_calls": float(calls) / count,
    "conversation/tool_use": float((conversation["tool_calls"] > 0).mean()),
    "conversation/tool_errors": float(errors) / max(float(calls), 1.0),
    "conversation/policy_tokens": float(policy) / count,
    "conversation/environment_tokens": float(total - policy) / count,
    "time/environment": scored.environment_seconds,
  }


def _response_metrics(samples: Samples, costs, sequences) -> dict[str, float]:
  lengths, finish = multihost.to_host((samples.lengths, samples.finish))
  used, finish = lengths > 0, finish[::sequences]
  speculation = {}
  if samples.drafts is not None:
    steps, accepted = map(int, multihost.to_host(samples.drafts))
    length = 1 + accepted / max(steps, 1)
    speculation["response/acceptance_length"] = length
  return speculation | {
    "response/length": float(lengths[used].mean()),
    "response/truncated": float((finish == TRUNCATED).mean()),
    # The others: steps of finished rows and empty slots, and tokens that were
    # sampled twice.
    "response/useful_steps": sampled_tokens(costs) / slot_steps(costs),
  }


def time_metrics(
  clock: Sequence[float], batch: RolloutBatch, trained_tokens: float
) -> dict[str, float]:
  """`time/*`, and tokens per second.

  `clock`, in seconds: the start, the ends of generation, score and update.
  """
  generate, score, update = np.diff(clock)
  total = clock[-1] - clock[0]
  beside = {"time/rollout": batch.seconds} if batch.seconds else {}
  return beside | {
    "time/generate": generate,
    "time/score": score,
    "time/update": update,
    "time/iteration": total,
    "throughput/sampler_tokens_per_second": batch.sampled_tokens
    / (batch.seconds or generate),
    "throughput/tokens_per_second": trained_tokens / total,
  }


def memory_metrics(device: jax.Device) -> dict[str, float]:
  """`memory/*` of a device, in GiB; a CPU has none."""
  names = {"peak_bytes_in_use": "peak", "bytes_limit": "limit"}
  stats = device.memory_stats() or {}
  return {
    f"memory/{name}_gib": stats[key] / 2**30
    for key, name in names.items()
    if key in stats
  }


def useful_fractions(
  row_tokens: Mapping[str, Any], costs: Sequence[RolloutCost]
) -> dict[str, float]:
  """`throughput/useful_fraction*`: real tokens over computed tokens.

  Of the update, of decoding, of the score if functions run before the update,
  and of all together. `row_tokens` has `real` and `computed` tokens by
  function: `update`, or one of the score.
  """
  decoded = sampled_tokens(costs), slot_steps(costs)
  parts = {"update": [], "score": [], "decode": [decoded]}
  for name, tokens in row_tokens.items():
    part = "update" if name == "update" else "score"
    parts[part].append((tokens.real, tokens.computed))
  sums = {
    name: np.sum(counts, axis=0) for name, counts in parts.items() if counts
  }
  real, computed = sum(sums.values())
  fractions = {
    f"throughput/useful_fraction_{name}": real / max(computed, 1)
    for name, (real, computed) in sums.items()
  }
  return {"throughput/useful_fraction": real / max(computed, 1), **fractions}
