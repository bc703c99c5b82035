"""What a GPU shows that a CPU cannot, most telling first.

  python -m benchmarks.gpu --out=gpu.json [--minutes=9] [--quick]

Each row is measured once, in a process of its own, and saved at once; a row
that fails says why. A call starts rows as long as they should end within
--minutes. It exits with 75 if rows are left: the same command goes on.

kernel        kernels beside float32 oracles (benchmarks/gpu_kernels.py)
ratio         the ratio of a policy that has not moved, in bfloat16, as in
              benchmarks/ratio_one.py: dense, with experts, with R3
iteration     the second of two iterations of GSPO with random weights, P
              prompts, G responses of R tokens to each. The gap: the mean
              |log-ratio| of sampler to trainer over a response, in lower clip
              ranges of GSPO. Tokens a second, and the share of the card's peak
              FLOPs (MFU). Its seconds and GiB, beside those of the plan
transformers  tokens a second of transformers with PyTorch on the same sizes
train         the embedded default, and each tiny family for four iterations:
              held-out pass@1 before and after

Nothing of it has run on a GPU yet. What the rows should take on an H100 comes
from benchmarks/gpu_plan.json, which this makes on any machine, and prints:

  pip install -e '.[plan-gpu]'
  python -m benchmarks.gpu --plan --out=benchmarks/gpu_plan.json
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
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from benchmarks import gpu_kernels, ratio_one, record
from gspo_jax import model
from gspo_jax.configs import gpu as config_for_gpu
from gspo_jax.configs import tiny_cpu
from gspo_jax.losses import gspo_loss
from gspo_jax.model.hf import config as hf_config
from gspo_jax.plan import chips, lower_bounds
from gspo_jax.plan.gpus import GPUS
from gspo_jax.plan.planner import plan
from gspo_jax.runtime import sharding
from gspo_jax.train import train_and_evaluate

_PLAN = record.ROOT / "benchmarks" / "gpu_plan.json"
_MORE, _NO_GPU = 75, 2  # exit codes
_LONGEST = 240.0  # seconds of a row
_START = 30.0  # seconds until a process has its weights: assumed
_ITERATIONS = 2
# `configs/gpu.py` of a variant, changes of its keys, a tiny model for --quick.
_ITERATION = {
  "qwen3-0.6b": ("qwen3-0.6b", {}, "tiny"),
  "olmoe-1b-7b": ("olmoe-1b-7b", {}, "tiny"),
  "olmoe-1b-7b R3": ("olmoe-1b-7b", {"objective.replay": "r3"}, "tiny"),
  "MLA": (
    "qwen3-0.6b",
    {
      "model.variant": "moonlight-16b-a3b",
      "model.num_layers": 4,
      "model.lora.rank": 16,
    },
    "tiny-moonlight",
  ),
  "DeltaNet": (
    "qwen3-0.6b",
    {"model.variant": "qwen3.5-0.8b"},
    "tiny-qwen3.5-dense",
  ),
}
_FAMILIES = [name for name in model.VARIANTS if name.startswith("tiny-")]


class Row(NamedTuple):
  measure: Callable[[], dict]
  seconds: float  # that it should take on an H100; assumed but for `iteration`


def rows(quick: bool) -> dict[str, Row]:
  """What to measure, by name, in order."""
  part, found = functools.partial, {}

  def add(name, seconds, *call):
    found[name] = Row(part(*call), seconds)

  for name, measure in gpu_kernels.KERNELS.items():
    add(f"kernel {name}", 45.0, measure, quick)
  add("ratio dense", 45.0, ratio, False, "")
  add("ratio experts", 45.0, ratio, True, "")
  add("ratio experts R3", 45.0, ratio, True, "r3")
  planned = json.loads(_PLAN.read_text())["rows"] if _PLAN.exists() else {}
  for name in _ITERATION:
    expected = planned.get(name, {})
    seconds = expected.get("row", _LONGEST)
    add(f"iteration {name}", seconds, iteration, name, quick, expected)
  if not quick:
    add("transformers qwen3-0.6b", 120.0, transformers, "qwen3-0.6b")
  add("train tiny", 180.0, train, "tiny", quick)
  for name in _FAMILIES[:1] if quick else _FAMILIES:
    add(f"train {name}", 45.0, train, name, True)
  return found


def ratio(experts: bool, replay: str) -> dict:
  """Standard deviation of the ratio, and the share of responses clipped."""
  mesh = sharding.make_mesh(jax.devices()[:1], data=1)
  changes = {"replay": replay} if replay else {}
  got = ratio_one.measure(ratio_one.config_of(experts=experts, **changes), mesh)
  keys = "ratio/sequence_std", "ratio/token_std", "clip_frac/sequence"
  return {key: got[key] for key in keys}


def _size(quick: bool) -> dict[str, int]:
  return {"P": 4, "G": 2, "R": 16} if quick else {"P": 32, "G": 8, "R": 512}


def iteration_config(name: str, quick: bool) -> ConfigDict:
  """Two iterations at learning rate 0 with random weights."""
  variant, changes, tiny = _ITERATION[name]
  size = _size(quick)
  responses = size["P"] * size["G"]
  c = config_for_gpu.get_config(f"variant={variant},memory=80")
  c.update_from_flattened_dict(changes)
  if quick:
    c.model.variant = tiny
  c.data.prompts, c.data.max_prompt_length = size["P"], 32
  c.rollout.group_size, c.sampler.max_new_tokens = size["G"], size["R"]
  c.continuous_batching.slots = responses
  pages = -(-(32 + size["R"]) // c.continuous_batching.page_size)
  c.continuous_batching.num_pages = responses * pages + 1
  c.learner.minibatches = 2
  c.learner.micro_batch_size = min(c.learner.micro_batch_size, responses // 2)
  c.num_steps, c.cold_start.steps, c.eval.every = _ITERATIONS, 0, 0
  c.optim.learning_rate = 0.0
  return c


def _metrics(config: ConfigDict) -> list[dict]:
  """The lines of a run's metrics.jsonl."""
  with tempfile.TemporaryDirectory() as folder:
    train_and_evaluate(config, folder)
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def iteration(name: str, quick: bool, planned: dict) -> dict:
  """The gap, the speed, and what the plan said of an H100."""
  config = iteration_config(name, quick)
  last = _metrics(config)[-1]
  gap = last["mismatch/sequence_abs_mean"]
  found = _size(quick) | {
    "gap, clip ranges": gap / gspo_loss.__kwdefaults__["clip_low"],
    "ratio/sequence_std": last["ratio/sequence_std"],
    "GiB": last.get("memory/peak_gib"),
  }
  cfg = model.variant(config.model.variant)
  if layers := config.model.get("num_layers"):
    cfg = model.variant(config.model.variant, num_layers=layers)
  kind = jax.devices()[0].device_kind
  peak = next((gpu.flops for gpu in GPUS.values() if gpu.name == kind), None)
  # Nearly all: two a parameter and token, once more for each backward product.
  flops = 2 * lower_bounds.active_parameters(cfg)
  tokens = found["P"] * found["G"] * last["response/length"]
  trained = 2 if config.model.lora.rank else 3
  for part, passes in (("generate", 1), ("score", 1), ("update", trained)):
    seconds = last[f"time/{part}"]
    found[f"{part}, s"] = seconds
    found[f"{part}, tokens/s"] = tokens / seconds
    if peak and part != "score":
      found[f"{part}, MFU"] = passes * flops * tokens / seconds / peak
  return found | {"planned for an H100": planned}


