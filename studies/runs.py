"""The runs of a study: trained once, kept, read; and what a study leaves.

A study is a folder here, with a config.py of one run and a run.py over all.
`python -m studies.NAME.run` writes studies/NAME/result.json and figure.png.
What it trains is kept in WORKDIR/NAME, and not trained again; a Ctrl-C or a
SIGTERM ends it, and the same command goes on. One study at a time in a WORKDIR:
they share the cold starts.
"""

import argparse
import hashlib
import importlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from absl import logging
from ml_collections import ConfigDict

from gspo_jax import train
from gspo_jax.errors import UserError
from gspo_jax.identity import changes

FOLDER = Path(__file__).parent


class Run(NamedTuple):
  """One run, as it left its workdir.

  Attributes:
    rows: of metrics.jsonl, by step.
    distributions: of distributions.jsonl, by step, without its edges.
    seconds: that it took, over all attempts; the first to need a cold start
      has that in it.
    commit: of the code that ended it.
    failure: why it ended before its last step; "" where it did not.
  """

  rows: list[dict]
  distributions: list[dict]
  seconds: float
  commit: str
  failure: str

  def curve(self, key: str) -> list[list[float]]:
    """[step, value] of each row that has the key."""
    return [[r["step"], r[key]] for r in self.rows if r.get(key) is not None]

  def mean(self, key: str, first: int, last: int) -> float:
    """Of the rows from step `first` to `last`; NaN where there are none."""
    found = [v for step, v in self.curve(key) if first <= step <= last]
    return sum(found) / len(found) if found else math.nan


class Study:
  """A study's flags, its runs, and its files.

  Args:
    name: of its folder.
    doc: of its run.py: the first line is what --help says.
    argv: flags; None: those of the command.

  Attributes:
    quick: the small version was asked for.
    plot: only the figure was asked for.
    figure: path of the figure.
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
    self.quick, self.plot, self._name = args.quick, args.plot, name
    self._workdir, self._command = args.workdir, parser.prog
    self._runs = args.workdir / name / ("quick" if args.quick else "")
    out = self._runs if args.quick else FOLDER / name
    self._result, self.figure = out / "result.json", out / "figure.png"
    self._trained: list[Run] = []
    logging.set_verbosity(logging.WARNING)  # Orbax tells its life at INFO
    if not jax.config.jax_compilation_cache_dir:
      compiled = str((args.workdir / "compiled").absolute())
      jax.config.update("jax_compilation_cache_dir", compiled)

  def train(self, argument: str) -> Run:
    """The run that the study's config.py makes of `argument`, and --quick."""
    module = importlib.import_module(f"studies.{self._name}.config")
    config = module.get_config(argument + (",quick=1" if self.quick else ""))
    if config.cold_start.steps:
      folder = self._workdir / "cold_starts" / cold_start(config)
      config.cold_start.dir = str(folder)
    print(f"\n== {self._name}: {argument}", flush=True)
    run = finish(config, self._runs / argument.replace(",", " "))
    self._trained.append(run)
    return run

  def write(self, *, planned: int, **findings) -> None:
    """result.json: the findings, of how many runs, and what they took."""
    record = {
      "command": self._command + (" --quick" if self.quick else ""),
      "commits": sorted({run.commit for run in self._trained}),
      "machine": machine(),
      "seconds": round(sum(run.seconds for run in self._trained)),
      "runs finished": len(self._trained),
      "runs planned": planned,
    }
    write(self._result, record | findings)

  def read(self) -> dict:
    """What `write` wrote, for the figure."""
    if not self._result.exists():
      raise UserError(f"{self._result}: not there yet; leave out --plot")
    return json.loads(self._result.read_text())


def command(main: Callable[[], None]) -> None:
  """Runs a study's main; a mistake of the caller's is one line."""
  try:
    main()
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


def cold_start(config) -> str:
  """The name of its folder: alike where all is that it depends on."""
  c = _plain(config)
  rest = c["sampler"]["max_new_tokens"], c["data"]["max_prompt_length"]
  gate = c["data"]["chain_steps"], c["eval"]["prompts"]
  parts = json.dumps([c["model"], c["cold_start"] | {"dir": ""}, rest, gate])
  return f"{hashlib.sha256(parts.encode()).hexdigest()[:8]} seed={config.seed}"


def _plain(config) -> dict:
  return json.loads(config.to_json_best_effort())


def finish(config: ConfigDict, workdir: Path) -> Run:
  """Trains, or goes on, unless that is done.

  Raises:
    UserError: the workdir holds another run, or training says so.
    SystemExit: a SIGTERM came; everything is saved.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  saved, record = workdir / "run_config.json", workdir / "study.json"
  if saved.exists():
    was, now = json.loads(saved.read_text()), _plain(config)
    was["cold_start"]["dir"] = now["cold_start"]["dir"]
    if was != now:
      raise UserError(
        f"{workdir} holds a run of another config: "
        f"{'; '.join(changes(was, now))}; remove the folder or use another "
        "--workdir"
      )
  if not (record.exists() and json.loads(record.read_text())["finished"]):
    _go_on(config, workdir, record)
  rows, (_, *distributions) = (
    [json.loads(line) for line in (workdir / name).read_text().splitlines()]
    for name in ("metrics.jsonl", "distributions.jsonl")
  )
  found = json.loads(record.read_text())
  return Run(
    rows, distributions, found["seconds"], found["commit"], found["failure"]
  )


def _go_on(config, workdir, record: Path) -> None:
  """One attempt, whose seconds count however it ends."""
  before = json.loads(record.read_text())["seconds"] if record.exists() else 0.0
  began, failure, state = time.monotonic(), "", None
  try:
    state = train.train_and_evaluate(config, str(workdir))
  except FloatingPointError as error:
    failure = str(error)
  finally:
    finished = state is not None or bool(failure)
    seconds = before + time.monotonic() - began
    values = {"seconds": round(seconds, 1), "commit": commit()}
    write(record, values | {"finished": finished, "failure": failure})
    jax.clear_caches()  # else each run's programs stay in memory
  if not finished:
    sys.exit("stopped; the same command goes on")


def commit() -> str:
  """Of the repository, and whether it was changed since."""
  git = lambda *words: subprocess.run(
    ["git", *words], cwd=FOLDER, capture_output=True, text=True
  ).stdout.strip()
  changed = " and changes" if git("status", "--porcelain") else ""
  return (git("rev-parse", "--short", "HEAD") or "none") + changed


def machine() -> str:
  """What the process runs on, in words."""
  devices = jax.devices()
  host = f"{os.cpu_count()} {platform.machine()} cores"
  if devices[0].platform == "cpu":
    return host
  return f"{len(devices)} x {devices[0].device_kind}, {host}"


def write(path: Path, record: dict) -> None:
  """JSON, whole or not at all; NaN and infinities as null."""
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_suffix(".tmp")
  text = json.dumps(_finite(record), indent=1, allow_nan=False)
  temporary.write_text(text + "\n")
  temporary.replace(path)


def _finite(value):
  if isinstance(value, dict):
    return {k: _finite(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(v) for v in value]
  if isinstance(value, float):
    return float(f"{value:.5g}") if math.isfinite(value) else None
  return value
