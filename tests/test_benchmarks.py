"""The benchmarks run, and print what they promise."""

import json
import subprocess
import sys

from conftest import ROOT


def quick(name):
  """The record that a benchmark prints last."""
  out = subprocess.run(
    [sys.executable, "-m", f"benchmarks.{name}", "--quick"],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  return json.loads(out.splitlines()[-1])


def test_sampler():
  record = quick("sampler")
  # Two questions, two answers each: of 8 tokens, or of 80.
  assert 32 <= record["tokens"]["short of long"] <= 40
  assert record["tokens"]["short of short"] == 32
  assert 320 <= record["tokens"]["long of long"] <= 328
  assert set(record["seconds"]) == set(record["tokens"])


def test_refill():
  record = quick("refill")
  assert set(record["seconds"]) == {"static", "4 slots"}
  assert record["useful"]["4 slots"] > 2 * record["useful"]["static"]


def test_load_hf():
  record = quick("load_hf")
  # Twice the bytes of bfloat16, but for the names in the files.
  assert 0 < 2 * record["files"] - record["params"] < 100_000
  assert 0 < record["beside"] < 200e6  # mostly compiled code, at this size


def test_replay():
  record = quick("replay")
  assert record["choices"] == 4 * 24 * 4 * 2
  assert record["bytes"]["draw, recorded"] > record["bytes"]["draw"]


def test_instruments():
  record = quick("instruments")
  assert set(record) == {"with", "without"}
  for seconds in record.values():
    phases = [seconds[k] for k in ("generate", "score", "update", "write")]
    assert all(phase > 0 for phase in phases)
    assert sum(phases) <= 1.001 * seconds["iteration"]
