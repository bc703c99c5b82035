"""Preemption: SIGTERM asks the training loop to save and stop."""

import signal
import threading

from gspo_jax.runtime import multihost


class Preemption:
  """A context manager that turns SIGTERM into a flag for the training loop.

  At its end it restores the previous handler. Outside the main thread it does
  nothing: Python allows no handlers there. It leaves SIGINT to the caller.

  JAX's preemption service is not used. It compares step numbers, and Orbax
  queries it at each save. If both count steps differently (in a resumed run, or
  after a cold start), it loses a SIGTERM.
  """

  requested: bool = False
  _agreed: bool = False  # the result of `reached`, equal on every process

  def __enter__(self) -> "Preemption":
    self._handles = threading.current_thread() is threading.main_thread()
    if self._handles:
      previous = signal.signal(signal.SIGTERM, self._request)
      # None: the previous handler was not set from Python (JAX's service).
      self._previous = signal.SIG_DFL if previous is None else previous
    return self

  def __exit__(self, *_) -> None:
    if self._handles:
      signal.signal(signal.SIGTERM, self._previous)

  def reached(self) -> bool:
    """Whether any process got a SIGTERM; every process must call this together.

    A SIGTERM that arrives during the call counts at the next call. After the
    first True the result stays True.
    """
    # Only the handler writes `requested`, and it can run at any moment.
    self._agreed = self._agreed or multihost.any_process(self.requested)
    return self._agreed

  def _request(self, *_) -> None:
    self.requested = True
