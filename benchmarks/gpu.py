"""What a GPU shows that a CPU cannot, most telling first.

  python -m benchmarks.gpu --out=gpu.json [--minutes=10] [--quick]

Each row is measured once, in a separate process, and saved at once; a row
that fails says why. A call goes on where the last one ended, for --minutes. It
exits with 75 if rows are left, so that this measures all of them:

  while python -m benchmarks.gpu --out=gpu.json; [ $? = 75 ]; do :; done

ratio         the ratio of a policy that has not moved, in bfloat16, as in
              benchmarks/ratio_one.py: dense, with experts, with R3
gap           mean |log-ratio| over a response of the sampler to the trainer,
              over the lower clip range of GSPO: random weights, dense and with
              experts, with and without R3
speed         tokens a second of sampling and of an update, and the share of the
              card's peak FLOPs (MFU): random weights, bfloat16
transformers  the same of transformers with PyTorch, if they are installed
families      each tiny family: pass@1 before and after
smollm2       GSPO and GRPO on the rules task, 3 seeds, if --checkpoint is
              there; a run that time stops goes on in the next call

P prompts, G responses of R tokens to each. Nothing of it has run on a GPU yet.
"""

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax

from benchmarks import ratio_one, record, seeds
from gspo_jax import model
from gspo_jax.configs import common
from gspo_jax.configs import gpu as config_for_gpu
from gspo_jax.losses import gspo_loss
from gspo_jax.model.hf import config as hf_config
from gspo_jax.plan import lower_bounds
from gspo_jax.plan.gpus import GPUS
from gspo_jax.runtime import sharding
from gspo_jax.train import train_and_evaluate

_MODELS = ("qwen3-0.6b", "qwen3-1.7b")
_SIZE, _QUICK = {"P": 32, "G": 8, "R": 1024}, {"P": 4, "G": 2, "R": 16}
_FAMILIES = sorted(name for name in model.VARIANTS if name.startswith("tiny-"))
_MORE = 75


def rows(quick: bool, checkpoint: Path) -> dict[str, Callable[[], dict]]:
  """What to measure, by name, in order."""
  size = _QUICK if quick else _SIZE
  dense, experts = ("tiny", "tiny") if quick else (_MODELS[0], "olmoe-1b-7b")
  models = ("tiny",) if quick else _MODELS
  part = functools.partial
  named = {}
  for kind, replay in (("dense", ""), ("experts", ""), ("experts", "r3")):
    named[f"ratio {kind} {replay}"] = part(ratio, kind == "experts", replay)
  for name, replay in ((dense, ""), (experts, ""), (experts, "r3")):
    named[f"gap {name} {replay}"] = part(gap, name, replay, size)
  for name in models:
    named[f"speed {name}"] = part(speed, name, size)
  for name in () if quick else models:
    named[f"transformers {name}"] = part(speed_of_transformers, name, size)
  for name in _FAMILIES[:1] if quick else _FAMILIES:
    named[f"families {name}"] = part(family, name, quick)
  for seed in range(3) if checkpoint.exists() else ():
    for name in ("gspo", "grpo"):
      named[f"smollm2 {name} {seed}"] = part(smollm2, name, seed, checkpoint)
  return named


def ratio(experts: bool, replay: str) -> dict:
  """Standard deviation of the ratio, and the share of responses clipped."""
  mesh = sharding.make_mesh(jax.devices()[:1], data=1)
  changes = {"replay": replay} if replay else {}
  got = ratio_one.measure(ratio_one.config_of(experts=experts, **changes), mesh)
  keys = "ratio/sequence_std", "ratio/token_std", "clip_frac/sequence"
  return {key: got[key] for key in keys}


