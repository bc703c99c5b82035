"""What a GPU shows that a CPU cannot, most telling first.

  python -m benchmarks.gpu --out=gpu.json [--minutes=8.5] [--quick]

A separate process measures each row once, and the row is saved at once. A row
that fails says why. A call starts rows that should end within --minutes. It
exits with 75 if rows are left: the same command goes on. Delete a row of the
file to measure it again.

packages      the versions of what runs
kernel        kernels beside float32 oracles (benchmarks/gpu_kernels.py)
ratio         the ratio of a policy that has not moved, in bfloat16, as in
              benchmarks/ratio_one.py: dense, with experts, with R3
iteration     the second of two iterations of GSPO with random weights, P
              prompts, G responses of R tokens to each. The gap: the mean
              |log-ratio| of sampler to trainer over a response, in lower clip
              ranges of GSPO. Tokens a second, and the share of the card's peak
              FLOPs (MFU). Its seconds and GiB, beside those of the plan
transformers  tokens a second of transformers with PyTorch on the same sizes;
              its loss is the cross-entropy
train         the embedded default, to its end; each tiny family for four
              iterations of its `debug` sizes: does it run

Nothing of it has run on a GPU yet. What an `iteration` should take on an H100
comes from benchmarks/gpu_plan.json, which any machine makes:

  pip install -e '.[plan-gpu]'
  python -m benchmarks.gpu --plan --out=benchmarks/gpu_plan.json
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
from ml_collections import ConfigDict

from benchmarks import gpu_kernels, ratio_one, record
from gspo_jax import model, train
from gspo_jax.configs import gpu as config_for_gpu
from gspo_jax.configs import tiny_cpu
from gspo_jax.losses import METHODS
from gspo_jax.model.hf import config as hf_config
from gspo_jax.plan import chips, lower_bounds
from gspo_jax.plan.gpus import GPUS
from gspo_jax.plan.planner import plan
from gspo_jax.program import load_params
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding

_PLAN = record.ROOT / "benchmarks" / "gpu_plan.json"
_MORE, _NO_GPU = 75, 69  # exit codes
_LONGEST = 240.0  # seconds of a row
_PROMPT = 10  # tokens of a chain's prompt
_FAMILIES = [name for name in model.VARIANTS if name.startswith("tiny-")]


class Policy(NamedTuple):
  """`configs/gpu.py` of a variant, and changes of its keys."""

  variant: str
  changes: dict
  quick: str  # a tiny variant in its place


_POLICIES = {
  "qwen3-0.6b": Policy("qwen3-0.6b", {}, "tiny"),
  "olmoe-1b-7b": Policy("olmoe-1b-7b", {}, "tiny"),
  "olmoe-1b-7b R3": Policy("olmoe-1b-7b", {"objective.replay": "r3"}, "tiny"),
  "MLA": Policy(
    "qwen3-0.6b",
    {
      "model.variant": "moonlight-16b-a3b",
      "model.num_layers": 4,
      "model.lora.rank": 16,
    },
    "tiny-moonlight",
  ),
  "DeltaNet": Policy(
    "qwen3-0.6b", {"model.variant": "qwen3.5-0.8b"}, "tiny-qwen3.5-dense"
  ),
}


class Row(NamedTuple):
  """A measurement, and the seconds that it should take on an H100.

  Those of an `iteration` are planned, the others assumed.
  """

  seconds: float
  measure: Callable[..., dict]
  arguments: tuple = ()


def rows(quick: bool) -> dict[str, Row]:
  """What to measure, by name, in order."""
  found = {"packages": Row(20.0, packages)}
  for name, measure in gpu_kernels.KERNELS.items():
    found[f"kernel {name}"] = Row(40.0, measure, (quick,))
  found["ratio dense"] = Row(40.0, ratio, (False, ""))
  found["ratio experts"] = Row(40.0, ratio, (True, ""))
  found["ratio experts R3"] = Row(40.0, ratio, (True, "r3"))
  planned = json.loads(_PLAN.read_text())["rows"] if _PLAN.exists() else {}
  for name in _POLICIES:
    expected = planned.get(name, {"row, s": _LONGEST})
    found[f"iteration {name}"] = Row(
      expected["row, s"], iteration, (name, quick, expected)
    )
  if not quick:
    found["transformers qwen3-0.6b"] = Row(90.0, by_torch, ("qwen3-0.6b",))
  found["train tiny"] = Row(180.0, run, ("tiny", quick))
  for name in _FAMILIES[:1] if quick else _FAMILIES:
    found[f"train {name}"] = Row(45.0, run, (name, True))
  return found


def packages() -> dict:
  """Versions; imports what only a GPU or some formats of data load."""
  for name in ("tokamax._src.ops.attention.api", "grain", "clu.metrics"):
    importlib.import_module(name)
  found = {d.name: d.version for d in importlib.metadata.distributions()}
  shown = "jax", "flax", "optax", "orbax", "tokamax", "torch", "transformers"
  return {
    name: version
    for name, version in sorted(found.items())
    if name.startswith(shown)
  }


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
  policy, size = _POLICIES[name], _size(quick)
  responses = size["P"] * size["G"]
  c = config_for_gpu.get_config(f"variant={policy.variant},memory=80")
  c.update_from_flattened_dict(policy.changes)
  if quick:
    c.model.variant = policy.quick
  c.data.prompts, c.data.max_prompt_length = size["P"], 32
  c.rollout.group_size, c.sampler.max_new_tokens = size["G"], size["R"]
  c.continuous_batching.slots = responses
  pages = -(-(32 + size["R"]) // c.continuous_batching.page_size)
  c.continuous_batching.num_pages = responses * pages + 1
  c.learner.minibatches = 2
  c.learner.micro_batch_size = min(c.learner.micro_batch_size, responses // 2)
  c.num_steps, c.cold_start.steps, c.eval.every = 2, 0, 0
  c.optim.learning_rate = 0.0
  return c


def _metrics(config: ConfigDict) -> list[dict]:
  """The lines of a run's metrics.jsonl."""
  with tempfile.TemporaryDirectory() as folder:
    train.train_and_evaluate(config, folder)
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def iteration(name: str, quick: bool, planned: dict) -> dict:
  """The gap, the speed, and what the plan said of an H100."""
  config, size = iteration_config(name, quick), _size(quick)
  with (  # of 7 to 14 GB, which nobody reads
    mock.patch.object(train, "_save"),
    mock.patch.object(load_params, "save_base"),
  ):
    last = _metrics(config)[-1]
  gap = last["mismatch/sequence_abs_mean"]
  found = size | {
    "gap, clip ranges": gap / METHODS["gspo"].arguments["clip_low"],
    "ratio/sequence_std": last["ratio/sequence_std"],
    "GiB": last.get("memory/peak_gib"),
  }
  cfg = build_program(parse(config), sharding.make_mesh(jax.devices()[:1])).cfg
  kind = jax.devices()[0].device_kind
  peak = next((gpu.flops for gpu in GPUS.values() if gpu.name == kind), None)
  flops = model_flops(cfg, size)
  for part in ("generate", "score", "update"):
    seconds = last[f"time/{part}"]
    tokens = size["P"] * size["G"] * last["response/length"]
    found[f"{part}, s"] = seconds
    found[f"{part}, tokens/s"] = tokens / seconds
    if peak and part in flops:
      found[f"{part}, MFU"] = flops[part] / seconds / peak
  return found | {"planned for an H100": planned}


