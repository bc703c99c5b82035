"""Compiling without a TPU: memory sizes, refusals and dumps."""

import re

import jax
import jax.numpy as jnp
import pytest
from compilers import absent_devices, needs_libtpu
from jax.sharding import SingleDeviceSharding

from gspo_jax.plan import chips
from gspo_jax.plan import compile as plan_compile
from gspo_jax.plan.hlo.module import parse
from gspo_jax.runtime.errors import UserError


def compiled(topology, function, shape, dtype=jnp.float32):
  """The function compiled for one device, with its argument donated."""
  device = absent_devices(topology)[0]
  argument = jax.ShapeDtypeStruct(
    shape, dtype, sharding=SingleDeviceSharding(device)
  )
  jitted = jax.jit(function, donate_argnums=0)
  return plan_compile.compile_one(jitted.lower(argument))


@pytest.mark.parametrize(
  ("platform", "extra"), [("tpu", "plan"), ("cuda", "plan-gpu")]
)
def test_without_the_compiler_it_names_the_extra(platform, extra, monkeypatch):
  def absent(name):
    raise plan_compile.importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(plan_compile.importlib.metadata, "version", absent)
  line = re.escape(f"pip install -e '.[{extra}]'")
  with pytest.raises(UserError, match=f"compiler, is not installed: {line}"):
    plan_compile.prepare(platform)


@pytest.mark.parametrize(("peak", "needed"), [(5, 33), (50, 50)])
def test_needed_memory_is_the_larger_estimate(peak, needed):
  assert plan_compile.Memory(10, 6, 4, 20, 1, peak).needed == needed


@needs_libtpu
def test_memory_of_a_donated_argument():
  done = compiled("v5e:2x2", lambda x: x + 1, (1024, 1024))
  assert done.memory.arguments == done.memory.outputs == 4 * 2**20
  assert done.memory.aliased == 4 * 2**20
  assert 4 * 2**20 <= done.memory.needed < 6 * 2**20
  assert done.reason == ""
  assert parse(done.text).entry.root.bytes == 4 * 2**20


@needs_libtpu
@pytest.mark.parametrize(
  "topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
)
def test_the_compilers_hbm_limit_is_that_of_the_chip(topology):
  done = compiled(topology, lambda x: jnp.sort(x, 0), (400, 2**20, 128))
  assert done.memory is None
  assert done.text is None
  limit = chips.parse(topology).chip.hbm / 2**30
  assert f"exceeds available HBM ({limit:.2f}G)" in done.reason
  size, what = done.buffers[0]
  assert done.too_much >= size
  assert size >= 4 * 400 * 2**27
  assert "f32[400,1048576,128]" in what


@needs_libtpu
def test_devices_of_two_slices():
  devices = absent_devices("v5e:2x2", slices=2)
  assert len(devices) == 8
  assert {d.slice_index for d in devices} == {0, 1}


def test_a_libtpu_without_dumps_is_an_error(monkeypatch, tmp_path):
  (tmp_path / "x.before_codegen.txt").write_text("HloModule x")
  monkeypatch.setattr(
    plan_compile.importlib.metadata, "version", lambda name: "9.9.9"
  )
  with pytest.raises(UserError, match=r"libtpu 9\.9\.9 does not dump \*after"):
    plan_compile._text(tmp_path)


REPORT = """\
Memory Space: default (color=0)
Total bytes: 2166784 (2.07MiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
    1.00MiB(100%);    1.00MiB;            0;                1; f32[1024,256]

  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
       512B( 20%);       512B;        32768;                1; pred[]
     2.5KiB(100%);     2.0KiB;        16384;                5; 5×s32[512]


Memory Space: vmem (color=1)
Total bytes: 3145728 (3.00MiB)
  ------------------------------------------------------------
    3.00MiB(100%);    3.00MiB;      1048576;                1; f32[1024,768]
"""


def test_buffers_in_hbm_the_largest_first(tmp_path):
  (tmp_path / "x.memory-usage-report.txt").write_text(REPORT)
  buffers, total = plan_compile._buffers(tmp_path)
  assert buffers == [
    (2**20, "f32[1024,256]"),
    (2048, "5×s32[512]"),
    (512, "pred[]"),
  ]
  assert total == 2166784
