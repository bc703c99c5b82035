"""A bucket of Google Cloud Storage, emulated on this machine."""

import contextlib
import itertools
import logging
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import NamedTuple

FAILS_EVERY = 20  # requests


class Bucket(NamedTuple):
  """An emulated bucket.

  Attributes:
    url: "gs://NAME".
    environment: what a process needs to use it.
    failures: the status of each request that failed on purpose.
  """

  url: str
  environment: dict[str, str]
  failures: list[int]


@contextlib.contextmanager
def emulated(monkeypatch) -> Iterator[Bucket]:
  """A bucket in this process that is out of service for every 20th request."""
  from gcp_storage_emulator import server

  failures, count = [], itertools.count(1)

  class Flaky(server.RequestHandler):
    def parse_request(self):
      parsed = super().parse_request()
      if not parsed:
        return False
      status = 503 if next(count) % FAILS_EVERY == 0 else None
      if "/moveTo/" in self.path:  # not emulated; gcsfs then copies
        status = 405
      if status:
        failures.append(status)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_error(status)
      return not status

  class Quiet(ThreadingHTTPServer):
    def handle_error(self, *_):  # a client that has gone away
      pass

  monkeypatch.setattr(server, "RequestHandler", Flaky)
  monkeypatch.setattr(server.server, "HTTPServer", Quiet)
  logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
  emulator = server.create_server(
    "localhost", 0, in_memory=True, default_bucket="bucket"
  )
  emulator.start()
  emulator._api.is_running.wait()
  address = f"http://localhost:{emulator._api._httpd.server_port}"
  environment = {
    "STORAGE_EMULATOR_HOST": address,  # for gcsfs
    "TENSORSTORE_GCS_HTTP_URL": address,
    "FSSPEC_GS_TOKEN": "anon",
    "FSSPEC_GCS_TOKEN": "anon",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # a call beside the emulator
  }
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  try:
    yield Bucket("gs://bucket", environment, failures)
  finally:
    emulator.stop()
