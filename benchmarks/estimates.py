"""What the plan's two estimates say of a program compiled for a TPU."""

from gspo_jax.model import experts
from gspo_jax.plan import chips
from gspo_jax.plan.hlo import walk as hlo_walk


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