def _run(variant: str, size: dict, **changes) -> dict:
  """The metrics of the last of three iterations with random weights."""
  if variant == "tiny":
    c = common.get_config()
    c.model.variant = variant
  else:
    c = config_for_gpu.get_config(f"variant={variant},memory=80")
  c.data.prompts, c.data.max_prompt_length = size["P"], 32
  c.rollout.group_size, c.sampler.max_new_tokens = size["G"], size["R"]
  c.continuous_batching.slots = size["P"] * size["G"]
  c.learner.minibatches = 2
  c.learner.micro_batch_size = min(8, size["P"] * size["G"] // 2)
  c.num_steps, c.cold_start.steps, c.eval.every = 3, 0, 0
  c.optim.learning_rate = 0.0
  c.log.instruments = True
  c.update_from_flattened_dict(changes)
  with tempfile.TemporaryDirectory() as folder:
    train_and_evaluate(c, folder)
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
  return json.loads(lines[-1])


def gap(variant: str, replay: str, size: dict) -> dict:
  """The gap of sampler and trainer in clip ranges; the ratio's deviation."""
  changes = {"objective.replay": replay} if replay else {}
  last = _run(variant, size, **changes)
  mean = last["mismatch/sequence_abs_mean"]
  return {
    "clip_ranges": mean / gspo_loss.__kwdefaults__["clip_low"],
    "ratio/sequence_std": last["ratio/sequence_std"],
    **size,
  }


def speed(variant: str, size: dict) -> dict:
  """Response tokens a second and MFU of sampling and of an update."""
  last = _run(variant, size, **{"log.instruments": False})
  cfg = model.variant(variant, dtype="bfloat16")
  tokens = size["P"] * size["G"] * last["response/length"]
  kind = jax.devices()[0].device_kind
  peak = next((gpu.flops for gpu in GPUS.values() if gpu.name == kind), None)
  # Nearly all: two a parameter and token, three times that in an update.
  flops = 2 * lower_bounds.active_parameters(cfg)
  found = dict(size)
  for name, passes in (("generate", 1), ("update", 3)):
    found[f"{name}, tokens/s"] = tokens / last[f"time/{name}"]
    if peak:
      rate = found[f"{name}, tokens/s"] * passes * flops
      found[f"{name}, MFU"] = rate / peak
  return found


def speed_of_transformers(variant: str, size: dict) -> dict:
  """`speed` with PyTorch's attention and fused AdamW."""
  import torch
  import transformers

  cfg = model.variant(variant)
  settings = hf_config.config_to_hf(cfg, "bfloat16", None)
  policy = transformers.AutoModelForCausalLM.from_config(
    transformers.AutoConfig.for_model(**settings), dtype=torch.bfloat16
  ).cuda()
  B, R, S = size["P"] * size["G"], size["R"], 10  # tokens of a chain's prompt
  tokens = torch.randint(cfg.vocab_size, (B, S + R), device="cuda")
  optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, fused=True)

  def generate():
    with torch.inference_mode():
      policy.generate(
        tokens[:, :S], do_sample=True, min_new_tokens=R, max_new_tokens=R
      )

  def update():
    for some in tokens.split(8):
      policy(input_ids=some, labels=some).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

  found = dict(size)
  for call in (generate, update):
    for _ in range(2):  # the first warms up
      torch.cuda.synchronize()
      start = time.monotonic()
      call()
      torch.cuda.synchronize()
      seconds = time.monotonic() - start
    found[f"{call.__name__}, tokens/s"] = B * R / seconds
  return found


def family(variant: str, quick: bool) -> dict:
  """A run of the embedded default with another model."""
  config = "configs/tiny_cpu.py" + (":debug" if quick else "")
  with tempfile.TemporaryDirectory() as folder:
    return seeds.train(config, Path(folder), **{"model.variant": variant})


def smollm2(objective: str, seed: int, checkpoint: Path) -> dict:
  """A run of configs/smollm2_cpu.py at the study's learning rate."""
  settings = {
    "model.checkpoint": checkpoint.absolute(),
    "objective.name": objective,
    "optim.learning_rate": 3e-5,
    "seed": seed,
  }
  workdir = Path("runs/gpu") / f"smollm2-{objective}-{seed}"
  return seeds.train("configs/smollm2_cpu.py", workdir, **settings)


def _measure(name: str, arguments: list[str], seconds: float) -> dict | None:
  """A row, by a separate process; None if the time ends first."""
  process = subprocess.Popen(
    [sys.executable, "-m", "benchmarks.gpu", f"--row={name}", *arguments],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=seeds.ROOT,
    start_new_session=True,
  )
  try:
    printed, errors = process.communicate(timeout=seconds)
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, signal.SIGTERM)  # a run saves what it has
    process.communicate()
    return None
  if process.returncode:
    return {"failed": (errors.splitlines() or [""])[-1]}
  return json.loads(printed.splitlines()[-1])


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  parser.add_argument("--out", type=Path)
  parser.add_argument("--minutes", type=float, default=10)
  parser.add_argument("--checkpoint", type=Path, default="models/smollm2")
  parser.add_argument("--row", help="measures this row, in this process")
  args = parser.parse_args()
  every = rows(args.quick, args.checkpoint)
  if args.row:
    device = jax.devices()[0]
    if device.platform != "gpu" and not args.quick:
      parser.error(f"expected a GPU, found {device.device_kind}")
    print(json.dumps({"device": device.device_kind} | every[args.row]()))
    return 0
  found = {}
  if args.out and args.out.exists():
    found = json.loads(args.out.read_text())["rows"]
  arguments = [f"--checkpoint={args.checkpoint.absolute()}"]
  arguments += ["--quick"] if args.quick else []
  end = time.monotonic() + 60 * args.minutes
  for name in every:
    if name in found:
      continue
    row = _measure(name, arguments, max(1, end - time.monotonic()))
    if row is None:
      return _MORE
    found[name] = row
    print(name, row, flush=True)
    record.finish("gpu", {"rows": found}, args.out)
  return 0


if __name__ == "__main__":
  raise SystemExit(main())
