"""A restored state equals the saved one, or the checkpoint is refused."""

import dataclasses
import functools
import os
import signal
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from processes import python
from repository import ROOT, xla_flags

from gspo_jax.record.checkpoint import Checkpoints, checksums
from gspo_jax.runtime.errors import UserError


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["mean", "seen"], meta_fields=[]
)
@dataclasses.dataclass
class Running:
  mean: jax.Array
  seen: jax.Array


@functools.cache
def make_state(seed):
  params = {
    "dense": {"w": jax.random.normal(jax.random.key(seed), (64, 16))},
    "b": jax.random.normal(jax.random.key(seed + 1), (16,), jnp.bfloat16),
  }
  return {
    "step": jnp.int32(seed),
    "params": params,
    "opt": optax.contrib.muon(1e-3).init(params),  # with parts of AdamW
    "key": jax.random.key(seed + 2),
    "running": Running(jnp.float32(0.5), jnp.arange(5) % 2 == 0),
  }


def shardings(tree, devices):
  mesh = jax.make_mesh(
    (devices,), ("fsdp",), (AxisType.Auto,), devices=jax.devices()[:devices]
  )

  def sharding(x):
    axes = ("fsdp",) if x.ndim == 2 else ()
    return NamedSharding(mesh, PartitionSpec(*axes))

  return jax.tree.map(sharding, tree)


def abstract(tree, devices=1):
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    jax.eval_shape(lambda: tree),
    shardings(tree, devices),
  )


def put(tree, devices):
  return jax.device_put(tree, shardings(tree, devices))


def assert_same(restored, expected):
  def same(a, b):
    assert a.dtype == b.dtype
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
      a, b = jax.random.key_data(a), jax.random.key_data(b)
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

  jax.tree.map(same, restored, expected)


accept_any = lambda step, metadata: None


def save_steps(directory, steps, keep=10, devices=1):
  with Checkpoints(directory, keep=keep) as checkpoints:
    for step in steps:
      checkpoints.save(step, put(make_state(step), devices), {"cursor": step})


def restore(directory, accept=accept_any, like=None, devices=1):
  like = make_state(0) if like is None else like
  with Checkpoints(directory, keep=10) as checkpoints:
    return checkpoints.restore(abstract(like, devices), accept)