def transformers(variant: str) -> dict:
  """Tokens a second with PyTorch's attention and fused AdamW."""
  import torch
  import transformers

  settings = hf_config.config_to_hf(model.variant(variant), "bfloat16", None)
  policy = transformers.AutoModelForCausalLM.from_config(
    transformers.AutoConfig.for_model(**settings), dtype=torch.bfloat16
  ).cuda()
  size = _size(quick=False)
  B, R, S = size["P"] * size["G"], size["R"], 10  # tokens of a chain's prompt
  tokens = torch.randint(policy.config.vocab_size, (B, S + R), device="cuda")
  optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, fused=True)

  def generate(length):
    with torch.inference_mode():
      policy.generate(
        tokens[:, :S],
        do_sample=True,
        min_new_tokens=length,
        max_new_tokens=length,
      )

  def update(length):
    for some in tokens[:, : S + length].split(8):
      policy(input_ids=some, labels=some).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

  found = dict(size)
  for call in (generate, update):
    for length in (64, R):  # the first warms up
      torch.cuda.synchronize()
      start = time.monotonic()
      call(length)
      torch.cuda.synchronize()
      seconds = time.monotonic() - start
    found[f"{call.__name__}, s"] = seconds
    found[f"{call.__name__}, tokens/s"] = B * R / seconds
  return found


