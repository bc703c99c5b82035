"""The rows of a run, to be compared with those of another."""

import json


def metrics_of(workdir):
  """The lines of metrics.jsonl, without what depends on the clock."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  timed = ("time/", "throughput/")
  return [
    {k: v for k, v in json.loads(line).items() if not k.startswith(timed)}
    for line in lines
  ]
