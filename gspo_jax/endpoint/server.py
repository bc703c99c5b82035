"""Listens for the endpoint's requests, in a thread."""

import contextlib
import resource
import socket
import sys
import threading

import uvicorn
from absl import logging
from uvicorn.protocols.http.h11_impl import H11Protocol

from gspo_jax.runtime.errors import UserError

_END = 5  # seconds for answers that are on their way
_HEAD = 10.0  # after as many to twice as many seconds without a request, closed
_BACKLOG = 64  # connections that are accepted at once


class _Connection(H11Protocol):
  """Closed if there are too many, or if no request begins in time."""

  def connection_made(self, transport) -> None:
    super().connection_made(transport)
    if len(self.connections) > (most := _most_connections()):
      logging.log_every_n_seconds(
        logging.WARNING,
        "%d connections are open, half of the file descriptors of 'ulimit -n': "
        "closed a new one",
        60,
        most,
      )
      transport.abort()
    self._look()

  def _look(self, last: object = "none") -> None:
    """`last` is the request, or None, that it waited behind when it looked."""
    if self.transport.is_closing():
      return
    waits = self.cycle is None or self.cycle.response_complete
    if waits and self.cycle is last:
      self.transport.abort()
    else:
      last = self.cycle if waits else "none"
      self.loop.call_later(_HEAD, self._look, last)


def _most_connections() -> int:
  """The trainer keeps half of its file descriptors, as for checkpoints."""
  most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
  return sys.maxsize if most == resource.RLIM_INFINITY else most // 2


class Server(contextlib.AbstractContextManager["Server"]):
  """Serves an ASGI application until it is closed; a context manager."""

  def __init__(self, app, host: str = "127.0.0.1", port: int = 0):
    """Port 0: any that is free. UserError if it cannot listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
      self._socket = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
      raise UserError(
        f"--host={host} --port={port}: {error}; expected an address of this "
        "machine and a free port"
      ) from error
    name = f"[{host}]" if ":" in host else host
    self.url = f"http://{name}:{self._socket.getsockname()[1]}/v1"
    config = uvicorn.Config(
      app,
      http=_Connection,
      backlog=_BACKLOG,
      log_level="warning",
      access_log=False,
      lifespan="off",
      ws="none",
      timeout_graceful_shutdown=_END,
    )
    self._server = uvicorn.Server(config)
    self._thread = threading.Thread(
      target=self._server.run, args=([self._socket],), daemon=True
    )
    self._thread.start()

  def close(self) -> None:
    self._server.should_exit = True
    self._thread.join(2 * _END)
    self._socket.close()

  def __exit__(self, *_) -> None:
    self.close()
