"""Listens for the endpoint's requests, in a thread."""

import socket
import threading

import uvicorn

from gspo_jax.runtime.errors import UserError

_END = 5  # seconds for answers that are on their way


class Server:
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

  def __enter__(self) -> "Server":
    return self

  def __exit__(self, *_) -> None:
    self.close()