def train(variant: str, debug: bool) -> dict:
  """A run of the embedded default, in bfloat16, with this model."""
  c = tiny_cpu.get_config("debug" if debug else "")
  c.model.variant, c.model.dtype = variant, "bfloat16"
  start = time.monotonic()
  lines = _metrics(c)
  return {
    "seconds": time.monotonic() - start,
    "an iteration, s": lines[-1]["time/iteration"],
    "pass@1 before": lines[0]["eval/pass@1"],
    "pass@1 after": lines[-1]["eval/pass@1"],
  }


def plan_row(name: str) -> dict:
  """What the plan says of an `iteration` on an H100."""
  config = iteration_config(name, quick=False)
  with tempfile.NamedTemporaryFile("w", suffix=".txt") as lengths:
    lengths.write(f"{config.sampler.max_new_tokens}\n")
    lengths.flush()
    topology = chips.parse("h100:1")
    report = plan(config, topology, lengths=lengths.name)
  functions = report["functions"]
  if not report["fits"]:
    raise ValueError(f"{name}: {[x['reason'] for x in functions.values()]}")
  parts = report["iteration"]["parts"]
  seconds = {k: parts[k]["seconds"] for k in ("generate", "score", "update")}
  # Functions that are one program have one time.
  compiling = sum({x["compile_seconds"] for x in functions.values()})
  least = report["iteration"]["seconds"]
  return {
    **{f"{part}, s at best": value for part, value in seconds.items()},
    "GiB": max(x["memory"]["needed"] for x in functions.values()) / 2**30,
    "compiling on two cores, s": compiling,
    # Iterations take twice as long as at best: assumed.
    "row": _START + compiling + 2 * _ITERATIONS * least,
  }


def _measure(name: str, quick: bool, seconds: float) -> dict | None:
  """A row, by a separate process; None if it is ended after `seconds`."""
  environment = os.environ | {
    "JAX_TRACEBACK_FILTERING": "off",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ".92",
  }
  if name.startswith("transformers"):
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
  process = subprocess.Popen(
    [
      *(sys.executable, "-m", "benchmarks.gpu", f"--row={name}"),
      *(["--quick"] if quick else []),
    ],
    stdout=subprocess.PIPE,
    text=True,
    cwd=record.ROOT,
    env=environment,
    start_new_session=True,
  )
  try:
    printed, _ = process.communicate(timeout=seconds)
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return None
  if process.returncode == _NO_GPU:
    raise SystemExit(_NO_GPU)
  if process.returncode:
    return {"failed": f"the process ended with {process.returncode}"}
  return json.loads(printed.splitlines()[-1])


def _row(row: Row, quick: bool) -> dict:
  """A row, or why it failed, in this process."""
  device = jax.devices()[0]
  if device.platform != "gpu" and not quick:
    print(f"expected a GPU, found {device.device_kind}", file=sys.stderr)
    raise SystemExit(_NO_GPU)
  start = time.monotonic()
  try:
    found = row.measure()
  except Exception as error:
    traceback.print_exc()
    found = {"failed": f"{type(error).__name__}: {error}"[:2000]}
  seconds = round(time.monotonic() - start, 1)
  return {"device": device.device_kind, "row, s": seconds} | found


def _measure_all(every: dict[str, Row], args) -> int:
  """The rows that `args.out` lacks, as long as there is time; an exit code."""
  found = {}
  if args.out and args.out.exists():
    found = json.loads(args.out.read_text())["rows"]
  end = time.monotonic() + 60 * args.minutes
  for name, row in every.items():
    if name in found:
      continue
    left = end - time.monotonic()
    if left < row.seconds and not args.quick:
      return _MORE
    got = _measure(name, args.quick, min(left, _LONGEST))
    if got is None and left < _LONGEST:
      return _MORE
    found[name] = got or {"failed": f"took over {_LONGEST:.0f} s"}
    print(name, found[name], flush=True)
    if args.out:
      record.write("gpu", {"jax": jax.__version__, "rows": found}, args.out)
  print(json.dumps({"rows": found}))
  return 0


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  parser.add_argument("--plan", action="store_true", help="needs no GPU")
  parser.add_argument("--out", type=Path)
  parser.add_argument("--minutes", type=float, default=9)
  parser.add_argument("--row", help="measures this row, in this process")
  args = parser.parse_args()
  if args.plan:
    planned = {name: plan_row(name) for name in _ITERATION}
    record.finish("gpu", {"rows": planned}, args.out)
    return 0
  every = rows(args.quick)
  if args.out:
    args.out.parent.mkdir(parents=True, exist_ok=True)
  if args.row:
    print(json.dumps(_row(every[args.row], args.quick)))
    return 0
  return _measure_all(every, args)


if __name__ == "__main__":
  raise SystemExit(main())
