"""What a benchmark found, as JSON: printed last, and written where asked."""

import json
import os
import platform
import sys
from pathlib import Path


def finish(name: str, record: dict, out: Path | None) -> None:
  """Prints `record`; writes it, and how it came about, to `out`."""
  print(json.dumps(record))
  if out:
    made = {
      "command": " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]]),
      "machine": f"{len(os.sched_getaffinity(0))} x {platform.machine()}",
    }
    out.write_text(json.dumps(made | record, indent=1) + "\n")
