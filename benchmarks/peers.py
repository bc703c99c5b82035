"""Losses and whole iterations beside those of Tunix and TRL.

  python -m benchmarks.peers [--quick] [--out=FILE.json] [--repeats=5]
    [--tunix_python=DIR/bin/python] [--trl_python=DIR/bin/python]
    [--cases=NAME,NAME]

With `--cases` only these are measured; all else in FILE.json stays.
Both peers are optional. Make one virtual environment for each:
  python3 -m venv DIR && DIR/bin/pip install google-tunix==0.1.7
  python3 -m venv DIR &&
    DIR/bin/pip install torch==2.13.0 trl==1.16.0 peft==0.21.2
Needs `pip install -e '.[hf]'`.

Losses: the same log-probs, advantages and mask for all; TRL computes in
float64, Tunix and gspo_jax in float32, which both require. Differences are the
largest absolute ones of a loss and of its gradient in a log-prob. A part of the
ratios is clipped.

Iterations: GSPO in float32 on the same Qwen3, of a Hugging Face folder, with
the same prompts. An iteration is a generation, its rewards, and one optimizer
step on the batch, for which no trainer computes old log-probs in advance. The
weights count down (see benchmarks/lengths.py), so that each response has the
wanted length in each trainer, which is checked: all the most tokens, or a long
tail. A micro-batch has 16 responses. `FULL` has the cases.
gspo_jax runs with the static sampler, and with continuous batching and packed
rows; Tunix with its own sampler, with and without sequence packing; TRL with
`generate`. (Its continuous batching took four times as long on a CPU.)

All share one core, in turns. Seconds are those in which a process computed (CPU
time), which other processes change little; those of the processes that score
for gspo_jax, a few milliseconds, are not among them. The first two iterations
of each are not counted: they compile. `first` is the seconds of the very first,
with no compilation cache; `times` is the least seconds of a peer's best form
over the least seconds of ours.
"""

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import tokenizers
import transformers

from benchmarks import lengths, record
from benchmarks.turns import answer
from gspo_jax import model
from gspo_jax.model import hf

ROOT = Path(__file__).parent.parent
FORMS = {
  "ours": ("static", "continuous"),
  "tunix": ("padded", "packed"),
  "trl": ("generate",),
}
PACKAGES = (
  *("jax", "flax", "google-tunix", "qwix"),
  *("trl", "torch", "peft", "transformers"),
)
# Of every process.
PLACE = {
  "cwd": ROOT,
  "env": os.environ
  | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"},
}
# Of the losses: the spread of log-ratios, and the clip range.
TOKEN_RATIOS = (0.3, 0.2, 0.28)
METHODS = {"gspo": (2e-3, 3e-4, 4e-4)} | dict.fromkeys(
  ("grpo", "dr_grpo", "dapo", "cispo", "sapo"), TOKEN_RATIOS
)


class Case(NamedTuple):
  """G responses of at most R tokens to each of P prompts of S tokens."""

  R: int
  vocabulary: int
  width: int  # of the model; heads have 32 columns, an MLP 3 * width
  long_tail: bool = False  # else all responses have R tokens
  experts: int = 0  # of which a token takes two, with half of an MLP each
  lora_rank: int = 0  # of adapters of all linear layers; 0: weights are trained
  P: int = 16
  G: int = 4
  S: int = 32
  layers: int = 4
  slots: int = 16


QUICK = {
  name: Case(R, 64, 64, long_tail, P=2, G=2, S=8, layers=1, slots=2)
  for name, R, long_tail in (("short", 8, False), ("long tail", 16, True))
}
FULL = {
  "short": Case(64, 512, 128),
  "short with 8 experts": Case(64, 512, 128, experts=8),
  "4.2M parameters": Case(128, 2048, 256),
  "4.2M parameters with a long tail": Case(256, 2048, 256, long_tail=True),
  "4.2M parameters with LoRA": Case(128, 2048, 256, lora_rank=8),
  "4.2M parameters with 512 tokens": Case(512, 2048, 256, P=8),
  "60M parameters": Case(64, 2048, 768, P=2, layers=8, slots=8),
  "vocabulary of 32768": Case(64, 32768, 128),
}


