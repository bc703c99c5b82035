"""On-policy rollouts: the policy that learns samples all responses."""

import jax

from gspo_jax import model
from gspo_jax.record.progress import Progress
from gspo_jax.rollout import dynamic_sampling
from gspo_jax.rollout.batch import (
  RolloutBatch,
  ScoredSamples,
  prompts_on_device,
  sampled_tokens,
)
from gspo_jax.rollout.context import RolloutContext, iteration_keys
from gspo_jax.runtime import sharding


class OnPolicy:
  """Samples responses to new prompts; in rounds, dynamically."""

  pending = None

  def __init__(self, context: RolloutContext):
    self._context = context

  def __call__(
    self, params: model.Params, step: int, policy_step: int | None = None
  ) -> RolloutBatch:
    """A batch for iteration `step`; the policy may be of another iteration."""
    rng = iteration_keys(self._context.rng, step).sample
    samples, costs = dynamic_sampling.sample_until_mixed(
      self._context,
      lambda i: self._sample(params, step, jax.random.fold_in(rng, i)),
      f"iteration {step}",
    )
    return RolloutBatch(
      samples,
      costs,
      sampled_tokens(costs),
      float(step if policy_step is None else policy_step),
      epochs=self._context.curriculum.epochs,
    )

  def _sample(self, params, step, key) -> ScoredSamples:
    context, generate = self._context, self._context.sampler.generate
    batch = context.curriculum.next_batch(step)
    label = f"rollout of iteration {step}"
    if play := context.conversations:  # then the sampler is a continuous one
      return play(generate, params, batch, key, label=label)  # type: ignore[arg-type]
    rows = sharding.batch_sharding(context.sampler.mesh)
    key = sharding.key_beside(rows, key)
    prompts = prompts_on_device(batch, rows)
    scorer = context.scorer(batch)
    count = context.prompts * context.rollout.group_size
    with Progress(label, count, "responses") as progress:
      samples = generate(
        params, prompts, key, on_finished=scorer.add, progress=progress
      )
    return scorer.scored(samples)

  def get_state(self) -> dict:
    """Nothing is pending."""
    return {}

  def set_state(self, pending: None, state: dict) -> None:
    """Nothing is pending."""