def largest_file(directory):
  files = [path for path in directory.rglob("d/*") if path.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def warnings(caplog):
  return [r.getMessage() for r in caplog.records if r.levelname != "INFO"]


def test_round_trip_on_other_device_counts(tmp_path, caplog, capfd):
  metadata = {"data": {"next_index": 7}, "config": {"lr": 1e-6, "name": "é"}}
  state = put(make_state(3), 8)
  with Checkpoints(tmp_path, keep=2) as checkpoints:
    checkpoints.save(3, state, metadata)
  for devices in (8, 4, 1):
    restored = restore(tmp_path, devices=devices)
    assert restored.step == 3
    assert restored.metadata == metadata
    assert_same(restored.state, state)
    assert isinstance(restored.state["running"], Running)
    w = restored.state["params"]["dense"]["w"]
    assert len(w.sharding.device_set) == devices
    assert w.addressable_shards[0].data.shape == (64 // devices, 16)
  assert warnings(caplog) == []
  assert capfd.readouterr().out == ""


def test_buffers_may_be_donated_right_after_save(tmp_path):
  spoil = jax.jit(lambda t: jax.tree.map(lambda x: x - 1, t), donate_argnums=0)

  def make(step):
    return put({"w": jnp.full((1024, 1024), float(step))}, 8)

  with Checkpoints(tmp_path, keep=9) as checkpoints:
    for step in range(4):
      state = make(step)
      checkpoints.save(step, state, {})
      for _ in range(3):
        state = spoil(state)
      jax.block_until_ready(state)
  for step in reversed(range(4)):
    restored = restore(tmp_path, like=make(0), devices=8)
    assert restored.step == step
    assert_same(restored.state, make(step))
    (tmp_path / str(step)).rename(tmp_path / f"read_{step}")


def test_a_relative_directory(tmp_path, monkeypatch):
  assert restore(tmp_path / "here") is None  # nothing is saved
  monkeypatch.chdir(tmp_path)
  save_steps("here", (1,))
  assert restore(tmp_path / "here").step == 1


def test_a_save_leaves_no_thread_and_no_descriptor_open(tmp_path):
  """Else the limit of open files ends a long run."""
  found = []
  with Checkpoints(tmp_path, keep=1) as checkpoints:
    for step in range(20):
      checkpoints.save(step, {"w": jnp.zeros(4)}, {})
      if step in (5, 19):
        checkpoints.wait()
        open_files = len(os.listdir("/proc/self/fd"))
        found.append((open_files, threading.active_count()))
  assert found[0] == found[1]


def flip_bit(step):
  path = largest_file(step)
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def truncate(step):
  path = largest_file(step)
  os.truncate(path, path.stat().st_size // 2)


def empty(step):
  step.rename(step.with_name("aside"))
  step.mkdir()


def lose_state(step):
  (step / "state").rename(step.with_name("aside"))


def lose_metadata(step):
  (step / "_CHECKPOINT_METADATA").unlink()


DAMAGE = [flip_bit, truncate, empty, lose_state, lose_metadata]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_a_damaged_checkpoint_is_skipped_and_replaced(tmp_path, caplog, damage):
  save_steps(tmp_path, (1, 2))
  damage(tmp_path / "2")
  with Checkpoints(tmp_path, keep=1) as checkpoints:
    restored = checkpoints.restore(abstract(make_state(0)), accept_any)
    assert (restored.step, restored.metadata) == (1, {"cursor": 1})
    assert_same(restored.state, make_state(1))
    ours = [w for w in warnings(caplog) if "checkpoint 2 skipped" in w]
    assert len(ours) == 1
    assert "\n" not in ours[0]
    if damage is flip_bit:
      assert "params/dense/w" in ours[0]
    checkpoints.save(2, make_state(20), {"cursor": 20})
  assert {path.name for path in tmp_path.iterdir()} - {"aside"} == {"2"}
  again = restore(tmp_path)
  assert (again.step, again.metadata) == (2, {"cursor": 20})
  assert_same(again.state, make_state(20))


def test_a_rejected_state_is_freed_before_the_next_is_loaded(
  tmp_path, monkeypatch
):
  """Else restoring needs the memory of two states."""
  save_steps(tmp_path, (1, 2))
  flip_bit(tmp_path / "2")
  load, seen, alive = Checkpoints._load, [], []

  def spy(*args):
    alive.append([ref() is not None for ref in seen])
    state = load(*args)
    seen.append(weakref.ref(state["params"]["dense"]["w"]))
    return state

  monkeypatch.setattr(Checkpoints, "_load", spy)
  assert restore(tmp_path).step == 1
  assert alive == [[], [False]]


def test_skipped_steps_do_not_count_as_the_latest(tmp_path):
  save_steps(tmp_path, (10, 20))
  empty(tmp_path / "20")
  with Checkpoints(tmp_path, keep=1) as checkpoints:
    assert checkpoints.restore(abstract(make_state(0)), accept_any).step == 10
    assert (tmp_path / "20").exists()
    checkpoints.save(15, make_state(15), {})
  assert not (tmp_path / "20").exists()
  assert restore(tmp_path).step == 15


def test_a_good_checkpoint_is_not_written_again_and_a_bad_one_is(tmp_path):
  (tmp_path / "1").mkdir()
  save_steps(tmp_path, (1,))
  assert_same(restore(tmp_path).state, make_state(1))
  before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
  with Checkpoints(tmp_path, keep=2) as checkpoints:
    checkpoints.save(1, make_state(7), {})
    checkpoints.save(2, make_state(2), {})
    checkpoints.save(2, make_state(7), {})
  for path, written in before.items():
    assert path == tmp_path or path.stat().st_mtime_ns == written
  assert_same(restore(tmp_path).state, make_state(2))


def test_if_all_are_damaged_it_is_an_error_and_nothing_is_touched(tmp_path):
  save_steps(tmp_path, (1, 2))
  flip_bit(tmp_path / "1")
  truncate(tmp_path / "2")
  before = sorted(tmp_path.rglob("*"))
  with pytest.raises(UserError, match="nothing was overwritten") as error:
    restore(tmp_path)
  assert str(tmp_path) in str(error.value)
  assert sorted(tmp_path.rglob("*")) == before


def test_a_leaf_of_another_shape_or_dtype_is_refused(tmp_path):
  save_steps(tmp_path, (1, 2))
  w = make_state(0)["params"]["dense"]["w"]
  dense = lambda **leaves: {"params": {"dense": leaves}}
  key = {"key": jax.random.key(0, impl="rbg")}
  for other, words in (
    (dense(w=w.astype(jnp.bfloat16)), r"dense/w' is float32\[64.*bfloat16\[64"),
    (dense(w=w[:32]), r"dense/w' is float32\[64, 16\], .* float32\[32, 16\]"),
    (dense(v=w, w=w), r"dense/v' is absent, expected float32\[64, 16\]"),
    (key, "key<fry>"),
  ):
    like = make_state(0) | other
    like["params"] = make_state(0)["params"] | like["params"]
    with pytest.raises(UserError, match=words):
      restore(tmp_path, like=like)


def test_an_exception_of_accept_ends_the_search(tmp_path):
  save_steps(tmp_path, (1, 2))
  calls = []

  def accept(step, metadata):
    calls.append((step, metadata))
    raise UserError("the dataset has changed")

  with pytest.raises(UserError, match="the dataset has changed"):
    restore(tmp_path, accept)
  assert calls == [(2, {"cursor": 2})]


FULL_DISK = """
folder = sys.argv[1] + "/full"
def limit(size):
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
noise = {"w": jnp.sin(jnp.arange(1 << 20, dtype=jnp.float32))}
def attempt(close):
  try:
    with Checkpoints(folder, keep=3) as checkpoints:
      limit(1 << 16)
      checkpoints.save(1, noise, {})
      if close == "crash":
        raise KeyError("an error of the loop")
      if close == "save":
        try:
          checkpoints.save(2, noise, {})
        finally:
          limit(resource.RLIM_INFINITY)
          checkpoints.save(1, noise, {"second": "try"})
  except (RuntimeError, KeyError) as error:
    print(close, type(error).__name__, error, flush=True)
  limit(resource.RLIM_INFINITY)
for close in ("with", "crash", "save"):
  attempt(close)
"""


KILLED = """
folder = sys.argv[1] + "/killed"
with Checkpoints(folder, keep=3) as checkpoints:
  checkpoints.save(1, put(make_state(1), 2), {"cursor": 1})
  noise = np.random.default_rng(0).random((2048, 4096), np.float32)
  checkpoints.save(2, {"w": jnp.asarray(noise)}, {"cursor": 2})
  half = pathlib.Path(folder) / "2.orbax-checkpoint-tmp"
  while not half.exists():
    pass
  os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def child(tmp_path_factory):
  """What a process printed whose disk was full, and which then was killed."""
  head = (
    "import os, pathlib, resource, signal, sys\n"
    "import jax, jax.numpy as jnp, numpy as np\n"
    "sys.path += sys.argv[2:]\n"
    "from test_checkpoint import Checkpoints, make_state, put\n"
  )
  folders = (ROOT / "tests/record", ROOT / "tests/support")
  folder, env = tmp_path_factory.mktemp("child"), {"XLA_FLAGS": xla_flags(2)}
  script = head + FULL_DISK + KILLED
  done = python("-c", script, folder, *folders, env=os.environ | env)
  assert done.returncode == -signal.SIGKILL, done.stderr
  return folder, done.stdout


def test_a_kill_during_a_save_keeps_the_previous_checkpoint(child):
  folder = child[0] / "killed"
  names = sorted(path.name for path in folder.iterdir())
  assert names == ["1", "2.orbax-checkpoint-tmp"]
  with Checkpoints(folder, keep=3) as checkpoints:
    restored = checkpoints.restore(abstract(make_state(0), 8), accept_any)
    assert restored.step == 1
    assert_same(restored.state, make_state(1))
    checkpoints.save(2, make_state(2), {})
  assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_a_failed_save_raises_later(child):
  folder, printed = child[0] / "full", child[1]
  lines = printed.splitlines()
  assert len(lines) == 3, printed
  for line, close in ((lines[0], "with"), (lines[2], "save")):
    assert line.startswith(f"{close} RuntimeError the checkpoint of step 1 ")
    assert str(folder) in line
    assert "File too large" in line
  assert lines[1] == "crash KeyError 'an error of the loop'"
  like = {"w": jnp.zeros(1 << 20)}
  assert restore(folder, like=like).metadata == {"second": "try"}


DTYPES = ["bool", "int8", "uint8", "int16", "bfloat16", "int32", "float32"]


def checksum(array):
  return checksums({"x": array})["x"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_flipped_bit_changes_the_checksum(dtype):
  rng = np.random.default_rng(0)
  size, is_bool = jnp.dtype(dtype).itemsize, dtype == "bool"
  bits = 1 if is_bool else 8 * size
  numbers = rng.integers(0, 2 if is_bool else 256, (3, 5, size))
  array = numbers.astype(np.uint8).view(jnp.dtype(dtype))[..., 0]
  total = checksum(array)
  assert 0 <= total < 2**32
  for bit in range(bits):
    raw = array.copy().view(np.uint8).reshape(-1)
    raw[rng.integers(15) * array.itemsize + bit // 8] ^= 1 << bit % 8
    assert checksum(raw.view(array.dtype).reshape(3, 5)) != total, bit


def test_checksums_of_scalars_keys_and_empty_arrays():
  assert checksum(jnp.float32(0.0)) != checksum(jnp.float32(-0.0))
  assert checksum(jnp.int32(1)) != checksum(jnp.int32(2))
  assert checksum(jnp.zeros((0, 3))) == 0
  keys = jax.random.split(jax.random.key(0), 2)
  assert checksum(keys[0]) != checksum(keys[1])
  assert checksum(keys) != checksum(keys[::-1])


def test_both_halves_of_64_bits_change_the_checksum():
  with jax.enable_x64(True):
    x = np.array([1.0, 2.0])
    arrays = x, x * (1 + 2.0**-52), x * 2, x[::-1]
    assert len(set(map(checksum, arrays))) == 4


def test_checksums_do_not_depend_on_the_sharding():
  state = make_state(5)
  sums = checksums(state)
  assert sums["params/dense/w"] == python_checksum(
    state["params"]["dense"]["w"]
  )
  for devices in (1, 4, 8):
    assert checksums(put(state, devices)) == sums
  mesh = jax.make_mesh((4, 2), ("a", "b"), (AxisType.Auto,) * 2)
  w = state["params"]["dense"]["w"]
  for spec in (PartitionSpec("a", "b"), PartitionSpec(None, ("b", "a"))):
    assert checksum(jax.device_put(w, NamedSharding(mesh, spec))) == checksum(w)


def python_checksum(array):
  total = 0
  for i, word in enumerate(np.asarray(array).view(np.uint32).ravel().tolist()):
    m = word ^ (i * 0x9E3779B1) % 2**32
    m = (m ^ (m >> 16)) * 0x85EBCA6B % 2**32
    m = (m ^ (m >> 13)) * 0xC2B2AE35 % 2**32
    total += m ^ (m >> 16)
  return total % 2**32


def test_a_reader_restores_the_given_step_and_touches_nothing(tmp_path):
  with pytest.raises(UserError, match="no such folder"):
    Checkpoints(tmp_path / "runs")
  assert not (tmp_path / "runs").exists()
  save_steps(tmp_path, (1, 2))
  unfinished = tmp_path / "3.orbax-checkpoint-tmp"  # another run is writing it
  unfinished.mkdir()
  with Checkpoints(tmp_path) as checkpoints:
    like = abstract(make_state(0))
    for step in (1, 2):
      restored = checkpoints.restore(like, accept_any, only=step)
      assert_same(restored.state, make_state(step))
    with pytest.raises(UserError, match=r"checkpoint 7: not in .* \[1, 2\]"):
      checkpoints.restore(like, accept_any, only=7)
  assert unfinished.exists()


def test_a_part_of_the_state_is_restored_alone(tmp_path):
  save_steps(tmp_path, (1,))
  like = abstract(make_state(0))
  part = {"params": like["params"]}
  with Checkpoints(tmp_path) as checkpoints:
    restored = checkpoints.restore(part, accept_any, part=True)
    assert_same(restored.state, {"params": make_state(1)["params"]})
    with pytest.raises(UserError, match="leaf 'key' is key<fry>"):
      checkpoints.restore(part, accept_any)
    part["params"] |= {"extra": like["step"]}
    with pytest.raises(UserError, match="leaf 'params/extra' is absent"):
      checkpoints.restore(part, accept_any, part=True)
