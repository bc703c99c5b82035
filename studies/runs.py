"""The runs of a study: trained once, kept, read."""

import hashlib
import json
import math
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from benchmarks.record import commit
from gspo_jax import train
from gspo_jax.configs import common
from gspo_jax.program.config import parse
from gspo_jax.record.identity import changes, flatten
from gspo_jax.runtime.errors import UserError
from studies import weight_errors

FOLDER = Path(__file__).parent


class Run(NamedTuple):
  """One run, as it left its folder.

  Attributes:
    config: what it was to do.
    folder: its workdir.
    rows: of metrics.jsonl, by step.
    distributions: of distributions.jsonl, by step, without its edges.
    seconds: that it took, over all attempts; the first to need a cold start
      has that in it.
    commit: of the code that ended it.
    failure: why it broke off before its last step; "" where it did not.
  """

  config: ConfigDict
  folder: Path
  rows: list[dict]
  distributions: list[dict]
  seconds: float
  commit: str
  failure: str

  def curve(self, key: str) -> list[list[float]]:
    """[step, value] of each row that has the key."""
    return [[r["step"], r[key]] for r in self.rows if r.get(key) is not None]

  def carried(self, key: str) -> list[list[float]]:
    """`curve` of a score; where the run broke off, at 0 on to its last step.

    A run that broke off has no policy left to score, and to leave it out would
    count the survivors only.
    """
    found = self.curve(key)
    if self.failure:
      every = self.config.eval.every if key.startswith("eval/") else 1
      begin = self.rows[-1]["step"] + 1 if self.rows else 1
      end = self.config.num_steps
      steps = range(begin, end + 1)
      scored = lambda step: step == end or (every and step % every == 0)
      found += [[step, 0.0] for step in steps if scored(step)]
    return found

  def mean(self, key: str) -> float:
    """Of the iterations that it had; NaN where there are none."""
    found = [value for _, value in self.curve(key)]
    return sum(found) / len(found) if found else math.nan


def cold_start(config: ConfigDict) -> str:
  """The name of its folder: alike where all is that it depends on.

  That it has no gate is part of it: with one, the questions would be, too.
  """
  c = _plain(config)
  c["model"].pop("exact", None)  # only rounds it
  rest = c["sampler"]["max_new_tokens"], c["data"]["max_prompt_length"]
  micro = c["learner"]["micro_batch_size"]
  parts = [c["model"], c["cold_start"], c["data"]["source"], rest, micro]
  return f"{_hash(parts)} seed={config.seed}"


def digest(config: ConfigDict, kept: dict | None = None) -> str:
  """A name for the run of this config, and what measuring it depends on."""
  return _hash([sorted(_chosen(_plain(config)).items()), kept])


def of_package(config: ConfigDict) -> ConfigDict:
  """Without `sampled_with`, the one key that only studies know."""
  return ConfigDict({k: v for k, v in config.items() if k != "sampled_with"})


def _chosen(plain: dict) -> dict:
  """By path, what is not as in common.py: keys that were added there since."""
  default = flatten(_plain(common.get_config()))
  same = lambda path, x: path in default and default[path] == x
  return {path: x for path, x in flatten(plain).items() if not same(path, x)}


def _hash(parts) -> str:
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]


def _plain(config) -> dict:
  return json.loads(config.to_json_best_effort())


def finish(config: ConfigDict, folder: Path) -> Run:
  """Trains, or goes on, unless that is done.

  Raises:
    UserError: the folder holds another run, or training says so.
    SystemExit: a SIGTERM came; everything is saved.
  """
  folder.mkdir(parents=True, exist_ok=True)
  saved, record = folder / "run_config.json", folder / "study.json"
  if saved.exists():
    was = json.loads(saved.read_text())
    now = parse(of_package(config)).as_json()
    if _chosen(was) != _chosen(now):
      raise UserError(
        f"{folder} holds a run of another config: "
        f"{'; '.join(changes(was, now))}; remove the folder or use another "
        "--workdir"
      )
  if not (record.exists() and json.loads(record.read_text())["finished"]):
    _go_on(config, folder, record)
  rows, (_, *distributions) = (
    [json.loads(line) for line in (folder / name).read_text().splitlines()]
    for name in ("metrics.jsonl", "distributions.jsonl")
  )
  found = json.loads(record.read_text())
  return Run(
    config,
    folder,
    rows,
    distributions,
    found["seconds"],
    found["commit"],
    found["failure"],
  )


def _go_on(config, folder, record: Path) -> None:
  """One attempt, whose seconds count however it ends."""
  before = json.loads(record.read_text())["seconds"] if record.exists() else 0.0
  began, failure, state = time.monotonic(), "", None
  try:
    with weight_errors.sampled_with(config.get("sampled_with", "")):
      state = train.train_and_evaluate(of_package(config), str(folder))
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


def write(path: Path, record: dict) -> None:
  """JSON, whole or not at all; see `plain`."""
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_suffix(".tmp")
  text = json.dumps(plain(record), indent=1, allow_nan=False)
  temporary.write_text(text + "\n")
  temporary.replace(path)


def plain(value):
  """As JSON has it: five digits, NaN and infinities None."""
  if isinstance(value, dict):
    return {k: plain(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [plain(v) for v in value]
  if isinstance(value, float):
    return float(f"{value:.5g}") if math.isfinite(value) else None
  return value
