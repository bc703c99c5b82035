"""Preemption: a SIGTERM is a request for one last checkpoint, not the end."""

import signal
import threading

from gspo_jax.runtime import multihost


class Preemption:
  """Turns SIGTERM into a flag for the loop: a context manager.

  A signal handler sets `requested`, of this process, and the handler before it
  is put back at the end. Python allows that in the main thread only: entered in
  another one, this process hears of no SIGTERM of its own. SIGINT stays
  KeyboardInterrupt.

  Not JAX's preemption service: it compares step numbers, Orbax asks it too at
  each save, and where the two count differently (a cold start and then RL, a
  resumed run) a SIGTERM is lost.
  """

  requested: bool = False
  _agreed: bool = False  # what `reached` said, on every process

  def __enter__(self) -> "Preemption":
    self._handles = threading.current_thread() is threading.main_thread()
    if self._handles:
      previous = signal.signal(signal.SIGTERM, self._request)
      # None: a handler that Python does not know, such as that service's.
      self._previous = signal.SIG_DFL if previous is None else previous
    return self

  def __exit__(self, *_) -> None:
    if self._handles:
      signal.signal(signal.SIGTERM, self._previous)

  def reached(self) -> bool:
    """Whether to save and stop now; to be asked at once by every process.

    A SIGTERM to one is a request to all. One that comes while they ask is for
    the next time.
    """
    # Only the handler writes `requested`, which may come true at any moment.
    self._agreed = self._agreed or multihost.any_process(self.requested)
    return self._agreed

  def _request(self, *_) -> None:
    self.requested = True
