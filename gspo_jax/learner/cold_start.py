"""Cold start: supervised fine-tuning until greedy decoding is accurate.

The demonstrations contain errors on purpose. A policy trained briefly on
correct ones lacks the skill, and RL does not improve it. A policy trained on
noisy ones until its GREEDY accuracy is high has the skill; its samples still
have errors, which RL removes. Sampled accuracy is a bad criterion: it failed
for one seed of three.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from gspo_jax import model
from gspo_jax.data.pipeline import Batches
from gspo_jax.data.prompt_batch import DemonstrationBatch
from gspo_jax.learner import train_batch, train_step
from gspo_jax.learner.optimizer import OptimConfig
from gspo_jax.learner.packing import PackingConfig, pack
from gspo_jax.learner.train_batch import TrainBatch
from gspo_jax.learner.train_step import TrainState
from gspo_jax.losses import Mean, Metrics
from gspo_jax.record.checkpoint import Checkpoints
from gspo_jax.record.identity import match
from gspo_jax.record.kept import Kept
from gspo_jax.record.progress import Progress
from gspo_jax.runtime import multihost
from gspo_jax.runtime.key import POSITIVE, SHARE, ZERO_OR_MORE, key
from gspo_jax.runtime.preemption import Preemption
from gspo_jax.sampler.samples import Prompts


@dataclasses.dataclass(frozen=True)
class ColdStartConfig:
  """Supervised fine-tuning before RL."""

  steps: int = key(0, "optimizer steps at most; 0: none", ZERO_OR_MORE)
  batch: int = key(64, "demonstrations a step")
  learning_rate: float = key(
    2e-3,
    "its peak, after at most 50 steps of warm-up; a cosine decays to a tenth",
    POSITIVE,
  )
  gate: float = key(
    0.9, "greedy accuracy that ends it; 0: run all steps", SHARE
  )
  check_every: int = 50  # steps between two measurements of greedy accuracy

  @property
  def optim(self) -> OptimConfig:
    return OptimConfig(
      name="adamw:b2=0.98,weight_decay=0.01",
      learning_rate=self.learning_rate,
      warmup_steps=min(50, self.steps // 4),
      decay="cosine:min_lr_ratio=0.1",
      total_steps=max(self.steps, 1),
    )


def cross_entropy(
  params: model.Params,
  batch: TrainBatch,
  is_old_policy: jax.Array | None = None,
  *,
  cfg: model.ModelConfig,
) -> train_step.LossOutput:
  """A `train_step.Loss`: mean over response tokens of `-log p`, no ratio."""
  logps = train_batch.response_logps(params, cfg, batch).logps
  loss = Mean.of(-logps, batch.response_mask)
  return train_step.LossOutput(
    loss, {"loss/imitation": jax.lax.stop_gradient(loss)}
  )


@dataclasses.dataclass(frozen=True)
class ColdStartFunctions:
  abstract: TrainState  # shapes and shardings
  init_state: train_step.InitState
  packing: PackingConfig
  # (state, arrays of a `DemonstrationBatch`, packing) -> (state, metrics);
  # donates the state
  update: Callable[..., tuple[TrainState, Metrics]]


def run(
  functions: ColdStartFunctions,
  init_params: Callable[[], model.Params],
  *,
  batches: Batches[DemonstrationBatch],
  batch_sharding: jax.sharding.Sharding,
  accuracy: Callable[[model.Params], float],
  checkpoints: Checkpoints,
  identity: dict,
  cfg: ColdStartConfig,
  preemption: Preemption,
  kept: Kept | None = None,
) -> TrainState | None:
  """Trains until greedy accuracy reaches `cfg.gate`; resumes if saved.

  `accuracy` is of greedy decoding on held-out problems, equal on every host.
  Cold starts with the same `identity` have the same result, up to rounding.
  `kept` is that of an earlier run, or becomes that of this one if this call
  makes all of it. Returns None after a preemption, with the state saved.

  Raises:
    UserError: the folder holds another cold start, or the gate was not reached.
  """

  def update(state):
    batch = next(batches)
    lengths = batch.lengths + batch.response_lengths
    packing = pack(lengths, np.arange(len(lengths)), functions.packing)
    prompts = Prompts(batch.tokens, batch.lengths)
    arrays = multihost.to_global(
      (prompts, batch.responses, batch.response_lengths, batch.turns),
      batch_sharding,
    )
    return functions.update(state, *arrays, packing)

  accept = lambda _, saved: match(
    identity, saved, "cold start in this folder", "use another --workdir"
  )
  restored = checkpoints.restore(functions.abstract, accept)
  if restored is None and kept:
    restored = kept.restore(functions.abstract, accept)
    if restored:
      print(f"cold start of an earlier run, from {kept.entry}", flush=True)
      checkpoints.save(restored.step, restored.state, restored.metadata)
  if restored is None:
    state = functions.init_state(init_params())
    step, greedy = 0, 0.0
  else:
    state, step = restored.state, restored.step
    greedy = restored.metadata["greedy"]
    batches.set_state(restored.metadata["data"])
  with Progress("cold start", cfg.steps, "steps", done=step) as progress:
    while step < cfg.steps and (not cfg.gate or greedy < cfg.gate):
      state, metrics = update(state)
      step += 1
      stop = preemption.reached()
      # Only at these steps: one more measurement could end a resumed run before
      # an uninterrupted one.
      measure = step % cfg.check_every == 0 or step == cfg.steps
      if measure:
        greedy = accuracy(state.params)
        loss = metrics["loss/imitation"].value()
        multihost.print_once(
          f"cold start {step:4d}/{cfg.steps}  loss {loss:.3f}  "
          f"greedy accuracy {greedy:.3f} (gate {cfg.gate})"
        )
      if measure or stop:
        metadata = {
          "greedy": greedy,
          "data": batches.get_state(),
          "identity": identity,
        }
        checkpoints.save(step, state, metadata)
      if stop:
        return None
      progress.advance()
  if cfg.gate and greedy < cfg.gate:
    raise multihost.AgreedError(
      f"cold_start.steps={cfg.steps} ended at greedy accuracy "
      f"{greedy:.3f}, under cold_start.gate={cfg.gate}: RL does not climb "
      "from there; raise the steps (in a new workdir), or set the gate to 0 "
      "to continue regardless"
    )
  if kept and restored is None:
    kept.save(step, state, metadata)
  return state
