"""Rows that are laid out, read where they lie, and joined again."""

import http.server
import threading

import jax
import numpy as np
import pytest
from jax._src.clusters import cloud_tpu_cluster

from gspo_jax import hosts, sharding
from gspo_jax.errors import UserError

ARRAY = np.arange(48, dtype=np.float32).reshape(16, 3)


@pytest.fixture(
  params=[{"data": 8}, {"data": 2, "expert": 2, "tensor": 2}, {"tensor": 8}],
  ids=str,
)
def rows(request):
  return sharding.rows(sharding.make_mesh(**request.param))


def test_rows_are_read_where_they_lie(rows):
  tree = {"x": ARRAY, "n": np.arange(16)}
  laid = hosts.lay(tree, rows)
  assert laid["x"].sharding == rows
  own = hosts.own(laid["x"])
  assert list(own) == list(range(16))
  np.testing.assert_array_equal(np.stack(list(own.values())), ARRAY)
  jax.tree.map(np.testing.assert_array_equal, hosts.fetch(laid), tree)


def test_values_of_rows_are_joined(rows):
  like = hosts.lay(np.zeros(16), rows)
  values = {i: i / 2 for i in reversed(range(16))}
  joined = hosts.join(values, like)
  assert joined.dtype == np.float32
  np.testing.assert_array_equal(joined, np.arange(16) / 2)


def test_together_gives_the_result_or_raises():
  assert hosts.together(lambda: 3) == 3

  def fail():
    raise UserError("bad é")

  with pytest.raises(UserError, match=r"^bad é$"):
    hosts.together(fail)


@pytest.mark.parametrize("text", ["", "é", "é" * 3000])
def test_what_is_told_is_heard_up_to_a_length(text):
  (heard,) = hosts.tell(text)
  assert text.startswith(heard)
  assert len(heard) >= min(len(text), 499)


# Where to find one another.


@pytest.fixture
def environment(monkeypatch):
  """Sets variables on a machine that has chips, and no other hint."""
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
    # One host: a notebook, whose name resolves to nothing.
    ({"TPU_PROCESS_ADDRESSES": "local"}, 1),
    ({"TPU_SKIP_MDS_QUERY": "1"}, 1),
  ],
)
def test_tpu_hosts_of_a_cluster(environment, variables, count):
  environment(**variables)
  assert hosts.tpu_hosts() == count


def test_a_machine_without_chips_is_one_host(environment):
  environment(TPU_WORKER_HOSTNAMES="a,b")
  for platforms in (None, "cpu", "cuda"):
    jax.config.update("jax_platforms", platforms)
    assert hosts.tpu_hosts() == 1


@pytest.mark.parametrize(("workers", "count"), [("a", 1), ("a,b,c", 3)])
def test_tpu_hosts_of_virtual_machines(environment, workers, count):
  """They ask a metadata server."""
  said = {
    "agent-worker-number": "0",
    "worker-network-endpoints": workers,
    "tpu-env": "ACCELERATOR_TYPE: 'v5p'",
  }

  class Metadata(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      self.send_response(200)
      self.end_headers()
      self.wfile.write(said[self.path.rpartition("/")[2]].encode())

    def log_message(self, *_):
      pass

  with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment(GCE_METADATA_IP=f"127.0.0.1:{server.server_port}")
    assert hosts.tpu_hosts() == count
    server.shutdown()


def test_start_is_nothing_on_one_machine():
  hosts.start()
  assert not jax.distributed.is_initialized()
