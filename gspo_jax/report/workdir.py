"""Reads the workdir of a run: metrics, distributions, samples and config."""

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from gspo_jax import losses
from gspo_jax.record import json_file, json_lines, run_files
from gspo_jax.record.identity import flatten
from gspo_jax.runtime import spec as specs
from gspo_jax.runtime.errors import UserError, content_of

# Config values that the page reads; sections come before their keys.
_KINDS = {
  "num_steps": int,
  "model": dict,
  "model.checkpoint": str,
  "model.variant": str,
  "objective": dict,
  "objective.name": str,
  "objective.kl_estimator": str,
  "objective.kl_coef": int | float,
}


class Series(NamedTuple):
  steps: np.ndarray  # [N] int, ascending
  values: np.ndarray  # [N] float; NaN where the run wrote null

  def finite(self) -> np.ndarray:
    """The values without NaN; [NaN] if all are NaN."""
    values = self.values[~np.isnan(self.values)]
    return values if len(values) else np.array([np.nan])


class Spread(NamedTuple):
  """A distribution: counts between edges, or one number for each layer."""

  steps: np.ndarray  # [N] int, ascending
  values: np.ndarray  # [N, bins] float
  edges: np.ndarray | None  # [bins + 1]; None for numbers by layer


class RunRecord(NamedTuple):
  """The files of a run; the field of a missing file is empty."""

  name: str  # the end of the path, unique among the runs
  scalars: dict[str, Series]  # by metric
  spreads: dict[str, Spread]  # by metric
  samples: dict[int, list[run_files.Sample]]  # by step
  config: dict  # nested
  last_step: int  # with metrics; 0 without

  def without_signal(self) -> np.ndarray:
    """Steps without advantages: in every group all rewards were equal.

    Empty with a critic or a KL term in the reward, which give advantages even
    then.
    """
    mixed = self.scalars.get("reward/mixed_groups")
    objective = self.config.get("objective", {})
    kl_in_reward = (
      objective.get("kl_coef") and objective.get("kl_estimator") == "k1"
    )
    method = losses.METHODS.get(objective.get("name", "").partition(":")[0])
    if mixed is None or kl_in_reward or (method and method.critic):
      return np.array([], int)
    return mixed.steps[mixed.values == 0]

  def clips(self, unit: str) -> dict[str, float]:
    """The log-ratios at which the method clips: "clip low", "clip high".

    `unit` is "token" or "sequence". {} if the method is unknown or does not
    clip the ratios of this unit.
    """
    name, _, text = (
      self.config.get("objective", {}).get("name", "").partition(":")
    )
    method = losses.METHODS.get(name)
    if method is None or not method.clips or method.unit != unit:
      return {}
    numbers = method.numbers
    if text:
      given = re.findall(r"(\w+)\s*=", text)
      numbers |= specs.values(name, given, text, "method")
    low, high = numbers["clip_low"], numbers["clip_high"]
    if method.clips == "log_ratio":
      return {"clip low": -low, "clip high": high}
    # A ratio is above 0, so a clip_low of 1 or more never clips.
    lower = {"clip low": math.log1p(-low)} if low < 1 else {}
    return lower | {"clip high": math.log1p(high)}


def read(workdirs: Sequence[str]) -> list[RunRecord]:
  """Reads runs; the last line of a file may be unfinished."""
  return [
    _read(epath.Path(folder), name)
    for folder, name in zip(workdirs, names(workdirs), strict=True)
  ]


def names(workdirs: Sequence[str]) -> list[str]:
  """The shortest ends of the paths that are all different."""
  parts = [
    [p for p in str(w).split("/") if p not in ("", ".")] for w in workdirs
  ]
  for n in range(1, max(map(len, parts), default=0) + 1):
    short = ["/".join(p[-n:]) for p in parts]
    if len(set(short)) == len(short):
      return short
  return [f"{'/'.join(p)} ({i})" for i, p in enumerate(parts, 1)]


def _read(folder: epath.Path, name: str) -> RunRecord:
  if not (folder / "metrics.jsonl").exists():
    raise UserError(f"{str(folder)!r} has no run: {_hint(folder)}")
  scalars = {
    metric: Series(*map(np.array, zip(*points, strict=True)))
    for metric, points in _points(folder / "metrics.jsonl", _number).items()
  }
  config = folder / "run_config.json"
  return RunRecord(
    name=name,
    scalars=scalars,
    spreads=_spreads(folder / "distributions.jsonl"),
    samples=run_files.read_samples(folder / "samples"),
    config=_config(config) if config.exists() else {},
    last_step=max((int(s.steps.max()) for s in scalars.values()), default=0),
  )


def _hint(folder: epath.Path) -> str:
  expected = "expected the --workdir of a run, with a metrics.jsonl"
  if not folder.is_dir():
    return f"there is no such folder; {expected}"
  below = sorted(
    p.name for p in folder.iterdir() if (p / "metrics.jsonl").exists()
  )
  return (
    f"{expected}, such as {str(folder / below[0])!r}" if below else expected
  )


def _config(path: epath.Path) -> dict:
  config = json_file.read(path)
  with content_of(f"{path}: not the config of a run"):
    flatten(config)
  for key, kind in _KINDS.items():
    section, _, name = key.rpartition(".")
    values = config.get(section, {}) if section else config
    if name in values and not _is_a(kind, values[name]):
      raise UserError(
        f"{path}: {key}={str(values[name])[:40]}: expected "
        f"{getattr(kind, '__name__', 'a number')}"
      )
  return config


def _is_a(kind, value) -> bool:
  """Whether a value has this type; numbers are finite and at least -1."""
  fits = not isinstance(value, int | float) or -1 <= value < math.inf
  return isinstance(value, kind) and fits


def _number(value, name: str, place: str) -> float:
  if value is None:
    return math.nan
  if isinstance(value, int | float):
    with contextlib.suppress(OverflowError):
      return float(value) if math.isfinite(value) else math.nan
  raise UserError(
    f"{place}: {name}={str(value)[:40]}: expected a number or null"
  )


def _numbers(values, name: str, place: str) -> np.ndarray:
  if not (isinstance(values, list) and values):
    raise UserError(
      f"{place}: {name}={str(values)[:40]}: expected a list of numbers"
    )
  return np.array([_number(v, name, place) for v in values])


def _points(path: epath.Path, read: Callable) -> dict[str, list[tuple]]:
  """Each value with its step, by metric; `edges` are at step 0."""
  lines = json_lines.read(path, drop_partial=True) if path.exists() else ()
  points: dict[str, list[tuple]] = {}
  for place, record in lines:
    step = 0 if "edges" in record else run_files.step_of(record, place)
    for metric, value in record.items():
      if metric != "step":
        points.setdefault(metric, []).append((step, read(value, metric, place)))
  return points


def _spreads(path: epath.Path) -> dict[str, Spread]:
  points, spreads = _points(path, _numbers), {}
  _, edges = points.pop("edges", [(0, None)])[-1]
  for metric, pairs in points.items():
    width = len(pairs[-1][1])
    pairs = [pair for pair in pairs if len(pair[1]) == width]
    steps, values = map(np.array, zip(*pairs, strict=True))
    counted = edges is not None and run_files.counts_over_edges(
      metric, values[0], edges
    )
    spreads[metric] = Spread(steps, values, edges if counted else None)
  return spreads
