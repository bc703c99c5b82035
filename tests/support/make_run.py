"""Workdirs like those of a run, of any length, written at once."""

import json

import numpy as np

from gspo_jax.losses import EDGES
from gspo_jax.record.run_files import Sample, write_samples
from gspo_jax.report import workdir

CONFIG = {
  "num_steps": 20,
  "model": {"checkpoint": "", "variant": "tiny"},
  "objective": {"name": "gspo"},
  "optim": {"learning_rate": 1e-6},
}


def make_run(
  folder, steps, *, moe=True, config=CONFIG, objective=CONFIG["objective"],
  seed=0, scalars=None, average=1,
):  # fmt: skip
  """Writes a run to `folder`; its avg@n is `average` times its pass@1."""
  rng = np.random.default_rng(seed)
  (folder / "samples").mkdir(parents=True)
  rows, spreads = [], [{"edges": numbers(EDGES)}]
  for step in range(steps + 1):
    row = {"step": step}
    if step:
      row |= _scalars(rng, step, steps, moe) | (scalars or {})
      spreads.append({"step": step} | _distributions(rng, moe))
    if step % 10 == 0 or step == steps:
      row |= {"eval/pass@1": 0.2 + 0.6 * step / max(steps, 1)}
      row |= {"eval/avg@4": row["eval/pass@1"] * average}
      row |= {"eval/greedy": 0.3, "eval/pass@4": 0.5}
    if step and (step % 10 == 0 or step == steps):
      add_sample(folder, step, response=f"it is {step}")
    rows.append(row)
  _write(folder / "metrics.jsonl", rows)
  _write(folder / "distributions.jsonl", spreads)
  if config:
    saved = json.dumps(config | {"objective": objective})
    (folder / "run_config.json").write_text(saved)
  return folder


def runs(*folders):
  """The runs of these folders, as a report reads them."""
  return workdir.read([str(folder) for folder in folders])


def add_sample(folder, step, *, problem="q?", response="a", reference="r"):
  sample = Sample(step, problem, response, reference, 0.5)
  write_samples(folder / "samples", step, [sample])


def numbers(values):
  return [float(v) if np.isfinite(v) else None for v in values]


def _write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _scalars(rng, step, steps, moe):
  clips = [
    f"clip_frac/{unit}{end}"
    for unit in ("sequence", "token")
    for end in ("", "_low", "_high")
  ]
  names = (
    *clips,
    *("grad/norm", "kl/old_new", "loss/policy", "policy/entropy"),
    *("mismatch/sequence_abs_mean", "mismatch/token_abs_mean", "ratio/moved"),
    *("ratio/sequence_std", "ratio/token_std", "reward/mixed_groups"),
    *("response/truncated", "time/generate", "time/score", "time/update"),
    *("time/iteration", "throughput/tokens_per_second"),
    *(("moe/expert_flip_rate", "moe/load_max") if moe else ()),
  )
  row = dict(zip(names, rng.uniform(0.01, 1, len(names)), strict=True))
  row["reward/mean"] = step / steps + rng.normal() / 20
  row["response/length"] = 100 + rng.normal()
  return row


def _distributions(rng, moe):
  found = {
    "ratio/token_log": np.histogram(rng.normal(size=500) / 50, EDGES)[0],
    "ratio/sequence_log": np.histogram(rng.normal(size=64) / 2000, EDGES)[0],
    "mismatch/token_gap": np.histogram(rng.normal(size=500) / 99, EDGES)[0],
    "mismatch/sequence_gap": np.histogram(rng.normal(size=64) / 3000, EDGES)[0],
  }
  if moe:
    found["moe/layer_flip_rate"] = rng.uniform(0, 0.2, 6).round(4)
  return {name: values.tolist() for name, values in found.items()}
