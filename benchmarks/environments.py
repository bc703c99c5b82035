"""Conversations before and after RL: accuracy, turns and tools, several seeds.

  python -m benchmarks.environments --out=benchmarks/environments.json

Runs `python -m gspo_jax.main` on each config of an embedded environment, once a
seed, in fresh workdirs, and writes a table with curves.
"""

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks import record
from benchmarks.seeds import train

CONFIGS = "configs/calculator_cpu.py", "configs/guessing_cpu.py"
METRICS = (
  "conversation/turns",
  "conversation/tool_use",
  "conversation/tool_errors",
  "conversation/policy_tokens",
  "conversation/environment_tokens",
  "time/environment",
)


def run(config: str, workdir: Path, seed: int) -> dict:
  """The row of `benchmarks.seeds`, with the metrics of conversations.

  Before is the first iteration, after the mean of the last five.
  """
  row = {"config": config, **train(config, workdir, seed=seed)}
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  records = [json.loads(line) for line in lines][1:]
  for name in METRICS:
    values = [record[name] for record in records]
    row[f"{name} first"] = round(values[0], 3)
    row[f"{name} last"] = round(sum(values[-5:]) / 5, 3)
    row[name] = [round(value, 3) for value in values]
  return row


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--configs", nargs="+", default=CONFIGS)
  parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
  parser.add_argument("--out", type=Path, required=True)
  args = parser.parse_args()
  results = []
  with tempfile.TemporaryDirectory() as folder:
    for config in args.configs:
      for seed in args.seeds:
        workdir = Path(folder) / Path(config).stem / str(seed)
        row = run(config, workdir, seed)
        results.append(row)
        record.write("environments", {"results": results}, args.out)
        short = {k: v for k, v in row.items() if not isinstance(v, list)}
        print(json.dumps(short), flush=True)


if __name__ == "__main__":
  main()
