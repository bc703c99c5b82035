"""A SIGTERM becomes one flag, on every process at the same step."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from gspo_jax.runtime import multihost
from gspo_jax.runtime.preemption import Preemption


def terminate():
  os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_is_a_request_and_the_old_handler_returns():
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


def test_a_sigterm_while_they_ask_one_another_is_not_lost(monkeypatch):
  def anywhere(flag):
    terminate()
    return flag

  with Preemption() as preemption:
    with monkeypatch.context() as during:
      during.setattr(multihost, "anywhere", anywhere)
      assert not preemption.reached()  # the others did not hear of it
    assert preemption.reached()


def test_the_request_of_another_stops_this_one(monkeypatch):
  with Preemption() as preemption:
    with monkeypatch.context() as once:
      once.setattr(multihost, "anywhere", lambda flag: True)
      assert preemption.reached()
    assert preemption.reached()
    assert not preemption.requested


def test_the_old_handler_returns_after_an_error():
  before = signal.getsignal(signal.SIGTERM)
  with pytest.raises(ZeroDivisionError), Preemption():
    raise ZeroDivisionError
  assert signal.getsignal(signal.SIGTERM) is before


def test_requests_do_not_leak_into_the_next_run():
  with Preemption() as first:
    terminate()
    assert first.requested
  with Preemption() as second:
    assert not second.reached()


def test_a_handler_that_python_does_not_know_is_not_put_back(monkeypatch):
  before = signal.getsignal(signal.SIGTERM)
  actual = signal.signal
  monkeypatch.setattr(signal, "signal", lambda *a: actual(*a) and None)
  try:
    with Preemption():
      pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
  finally:
    actual(signal.SIGTERM, before)


def test_ctrl_c_stays_keyboard_interrupt():
  # A shell that starts the tests in the background has it ignored.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    with pytest.raises(KeyboardInterrupt), Preemption():
      os.kill(os.getpid(), signal.SIGINT)
  finally:
    signal.signal(signal.SIGINT, before)


def test_does_nothing_off_the_main_thread():
  before = signal.getsignal(signal.SIGTERM)
  results = []

  def loop():
    with Preemption() as preemption:
      results.append((preemption.reached(), signal.getsignal(signal.SIGTERM)))

  thread = threading.Thread(target=loop)
  thread.start()
  thread.join()
  assert results == [(False, before)]


CHILD = """
import os, signal, sys
from gspo_jax import hosts
from gspo_jax.runtime.preemption import Preemption
rank, count, port = map(int, sys.argv[1:])
hosts.start(f"127.0.0.1:{port}", count, rank)
with Preemption() as preemption:
  for step in range(1, 9):
    if rank == count - 1 and step == 3:
      os.kill(os.getpid(), signal.SIGTERM)
    if preemption.reached():
      break
print("stopped", step, preemption.reached(), flush=True)
"""


@pytest.mark.parametrize("count", [1, 2])
def test_a_sigterm_to_one_process_stops_all_at_one_step(count, tmp_path):
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  children, logs = [], []
  for rank in range(count):
    logs.append(tmp_path / f"{rank}.log")
    args = [sys.executable, "-c", CHILD, str(rank), str(count), str(port)]
    with logs[-1].open("w") as log:
      children.append(
        subprocess.Popen(args, stdout=log, stderr=subprocess.STDOUT)
      )
  try:
    codes = [child.wait(timeout=60) for child in children]
  finally:
    for child in children:
      child.kill()
  texts = [log.read_text() for log in logs]
  assert codes == [0] * count, texts
  for text in texts:
    assert "stopped 3 True" in text
