"""Global arrays and back, agreement of processes, and the start."""

import errno
import http.server
import os
import sys
import threading

import jax
import numpy as np
import pytest
from etils import epath
from jax._src.clusters import cloud_tpu_cluster

from gspo_jax import train
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError

ARRAY = np.arange(48, dtype=np.float32).reshape(16, 3)


@pytest.fixture(
  params=[{"data": 8}, {"data": 2, "expert": 2, "tensor": 2}, {"tensor": 8}],
  ids=str,
)
def rows(request):
  return sharding.batch_sharding(sharding.make_mesh(**request.param))


def test_rows_of_global_arrays(rows):
  """Local ones and those of the host invert `to_global`; values are joined."""
  tree = {"x": ARRAY, "n": np.arange(16)}
  arrays = multihost.to_global(tree, rows)
  assert arrays["x"].sharding == rows
  local = multihost.local_rows(arrays["x"])
  assert list(local) == list(range(16))
  np.testing.assert_array_equal(np.stack(list(local.values())), ARRAY)
  jax.tree.map(np.testing.assert_array_equal, multihost.to_host(arrays), tree)
  values = {i: i / 2 for i in reversed(range(16))}
  joined = multihost.allgather_rows(values, 16)
  assert joined.dtype == np.float32
  np.testing.assert_array_equal(joined, np.arange(16) / 2)


# One workdir for all processes.


def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
  """A full disk creates an empty file, and fails at the first byte."""
  workdir = epath.Path(tmp_path)

  def write(path, text):
    open(path, "w").close()
    if text:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(type(workdir), "write_text", write)
  with pytest.raises(multihost.AgreedError, match=r"written: No space left"):
    multihost.require_shared(workdir)
  assert list(tmp_path.iterdir()) == []


def test_processes_that_did_not_join_are_refused(
  tmp_path, monkeypatch, debug_config
):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(UserError, match=r"2 processes, but jax\.distributed"):
    train.train_and_evaluate(debug_config, str(tmp_path / "new"))
  assert list(tmp_path.iterdir()) == []


# The hosts of a TPU slice.


@pytest.fixture
def environment(monkeypatch):
  """A function that sets variables, on a machine that seems to have chips."""
  monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
  for name in (
    *("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES", "TPU_SKIP_MDS_QUERY"),
    *("MEGASCALE_NUM_SLICES", "MEGASCALE_COORDINATOR_ADDRESS"),
  ):
    monkeypatch.delenv(name, raising=False)
  before = jax.config.jax_platforms
  jax.config.update("jax_platforms", "tpu,cpu")  # as `import jax` does there
  yield lambda **variables: [
    monkeypatch.setenv(name, value) for name, value in variables.items()
  ]
  jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(
  ("variables", "count"),
  [
    ({"TPU_WORKER_HOSTNAMES": "a,b,c,d"}, 4),
    ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, 2),
    ({"TPU_PROCESS_ADDRESSES": "a:1,b:1", "TPU_WORKER_HOSTNAMES": "a"}, 2),
    # One host: a notebook, whose name does not resolve.
    ({"TPU_PROCESS_ADDRESSES": "local"}, 1),
    ({"TPU_SKIP_MDS_QUERY": "1"}, 1),
  ],
)
def test_tpu_hosts_of_a_cluster(environment, variables, count):
  environment(**variables)
  assert multihost.tpu_hosts() == count


def test_a_machine_without_chips_is_one_host(environment):
  environment(TPU_WORKER_HOSTNAMES="a,b")
  for platforms in (None, "cpu", "cuda"):
    jax.config.update("jax_platforms", platforms)
    assert multihost.tpu_hosts() == 1


@pytest.mark.parametrize(("workers", "count"), [("a", 1), ("a,b,c", 3)])
def test_tpu_hosts_of_virtual_machines(environment, workers, count):
  """On a TPU VM the number comes from the metadata server."""
  answers = {
    "agent-worker-number": "0",
    "worker-network-endpoints": workers,
    "tpu-env": "ACCELERATOR_TYPE: 'v5p'",
  }

  class Metadata(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      self.send_response(200)
      self.end_headers()
      self.wfile.write(answers[self.path.rpartition("/")[2]].encode())

    def log_message(self, *_):
      pass

  with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment(GCE_METADATA_IP=f"127.0.0.1:{server.server_port}")
    assert multihost.tpu_hosts() == count
    server.shutdown()


@pytest.fixture
def initialize(environment, monkeypatch):
  """Replaces `jax.distributed.initialize`: its calls, and errors to raise."""
  calls, errors = [], []

  def initialize(*args, **_):
    calls.append(args)
    for error in errors:
      raise error

  monkeypatch.setattr(jax.distributed, "initialize", initialize)
  before = jax.config.jax_enable_preemption_service
  yield calls, errors
  jax.config.update("jax_enable_preemption_service", before)


def test_without_those_names_jax_detects_the_hosts(
  environment, initialize, monkeypatch
):
  calls, errors = initialize
  monkeypatch.setitem(sys.modules, cloud_tpu_cluster.__name__, None)
  environment()
  assert multihost.tpu_hosts() == 0
  multihost.start()
  assert calls == [(None, None, None)]
  errors.append(ValueError("coordinator_address should be defined."))
  multihost.start()  # JAX finds no cluster
  with pytest.raises(ValueError, match="should be defined"):
    multihost.start("host:1", 2, 0)


def test_a_failed_start_names_the_given_flag(environment, initialize):
  _, errors = initialize
  errors.append(RuntimeError("no port"))
  environment(TPU_WORKER_HOSTNAMES="a,b")
  with pytest.raises(UserError, match=r"^TPU slice: no port$"):
    multihost.start()
  with pytest.raises(UserError, match=r"^--coordinator=h:1: no port$"):
    multihost.start("h:1", 2, 0)


def test_a_silent_process_is_named_once_until_it_speaks_again():
  heard, silent = {}, {}
  counts = [("0", "0"), ("1", "0"), ("2", "0"), ("3", "0"), ("4", "0"),
            ("5", "0"), ("6", "0"), ("7", "1"), ("8", "1")]  # fmt: skip
  for now, count in enumerate(counts):
    both = dict(zip(("beats/0", "beats/1"), count, strict=True))
    silent[2 * now] = multihost._silent(heard, both, 2.0 * now)
  assert {now: names for now, names in silent.items() if names} == {
    8: ["beats/1"]
  }
  assert multihost._silent(heard, {"beats/0": "8", "beats/1": "1"}, 22.0) == [
    "beats/1"
  ]


def test_start_does_nothing_on_a_single_machine(monkeypatch):
  given = {"TPU_WORKER_ID": "7"}
  monkeypatch.setattr(os, "environ", given)
  multihost.start()
  assert not jax.distributed.is_initialized()
  assert given == multihost.NO_TPU | {"TPU_WORKER_ID": "7"}


def test_a_machine_with_a_tpu_keeps_its_environment(environment, monkeypatch):
  environment(TPU_WORKER_HOSTNAMES="a")
  given = dict(os.environ)
  multihost.start()
  assert dict(os.environ) == given
