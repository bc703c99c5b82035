"""Reads a file with one JSON object, such as config.json."""

import json
from typing import Any

from etils import epath

from gspo_jax.record.run_files import is_file
from gspo_jax.runtime.errors import UserError, with_reason


def read(path: epath.PathLike) -> dict[str, Any]:
  """The object of a file in a folder or bucket; UserError without one."""
  path = epath.Path(path)
  with with_reason(str(path)):
    if not is_file(path):
      reason = "expected a file" if path.exists() else "no such file"
      raise UserError(f"{path}: {reason}")
    text = path.read_bytes()
  try:
    raw = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise UserError(f"{path}: not JSON: {error}") from None
  if not isinstance(raw, dict):
    raise UserError(f"{path}: expected a JSON object, got {raw!r:.40}")
  return raw
