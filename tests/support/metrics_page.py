"""The names of metrics in docs/metrics.md."""

import json
import re
from pathlib import Path

from repository import ROOT

PAGE = (ROOT / "docs" / "metrics.md").read_text()
# Name, unit, meaning, healthy.
ROWS = re.findall(
  r"^\| `([^`]+/[^`]+)` \| (\S.*?) \| (\S.*?) \| (\S.*?) \|$", PAGE, re.M
)
NAMES = [row[0] for row in ROWS]


def is_documented(name: str) -> bool:
  """Whether a row has this name; <k> in a row stands for any text."""
  as_regex = lambda row: re.sub(r"<\w+>", ".+", re.escape(row))
  return any(re.fullmatch(as_regex(row), name) for row in NAMES)


def undocumented(workdir: Path) -> list[str]:
  """The metrics and distributions of a run that have no row."""
  written = {}
  for file in ("metrics.jsonl", "distributions.jsonl"):
    for line in (workdir / file).read_text().splitlines():
      written |= json.loads(line)
  names = written.keys() - {"step", "edges"}
  return sorted(name for name in names if not is_documented(name))
