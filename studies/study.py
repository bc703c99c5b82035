"""A study: its flags, its runs one after another, and what it leaves.

A study is a folder here: config.py is one run, run.py all of them, figure.py
draws. `python -m studies.NAME.run` writes studies/NAME/result.json and
figure.png. What it trains is kept in WORKDIR/NAME, and not trained again; a
Ctrl-C or a SIGTERM ends it, and the same command goes on. One study at a time
in a WORKDIR: they share the cold starts.
"""

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from absl import logging

from gspo_jax.errors import UserError
from studies import arguments
from studies.runs import FOLDER, Run, cold_start, finish, write


class Study:
  """One study, as the command line asks for it.

  Args:
    name: of its folder.
    doc: of its run.py: the first line is what --help says.
    argv: flags; None: those of the command.

  Attributes:
    quick: the small version was asked for.
  """

  def __init__(self, name: str, doc: str, argv: Sequence[str] | None = None):
    parser = argparse.ArgumentParser(
      prog=f"python -m studies.{name}.run", description=doc.splitlines()[0]
    )
    parser.add_argument(
      "--workdir",
      type=Path,
      default=Path("runs/studies"),
      help="where runs are kept, WORKDIR/NAME, and cold starts",
    )
    parser.add_argument(
      "--quick",
      action="store_true",
      help="a tiny version; its result and figure go to WORKDIR/NAME/quick",
    )
    parser.add_argument(
      "--plot", action="store_true", help="redraw the figure, run nothing"
    )
    args = parser.parse_args(argv)
    self.quick, self._plot, self._name = args.quick, args.plot, name
    self._workdir, self._command = args.workdir, parser.prog
    self._runs = args.workdir / name / ("quick" if args.quick else "")
    self._out = self._runs if args.quick else FOLDER / name

  def sweep(
    self,
    planned: Sequence[dict],
    measure: Callable[[Run], dict],
    summarize: Callable[[list[dict]], dict],
    *,
    kept: dict | None = None,
  ) -> None:
    """Trains, measures, sums up: result.json after each run, then the figure.

    Args:
      planned: the arguments of each run's config, in their order.
      measure: what result.json says of a run.
      summarize: what it says of all of them so far, each its argument with
        what was measured.
      kept: where measuring takes long, what it depends on besides the run: it
        is kept in the run's folder, and holds while this does.
    """
    results, took, commits = [], 0.0, set()
    for one in () if self._plot else planned:
      run = self.train(arguments.write(**one))
      found, seconds = measured(run, measure, kept)
      results.append(one | found)
      took += run.seconds + seconds
      commits.add(run.commit)
      record = {
        "command": self._command + (" --quick" if self.quick else ""),
        "commits": sorted(commits),
        "machine": machine(),
        "seconds": round(took),
        "runs finished": len(results),
        "runs planned": len(planned),
      }
      findings = summarize(results) | {"runs": results}
      write(self._out / "result.json", record | findings)
    # Here, so that a run needs no matplotlib.
    figure = importlib.import_module(f"studies.{self._name}.figure")
    figure.draw(self._read(), self._out / "figure.png")

  def train(self, argument: str) -> Run:
    """The run that the study's config.py makes of `argument`, and --quick."""
    logging.set_verbosity(logging.WARNING)  # Orbax tells its life at INFO
    if not jax.config.jax_compilation_cache_dir:
      compiled = str((self._workdir / "compiled").absolute())
      jax.config.update("jax_compilation_cache_dir", compiled)
    module = importlib.import_module(f"studies.{self._name}.config")
    config = module.get_config(argument + (",quick=1" if self.quick else ""))
    folder = self._workdir / "cold_starts" / cold_start(config)
    config.cold_start.dir = str(folder)
    print(f"\n== {self._name}: {argument}", flush=True)
    return finish(config, self._runs / argument.replace(",", " "))

  def _read(self) -> dict:
    path = self._out / "result.json"
    if not path.exists():
      raise UserError(f"{path}: not there yet; leave out --plot")
    return json.loads(path.read_text())


def measured(run: Run, measure, kept: dict | None) -> tuple[dict, float]:
  """What `measure` says of a run, and the seconds that it took; see `sweep`."""
  path, kept = run.folder / "measured.json", json.dumps(kept)
  if kept != "null" and path.exists():
    record = json.loads(path.read_text())
    if record["kept"] == kept:
      return record["found"], record["seconds"]
  began = time.monotonic()
  found = measure(run)
  seconds = time.monotonic() - began
  if kept != "null":
    write(path, {"kept": kept, "seconds": seconds, "found": found})
    found = json.loads(path.read_text())["found"]  # as the next time
    jax.clear_caches()
  return found, seconds


def command(main: Callable[[], None]) -> None:
  """Runs a study's main; a mistake of the caller's is one line."""
  try:
    main()
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


def machine() -> str:
  """What the process runs on, in words."""
  devices = jax.devices()
  host = f"{os.cpu_count()} {platform.machine()} cores"
  if devices[0].platform == "cpu":
    return host
  return f"{len(devices)} x {devices[0].device_kind}, {host}"
