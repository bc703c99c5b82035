"""The cold start: imitate worked answers until greedy decoding gets them right.

Demonstrations are noisy on purpose. Stopped early on clean ones, the skill
itself is missing and RL does not climb; trained on noisy ones until GREEDY
accuracy is high, the method is there, sampling still errs, and RL removes the
error. Sampled accuracy is a bad gate: it failed for one seed of three.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gspo_jax import model
from gspo_jax.learner import train_batch, train_step
from gspo_jax.learner.train_batch import TrainBatch
from gspo_jax.learner.train_step import TrainState
from gspo_jax.losses import Mean
from gspo_jax.runtime import multihost
from gspo_jax.runtime.checkpoint import Checkpoints
from gspo_jax.runtime.identity import match
from gspo_jax.runtime.preemption import Preemption
from gspo_jax.sampler.samples import Prompts


@dataclasses.dataclass(frozen=True)
class ColdStartConfig:
  """How long to imitate.

  Attributes:
    steps: optimizer steps at most.
    check_every: steps between two looks at greedy accuracy.
    gate: greedy accuracy that ends it; 0 runs all the steps.
  """

  steps: int
  check_every: int
  gate: float


def cross_entropy(
  params: model.Params,
  rows: TrainBatch,
  own: jax.Array | None = None,
  *,
  cfg: model.ModelConfig,
) -> train_step.LossOutput:
  """Mean over tokens of `-log p`, as `train_step.update` takes a loss.

  `own` is not used: no ratio is taken.
  """
  mask = rows.response_mask
  logps = train_batch.logprobs(params, cfg, rows).logps
  total = -jnp.where(mask, logps, 0.0).sum()
  loss = Mean(total, mask.sum(dtype=jnp.float32))
  return train_step.LossOutput(
    loss, {"loss/imitation": jax.lax.stop_gradient(loss)}
  )


def as_rollout(batch: dict[str, jax.Array]) -> TrainBatch:
  """The arrays of a `data.demonstrations` batch, as `update` takes them."""
  prompts = Prompts(batch["tokens"], batch["length"])
  return train_batch.make_train_batch(
    prompts, batch["response"], batch["response_length"]
  )


def imitate(
  init: Callable[[], TrainState],
  abstract: TrainState,
  batches,
  update: Callable,
  accuracy: Callable[[model.Params], float],
  checkpoints: Checkpoints,
  preemption: Preemption,
  identity: dict,
  cfg: ColdStartConfig,
) -> TrainState | None:
  """Trains until `cfg.gate`, resuming from and saving to `checkpoints`.

  Args:
    init: makes a fresh state.
    abstract: its shapes and shardings, for a restore.
    batches: iterator of `data.demonstrations`.
    update: `(state, arrays of a batch) -> (state, metrics)`, jitted.
    accuracy: greedy accuracy of parameters on held-out questions.
    checkpoints: a folder of its own, so that a later run reuses the result.
    preemption: asked every step.
    identity: what makes two cold starts the same.
    cfg: when to stop.

  Returns:
    The trained state, or None where preemption came first (and saved).

  Raises:
    UserError: the folder holds another cold start, or the gate was not reached.
  """
  accept = lambda _, found: match(identity, found, "cold start")
  restored = checkpoints.restore(abstract, accept)
  if restored is None:
    state, step, reached = init(), 0, 0.0
  else:
    state, step = restored.state, restored.step
    reached = restored.metadata["greedy"]
    batches.set_state(restored.metadata["data"])
  while step < cfg.steps and (not cfg.gate or reached < cfg.gate):
    arrays = {k: v for k, v in next(batches).items() if k != "problems"}
    state, metrics = update(state, arrays)
    step += 1
    stop = preemption.reached()
    check = step % cfg.check_every == 0 or step == cfg.steps
    # Never off that grid: a look more could pass the gate where an
    # uninterrupted run goes on.
    if check:
      reached = accuracy(state.params)
      loss = metrics["loss/imitation"].value()
      multihost.print_once(
        f"cold start {step:4d}/{cfg.steps}  loss {loss:.3f}  "
        f"greedy accuracy {reached:.3f} (gate {cfg.gate})"
      )
    if check or stop:
      saved = {"greedy": reached, "data": batches.get_state()}
      checkpoints.save(step, state, saved | {"identity": identity})
    if stop:
      return None
  if reached < cfg.gate:
    raise multihost.AgreedError(
      f"cold_start.steps={cfg.steps} ended at greedy accuracy {reached:.3f}, "
      f"under cold_start.gate={cfg.gate}: RL does not climb from there; raise "
      "the steps (in a new workdir), or set the gate to 0 to go on regardless"
    )
  return state
