"""The weights of a checkpoint, and what identifies them."""

import dataclasses

from etils import epath

from gspo_jax import model
from gspo_jax.program.config import Config
from gspo_jax.program.functions import Program
from gspo_jax.runtime.checkpoint import Checkpoints
from gspo_jax.runtime.errors import UserError, how_to_download
from gspo_jax.runtime.identity import match


def identity(program: Program) -> dict:
  """What weights must agree with to fit this model and tokenizer."""
  cfg = dataclasses.asdict(program.cfg)
  # The same model may recompute more or less, and run unrolled.
  free = ("remat", "keep", "unroll")
  return {
    "model": {k: v for k, v in cfg.items() if k not in free},
    "tokenizer": program.tokenizer.fingerprint,
  }


def with_checkpoint(config: Config, checkpoint: str) -> Config:
  """The config, with `model.checkpoint` if this is a Hugging Face folder."""
  if (epath.Path(checkpoint) / "config.json").exists():
    return config.replace(model={"checkpoint": checkpoint})
  return config


def load(config: Config, program: Program, checkpoint: str) -> model.Params:
  """The weights in a Hugging Face folder, or of a run.

  Args:
    config: of `with_checkpoint`.
    program: built from it.
    checkpoint: such a folder; or a run's workdir, for its newest checkpoint
      that is whole; or one step of it, WORKDIR/checkpoints/STEP.

  Raises:
    UserError: there is none, or it is of another model.
  """
  if config.model.checkpoint == checkpoint:
    return program.init_params(None)
  folder, step = epath.Path(checkpoint), None
  if folder.name.isdecimal() and folder.parent.name == "checkpoints":
    folder, step = folder.parent.parent, int(folder.name)
  wanted = identity(program)
  wanted["model"].pop("dtype")  # of activations: the weights are float32

  def accept(_, saved):
    part = {k: saved["identity"].get(k) for k in wanted}
    part["model"].pop("dtype")
    match(wanted, {"identity": part}, "checkpoint")

  # Without the optimizer's moments, which are twice as large.
  params = {"params": program.abstract_params}
  with Checkpoints(folder / "checkpoints") as checkpoints:
    restored = checkpoints.restore(params, accept, only=step, part=True)
  if restored is None:
    raise UserError(
      f"--checkpoint={checkpoint}: no config.json of a Hugging Face folder, "
      f"and no checkpoints of a run{how_to_download(checkpoint)}"
    )
  return restored.state["params"]
