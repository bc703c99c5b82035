"""Flags and exit codes of the commands that prepare data or a model."""

import sys
from collections.abc import Callable, Sequence

from absl import app, flags

from gspo_jax.runtime.errors import UserError, complain


def run(
  work: Callable[[], None], required: Sequence[flags.FlagHolder], start: str
) -> None:
  """Runs a command; exits with code 2 and one line on a mistake of the user.

  `work` reads the flags; `required` must be given; `start` is an example.
  """

  def parse(argv):
    try:
      rest = flags.FLAGS(argv)
    except flags.Error as error:
      raise UserError(str(error)) from error
    if len(rest) > 1:
      raise UserError(
        f"unexpected argument {rest[1]!r}: flags are --name=value"
      )
    for flag in required:
      if not flag.value:
        raise UserError(f"--{flag.name} is missing; for a start: {start}")
    return rest

  try:
    app.run(lambda argv: work(), flags_parser=parse)
  except UserError as error:
    sys.exit(complain(error))
