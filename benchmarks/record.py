"""What a benchmark found, as JSON: printed last, and written where asked."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Measuring writes these, which changes no code.
RESULTS = (
  *(f":!benchmarks/*.{kind}" for kind in ("json", "png")),
  *(f":!studies/*/{name}" for name in ("result.json", "figure.png")),
)


def finish(name: str, record: dict, out: Path | None) -> None:
  """Prints `record`; writes it, and how it came about, to `out`."""
  print(json.dumps(record))
  if out:
    write(name, record, out)


def write(name: str, record: dict, out: Path) -> None:
  """Writes `record` behind the command, the machine and the commit."""
  # Without the folders of this machine.
  words = [
    re.sub(r"(^|=)/.*?(/bin)?/([^/]*)$", r"\1DIR\2/\3", x) for x in sys.argv
  ]
  made = {
    "command": " ".join(["python -m", f"benchmarks.{name}", *words[1:]]),
    "machine": f"{len(os.sched_getaffinity(0))} x {platform.machine()}",
    "commit": commit(),
  }
  part = out.with_name(f"{out.name}.part")  # no call ends with half of it
  part.write_text(json.dumps(made | record, indent=1) + "\n")
  part.replace(out)


def commit(root: Path = ROOT) -> str:
  """The commit of the repository, and whether code was changed since."""
  if not shutil.which("git"):
    return "none"
  git = lambda *words: subprocess.run(
    ["git", *words], cwd=root, capture_output=True, text=True
  ).stdout.strip()
  changed = git("status", "--porcelain", "--untracked-files=all", ".", *RESULTS)
  head = git("rev-parse", "--short", "HEAD") or "none"
  return head + (" and changes" if changed else "")