def model_flops(cfg: model.ModelConfig, size: dict[str, int]) -> dict:
  """FLOPs that sampling and an update need, without the prompts' prefill."""
  B, R = size["P"] * size["G"], size["R"]
  past = _PROMPT + np.arange(R)
  whole = lower_bounds.forward_flops(cfg, B, _PROMPT + R, R)
  return {
    "generate": lower_bounds.forward_flops(cfg, B, 1, 1, past).sum(),
    "update": lower_bounds.update_passes(cfg) * whole,
  }


def by_torch(variant: str) -> dict:
  """Tokens a second with PyTorch's attention and fused AdamW."""
  import torch
  import transformers

  settings = hf_config.config_to_hf(model.variant(variant), "bfloat16", None)
  policy = transformers.AutoModelForCausalLM.from_config(
    transformers.AutoConfig.for_model(**settings), dtype=torch.bfloat16
  ).cuda()
  size = _size(quick=False)
  B, R = size["P"] * size["G"], size["R"]
  shape = B, _PROMPT + R
  tokens = torch.randint(policy.config.vocab_size, shape, device="cuda")
  optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, fused=True)

  def generate(length):
    with torch.inference_mode():
      policy.generate(
        tokens[:, :_PROMPT],
        do_sample=True,
        top_k=0,
        min_new_tokens=length,
        max_new_tokens=length,
      )

  def update(length):
    for minibatch in tokens[:, : _PROMPT + length].chunk(2):
      for some in minibatch.split(8):
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


