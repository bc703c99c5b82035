"""Trains a policy: flags in, an exit code out.

  python -m gspo_jax.main --config=configs/tiny_cpu.py --workdir=runs/tiny

The console command gspo-jax is the same. `--help` lists every key of a config.

On several hosts the same command on each, and the same workdir for all. On a
Cloud TPU slice they find one another; elsewhere each needs
`--coordinator=HOST:PORT --num_processes=N --process_id=I`.

Exit codes, the same on every host: 0 done; 75 (EX_TEMPFAIL of sysexits.h)
stopped by SIGTERM before the last step with everything saved, for a scheduler
to start the same command again; 2 a mistake of the caller's, in one line;
anything else is a fault or an outage, with its traceback.
"""

import signal
import sys

from absl import app

from gspo_jax.program.command import (
  CONFIG,
  START,
  WORKDIR,
  on_hosts,
  parse,
)
from gspo_jax.runtime.errors import UserError, complain

INTERRUPTED = 75


def main() -> None:
  """The console's entry."""
  sys.path.append("")  # rewards and data of the user's, as with `python -m`
  try:
    app.run(_main, flags_parser=_parse)
  except UserError as error:
    sys.exit(complain(error))


def _parse(argv):
  return parse(argv, START, __doc__)


def _main(argv) -> int:
  def work():
    from gspo_jax import train

    state = train.train_and_evaluate(CONFIG.value, WORKDIR.value)
    # All is saved: a SIGTERM while the process ends must not change its code.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return INTERRUPTED if state is None else 0

  return on_hosts(work)


if __name__ == "__main__":
  main()
