"""Compilations: their lines of progress, and the seconds that they take."""

import time

import jax
import jax.numpy as jnp
import pytest
from jax import monitoring

from gspo_jax.runtime import compilations
from gspo_jax.runtime.compilations import Compilations
from gspo_jax.runtime.progress import Progress

COMPILE = "/jax/core/compile/backend_compile_duration"
TRACE = "/jax/core/compile/jaxpr_trace_duration"


def begin(event, name):
  monitoring.record_scalar(event, time.time(), fun_name=name)


def end(event, seconds, name):
  monitoring.record_event_duration_secs(event, seconds, fun_name=name)


@pytest.fixture
def fast(monkeypatch):
  """Compilations print their first line at once."""
  monkeypatch.setattr(compilations, "AFTER", 0.01)


def test_a_slow_compilation_has_a_line_when_it_begins_and_one_after(
  fast, capsys
):
  with Compilations():
    begin(COMPILE, "jit(_update)")
    time.sleep(0.05)
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


def test_jax_reports_the_stages_of_a_function(monkeypatch):
  """The names of its events, and that a start comes before an end."""
  seen = []

  class Seen:
    compile_seconds = 0.0

    def __init__(self, what, after):
      self.what = what

    def __enter__(self):
      seen.append(self.what)
      return self

    def __exit__(self, *exception):
      seen.append(f"{self.what}: done")

  def _update(x):
    return jnp.sin(x) * 3

  monkeypatch.setattr(compilations, "Progress", Seen)
  with Compilations():
    update = jax.jit(_update)
    update(1.0)
    first = Seen.compile_seconds
    update(2.0)
  stages = [f"{stage} update" for stage in ("tracing", "lowering", "compiling")]
  expected = [line for what in stages for line in (what, f"{what}: done")]
  assert [line for line in seen if "update" in line] == expected
  assert Seen.compile_seconds == first > 0
