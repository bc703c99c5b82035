"""Finished states in the user's cache folder, for runs in other workdirs."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from gspo_jax.record.checkpoint import Checkpoints, Restored
from gspo_jax.runtime.errors import UserError

NEWEST = 4  # entries of a folder that stay
MAX_BYTES = 2**28  # of an entry


class Kept:
  """The state whose arrays `key`, a JSON object, decides to the last bit.

  It is an entry of `folder`, which other processes may use at the same time. An
  entry that cannot be read or written costs a line, not the run.
  """

  def __init__(self, folder: Path, key: dict):
    text = json.dumps(key, sort_keys=True)
    self._folder = folder
    self.entry = folder / hashlib.sha256(text.encode()).hexdigest()

  def restore(self, abstract_state: Any, accept: Callable) -> Restored | None:
    """As `Checkpoints.restore`; an entry that fails its checks is deleted."""
    if not self.entry.exists():
      return None
    try:
      with Checkpoints(self.entry) as checkpoints:
        restored = checkpoints.restore(abstract_state, accept)
      if restored is None:
        raise UserError("it is empty")
      os.utime(self.entry)
    except (OSError, UserError) as error:
      print(f"{self.entry} is not used: {error}", flush=True)
      shutil.rmtree(self.entry, ignore_errors=True)
      return None
    return restored

  def save(self, step: int, state: Any, metadata: dict[str, Any]) -> None:
    """As `Checkpoints.save`, and waits; does nothing if the state is large."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    if size > MAX_BYTES or self.entry.exists():
      return
    try:
      self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
      with tempfile.TemporaryDirectory(dir=self._folder) as temporary:
        whole = Path(temporary, "whole")
        with Checkpoints(whole, keep=1) as checkpoints:
          checkpoints.save(step, state, metadata)
        whole.rename(self.entry)
      found = self._folder.glob(64 * "?")  # without temporary ones
      entries = sorted(found, key=os.path.getmtime)
    except (OSError, RuntimeError, UserError) as error:
      if not self.entry.exists():  # else another run was first
        print(f"{self.entry} is not kept: {error}", flush=True)
      return
    for old in entries[:-NEWEST]:
      shutil.rmtree(old, ignore_errors=True)
