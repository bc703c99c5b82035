"""Preemption: SIGTERM asks the training loop to save and stop."""

import signal
import threading

from gspo_jax.runtime import multihost


class Preemption:
  """A context manager that turns SIGTERM into a flag for the training loop.

  At the end of the context the previous handler is restored. Python allows
  signal handlers in the main thread only: in any other thread this process
  ignores its own SIGTERM. SIGINT is left to the caller: in a notebook it raises
  KeyboardInterrupt, and `gspo_jax.main` turns it into a SIGTERM.

  JAX's preemption service is not used. It compares step numbers, and Orbax
  queries it at each save: where the two count steps differently (a cold start
  followed by RL, a resumed run), it loses a SIGTERM.
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
    """Whether any process got a SIGTERM. Every process must call this together.

    A SIGTERM that arrives during the call counts at the next call. After the
    first True the result stays True.
    """
    # Only the handler writes `requested`, and it can run at any moment.
    self._agreed = self._agreed or multihost.any_process(self.requested)
    return self._agreed

  def _request(self, *_) -> None:
    self.requested = True
