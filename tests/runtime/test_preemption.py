"""SIGTERM sets a flag that every process sees at the same step."""

import os
import signal
import threading

import pytest

from gspo_jax.runtime import multihost
from gspo_jax.runtime.preemption import Preemption


def terminate():
  os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_sets_a_flag_and_the_previous_handler_returns():
  seen = []
  before = signal.signal(signal.SIGTERM, lambda *_: seen.append("old"))
  try:
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
  finally:
    signal.signal(signal.SIGTERM, before)


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
  before = signal.getsignal(signal.SIGTERM)
  actual = signal.signal
  monkeypatch.setattr(signal, "signal", lambda *a: actual(*a) and None)
  try:
    with Preemption():
      pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
  finally:
    actual(signal.SIGTERM, before)


def test_ctrl_c_still_raises_keyboard_interrupt():
  # SIGINT is ignored if a shell started the tests in the background.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    with pytest.raises(KeyboardInterrupt), Preemption():
      os.kill(os.getpid(), signal.SIGINT)
  finally:
    signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_no_handler_is_set():
  before = signal.getsignal(signal.SIGTERM)
  results = []

  def loop():
    with Preemption() as preemption:
      results.append((preemption.reached(), signal.getsignal(signal.SIGTERM)))

  thread = threading.Thread(target=loop)
  thread.start()
  thread.join()
  assert results == [(False, before)]
