"""What a GPU shows that a CPU cannot, most telling first.

  python -m benchmarks.gpu --out=benchmarks/gpu.json [--minutes=10] [--quick]
  until python -m benchmarks.gpu --out=gpu.json; do :; done   # in pieces

Each row is measured once and saved at once; a call goes on where the last one
ended, and starts no row after --minutes. It exits with 0 once all are there.

ratio         the ratio of a policy that has not moved, in bfloat16, as in
              benchmarks/ratio_one.py: dense, with experts, with replay
gap           mean |log-ratio| over a response of the sampler to the trainer,
              over the lower clip range of GSPO: random weights, dense and with
              experts, with and without R3
speed         tokens a second of sampling and of an update, and their share of
              the card's peak FLOPs (MFU): random weights, bfloat16
transformers  the same of transformers with PyTorch, if they are installed
families      40 iterations of each tiny family: pass@1 before and after
smollm2       GSPO and GRPO on the rules task, 3 seeds, if --checkpoint is there

The model, P prompts of S tokens, G responses of R tokens to each and the
learning rate are in each row. Nothing of it has been run on a GPU yet.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import jax

from benchmarks import ratio_one, record, seeds
from gspo_jax import model
from gspo_jax.configs import common
from gspo_jax.losses import gspo_loss
from gspo_jax.model.hf import config as hf_config
from gspo_jax.plan import lower_bounds
from gspo_jax.plan.gpus import GPUS
from gspo_jax.runtime import sharding
from gspo_jax.train import train_and_evaluate

_MODELS = ("qwen3-0.6b", "qwen3-1.7b")
_SIZE = {"P": 32, "S": 256, "G": 8, "R": 1024}
_QUICK = {"P": 4, "S": 32, "G": 2, "R": 16}
_FAMILIES = sorted(name for name in model.VARIANTS if name.startswith("tiny-"))


def rows(quick: bool, checkpoint: Path):
  """(name, function without arguments) of each row, in order."""
  for experts, replay in ((False, "none"), (True, "none"), (True, "r3")):
    yield f"ratio {experts=} {replay=}", lambda e=experts, r=replay: ratio(e, r)
  size = _QUICK if quick else _SIZE
  dense, experts = ("tiny", "tiny") if quick else (_MODELS[0], "olmoe-1b-7b")
  for variant, replay in ((dense, "none"), (experts, "none"), (experts, "r3")):
    call = lambda v=variant, r=replay: gap(v, r, size)
    yield f"gap {variant} {replay=}", call
  for variant in ("tiny",) if quick else _MODELS:
    yield f"speed {variant}", lambda v=variant: speed(v, size)
    if not quick:
      call = lambda v=variant: speed_of_transformers(v, size)
      yield f"transformers {variant}", call
  for variant in _FAMILIES[:1] if quick else _FAMILIES:
    yield f"families {variant}", lambda v=variant: family(v, quick)
  if checkpoint.exists():
    for seed in range(3):
      for name in ("gspo", "grpo"):
        call = lambda n=name, s=seed: smollm2(n, s, checkpoint)
        yield f"smollm2 {name} {seed}", call


def ratio(experts: bool, replay: str) -> dict:
  """Standard deviation of the ratio, and the share of responses clipped."""
  mesh = sharding.make_mesh(jax.devices()[:1], data=1)
  changes = {"replay": replay} if replay != "none" else {}
  got = ratio_one.measure(ratio_one.config_of(experts=experts, **changes), mesh)
  keys = "ratio/sequence_std", "ratio/token_std", "clip_frac/sequence"
  return {key: got[key] for key in keys}


def _run(variant: str, size: dict, **changes) -> list[dict]:
  """The metrics of three iterations of random weights; the first compiles."""
  c = common.get_config()
  c.model.variant, c.model.dtype = variant, "bfloat16"
  c.data.prompts, c.data.max_prompt_length = size["P"], size["S"]
  c.rollout.group_size, c.sampler.max_new_tokens = size["G"], size["R"]
  c.continuous_batching.slots = size["P"] * size["G"]
  c.learner.minibatches = 2
  c.learner.micro_batch_size = min(8, size["P"] * size["G"] // 2)
  c.num_steps, c.cold_start.steps, c.eval.every = 3, 0, 0
  c.optim.learning_rate = 0.0
  c.update_from_flattened_dict(changes)
  with tempfile.TemporaryDirectory() as folder:
    train_and_evaluate(c, folder)
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
  return [row for row in map(json.loads, lines) if "loss/policy" in row]


def gap(variant: str, replay: str, size: dict) -> dict:
  """The gap of sampler and trainer in clip ranges; the ratio's deviation."""
  row = _run(variant, size, **{"objective.replay": replay})[-1]
  mean = row["mismatch/sequence_abs_mean"]
  return {
    "clip_ranges": mean / gspo_loss.__kwdefaults__["clip_low"],
    "ratio/sequence_std": row["ratio/sequence_std"],
    **size,
  }


