"""Cold start: supervised fine-tuning until greedy decoding is accurate.

The demonstrations are noisy on purpose. A policy trained on clean ones and
stopped early lacks the skill itself, and RL does not climb. A policy trained on
noisy ones until its GREEDY accuracy is high has the method, its samples still
have errors, and RL removes them. Sampled accuracy is a bad criterion: it failed
for one seed of three.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import model
from gspo_jax.data.pipeline import Batches
from gspo_jax.learner import train_batch, train_step
from gspo_jax.learner.optimizer import OptimConfig
from gspo_jax.learner.packing import (
  Packing,
  PackingConfig,
  pack,
  pack_responses,
)
from gspo_jax.learner.train_batch import PackedBatch, TrainBatch
from gspo_jax.learner.train_step import TrainState
from gspo_jax.losses import Mean, Metrics
from gspo_jax.record.checkpoint import Checkpoints
from gspo_jax.record.identity import match
from gspo_jax.record.progress import Progress
from gspo_jax.runtime import multihost
from gspo_jax.runtime.key import POSITIVE, SHARE, ZERO_OR_MORE, check, key
from gspo_jax.runtime.preemption import Preemption
from gspo_jax.sampler.samples import Prompts


@dataclasses.dataclass(frozen=True)
class ColdStartConfig:
  """Supervised fine-tuning before RL.

  Attributes:
    check_every: steps between two measurements of greedy accuracy.
  """

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
  check_every: int = 50

  def __post_init__(self):
    check(self, "cold_start")

  @property
  def optim(self) -> OptimConfig:
    """Its optimizer."""
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
  """Mean over response tokens of `-log p`, a `train_step.Loss`.

  `is_old_policy` is not used: there is no ratio.
  """
  mask = batch.response_mask
  logps = train_batch.response_logps(params, cfg, batch).logps
  total = -jnp.where(mask, logps, 0.0).sum()
  loss = Mean(total, mask.sum(dtype=jnp.float32))
  return train_step.LossOutput(
    loss, {"loss/imitation": jax.lax.stop_gradient(loss)}
  )


def demonstration_batch(
  prompts: Prompts,
  responses: jax.Array,
  lengths: jax.Array,
  turns: jax.Array | None,
  packing: Packing,
  cfg: PackingConfig,
) -> PackedBatch:
  """The batch of an update, of the arrays of a `DemonstrationBatch`.

  Args:
    prompts: P of them.
    responses: [P, R] int32.
    lengths: [P] int32, of the responses.
    turns: [P, R] int16, or None.
    packing: where each demonstration goes.
    cfg: the rows, of one minibatch; static.
  """
  batch = pack_responses(prompts, responses, lengths, packing, cfg, turns=turns)
  return batch._replace(rows=dataclasses.replace(batch.rows, turns=None))


@dataclasses.dataclass(frozen=True)
class ColdStartFunctions:
  """The jitted functions of a cold start.

  Attributes:
    abstract: shapes and shardings of the state.
    init_state: params, donated -> the first state.
    packing: the rows of a step.
    update: (state, donated, `DemonstrationBatch`'s arrays, packing) -> (state,
      metrics).
  """

  abstract: TrainState
  init_state: train_step.InitState
  packing: PackingConfig
  update: Callable[..., tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True)
class ColdStart:
  """Supervised fine-tuning that is saved, resumed and reused.

  Attributes:
    batches: from `pipeline.demonstrations`.
    batch_sharding: for arrays whose first axis is the batch.
    accuracy: params -> greedy accuracy on held-out problems, the same on every
      host; it decides when to stop.
    checkpoints: in a folder of its own, so that a later run reuses the result.
    identity: two cold starts with the same identity have the same result.
    cfg: when to stop.
  """

  functions: ColdStartFunctions
  batches: Batches
  batch_sharding: jax.sharding.Sharding
  accuracy: Callable[[model.Params], float]
  checkpoints: Checkpoints
  identity: dict
  cfg: ColdStartConfig

  def run(
    self, init_params: Callable[[], model.Params], preemption: Preemption
  ) -> TrainState | None:
    """Trains until `cfg.gate` is reached; resumes what `checkpoints` has.

    Args:
      init_params: makes the first weights.
      preemption: checked every step.

    Returns:
      The trained state; None where preemption came first (it is saved).

    Raises:
      UserError: the folder holds another cold start, or the gate was not
        reached.
    """
    cfg = self.cfg
    accept = lambda _, saved: match(
      self.identity,
      saved,
      "cold start in this folder",
      "use another --workdir",
    )
    restored = self.checkpoints.restore(self.functions.abstract, accept)
    if restored is None:
      state = self.functions.init_state(init_params())
      step, accuracy = 0, 0.0
    else:
      state, step = restored.state, restored.step
      accuracy = restored.metadata["greedy"]
      self.batches.set_state(restored.metadata["data"])
    with Progress("cold start", cfg.steps, "steps", done=step) as progress:
      while step < cfg.steps and (not cfg.gate or accuracy < cfg.gate):
        state, metrics = self._update(state)
        step += 1
        stop = preemption.reached()
        # Only at these steps: an additional check could end a resumed run where
        # an uninterrupted one goes on.
        check = step % cfg.check_every == 0 or step == cfg.steps
        if check:
          accuracy = self.accuracy(state.params)
          loss = metrics["loss/imitation"].value()
          multihost.print_once(
            f"cold start {step:4d}/{cfg.steps}  loss {loss:.3f}  "
            f"greedy accuracy {accuracy:.3f} (gate {cfg.gate})"
          )
        if check or stop:
          self._save(step, state, accuracy)
        if stop:
          return None
        progress.advance()
    if cfg.gate and accuracy < cfg.gate:
      raise multihost.AgreedError(
        f"cold_start.steps={cfg.steps} ended at greedy accuracy "
        f"{accuracy:.3f}, under cold_start.gate={cfg.gate}: RL does not climb "
        "from there; raise the steps (in a new workdir), or set the gate to 0 "
        "to continue regardless"
      )
    return state

  def _update(self, state):
    batch = next(self.batches)
    lengths = batch.lengths + batch.response_lengths
    order = np.arange(len(lengths))
    packing = pack(lengths, order, self.functions.packing)
    prompts = Prompts(batch.tokens, batch.lengths)
    arrays = multihost.to_global(
      (prompts, batch.responses, batch.response_lengths, batch.turns),
      self.batch_sharding,
    )
    return self.functions.update(state, *arrays, packing)

  def _save(self, step, state, accuracy):
    metadata = {
      "greedy": accuracy,
      "data": self.batches.get_state(),
      "identity": self.identity,
    }
    self.checkpoints.save(step, state, metadata)
