"""What saving many checkpoints leaves open in a process.

  python -m benchmarks.checkpoint_leak

Saves a state of 100 numbers again and again, and counts after 5, 50 and 500
saves. Then it trains the debug sizes of the embedded default for 200
iterations with a checkpoint after each, and counts after 20, 100 and 200.

descriptors  open files, sockets and polls of the process
threads      of the process
mib          resident memory, without what the C library keeps for reuse
"""

import argparse
import ctypes
import os
import tempfile
from pathlib import Path

import jax.numpy as jnp

from benchmarks import record
from gspo_jax import train
from gspo_jax.configs import tiny_cpu
from gspo_jax.record.checkpoint import Checkpoints


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="5 and 10 saves")
  parser.add_argument("--out", type=Path)
  args = parser.parse_args()
  found = {"saves": _saves((5, 10) if args.quick else (5, 50, 500))}
  if not args.quick:
    found["iterations"] = _iterations((20, 100, 200))
  record.finish("checkpoint_leak", found, args.out)


def process() -> dict[str, int]:
  """What this process has open: what the docstring of the module lists."""
  ctypes.CDLL("libc.so.6").malloc_trim(0)
  lines = Path("/proc/self/status").read_text().splitlines()
  status = dict(line.split(":\t") for line in lines if ":\t" in line)
  return {
    "descriptors": len(os.listdir("/proc/self/fd")),
    "threads": int(status["Threads"]),
    "mib": int(status["VmRSS"].split()[0]) // 1024,
  }


def _saves(at: tuple[int, ...]) -> dict[int, dict[str, int]]:
  """`process` after so many saves."""
  found = {}
  with (
    tempfile.TemporaryDirectory() as folder,
    Checkpoints(folder, keep=2) as checkpoints,
  ):
    for step in range(1, max(at) + 1):
      checkpoints.save(step, {"w": jnp.arange(100.0)}, {})
      checkpoints.wait()
      if step in at:
        found[step] = process()
  return found


def _iterations(at: tuple[int, ...]) -> dict[int, dict[str, int]]:
  """`process` after so many iterations of one run."""
  found, save = {}, Checkpoints.save

  def counted(self, step, state, metadata):
    save(self, step, state, metadata)
    if "rollouts" in metadata and step in at:  # none of the cold start
      self.wait()
      found[step] = process()

  config = tiny_cpu.get_config("debug")
  config.num_steps, config.checkpoint.every = max(at), 1
  Checkpoints.save = counted
  with tempfile.TemporaryDirectory() as folder:
    train.train_and_evaluate(config, folder)
  return found


if __name__ == "__main__":
  main()
