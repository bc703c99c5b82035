"""Writes one HTML page about a run or several; it needs no other file.

  python -m gspo_jax.report runs/tiny
  python -m gspo_jax.report runs/gspo runs/grpo --to=compared.html

The page, WORKDIR/report.html by default, has charts of all metrics (see
docs/metrics.md), histograms, tables, sample responses and the config. Several
runs are overlaid, and the differences of their configs listed. The runs need
not be finished.

Drag to zoom, double-click to go back, click the camera for a PNG file. A curve
of more than 1,000 steps shows the smallest and the largest value in each of 500
stretches. The page contains plotly.js (about 5 MB) and loads nothing; its
content security policy forbids it. Needs `pip install -e '.[report]'`.

Exit codes: 0 done; 2 a mistake of the user, in one line.
"""

import argparse
import sys

from gspo_jax.runtime.errors import UserError, complain, needs_extra


class _Parser(argparse.ArgumentParser):
  def error(self, message):
    raise UserError(
      f"{message}; for a start: python -m gspo_jax.report runs/tiny"
    )


def main() -> None:
  parser = _Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
  parser.add_argument(
    "workdir", nargs="+", help="of a run; several are compared"
  )
  parser.add_argument(
    "--to", help="file of the page; for one run WORKDIR/report.html by default"
  )
  try:
    arguments = parser.parse_args()
    with needs_extra("report", "the report"):
      from gspo_jax.report import page
    print(page.write(arguments.workdir, arguments.to))
  except UserError as error:
    sys.exit(complain(error))


if __name__ == "__main__":
  main()
