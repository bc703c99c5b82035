"""The flags of a command, and its exit codes."""

import re
import sys
from collections.abc import Callable

from absl import flags, logging
from ml_collections import config_flags

from gspo_jax.program import config_keys
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.identity import flatten

START = (
  "python -m gspo_jax.main --config=configs/tiny_cpu.py --workdir=runs/tiny"
)
CONFIG = config_flags.DEFINE_config_file(
  "config",
  None,
  "A file of configs/, perhaps with :argument.",
  lock_config=True,
)
WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where checkpoints, metrics and samples go."
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "HOST:PORT where process 0 listens; not on a TPU."
)
_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", None, "Processes of the job.", lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer(
  "process_id", None, "Which of them this is, from 0.", lower_bound=0
)


def on_hosts(work: Callable[[], int]) -> int:
  """Joins the other processes, if there are any, and calls `work`.

  Args:
    work: returns an exit code, the same on every process.

  Returns:
    That exit code, or 2 after a UserError.
  """
  # Not at the top: JAX takes seconds, and a mistaken flag needs none of it.
  from gspo_jax.runtime import multihost

  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)  # Orbax logs a lot at INFO
  multihost.start(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
  try:
    code = work()
  except multihost.AgreedError as error:
    return complain(error) if multihost.is_primary() else 2
  except UserError as error:  # perhaps of this process alone
    return complain(error)
  # Without it, a process that ends early waits only 30 s for the last save.
  multihost.barrier()
  return code


def complain(error: Exception) -> int:
  """Prints an error of the caller in one line; returns the exit code."""
  print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
  return 2


def parse(argv: list[str], start: str = START) -> list[str]:
  """Parses the flags of a command.

  Args:
    argv: the command line.
    start: an example of the command, with all flags that it requires.

  Raises:
    UserError: a flag is mistaken or missing; the error names it and `start`.
  """
  usage = f"see {start.partition(' --')[0]} --help"
  try:
    _check_keys(argv)
    rest = flags.FLAGS(argv)
  except UserError:
    raise
  except (AttributeError, KeyError) as error:
    raise _unknown_key(error) from error
  except (flags.Error, OSError, ValueError, TypeError) as error:
    # ml_collections puts a traceback into its message; the cause comes last.
    cause = str(error).strip().splitlines()[-1]
    raise UserError(f"{cause}; {usage}") from error
  if len(rest) > 1:
    raise UserError(
      f"unexpected argument {rest[1]!r}: flags are --name=value; {usage}"
    )
  for name in re.findall(r" --(\w+)=", start):
    if not flags.FLAGS[name].value:
      raise UserError(f"--{name} is missing; for a start: {start}")
  _check_processes()
  return rest


def _unknown_key(error: Exception) -> Exception:
  """A UserError if a config file sets a key that does not exist."""
  from gspo_jax.program.config import all_keys

  # ml_collections says 'paging', or 'Key "ahead" does not exist and ...'.
  key = re.match(
    r"""['"]*(?:Key ")?(\w+)(?:['"]+$|" does not exist)""", str(error)
  )
  if not key:
    return error
  hint = config_keys.hint(key[1], all_keys())
  return UserError(f"the config file sets {key[1]}: no such key; {hint}")


def _check_processes() -> None:
  """UserError unless all flags of a multi-process job are there, and agree."""
  together = (_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID)
  missing = [flag.name for flag in together if flag.value is None]
  if len(missing) == len(together):
    return
  if missing:
    raise UserError(
      f"--{missing[0]} is missing: --coordinator=HOST:PORT --num_processes=N "
      "--process_id=I belong together"
    )
  if not re.fullmatch(r".+:\d+", _COORDINATOR.value):
    raise UserError(f"--coordinator={_COORDINATOR.value}: expected HOST:PORT")
  if _PROCESS_ID.value >= _NUM_PROCESSES.value:
    raise UserError(
      f"--process_id={_PROCESS_ID.value}: expected 0 to "
      f"{_NUM_PROCESSES.value - 1}, under --num_processes"
    )


def _check_keys(argv: list[str]) -> None:
  """UserError for an override of a key that the config file does not have."""
  # A separate FlagValues: absl defines the flags of overrides only once.
  first = flags.FlagValues()
  config = config_flags.DEFINE_config_file(
    "config", flag_values=first, sys_argv=[]
  )
  first(argv, known_only=True)
  if config.value is None:
    return
  keys = flatten(config.value.to_dict()).keys()
  for flag in argv:
    override = re.match(r"--?(?:no)?config\.([^=]*)", flag)
    if override and override[1] not in keys:
      hint = config_keys.hint(override[1], keys)
      raise UserError(f"{flag[:80]}: no such key; {hint}")