def speed(variant: str, size: dict) -> dict:
  """Tokens a second and MFU of sampling and of an update."""
  last = _run(variant, size)[-1]
  cfg = model.variant(variant, dtype="bfloat16")
  tokens = size["P"] * size["G"] * (size["S"] + size["R"])
  sampled = size["P"] * size["G"] * size["R"]
  seconds = {name: last[f"time/{name}"] for name in ("generate", "update")}
  # Nearly all FLOPs: 2 a parameter and token, and three times that to update.
  flops = 2 * lower_bounds.active_parameters(cfg)
  work = {"generate": flops * sampled, "update": 3 * flops * tokens}
  kind = jax.devices()[0].device_kind
  peak = next((gpu.flops for gpu in GPUS.values() if gpu.name == kind), None)
  return {
    "sampled tokens/s": sampled / seconds["generate"],
    "updated tokens/s": tokens / seconds["update"],
    "MFU": peak and {n: work[n] / seconds[n] / peak for n in work},
    **size,
  }


def speed_of_transformers(variant: str, size: dict) -> dict:
  """`speed` with PyTorch's attention and fused AdamW, in one process."""
  try:
    import torch
    import transformers
  except ImportError as error:
    return {"not measured": str(error)}
  cfg = model.variant(variant)
  settings = hf_config.config_to_hf(cfg, "bfloat16", None)
  config = transformers.AutoConfig.for_model(**settings)
  policy = transformers.AutoModelForCausalLM.from_config(
    config, dtype=torch.bfloat16
  ).cuda()
  B, S, R = size["P"] * size["G"], size["S"], size["R"]
  tokens = torch.randint(cfg.vocab_size, (B, S + R), device="cuda")

  def timed(call):
    call()
    torch.cuda.synchronize()
    start = time.monotonic()
    call()
    torch.cuda.synchronize()
    return time.monotonic() - start

  def generate():
    with torch.inference_mode():
      policy.generate(
        tokens[:, :S], do_sample=True, min_new_tokens=R, max_new_tokens=R
      )

  optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, fused=True)

  def update():
    for some in tokens.split(8):
      policy(input_ids=some, labels=some).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

  sampling, updating = timed(generate), timed(update)
  return {
    "sampled tokens/s": B * R / sampling,
    "updated tokens/s": B * (S + R) / updating,
    **size,
  }


def _train(config: str, **settings) -> dict:
  with tempfile.TemporaryDirectory() as folder:
    return seeds.train(config, Path(folder), **settings)


def family(variant: str, quick: bool) -> dict:
  """A run of the embedded default with another model."""
  config = "configs/tiny_cpu.py" + (":debug" if quick else "")
  return _train(config, **{"model.variant": variant})


def smollm2(objective: str, seed: int, checkpoint: Path) -> dict:
  """A run of configs/smollm2_cpu.py at the study's learning rate."""
  settings = {
    "model.checkpoint": checkpoint.absolute(),
    "objective.name": objective,
    "optim.learning_rate": 3e-5,
    "seed": seed,
  }
  return _train("configs/smollm2_cpu.py", **settings)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--quick", action="store_true", help="tiny, on any device"
  )
  parser.add_argument("--out", type=Path)
  parser.add_argument("--minutes", type=float, default=10)
  parser.add_argument("--checkpoint", type=Path, default="models/smollm2")
  args = parser.parse_args()
  device = jax.devices()[0]
  if device.platform != "gpu" and not args.quick:
    parser.error(f"expected a GPU, found {device.device_kind}")
  found = {}
  if args.out and args.out.exists():
    found = json.loads(args.out.read_text())["rows"]
  end = time.monotonic() + 60 * args.minutes
  for name, measure in rows(args.quick, args.checkpoint):
    if name in found:
      continue
    if time.monotonic() > end:
      return 1
    found[name] = measure()
    print(name, found[name], flush=True)
    results = {"device": device.device_kind, "rows": found}
    record.finish("gpu", results, args.out)
  return 0


if __name__ == "__main__":
  raise SystemExit(main())
