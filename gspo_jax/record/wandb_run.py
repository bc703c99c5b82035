"""The metrics of a run in Weights & Biases (the extra `wandb`)."""

import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import logging
from etils import epath

from gspo_jax.record.run_files import in_bucket
from gspo_jax.runtime.errors import UserError, needs_extra


def require_login(project: str) -> None:
  """Checks that `WandbRun` will work, before a run spends hours on other work.

  On a terminal wandb may ask for a key; elsewhere it does not wait.
  """
  with needs_extra("wandb", f"log.wandb={project!r}"):
    import wandb
  try:
    if wandb.setup().settings.mode in ("online", "shared"):
      wandb.login()
  except Exception as error:  # its settings raise others than wandb.Error
    raise _unusable(project, error) from error


class WandbRun:
  """A W&B run; a resumed run continues the same W&B run.

  W&B cannot overwrite a step. Steps that were logged before an interruption
  keep their first values.

  Args:
    project: W&B's name for a group of runs; created if it does not exist.
    workdir: its last part is the run's name; its file wandb_id has the run's
      id. wandb writes its files there, unless it is a bucket.
    config: all keys of the run.
    resumes: whether to continue the W&B run of wandb_id.
  """

  def __init__(
    self,
    project: str,
    workdir: epath.Path,
    config: Mapping[str, Any],
    *,
    resumes: bool,
  ):
    import wandb

    self._histogram = wandb.Histogram
    id_file = workdir / "wandb_id"
    if not (resumes and id_file.exists()):
      id_file.write_text(secrets.token_hex(4))
    try:
      self._run = wandb.init(
        project=project,
        name=workdir.name,
        id=id_file.read_text().strip(),
        resume="allow",
        config=dict(config),
        allow_val_change=True,  # a resumed run may have other values
        dir=None if in_bucket(workdir) else str(workdir),
      )
    except Exception as error:
      raise _unusable(project, error) from error

  def write(
    self,
    step: int,
    scalars: Mapping[str, float],
    histograms: Mapping[str, tuple[np.ndarray, np.ndarray]],
  ) -> None:
    """Logs a step. If W&B fails, the run continues with a warning.

    Histograms are [N] counts and [N + 1] finite edges.
    """
    try:
      if step >= self._run.step:
        charts = {
          name: self._histogram(np_histogram=bins)
          for name, bins in histograms.items()
        }
        self._run.log({**scalars, **charts}, step=step, commit=True)
    except Exception as error:
      logging.warning("step %d is not in W&B: %s", step, error)

  def close(self, *, failed: bool = False) -> None:
    """Waits for all uploads; W&B shows whether the run failed."""
    try:
      self._run.finish(exit_code=int(failed))
    except Exception as error:
      logging.warning("the end of the run is not in W&B: %s", error)


def _unusable(project: str, error: Exception) -> UserError:
  return UserError(
    f"log.wandb={project!r}: {error}; run `wandb login`, or set "
    "WANDB_MODE=offline to write files that `wandb sync` uploads"
  )
