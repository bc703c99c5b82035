"""One HTML page of a run, or of several, that needs nothing beside itself.

  python -m gspo_jax.report runs/tiny
  python -m gspo_jax.report runs/gspo runs/grpo --to=compared.html

Curves by subject, histograms, sample answers and the config; of several runs,
their curves over one another and what differs in their configs. A run that
still goes on may be looked at. The page is WORKDIR/report.html, or that of
--to. It loads nothing, and its policy forbids the browser to.

Exit codes: 0 done; 2 a mistake of the caller's, in one line.
"""

import argparse
import sys

from gspo_jax.report.page import write
from gspo_jax.runtime.errors import UserError


class _Parser(argparse.ArgumentParser):
  def error(self, message):
    raise UserError(
      f"{message}; for a start: python -m gspo_jax.report runs/tiny"
    )


def command() -> None:
  """The console's entry."""
  parser = _Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
  parser.add_argument("workdir", nargs="+", help="of a run; several: compared")
  parser.add_argument("--to", help="the page; of one run by default in WORKDIR")
  try:
    asked = parser.parse_args()
    print(write(asked.workdir, asked.to))
  except UserError as error:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
  command()
