"""The rows of a run, to be compared with those of another."""

import json


def metrics_of(workdir):
  """The lines of metrics.jsonl, without what depends on the clock."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  timed = ("time/", "throughput/")
  rows = [
    {k: v for k, v in json.loads(line).items() if not k.startswith(timed)}
    for line in lines
  ]
  for row in rows:
    if "conversation/turns" in row:
      # When a request comes decides the steps, and how its log-probs round.
      del row["response/useful_steps"]
      del row["mismatch/token_abs_mean"], row["mismatch/sequence_abs_mean"]
  return rows
