"""SIGTERM sets a flag that every process sees at the same step."""

import os
import signal
import threading

import pytest

from gspo_jax.runtime import multihost
from gspo_jax.runtime.preemption import Preemption


@pytest.fixture(autouse=True)
def before():
  """The handler of SIGTERM; that of SIGINT is Python's own."""
  set_handler, term = signal.signal, signal.getsignal(signal.SIGTERM)
  interrupt = set_handler(signal.SIGINT, signal.default_int_handler)
  yield term
  set_handler(signal.SIGTERM, term)
  set_handler(signal.SIGINT, interrupt)


def terminate():
  os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_sets_a_flag_and_the_previous_handler_returns():
  seen = []
  signal.signal(signal.SIGTERM, lambda *_: seen.append("old"))
  with Preemption() as preemption:
    assert not preemption.reached()
    assert not preemption.requested
    terminate()
    assert preemption.requested
    assert preemption.reached()
    assert preemption.reached()
    assert seen == []
  terminate()
  assert seen == ["old"]


def test_a_sigterm_during_the_exchange_is_not_lost(monkeypatch):
  def any_process(flag):
    terminate()
    return flag

  with Preemption() as preemption:
    with monkeypatch.context() as during:
      during.setattr(multihost, "any_process", any_process)
      assert not preemption.reached()  # the exchange used the old flag
    assert preemption.reached()


def test_a_sigterm_to_another_process_stops_this_run_alone(monkeypatch):
  with Preemption() as preemption:
    with monkeypatch.context() as once:
      once.setattr(multihost, "any_process", lambda flag: True)
      assert preemption.reached()
    assert preemption.reached()
    assert not preemption.requested
  with Preemption() as following:
    assert not following.reached()


def test_a_handler_set_outside_python_is_replaced_by_the_default(monkeypatch):
  actual = signal.signal
  monkeypatch.setattr(signal, "signal", lambda *a: actual(*a) and None)
  with Preemption():
    pass
  assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ctrl_c_still_raises_keyboard_interrupt():
  with pytest.raises(KeyboardInterrupt), Preemption():
    os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_no_handler_is_set(before):
  results = []

  def loop():
    with Preemption() as preemption:
      results.append((preemption.reached(), signal.getsignal(signal.SIGTERM)))

  thread = threading.Thread(target=loop)
  thread.start()
  thread.join()
  assert results == [(False, before)]
