"""Reads the workdir of a run: metrics, distributions, samples and config."""

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from gspo_jax import losses
from gspo_jax.runtime import json_lines, run_files
from gspo_jax.runtime.errors import UserError


class Series(NamedTuple):
  """A scalar over the steps at which it was written."""

  steps: np.ndarray  # [N] int, ascending
  values: np.ndarray  # [N] float; NaN where the run wrote null


class Spread(NamedTuple):
  """A distribution: counts between edges, or one number for each layer."""

  steps: np.ndarray  # [N] int, ascending
  values: np.ndarray  # [N, bins] float
  edges: np.ndarray | None  # [bins + 1]; None for numbers of layers


class RunRecord(NamedTuple):
  """The files of a run. Attributes are empty if their file is missing.

  Attributes:
    name: the folder, or the end of its path that differs from other runs.
    scalars: by metric.
    spreads: by metric.
    samples: the sample responses by step.
    config: nested dicts.
    last_step: the last step with metrics; 0 if there is none.
  """

  name: str
  scalars: dict[str, Series]
  spreads: dict[str, Spread]
  samples: dict[int, list[run_files.Sample]]
  config: dict
  last_step: int

  def first(self, metric: str) -> float:
    """The first finite value; NaN if there is none."""
    return self._end(metric, 0)

  def last(self, metric: str) -> float:
    """The last finite value; NaN if there is none."""
    return self._end(metric, -1)

  def _end(self, metric: str, index: int) -> float:
    series = self.scalars.get(metric)
    finite = [] if series is None else series.values[~np.isnan(series.values)]
    return float(finite[index]) if len(finite) else float("nan")

  def seconds(self) -> float:
    """Time of all iterations, without evaluations and the cold start."""
    series = self.scalars.get("time/iteration")
    return float("nan") if series is None else float(np.nansum(series.values))

  def without_signal(self) -> np.ndarray:
    """Steps without advantages: in no group did the rewards differ.

    Empty with a critic or with a KL term in the reward, where equal rewards
    give advantages, too.
    """
    mixed = self.scalars.get("reward/mixed_groups")
    objective = self.config.get("objective", {})
    kl_in_reward = (
      objective.get("kl_coef") and objective.get("kl_estimator") == "k1"
    )
    if mixed is None or kl_in_reward or objective.get("name") == "ppo":
      return np.array([], int)
    return mixed.steps[mixed.values == 0]

  def clips(self, unit: str) -> dict[str, float]:
    """The log-ratios beyond which the method clips.

    Args:
      unit: "token" or "sequence".

    Returns:
      {"clip low": ..., "clip high": ...}; {} if the method is unknown or does
      not clip the ratios of this unit.
    """
    objective = self.config.get("objective", {})
    name = objective.get("name")
    if losses.CLIPPED.get(name) != unit:
      return {}
    defaults = getattr(losses, f"{name}_loss").__kwdefaults__
    low, high = (
      defaults[key] if objective.get(key, -1) == -1 else objective[key]
      for key in ("clip_low", "clip_high")
    )
    if name in losses.CLIP_LOGS:
      return {"clip low": -low, "clip high": high}
    # A ratio is above 0, so a clip_low of 1 or more never clips.
    lower = {"clip low": math.log1p(-low)} if low < 1 else {}
    return lower | {"clip high": math.log1p(high)}


def read(workdirs: Sequence[str]) -> list[RunRecord]:
  """Reads runs, in this order.

  Raises:
    UserError: a folder has no run, or a line of its files is bad. The last line
      may be cut short: the run may still be writing.
  """
  return [
    _read(epath.Path(folder), name)
    for folder, name in zip(workdirs, names(workdirs), strict=True)
  ]


def names(workdirs: Sequence[str]) -> list[str]:
  """The ends of the paths, as short as they are all different."""
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
  lines = json_lines.read(folder / "metrics.jsonl", drop_partial=True)
  records = []
  for where, record in lines:
    run_files.step_of(record, where)  # raises if there is none
    records.append(record)
  config = folder / "run_config.json"
  return RunRecord(
    name=name,
    scalars=_series(records),
    spreads=_spreads(folder / "distributions.jsonl"),
    samples=run_files.read_samples(folder / "samples"),
    config=json.loads(config.read_text()) if config.exists() else {},
    last_step=max((record["step"] for record in records), default=0),
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


def _numbers(values: Sequence) -> np.ndarray:
  return np.array([np.nan if v is None else v for v in values], float)


def _series(records: Sequence[dict]) -> dict[str, Series]:
  points: dict[str, tuple[list, list]] = {}
  for record in records:
    for metric, value in record.items():
      if metric != "step":
        steps, values = points.setdefault(metric, ([], []))
        steps.append(record["step"])
        values.append(value)
  return {k: Series(np.array(s), _numbers(v)) for k, (s, v) in points.items()}


def _spreads(path: epath.Path) -> dict[str, Spread]:
  lines = json_lines.read(path, drop_partial=True) if path.exists() else ()
  edges, points = None, {}
  for where, record in lines:
    if "edges" in record:
      edges = _numbers(record["edges"])
      continue
    step = run_files.step_of(record, where)
    for metric, values in record.items():
      if metric != "step":
        points.setdefault(metric, []).append((step, _numbers(values)))
  return {
    metric: _spread(metric, pairs, edges) for metric, pairs in points.items()
  }


def _spread(metric: str, pairs, edges: np.ndarray | None) -> Spread:
  width = len(pairs[-1][1])
  pairs = [pair for pair in pairs if len(pair[1]) == width]
  counted = edges is not None and run_files.counts_over_edges(
    metric, pairs[0][1], edges
  )
  return Spread(
    np.array([step for step, _ in pairs]),
    np.stack([values for _, values in pairs]),
    edges if counted else None,
  )
