"""A profile has the iterations that were asked for, and is written once."""

from types import SimpleNamespace

import jax
import pytest
from processes import python

from gspo_jax.record import profile
from gspo_jax.record.profile import Profile
from gspo_jax.runtime.errors import UserError


@pytest.fixture
def calls(monkeypatch):
  """The calls of jax.profiler, by name."""
  calls = []

  def start(folder, profiler_options):
    assert profiler_options.python_tracer_level == 0
    calls.append(f"start {folder}")

  monkeypatch.setattr(jax.profiler, "start_trace", start)
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
  return calls


def iterate(iterations, steps, calls, *, fail_at=0):
  with Profile(iterations, "there") as traced:
    for step in steps:
      with traced.iteration(step):
        calls.append(step)
        if step == fail_at:
          raise ArithmeticError
      calls.append("evaluate")


@pytest.mark.parametrize(
  ("iterations", "expected"),
  [
    ((), [3, "evaluate", 4, "evaluate"]),
    ((4, 4), [3, "evaluate", "start there", 4, "stop", "evaluate"]),
    ((1, 3), ["start there", 3, "stop", "evaluate", 4, "evaluate"]),
    # A SIGTERM ended the run before iteration 9.
    ((4, 9), [3, "evaluate", "start there", 4, "evaluate", "stop"]),
    ((1, 2), [3, "evaluate", 4, "evaluate"]),  # it was resumed later
  ],
)
def test_a_trace_begins_before_the_first_and_ends_after_the_last(
  iterations, expected, calls
):
  iterate(iterations, (3, 4), calls)
  assert calls == expected


def test_a_run_that_fails_leaves_its_trace(calls):
  with pytest.raises(ArithmeticError):
    iterate((3, 9), (3, 4), calls, fail_at=3)
  assert calls == ["start there", 3, "stop"]


def test_other_processes_write_none(calls, monkeypatch):
  monkeypatch.setattr(profile.multihost, "is_primary", lambda: False)
  iterate((3, 4), (3, 4), calls)
  assert calls == [3, "evaluate", 4, "evaluate"]


@pytest.mark.parametrize(
  ("libtpu", "platforms", "crashes"),
  [(True, None, True), (True, "cpu", False), (False, None, False)],
)
def test_libtpu_without_a_tpu_is_an_error(
  monkeypatch, libtpu, platforms, crashes
):
  monkeypatch.setattr(profile.importlib.util, "find_spec", lambda _: libtpu)
  monkeypatch.setattr(
    profile.jax, "config", SimpleNamespace(jax_platforms=platforms)
  )
  monkeypatch.setattr(profile.jax, "default_backend", lambda: "cpu")
  if not crashes:
    profile.require_profiler((10, 12))
    return
  words = r"^log\.profile=\(10, 12\): .*libtpu.* set JAX_PLATFORMS=cpu"
  with pytest.raises(UserError, match=words):
    profile.require_profiler((10, 12))


TRACED = """
import sys
import jax, jax.numpy as jnp
from gspo_jax.record.profile import Profile

with Profile((2, 2), sys.argv[1]) as traced:
  for step in (1, 2):
    with traced.iteration(step):
      jax.jit(jnp.sin)(1.0).block_until_ready()
"""


def test_the_trace_has_the_calls_of_an_iteration(tmp_path):
  """In a process of its own: other tests load libtpu, which would crash."""
  done = python("-c", TRACED, tmp_path, check=True)
  (file,) = tmp_path.rglob("*.xplane.pb")
  trace = file.read_bytes()
  assert b"PjitFunction(sin)" in trace
  assert b"iteration" in trace
  assert done.stdout == f"profile: {tmp_path}\n"
