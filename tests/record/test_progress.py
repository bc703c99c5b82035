"""Lines of progress: what they say, when they come, and who prints them."""

import io
import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import monitoring

from gspo_jax.record import progress
from gspo_jax.record.progress import Compilations, Progress


@pytest.fixture
def clock(monkeypatch):
  """A clock that the test sets."""
  clock = SimpleNamespace(now=0.0)
  fake = SimpleNamespace(monotonic=lambda: clock.now)
  monkeypatch.setattr(Progress, "compile_seconds", 0.0)
  monkeypatch.setattr(progress, "time", fake)
  return clock


@pytest.fixture
def fast(monkeypatch):
  monkeypatch.setattr(progress, "SECONDS", 0.02)
  monkeypatch.setattr(progress, "_TICK", 0.005)


def test_a_line_says_how_much_is_done_and_how_long_the_rest_takes(clock):
  work = Progress("cold start", 800, "steps")
  clock.now = 30.0  # the first step compiled
  work.advance()
  assert work.line() == "cold start: 1/800 steps in 30 s"
  clock.now = 60.0
  work.advance(300)
  assert work.line() == "cold start: 301/800 steps in 60 s, 50 s left"
  clock.now = 80.0  # nothing was done meanwhile
  assert work.line() == "cold start: 301/800 steps in 80 s, 30 s left"
  clock.now = 200.0
  assert work.line().endswith(", 0 s left")
  work.advance(499)
  assert work.line() == "cold start: 800/800 steps in 3 min"


def test_the_estimate_leaves_out_what_was_done_before_or_is_compiled(clock):
  work = Progress("cold start", 800, "steps", done=400)
  clock.now = 10.0
  work.advance()
  work.advance(0)
  assert work.line() == "cold start: 401/800 steps in 10 s"
  clock.now = 20.0
  work.advance(10)
  assert work.line() == "cold start: 411/800 steps in 20 s, 6 min left"
  clock.now = 0.0
  work = Progress("cold start", 800, "steps")
  work.advance()
  clock.now, Progress.compile_seconds = 110.0, 100.0
  work.advance(99)
  clock.now = 115.0
  assert work.line() == "cold start: 100/800 steps in 115 s, 66 s left"


def test_tokens_per_second_and_work_without_a_total_or_a_count(clock):
  work = Progress("rollout", 256, "responses")
  unknown, single = Progress("load", unit="tensors"), Progress("compile update")
  clock.now = 20.0
  work.advance(96, tokens=41000)
  unknown.advance(1200)
  assert work.line() == "rollout: 96/256 responses in 20 s, 2,050 tokens/s"
  assert unknown.line() == "load: 1,200 tensors in 20 s"
  assert single.line() == "compile update: 20 s so far"


def wait_for_lines(out, count):
  deadline = time.monotonic() + 10
  while out.getvalue().count("\n") < count:
    assert time.monotonic() < deadline, "no line came"
    time.sleep(0.005)


def test_lines_come_while_a_single_call_runs_and_a_last_one_after(fast):
  out = io.StringIO()
  with Progress("compile", file=out):
    wait_for_lines(out, 2)
  *during, last = out.getvalue().splitlines()
  for line in during:
    assert re.fullmatch(r"compile: \d+ s so far", line)
  assert re.fullmatch(r"compile: \d+ s", last)
  time.sleep(0.05)
  assert out.getvalue().splitlines() == [*during, last]


def test_only_the_inner_one_of_two_prints(fast):
  outer_out, inner_out = io.StringIO(), io.StringIO()
  with Progress("outer", file=outer_out):
    with Progress("inner", after=0.01, file=inner_out) as inner:
      wait_for_lines(inner_out, 3)
      inner.note = ", from the cache"
    assert not outer_out.getvalue()
    wait_for_lines(outer_out, 1)
  assert inner_out.getvalue().endswith(" s, from the cache\n")


def test_lines_become_rarer_to_one_a_minute(clock):
  out, times = io.StringIO(), []
  with Progress("compile", file=out):
    for clock.now in range(600):
      before = len(out.getvalue())
      Progress.print_due()
      times += [clock.now] if len(out.getvalue()) > before else []
  assert times[:5] == [10, 20, 30, 40, 50]
  assert times[5] == 63  # a quarter of the time so far
  assert times[-1] - times[-2] == 60


def test_short_work_prints_nothing(capsys):
  with Progress("short", 3, "steps") as work:
    work.advance()
  assert capsys.readouterr().out == ""


def test_other_processes_print_nothing(fast, monkeypatch, capsys):
  monkeypatch.setattr(progress.multihost, "is_primary", lambda: False)
  with Progress("long", 3, "steps"):
    time.sleep(0.05)
  assert capsys.readouterr().out == ""


def test_work_that_fails_has_no_last_line(fast):
  out = io.StringIO()

  def fail():
    with Progress("compile", file=out):
      wait_for_lines(out, 1)
      raise ArithmeticError

  with pytest.raises(ArithmeticError):
    fail()
  assert all(line.endswith("so far") for line in out.getvalue().splitlines())


# What JAX compiles.


COMPILE = "/jax/core/compile/backend_compile_duration"
TRACE = "/jax/core/compile/jaxpr_trace_duration"


def begin(event, name):
  monitoring.record_scalar(event, time.time(), fun_name=name)


def end(event, seconds, name):
  monitoring.record_event_duration_secs(event, seconds, fun_name=name)


def test_a_slow_compilation_has_a_line_when_it_begins_and_one_after(
  monkeypatch, capsys
):
  monkeypatch.setattr(progress, "COMPILE_SECONDS", 0.0)
  with Compilations():
    begin(COMPILE, "jit(_update)")
    Progress.print_due()
    first = capsys.readouterr().out
    monitoring.record_event("/jax/compilation_cache/cache_hits")
    end(COMPILE, 0.05, "jit(_update)")
  assert first == "compiling update: 0 s so far\n"
  last = "compiling update: 0 s, from the compilation cache\n"
  assert capsys.readouterr().out == last


def test_what_is_compiled_while_another_is_traced_counts_once(monkeypatch):
  monkeypatch.setattr(Progress, "compile_seconds", 0.0)
  with Compilations():
    begin(TRACE, "update")
    begin(COMPILE, "jit(add)")
    end(COMPILE, 2.0, "jit(add)")
    end(TRACE, 5.0, "update")
    begin(COMPILE, "jit(update)")
    end(COMPILE, 7.0, "jit(update)")
  begin(COMPILE, "jit(later)")
  end(COMPILE, 100.0, "jit(later)")
  assert Progress.compile_seconds == 12.0


def test_jax_reports_the_stages_of_a_function(monkeypatch, capsys):
  """The names of its events, and that a start comes before an end."""

  def _update(x):
    return jnp.sin(x) * 3

  monkeypatch.setattr(Progress, "compile_seconds", 0.0)
  monkeypatch.setattr(progress, "SECONDS", 0.0)
  monkeypatch.setattr(progress, "COMPILE_SECONDS", 0.0)
  with Compilations():
    update = jax.jit(_update)
    update(1.0)
    first = Progress.compile_seconds
    update(2.0)
  lines = capsys.readouterr().out.splitlines()
  ended = [x for x in lines if "update" in x and not x.endswith("so far")]
  stages = [line.partition(":")[0] for line in ended]
  assert stages == ["tracing update", "lowering update", "compiling update"]
  assert Progress.compile_seconds == first > 0