def losses_given(B: int = 8, T: int = 32) -> dict[str, np.ndarray]:
  """Random arrays: `mask`, `advantages`, and others by method."""
  rng = np.random.default_rng(0)
  mask = np.arange(T) < rng.integers(1, T + 1, (B, 1))
  given = {"mask": mask, "advantages": rng.normal(size=B).astype(np.float32)}
  for name, (spread, low, high) in METHODS.items():
    logps = -rng.exponential(size=(B, T)).astype(np.float32)
    noise = rng.normal(scale=spread, size=(B, T)).astype(np.float32)
    given |= {f"{name}/logps": logps, f"{name}/old_logps": logps - noise}
    given |= {f"{name}/low": np.array(low), f"{name}/high": np.array(high)}
  return given


def write_model(folder: str, case: Case) -> None:
  """A Hugging Face folder: Qwen3 that counts down, a word for each token."""
  heads = case.width // 32
  cfg = model.variant(
    "tiny",
    vocab_size=case.vocabulary,
    num_layers=case.layers,
    embed_dim=case.width,
    num_heads=heads,
    num_kv_heads=heads // 2,
    head_dim=32,
    mlp_dim=case.width * 3 // (2 if case.experts else 1),
    num_experts=case.experts,
    experts_per_token=2 if case.experts else 0,
    dtype="float32",
  )
  hf.save_hf(lengths.countdown(model.init(jax.random.key(0), cfg)), cfg, folder)
  words = {word(i): i for i in range(case.vocabulary)}
  fast = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(words, unk_token=word(1))
  )
  fast.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=fast,
    eos_token=word(lengths.STOP),
    pad_token=word(case.vocabulary - 1),
    unk_token=word(1),
  ).save_pretrained(folder)


def word(token: int) -> str:
  """Of one width: a special token is found inside of longer words, too."""
  return f"t{token:05d}"


def plan_of(folder: Path, case: Case) -> dict:
  """What the processes read: the model, and prompts with responses."""
  folder.mkdir()
  write_model(f"{folder}/model", case)
  each = np.full(case.P, case.R)
  if case.long_tail:
    each = lengths.long_tailed(case.P, case.R)
  starts = [word(1)] * (case.S - 1)
  prompts = [" ".join([*starts, word(n)]) for n in each]
  rows = [json.dumps({"question": p, "answer": "#### 1"}) for p in prompts]
  (folder / "problems.jsonl").write_text("\n".join(rows))
  plan = {
    "model": f"{folder}/model",
    "problems": f"{folder}/problems.jsonl",
    "prompts": prompts,
    "lengths": sorted(np.repeat(each, case.G).tolist()),
    "group": case.G,
    "prompt_tokens": case.S,
    "max_new_tokens": case.R,
    "slots": case.slots,
    "lora_rank": case.lora_rank,
    "micro_batch": min(16, case.P * case.G),
  }
  (folder / "plan.json").write_text(json.dumps(plan))
  return plan


class Trainer:
  """A process of a trainer that makes an iteration whenever it is asked.

  Args:
    python: of its environment.
    name: of `FORMS`.
    form: of these.
    folder: with a plan.json.
  """

  def __init__(self, python: str, name: str, form: str, folder: Path):
    pipe = subprocess.PIPE
    self._process = subprocess.Popen(
      command(python, name, form, folder),
      stdin=pipe,
      stdout=pipe,
      text=True,
      **PLACE,
    )

  def ask(self) -> dict:
    """Seconds and lengths of an iteration."""
    print(file=self._process.stdin, flush=True)
    return answer(self._process.stdout)

  def end(self) -> None:
    self._process.stdin.close()
    self._process.wait()


def command(python: str, name: str, part: str, folder: Path) -> list[str]:
  return [python, "-m", f"benchmarks.peers_{name}", str(folder), part]


