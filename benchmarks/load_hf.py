"""Host memory while a checkpoint of 2.5 GB is loaded, beside its parameters.

  python -m benchmarks.load_hf [--quick]

A folder of random bfloat16 in the shape of Qwen3-MoE, a file a layer, is made
and loaded by a fresh process on a CPU device, whose arrays are host memory too.
This one reads that one's /proc (Linux only) every few milliseconds. What counts
is RssAnon: what was allocated, arrays and compiled code. The files' own pages,
which are mapped and which the kernel takes back at will, are RssFile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from gspo_jax import model
from gspo_jax.model.hf import config as hf_config
from gspo_jax.model.hf import tensors as hf_tensors

_MIB = 2**20


def shape(quick: bool) -> model.ModelConfig:
  sizes = {"num_layers": 12, "vocab_size": 32_768, "num_experts": 16}
  if quick:
    sizes |= {
      "num_layers": 3,
      "vocab_size": 512,
      "embed_dim": 64,
      "mlp_dim": 32,
    }
  return model.variant("qwen3-30b-a3b", dtype="float32", **sizes)


def make(folder: Path, cfg: model.ModelConfig) -> None:
  """Random numbers between 0 and 1, a file a layer and one for the rest."""
  rng, files, index = np.random.default_rng(0), {}, {}
  for name, dims in hf_tensors.expected(cfg).items():
    part = name.split(".")[2] if ".layers." in name else "rest"
    files.setdefault(f"model-{part}.safetensors", {})[name] = dims
  for file, tensors in files.items():
    bits = {
      n: rng.integers(0x3000, 0x3F80, d, "u2") for n, d in tensors.items()
    }
    wide = {n: x.view(ml_dtypes.bfloat16) for n, x in bits.items()}
    save_file(wide, folder / file, {"format": "pt"})
    index |= dict.fromkeys(tensors, file)
  (folder / hf_tensors.INDEX).write_text(json.dumps({"weight_map": index}))
  config = hf_config.config_to_hf(cfg, "bfloat16", None)
  (folder / "config.json").write_text(json.dumps(config))


def load(folder: str) -> None:
  """The process that is watched: it waits for a line, loads, and says so."""
  from gspo_jax.model import hf

  jax.block_until_ready(jax.jit(lambda: jax.numpy.zeros(8) + 1)())
  print("ready", flush=True)
  sys.stdin.readline()
  began = time.monotonic()
  params = hf.load_hf(folder, hf.config_from_hf(folder))
  jax.block_until_ready(params)
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  print(json.dumps({"seconds": time.monotonic() - began, "params": size}))


def resident(process: int) -> dict[str, int]:
  """Bytes, by kind: RssAnon and RssFile."""
  lines = Path(f"/proc/{process}/status").read_text().splitlines()
  pairs = (line.split(":") for line in lines if line.startswith("Rss"))
  return {kind: int(value.split()[0]) * 1024 for kind, value in pairs}


def watch(folder: str) -> dict:
  """What `load` took, in bytes."""
  command = [sys.executable, "-m", "benchmarks.load_hf", f"--load={folder}"]
  child = subprocess.Popen(
    command,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )
  assert child.stdout.readline() == "ready\n"
  start = resident(child.pid)
  peak = dict(start)
  print("", file=child.stdin, flush=True)
  while child.poll() is None:
    now = resident(child.pid)
    # A process that has just ended has none.
    peak = {kind: max(size, now.get(kind, 0)) for kind, size in peak.items()}
    time.sleep(0.002)
  record = json.loads(child.stdout.read())
  beside = peak["RssAnon"] - start["RssAnon"] - record["params"]
  return record | {"start": start, "peak": peak, "beside": beside}


def main(quick: bool) -> None:
  cfg = shape(quick)
  with tempfile.TemporaryDirectory() as folder:
    make(Path(folder), cfg)
    record = watch(folder)
    files = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
  layer = sum(
    np.prod(place.shape)
    for place in hf_tensors.tensor_maps(cfg)
    if place.stacked
  )
  record |= {"files": files, "layer": 4 * int(layer)}
  record["table"] = 4 * cfg.vocab_size * cfg.embed_dim
  for name, size in (
    ("files, bfloat16", files),
    ("parameters, float32", record["params"]),
    ("one layer, float32", record["layer"]),
    ("embedding, float32", record["table"]),
    ("RssAnon before", record["start"]["RssAnon"]),
    ("RssAnon at most", record["peak"]["RssAnon"]),
    ("beside the parameters", record["beside"]),
    ("RssFile at most", record["peak"]["RssFile"]),
  ):
    print(f"{name:22s} {size / _MIB:8.0f} MiB")
  print(f"{record['seconds']:.1f} s")
  print(json.dumps(record))


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  parser.add_argument("--load", help=argparse.SUPPRESS)
  args = parser.parse_args()
  load(args.load) if args.load else main(args.quick)
