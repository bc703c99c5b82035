"""What the plan's two estimates say of a program compiled for a TPU."""

import functools
import math
from collections.abc import Callable

from jax.sharding import Mesh

from gspo_jax.model import experts
from gspo_jax.plan import analysis, chips
from gspo_jax.plan.hlo import walk as hlo_walk
from gspo_jax.plan.hlo.collectives import Collective


def of(module, topology: str, devices: int, *, unit: str) -> dict[str, float]:
  """HBM bytes of a device, and its time at best and by libtpu's cycles.

  Args:
    module: of a compiled program; its experts' rows are filled at an even load.
    topology: that it was compiled for.
    devices: that it runs on.
    unit: of the times, "ms" or "us".
  """
  chip = chips.parse(topology).chip
  best, by_compiler = (
    hlo_walk.walk(
      module,
      chip,
      lambda collective: chip.link,
      devices,
      filled=1 / experts.SLACK,
      by_compiler=by,
    )
    for by in (False, True)
  )
  scale = {"ms": 1e3, "us": 1e6}[unit]
  return {
    "hbm_bytes": best.hbm_bytes,
    f"best_{unit}": best.roofline_seconds * scale,
    f"libtpu_{unit}": by_compiler.roofline_seconds * scale,
  }


def scheduled(
  module,
  topology: str,
  mesh: Mesh,
  free: Callable[[Collective], bool] = lambda collective: False,
) -> dict[str, float]:
  """Milliseconds of a device as scheduled, with collectives.

  Args:
    module: of a compiled program; its experts' rows are filled at an even load.
    topology: that it was compiled for.
    mesh: that it runs on.
    free: whether the links take no time for a collective.
  """
  where = chips.parse(topology)
  places = [*map(analysis.place, mesh.devices.flat)]

  @functools.cache
  def bandwidth(collective):
    if free(collective):
      return math.inf
    group = [places[n] for n in collective.members]
    return chips.bandwidth(where, group, "to-all" in collective.kind)

  best, by_compiler = (
    hlo_walk.walk(
      module,
      where.chip,
      bandwidth,
      mesh.size,
      filled=1 / experts.SLACK,
      by_compiler=by,
    )
    for by in (False, True)
  )
  return {
    "hbm_bytes": best.hbm_bytes,
    "best_ms": best.scheduled * 1e3,
    "libtpu_ms": by_compiler.scheduled * 1e3,
    "collectives_ms": best.collective_seconds * 1e3,
    "exposed_best_ms": best.stalled_seconds * 1e3,
    "exposed_libtpu_ms": by_compiler.stalled_seconds * 1e3,
  }
