"""A study: its flags, its runs one after another, and what it leaves.

A study is a folder here: config.py is one run, run.py all of them, figure.py
draws. `python -m studies.NAME.run` writes studies/NAME/result.json and
figure.png. A run that is in result.json is not made again, on whatever machine
that was; what is being trained is kept in WORKDIR/NAME. A Ctrl-C or a SIGTERM
ends it, and the same command goes on. One study at a time in a WORKDIR: they
share the cold starts.
"""

import argparse
import functools
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
from ml_collections import ConfigDict

from gspo_jax.runtime.errors import UserError
from studies import arguments
from studies.runs import (
  FOLDER,
  Run,
  cold_start,
  digest,
  finish,
  plain,
  write,
)


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
    planned: Sequence[dict] | Callable[[list[dict]], Sequence[dict]],
    measure: Callable[[Run], dict],
    summarize: Callable[[list[dict]], dict],
    *,
    kept: dict | None = None,
  ) -> None:
    """Trains, measures, sums up: result.json after each run, then the figure.

    Args:
      planned: the arguments of each run's config, in their order; or what
        gives them from the results so far, and is asked again after each run.
      measure: what result.json says of a run.
      summarize: what it says of all of them so far, each its argument with
        what was measured.
      kept: what measuring depends on besides the run.
    """
    if not self._plot:
      self._make_all(planned, measure, summarize, kept)
    # Here, so that a run needs no matplotlib.
    figure = importlib.import_module(f"studies.{self._name}.figure")
    figure.draw(self._read(), self._out / "figure.png")

  def _make_all(self, planned, measure, summarize, kept) -> None:
    """Makes the runs that result.json lacks, and loses none that it has."""
    known = self._known()
    name_of = functools.cache(lambda text: digest(self._config(text), kept))
    while True:
      every = planned(list(known.values())) if callable(planned) else planned
      names = [name_of(arguments.write(**one)) for one in every]
      found = lambda names=names: [known[n] for n in names if n in known]
      lacking = [i for i, name in enumerate(names) if name not in known]
      if not lacking:
        return self._write(found(), names, summarize)
      one, name = every[lacking[0]], names[lacking[0]]
      config = self._config(arguments.write(**one))
      known[name] = one | {"run": name} | self._make(config, one, measure)
      self._write(found(), names, summarize)

  def _write(self, results, planned, summarize) -> None:
    record = {
      "command": self._command + (" --quick" if self.quick else ""),
      "commits": sorted({row["commit"] for row in results}),
      "machines": sorted({row["machine"] for row in results}),
      "seconds": round(sum(row["seconds"] for row in results)),
      "runs finished": len(results),
      "runs planned": len(planned),
    }
    findings = summarize(results) | {"runs": results}
    write(self._out / "result.json", record | findings)

  def _config(self, argument: str) -> ConfigDict:
    """That which config.py makes of `argument`, and --quick."""
    module = importlib.import_module(f"studies.{self._name}.config")
    return module.get_config(argument + (",quick=1" if self.quick else ""))

  def _make(self, config, one, measure) -> dict:
    """Trains and measures: what result.json says of a run."""
    run = self.train(config, arguments.write(**one))
    began = time.monotonic()
    found = measure(run)
    jax.clear_caches()
    took = {
      "seconds": round(run.seconds + time.monotonic() - began, 1),
      "commit": run.commit,
      "machine": machine(),
    }
    return plain(took | found)

  def train(self, config: ConfigDict, name: str) -> Run:
    """The run of this config, in a folder of this name."""
    logging.set_verbosity(logging.WARNING)  # Orbax tells its life at INFO
    if not jax.config.jax_compilation_cache_dir:
      compiled = str((self._workdir / "compiled").absolute())
      jax.config.update("jax_compilation_cache_dir", compiled)
    print(f"\n== {self._name}: {name}", flush=True)
    folder = self._runs / name.replace(",", " ")
    # Runs with the same cold start share its folder.
    shared = self._workdir / "cold_starts" / cold_start(config)
    for made in (folder, shared):
      made.mkdir(parents=True, exist_ok=True)
    if not (folder / "cold_start").exists():
      (folder / "cold_start").symlink_to(shared.absolute())
    return finish(config, folder)

  def _known(self) -> dict[str, dict]:
    """By digest, the runs that result.json has."""
    if not (self._out / "result.json").exists():
      return {}
    return {row["run"]: row for row in self._read()["runs"]}

  def _read(self) -> dict:
    path = self._out / "result.json"
    if not path.exists():
      raise UserError(f"{path}: not there yet; leave out --plot")
    return json.loads(path.read_text())


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
