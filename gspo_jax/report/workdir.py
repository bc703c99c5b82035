"""What a run's folder tells a reader: numbers, distributions, texts, config."""

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from gspo_jax import losses
from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.run_files import counts_over_edges

# Whose ratio a method clips. The others have no range on either side of 1.
_CLIPPED = {
  "gspo": "sequence",
  "gspo_token": "sequence",
  "grpo": "token",
  "dr_grpo": "token",
  "dapo": "token",
  "ppo": "token",
  "gmpo": "token",
  "rspo": "token",
}
_IN_LOGS = ("gmpo", "rspo")  # clip log-ratios, the others ratios


class Series(NamedTuple):
  """A number at the steps at which it was written."""

  steps: np.ndarray  # [N] int, ascending
  values: np.ndarray  # [N] float; NaN where the run wrote null


class Spread(NamedTuple):
  """Many numbers a step: counts between edges, or a number a layer."""

  steps: np.ndarray  # [N] int, ascending
  values: np.ndarray  # [N, bins] float
  edges: np.ndarray | None  # [bins + 1]; None: one number a layer


class RunRecord(NamedTuple):
  """Attributes are empty where the folder has nothing of the kind.

  Attributes:
    name: of the folder, or as much of its path as tells it from the others.
    scalars: by metric.
    spreads: by metric.
    samples: the text of a step's sample answers, by step.
    config: as nested dicts.
    last_step: the newest that wrote a row; 0 before any.
  """

  name: str
  scalars: dict[str, Series]
  spreads: dict[str, Spread]
  samples: dict[int, str]
  config: dict
  last_step: int

  def first(self, metric: str) -> float:
    """The oldest finite value; NaN without one."""
    return self._end(metric, 0)

  def last(self, metric: str) -> float:
    """The newest finite value; NaN without one."""
    return self._end(metric, -1)

  def _end(self, metric: str, index: int) -> float:
    found = self.scalars.get(metric)
    finite = [] if found is None else found.values[~np.isnan(found.values)]
    return float(finite[index]) if len(finite) else float("nan")

  def seconds(self) -> float:
    """In iterations, evaluations and the cold start not counted."""
    found = self.scalars.get("time/iteration")
    return float("nan") if found is None else float(np.nansum(found.values))

  def without_signal(self) -> np.ndarray:
    """Steps at which no group had differing rewards: no advantage, no signal.

    Empty with a critic, or a KL in the reward: these teach of equal rewards.
    """
    found = self.scalars.get("reward/mixed_groups")
    asked = self.config.get("objective", {})
    in_reward = asked.get("kl_coef") and asked.get("kl_estimator") == "k1"
    if found is None or in_reward or asked.get("name") == "ppo":
      return np.array([], int)
    return found.steps[found.values == 0]

  def clips(self, unit: str) -> dict[str, float]:
    """The log-ratios beyond which a "token" or a "sequence" is clipped.

    {} where the method clips none, or those of the other unit, or is unknown.
    """
    asked = self.config.get("objective", {})
    name = asked.get("name")
    if _CLIPPED.get(name) != unit:
      return {}
    own = getattr(losses, f"{name}_loss").__kwdefaults__
    low, high = (
      own[key] if asked.get(key, -1) == -1 else asked[key]
      for key in ("clip_low", "clip_high")
    )
    if name in _IN_LOGS:
      return {"clip low": -low, "clip high": high}
    # A ratio does not reach 0.
    found = {"clip low": math.log1p(-low)} if low < 1 else {}
    return found | {"clip high": math.log1p(high)}


def read(workdirs: Sequence[str]) -> list[RunRecord]:
  """The runs, in this order.

  Raises:
    UserError: a folder that holds no run, or one whose rows are not JSON.
  """
  return [
    _read(epath.Path(folder), name)
    for folder, name in zip(workdirs, names(workdirs), strict=True)
  ]


def names(workdirs: Sequence[str]) -> list[str]:
  """The last parts of the paths, as many as tell one from another."""
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
    raise UserError(f"{str(folder)!r} holds no run: {_hint(folder)}")
  rows = _rows(folder / "metrics.jsonl")
  config = folder / "run_config.json"
  return RunRecord(
    name=name,
    scalars=_series(rows),
    spreads=_spreads(folder / "distributions.jsonl"),
    samples=_samples(folder / "samples"),
    config=json.loads(config.read_text()) if config.exists() else {},
    last_step=max((row["step"] for row in rows), default=0),
  )


def _hint(folder: epath.Path) -> str:
  expected = "expected the --workdir of one, with a metrics.jsonl"
  if not folder.is_dir():
    return f"there is no such folder; {expected}"
  below = sorted(
    p.name for p in folder.iterdir() if (p / "metrics.jsonl").exists()
  )
  return (
    f"{expected}, such as {str(folder / below[0])!r}" if below else expected
  )


def _rows(path: epath.Path) -> list[dict]:
  """Rows in order; a last one that is being written is left out."""
  lines, rows = path.read_bytes().splitlines(), []
  for n, line in enumerate(lines, 1):
    try:
      row = json.loads(line)
      rows.append(
        row | {"step": int(row["step"])} if "edges" not in row else row
      )
    except (ValueError, KeyError, TypeError) as e:
      if n < len(lines):
        raise UserError(
          f"{path}, line {n}: {line[:60]=}, expected a JSON object with a step"
        ) from e
  return rows


def _numbers(values: Sequence) -> np.ndarray:
  return np.array([np.nan if v is None else v for v in values], float)


def _series(rows: Sequence[dict]) -> dict[str, Series]:
  found: dict[str, tuple[list, list]] = {}
  for row in rows:
    for metric, value in row.items():
      if metric != "step":
        steps, values = found.setdefault(metric, ([], []))
        steps.append(row["step"])
        values.append(value)
  return {k: Series(np.array(s), _numbers(v)) for k, (s, v) in found.items()}


def _spreads(path: epath.Path) -> dict[str, Spread]:
  rows = _rows(path) if path.exists() else []
  edges, found = None, {}
  for row in rows:
    if "edges" in row:
      edges = _numbers(row["edges"])
      continue
    for metric, values in row.items():
      if metric != "step":
        found.setdefault(metric, []).append((row["step"], _numbers(values)))
  return {
    metric: _spread(metric, pairs, edges) for metric, pairs in found.items()
  }


def _spread(metric, pairs, edges) -> Spread:
  width = len(pairs[-1][1])
  pairs = [pair for pair in pairs if len(pair[1]) == width]
  counted = edges is not None and counts_over_edges(metric, pairs[0][1], edges)
  return Spread(
    np.array([step for step, _ in pairs]),
    np.stack([values for _, values in pairs]),
    edges if counted else None,
  )


def _samples(folder: epath.Path) -> dict[int, str]:
  files = sorted(folder.glob("step_*.txt")) if folder.exists() else []
  texts = {}
  for file in files:
    number = file.stem.removeprefix("step_")
    if number.isdigit():
      texts[int(number)] = file.read_bytes().decode(errors="replace")
  return texts
