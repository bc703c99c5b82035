"""Preemption: a SIGTERM is a request for one last checkpoint, not the end."""

import signal
import threading

import jax
from jax.experimental import multihost_utils


class Preemption:
  """Turns SIGTERM into a flag for the loop: a context manager.

  Alone, a process sets `requested` in a signal handler, and puts the handler
  before it back at the end. Python allows that in the main thread only; entered
  in another thread this does nothing. After `jax.distributed.initialize` JAX's
  own notifier listens, and a SIGTERM to any process stops all of them at the
  same step: a Python handler would silence it, so none is installed, and
  `requested` follows `reached`. SIGINT stays KeyboardInterrupt.
  """

  requested: bool = False

  def __enter__(self) -> "Preemption":
    self._distributed = jax.distributed.is_initialized()
    main = threading.current_thread() is threading.main_thread()
    self._handles = main and not self._distributed
    if self._handles:
      self._previous = signal.signal(signal.SIGTERM, self._request)
    return self

  def __exit__(self, *_) -> None:
    if self._handles:
      signal.signal(signal.SIGTERM, self._previous)

  def reached(self, step: int) -> bool:
    """Whether to save and stop after `step`; once a step, on every process."""
    if self._distributed:
      self.requested |= multihost_utils.reached_preemption_sync_point(step)
    return self.requested

  def _request(self, *_) -> None:
    self.requested = True
