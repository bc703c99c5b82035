"""One iteration of RL: rollouts, verification, the update, and its numbers."""

import time

import jax
import numpy as np
from absl import logging

from gspo_jax.data.curriculum import Curriculum
from gspo_jax.learner.health import require_finite
from gspo_jax.learner.train_step import TrainState
from gspo_jax.program import experiment
from gspo_jax.rollout import dynamic_sampling, scoring
from gspo_jax.rollout.batch import sampled_tokens
from gspo_jax.rollout.scoring import Rewards
from gspo_jax.rollout.source import Source
from gspo_jax.runtime import metric_writer, multihost, sharding
from gspo_jax.sampler.samples import TRUNCATED, Prompts


def iterate(
  run: experiment.Experiment,
  state: TrainState,
  curriculum: Curriculum,
  source: Source,
  step: int,
):
  """Rollouts, verification, update.

  Each phase is waited for, and so the times are true.

  Returns:
    The new state, the step's scalars and distributions, and rows of sample
    answers of this host.

  Raises:
    FloatingPointError: a scalar is not finite.
    hosts.Agreed: too many answers could not be scored.
  """
  functions, config = run.program, run.config
  rows = sharding.batch_sharding(functions.mesh)
  clock = [time.monotonic()]
  tick = lambda: clock.append(time.monotonic())

  # Rollouts: G answers to each question, which each host begins to verify.
  ready = source(state.params, step)
  batch, samples, answers, marking = ready.kept
  asked = multihost.to_global(Prompts(batch["tokens"], batch["length"]), rows)
  tick()

  # Old log-probs, and what a reference and a critic say, meanwhile.
  key = experiment.iteration_keys(run, step)[1]
  rollout, scored = functions.assemble(asked, samples), {}
  if functions.scores:
    state, rollout, scored = functions.score(state, rollout, key)
  if functions.appraise:
    rollout = functions.appraise(state, rollout)
  marks = marking()
  for cost in ready.costs:
    curriculum.record(cost.batch, cost.marks().correct)
  for reason in marks.reasons:
    logging.warning("step %d: an answer scored 0: %s", step, reason)
  scoring.require_scored(
    [cost.marks() for cost in ready.costs],
    config.reward.max_failed,
    of=f"iteration {step}",
  )
  # Advantages of whole groups, before any shuffle.
  rewards = multihost.to_global(marks.total.reshape(-1), rows)
  rollout = functions.assign(rollout, rewards, samples.finish)
  jax.block_until_ready(rollout)
  tick()

  # The update: a loop over minibatches.
  state, _, learnt = functions.update(state, rollout, key)
  row, distributions = metric_writer.to_scalars(scored, learnt)
  tick()
  functions.check_compiled_once()

  row |= _rollout_row(marks, samples, ready.costs)
  row |= _time_row(clock, ready.spent)
  if config.rollout.dynamic_sampling_rounds > 1:
    row |= dynamic_sampling.metrics(ready.kept, ready.costs)
  if (
    config.rollout.one_step_off_policy
    or config.rollout.max_tokens_per_iteration
  ):
    # Iterations between the policy that drew a token and the one that learns.
    row["rollout/staleness"] = step - ready.drawn_at
    row["rollout/continued"] = ready.continued
  if config.data.drop_solved:
    row["data/solved"] = curriculum.num_solved
  updates = step * config.learner.minibatches
  row["optim/learning_rate"] = float(functions.schedule(updates - 1))
  require_finite(row, step)
  shown = _shown(batch["problems"], answers, marks)
  return state, row, distributions, shown


def _rollout_row(marks: Rewards, samples, costs) -> dict[str, float]:
  lengths, finish = multihost.to_host((samples.lengths, samples.finish))
  slot_steps = sum(int(cost.slot_steps) for cost in costs)
  parts = marks.parts if len(marks.parts) > 1 else {}
  return {
    "reward/mean": float(marks.total.mean()),
    **{f"reward/{name}": float(part.mean()) for name, part in parts.items()},
    # Groups of equal rewards have no advantage: only a penalty moves them.
    "reward/mixed_groups": float((np.ptp(marks.total, axis=1) > 0).mean()),
    "reward/failed": float(marks.failed.mean()),
    "response/length": float(lengths.mean()),
    "response/truncated": float((finish == TRUNCATED).mean()),
    # What is missing to 1 are decode steps of rows that had ended, of slots
    # that had no answer, and of tokens that were drawn again.
    "response/useful_steps": sampled_tokens(costs) / slot_steps,
  }


def _time_row(clock, tokens) -> dict[str, float]:
  generate, score, update = np.diff(clock)
  whole = clock[-1] - clock[0]
  return {
    "time/generate": generate,
    "time/score": score,
    "time/update": update,
    "time/iteration": whole,
    "throughput/sampler_tokens_per_second": tokens / generate,
    "throughput/tokens_per_second": tokens / whole,
  }


def _shown(problems, answers, marks) -> list[tuple[str, str, str, float]]:
  """One answer to each question: question, answer, reference, reward."""
  group = marks.total.shape[1]
  return [
    (p.text, answers[i].text, p.reference, float(marks.total[i // group, 0]))
    for i, p in zip(range(0, marks.total.size, group), problems, strict=True)
    if i in answers  # else another host holds it
  ]