def compare_losses(
  pythons: dict[str, str], folder: Path, case: Case
) -> list[dict]:
  """Prints and returns the largest differences by peer and method."""
  print("peer | method | loss | gradient: largest differences")
  plan_of(folder, case)
  np.savez(folder / "losses.npz", **losses_given())
  found = {}
  for name, python in pythons.items():
    run = command(python, name, "losses", folder)
    subprocess.run(run, check=True, stdout=sys.stderr, **PLACE)
    found[name] = np.load(folder / f"losses_{name}.npz")
  ours, rows = found.pop("ours"), []
  for peer, theirs in found.items():
    for method in METHODS:
      if f"{method}/loss" in theirs:
        row = {"peer": peer, "method": method}
        for of in ("loss", "gradient"):
          key = f"{method}/{of}"
          row[of] = float(f"{np.abs(ours[key] - theirs[key]).max():.2g}")
        rows.append(row)
        print(" | ".join(map(str, row.values())), flush=True)
  return rows


def compare_iterations(
  pythons: dict[str, str], folder: Path, kind: str, case: Case, repeats: int
) -> dict:
  """Prints and returns seconds by trainer and form, and how they compare."""
  plan = plan_of(folder, case)
  trainers = {
    (name, form): Trainer(python, name, form, folder)
    for name, python in pythons.items()
    for form in FORMS[name]
  }
  seconds = {key: [] for key in trainers}
  for _ in range(repeats + 2):
    for key, trainer in trainers.items():
      turn = trainer.ask()
      if turn["lengths"] != plan["lengths"]:
        raise ValueError(f"{key}: {turn['lengths']=}, {plan['lengths']=}")
      seconds[key].append(turn["seconds"])
  for trainer in trainers.values():
    trainer.end()
  found, best = {name: {} for name in pythons}, {}
  for (name, form), every in seconds.items():
    least, middle = min(every[2:]), statistics.median(every[2:])
    found[name][form] = {
      "first": round(every[0], 1),
      "min": round(least, 3),
      "median": round(middle, 3),
    }
    best[name] = min(best.get(name, least), least)
    print(*(kind, name, form, found[name][form]), sep=" | ", flush=True)
  times = {
    n: round(b / best["ours"], 2) for n, b in best.items() if n != "ours"
  }
  print(f"{kind} | times | {times}", flush=True)
  return {
    "case": kind,
    "commit": record.commit(),
    "seconds": found,
    "times": times,
  }


def with_others(rows: list[dict], kept: list[dict]) -> list[dict]:
  """These rows, and those of other cases that are kept."""
  by_case = {row["case"]: row for row in [*kept, *rows]}
  return [*by_case.values()]


def versions(python: str) -> dict[str, str]:
  """Of the packages in an environment."""
  script = (
    "import importlib.metadata as m; "
    "print({d.name: d.version for d in m.distributions()})"
  )
  out = subprocess.run(
    [python, "-c", script], check=True, capture_output=True, text=True
  ).stdout
  installed = ast.literal_eval(out)
  return {name: installed[name] for name in PACKAGES if name in installed}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  parser.add_argument("--out", type=Path)
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--tunix_python", type=Path)
  parser.add_argument("--trl_python", type=Path)
  parser.add_argument("--cases", help="names, by comma; needs --out")
  args = parser.parse_args()
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  pythons = {"ours": sys.executable}
  for name in ("tunix", "trl"):
    if path := getattr(args, f"{name}_python"):
      pythons[name] = str(path.absolute())
  cases, repeats = (QUICK, 1) if args.quick else (FULL, args.repeats)
  kept = {}
  if args.cases:
    cases = {name: FULL[name] for name in args.cases.split(",")}
    kept = json.loads(args.out.read_text())
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    first = next(iter(cases.values()))
    losses = kept.get("losses") or compare_losses(
      pythons, folder / "losses", first
    )
    rows = [
      compare_iterations(pythons, folder / kind, kind, case, repeats)
      for kind, case in cases.items()
    ]
  measured = {
    "versions": {name: versions(path) for name, path in pythons.items()},
    "losses": losses,
    "iterations": with_others(rows, kept.get("iterations", [])),
  }
  record.finish("peers", measured, args.out)


if __name__ == "__main__":
  main()
