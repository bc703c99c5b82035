"""The benchmarks run, and print what they promise."""

import json
import subprocess
import sys

from conftest import ROOT


def test_sampler():
  out = subprocess.run(
    [sys.executable, "-m", "benchmarks.sampler", "--quick"],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  record = json.loads(out.splitlines()[-1])
  # Two questions, two answers each: of 8 tokens, or of 80.
  assert 32 <= record["tokens"]["short of long"] <= 40
  assert record["tokens"]["short of short"] == 32
  assert 320 <= record["tokens"]["long of long"] <= 328
  assert set(record["seconds"]) == set(record["tokens"])