def run(variant: str, debug: bool) -> dict:
  """A run of the embedded default, in bfloat16, with this model."""
  c = tiny_cpu.get_config("debug" if debug else "")
  c.model.variant, c.model.dtype = variant, "bfloat16"
  lines = _metrics(c)
  found = {"an iteration, s": lines[-1]["time/iteration"]}
  found["grad/norm"] = lines[-1]["grad/norm"]
  if not debug:
    found["pass@1 before"] = lines[0]["eval/pass@1"]
    found["pass@1 after"] = lines[-1]["eval/pass@1"]
  return found


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
  of = report["iteration"]["seconds_of"]
  generate = sum(of.values()) - of["score"] - of["update"]
  # Functions that are one program took the same time. Segments of fewer slots
  # do not run, as all responses have one length.
  compiling = sum({x["compile_seconds"] for x in functions.values()})
  # Assumed: 30 s until a process has its weights, and that an iteration takes
  # twice as long as at best.
  seconds = (
    30 + compiling + 2 * config.num_steps * report["iteration"]["seconds"]
  )
  return {
    "generate, s at best": generate,
    **{f"{part}, s at best": of[part] for part in ("score", "update")},
    "GiB": max(x["memory"]["needed"] for x in functions.values()) / 2**30,
    "compiling, s": compiling,
    "row, s": seconds,
    "compiled by": f"jax {report['jax']}, {report['compiled_by']}",
  }


def _measure(name: str, quick: bool, seconds: float) -> dict | None:
  """A row, by a separate process; None if it is ended after `seconds`."""
  environment = os.environ | {
    "JAX_TRACEBACK_FILTERING": "off",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ".92",
  }
  # A row that a call ends need not compile again.
  cache = str(record.ROOT / ".jax_cache")
  environment.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
  if name.startswith("transformers"):
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
  command = [sys.executable, "-m", "benchmarks.gpu", f"--row={name}"]
  command += ["--quick"] if quick else []
  with tempfile.TemporaryFile("w+") as errors:
    try:
      done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        cwd=record.ROOT,
        env=environment,
        timeout=seconds,
      )
    except subprocess.TimeoutExpired:
      return None
    finally:
      errors.seek(0)
      said = errors.read()
      sys.stderr.write(said[-4000:])
  if done.returncode == _NO_GPU:
    raise SystemExit(_NO_GPU)
  try:
    return json.loads(done.stdout.splitlines()[-1])
  except (IndexError, ValueError):
    return {"failed": f"exit code {done.returncode}: {said[-1000:]}"}


def _row(row: Row, quick: bool) -> dict:
  """A row, or why it failed, in this process."""
  device = jax.devices()[0]
  if device.platform != "gpu" and not quick:
    print(f"expected a GPU, found {device.device_kind}", file=sys.stderr)
    raise SystemExit(_NO_GPU)
  found = {"device": device.device_kind, "commit": record.commit()}
  start = time.monotonic()
  try:
    found |= row.measure(*row.arguments)
  except Exception as error:
    traceback.print_exc()
    found["failed"] = f"{type(error).__name__}: {error}"[:2000]
  return found | {"row, s": round(time.monotonic() - start, 1)}


def _measure_all(every: dict[str, Row], args) -> int:
  """The rows that `args.out` lacks, as long as there is time; an exit code."""
  saved = {"quick": args.quick, "rows": {}}
  if args.out and args.out.exists():
    saved |= json.loads(args.out.read_text())
  if saved["quick"] != args.quick:
    raise SystemExit(f"--out={args.out}: has rows with and without --quick")
  found, end = saved["rows"], time.monotonic() + 60 * args.minutes
  for name, row in every.items():
    if name in found:
      continue
    left = end - time.monotonic()
    if left < row.seconds and not args.quick:
      print(f"{left:.0f} s are left, and {name} takes about {row.seconds:.0f}")
      return _MORE
    got = _measure(name, args.quick, min(left, _LONGEST))
    if got is None and left < _LONGEST:
      return _MORE
    found[name] = got or {"failed": f"took over {_LONGEST:.0f} s"}
    print(name, found[name], flush=True)
    if args.out:
      args.out.parent.mkdir(parents=True, exist_ok=True)
      record.write("gpu", {"quick": args.quick, "rows": found}, args.out)
  print(json.dumps({"rows": found}))
  return 0


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  parser.add_argument("--plan", action="store_true", help="needs no GPU")
  parser.add_argument("--out", type=Path)
  parser.add_argument("--minutes", type=float, default=8.5)
  parser.add_argument("--row", help="measures this row, in this process")
  args = parser.parse_args()
  if args.plan:
    planned = {name: plan_row(name) for name in _POLICIES}
    record.finish("gpu", {"rows": planned}, args.out)
    return 0
  every = rows(args.quick)
  if args.row:
    print(json.dumps(_row(every[args.row], args.quick)))
    return 0
  return _measure_all(every, args)


if __name__ == "__main__":
  raise SystemExit(main())
