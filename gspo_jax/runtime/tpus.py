"""What programs do differently on a kind of TPU."""

from typing import NamedTuple


class Tpu(NamedTuple):
  """A kind of TPU; the defaults hold for unknown kinds."""

  # Whether ragged_dot takes tiles that divide the widths of the matrices.
  chooses_tiles: bool = False
  # Collectives run on SparseCores, beside the matrix units, only if asked to.
  asks_for_sparse_cores: bool = False
  # Whether libtpu 0.0.51 compiles a program for a part of the chips of each of
  # several hosts; if not, it crashes.
  splits_hosts: bool = True
  # Keys of the largest block of attention's backward pass that fits in VMEM.
  longest_block: int = 2048


_V5P = Tpu(chooses_tiles=True, asks_for_sparse_cores=True)
TPUS = {  # by `device_kind`
  "TPU v5 lite": Tpu(chooses_tiles=True, splits_hosts=False),
  "TPU v5": _V5P,
  "TPU v5p": _V5P,
  "TPU v6 lite": Tpu(asks_for_sparse_cores=True, splits_hosts=False),
  "TPU7x": Tpu(longest_block=4096),
}


def of_kind(device_kind: str) -> Tpu:
  return TPUS.get(device_kind, Tpu())
