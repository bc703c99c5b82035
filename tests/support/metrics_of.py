"""The rows of a run, to be compared with those of another."""

import json


def rows_of(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [*map(json.loads, lines)]


def metrics_of(workdir):
  """The lines of metrics.jsonl, without what depends on the clock."""
  timed = ("time/", "throughput/")
  rows = [
    {k: v for k, v in row.items() if not k.startswith(timed)}
    for row in rows_of(workdir)
  ]
  for row in rows:
    if "conversation/turns" in row:
      # When a request comes decides the steps, and how its log-probs round.
      del row["response/useful_steps"]
      del row["mismatch/token_abs_mean"], row["mismatch/sequence_abs_mean"]
  return rows
