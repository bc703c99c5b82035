"""Slow tests in pieces: `pytest -m slow --minutes=20`, again and again.

Those that failed or ran longest ago run first, and none starts that would end
after the given minutes. A record in the cache folder of the user, which all
clones share, has the commit at which each test last passed, and its seconds.
Without a record the commit decides which file comes first.
"""

import hashlib
import json
import os
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from repository import ROOT

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
RECORD = CACHE / "gspo_jax" / "slow_tests.json"
UNTRIED = {"ran": 0, "commit": "never", "seconds": 60}
NO_TIME = "no time"


def pytest_addoption(parser):
  text = "start slow tests for this long, what ran longest ago first"
  parser.addoption("--minutes", type=float, default=None, help=text)


def pytest_configure(config):
  if config.getoption("markexpr") == "slow":
    config.pluginmanager.register(SlowTests(config))


class SlowTests:
  """A pytest plugin; each process of xdist has one, and the first writes."""

  def __init__(self, config):
    self._minutes = config.getoption("minutes")
    self._ends = time.monotonic() + 60 * (self._minutes or 0)
    self._writes = not hasattr(config, "workerinput")
    self._record, self._commit = read(), commit()
    self._results, self._seconds = {}, Counter()
    if self._minutes is not None:
      config.option.dist = "load"  # loadfile would run whole files

  @pytest.hookimpl(trylast=True)
  def pytest_collection_modifyitems(self, items):
    if self._minutes is not None:
      items[:] = in_turn(items, self._record, self._commit)

  def pytest_runtest_setup(self, item):
    seconds = self._record.get(item.nodeid, UNTRIED)["seconds"]
    if self._minutes is not None and time.monotonic() + seconds > self._ends:
      pytest.skip(NO_TIME)

  def pytest_runtest_logreport(self, report):
    if not self._writes:
      return
    name, result = report.nodeid, report.outcome
    if report.skipped and NO_TIME in report.longrepr[2]:
      result = NO_TIME
    self._seconds[name] += report.duration
    if self._results.get(name, "passed") == "passed":
      self._results[name] = result
    if report.when == "teardown" and self._results[name] != NO_TIME:
      self._remember(name)

  def _remember(self, name):
    result, self._record = self._results[name], read()  # others write, too
    last = self._record.get(name, UNTRIED)
    if result != "skipped":
      last = last | {"seconds": round(self._seconds[name])}
    if result != "failed":  # what failed runs first next time
      last = last | {"ran": int(time.time())}
    if result == "passed":
      last = last | {"commit": self._commit}
    self._record[name] = last
    write(self._record)

  def pytest_terminal_summary(self, terminalreporter):
    if not self._writes:
      return
    terminalreporter.section("slow tests: result, last pass, seconds")
    for name, result in self._results.items():
      last = self._record.get(name, UNTRIED)
      terminalreporter.write_line(
        f"{result:8}{last['commit']:12}{last['seconds']:>5}  {name}"
      )


def in_turn(items, record, commit):
  """`items` by the hour of their last run, and within it by file."""

  def turn(item):
    name = item.path.name
    chance = hashlib.sha256(f"{commit} {name}".encode()).hexdigest()
    ran = record.get(item.nodeid, UNTRIED)["ran"]
    return ran // 3600, chance

  return sorted(items, key=turn)


def read():
  return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def write(record):
  """Replaces the file, so that no reader finds half of it."""
  RECORD.parent.mkdir(parents=True, exist_ok=True)
  part = RECORD.with_suffix(f".{os.getpid()}")
  part.write_text(json.dumps(record, indent=1, sort_keys=True))
  part.replace(RECORD)


def commit():
  """Of this checkout; with a + if files differ from it."""
  describe = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
  done = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True)
  return done.stdout.strip() or "unknown"
