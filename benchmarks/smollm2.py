"""SmolLM2 before and after GSPO: rules kept, and what is lost elsewhere.

  python -m gspo_jax.model.hf.prepare_smollm2 --to=models/smollm2
  python -m benchmarks.smollm2 --text=test.jsonl --out=benchmarks/smollm2
  python -m benchmarks.smollm2 --tables=benchmarks/smollm2.json

Trains `configs/smollm2_cpu.py` for each objective and seed in
RUNS/OBJECTIVE-SEED; runs that are done are not repeated. Then it evaluates the
start and each policy on new subjects and on rules of new kinds, and compares
their distributions:

kl           mean over the tokens of a policy's own responses, one to each
             problem, of the KL divergence of its next-token distribution from
             the start's, nats
perplexity   of the first 192 tokens of each of the first 100 rows of other
             text, --text: a JSON object a line, with `question` and `answer`,
             such as the test set of GSM8K

Both are at temperature 1, in the dtype of the run. Writes OUT.json and OUT.png.

--tables trains nothing. It prints, of a record, the means over the seeds with
95 % intervals, and its responses at the start and of the first seed. Intervals
are Student's: over the seeds, and where there are problems also over these. The
half-widths of the two are added as the roots of a sum of squares. The seeds
share the problems, so that the mean of their standard errors over problems
counts, undivided: the largest that the error of their mean can be.
"""

import argparse
import functools
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from benchmarks import record, seeds
from gspo_jax import model
from gspo_jax.configs import smollm2_cpu
from gspo_jax.data import tokenizers
from gspo_jax.model import hf
from gspo_jax.tasks import instructions

_CONFIG = "configs/smollm2_cpu.py"
_SETS = {
  "new_subjects": (instructions.new_subjects, 64, 4),
  "new_rules": (instructions.new_rules, 96, 2),
}  # problems, and responses to each
_ROWS, _LENGTH = 8, 192  # of a batch of texts; longer ones are cut
_TEXTS = 100
_SHOWN = 4  # problems of each set, with the first response


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--checkpoint", default="models/smollm2")
  parser.add_argument("--objectives", nargs="+", default=["gspo"])
  parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
  parser.add_argument("--runs", type=Path, default=Path("runs/smollm2"))
  parser.add_argument("--text", type=Path)
  action = parser.add_mutually_exclusive_group(required=True)
  action.add_argument("--out", type=Path)
  action.add_argument("--tables", type=Path, metavar="RECORD")
  args = parser.parse_args()
  if args.tables:
    print("\n".join(_tables(json.loads(args.tables.read_text()))))
    return
  runs, settings = {}, {}
  for objective in args.objectives:
    for seed in args.seeds:
      name = f"{objective}-{seed}"
      settings[name] = {
        "model.checkpoint": args.checkpoint,
        "objective.name": objective,
        "seed": seed,
      }
      runs[name] = seeds.train(_CONFIG, args.runs / name, **settings[name])
      for key in ("seconds", "largest resident set, GiB"):
        del runs[name][key]  # of a run that may have been done before
  texts = _texts(args.text) if args.text else []
  files = _write_sets(args.runs)
  tokenizer = tokenizers.load(args.checkpoint)
  dtype = smollm2_cpu.get_config().model.dtype
  cfg = hf.config_from_hf(args.checkpoint, dtype=dtype)
  first = hf.load_hf(args.checkpoint, cfg)
  before, answers = _evaluate(
    args.checkpoint,
    args.runs / "start",
    files,
    {"model.checkpoint": args.checkpoint},
  )
  before |= _perplexity(first, cfg, tokenizer, texts)
  shown = _show({}, "before", answers)
  for name, run in runs.items():
    workdir = args.runs / name
    run["objective"] = settings[name]["objective.name"]
    found, answers = _evaluate(workdir, workdir, files, settings[name])
    run |= found
    policy = hf.load_hf(_export(workdir, settings[name]), cfg)
    run |= _perplexity(policy, cfg, tokenizer, texts)
    run["kl"] = _kl(policy, first, cfg, tokenizer, answers)
    shown = _show(shown, name, answers)
  found = {"before": before, "results": list(runs.values())}
  record.finish(
    "smollm2", found | {"samples": shown}, args.out.with_suffix(".json")
  )
  seeds.draw(found["results"], args.out.with_suffix(".png"))


def _command(module: str, settings: dict, *flags: str) -> None:
  config = (f"--config.{key}={value}" for key, value in settings.items())
  subprocess.run(
    [
      *(sys.executable, "-m", f"gspo_jax.{module}", f"--config={_CONFIG}"),
      *(*config, *flags),
    ],
    cwd=seeds.ROOT,
    check=True,
  )


def _texts(path: Path) -> list[str]:
  """The first texts of a file of questions."""
  rows = map(json.loads, path.read_text().splitlines()[:_TEXTS])
  return [f"{row['question']}\n{row['answer']}" for row in rows]


def _write_sets(folder: Path) -> dict[str, Path]:
  """The files of the held-out problems, for `evaluate`."""
  files = {}
  for name, (problems, count, _) in _SETS.items():
    files[name] = (folder / f"{name}.jsonl").absolute()
    rows = [
      {"question": p.text, "answer": p.reference} for p in problems()[:count]
    ]
    files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
  return files


def _evaluate(checkpoint, folder, files, settings) -> tuple[dict, list[dict]]:
  """pass@1 and length of each set, with standard error, and all responses."""
  found, answers = {}, []
  for name, (_, _, samples) in _SETS.items():
    out = folder.absolute() / f"evaluation-{name}"
    _command(
      *("evaluate", settings, f"--checkpoint={Path(checkpoint).absolute()}"),
      *(f"--set={name}={files[name]}", "--reward=instructions"),
      *(f"--samples={samples}", f"--out={out}"),
    )
    row = json.loads((out / name / "results.json").read_text())["results"]
    keys = ("avg", "avg_error", "problems", "samples", "tokens", "truncated")
    found[name] = {key: row[key] for key in keys}
    lines = (out / name / "answers.jsonl").read_text().splitlines()
    answers += map(json.loads, lines)
  return found, answers


def _export(workdir: Path, settings: dict) -> Path:
  """The newest policy of a run, as a folder."""
  folder = workdir / "exported"
  if not folder.exists():
    _command(
      *("export", settings, f"--workdir={workdir.absolute()}"),
      *(f"--to={folder.absolute()}", "--dtype=float32"),
    )
  return folder


def _batches(rows: list[list[int]]) -> Iterator[np.ndarray]:
  """The rows [_ROWS, _LENGTH], and which tokens are real."""
  for start in range(0, len(rows), _ROWS):
    tokens, real = np.zeros((2, _ROWS, _LENGTH), np.int32)
    for i, row in enumerate(rows[start : start + _ROWS]):
      row = row[:_LENGTH]
      tokens[i, : len(row)], real[i, : len(row)] = row, 1
    yield tokens, real


def _log_probs(params, cfg, tokens, real):
  """Of every next token, [rows, length - 1, vocabulary]."""
  positions = jnp.broadcast_to(jnp.arange(_LENGTH), tokens.shape)
  logits = model.forward(params, cfg, tokens, positions, real).logits
  return jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))


@functools.partial(jax.jit, static_argnames="cfg")
def _sum_log_probs(params, cfg, tokens, real):
  log_probs = _log_probs(params, cfg, tokens, real)
  of_next = jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1)[..., 0]
  return jnp.sum(of_next * real[:, 1:])


@functools.partial(jax.jit, static_argnames="cfg")
def _sum_kl(policy, first, cfg, tokens, real, is_response):
  log_p = _log_probs(policy, cfg, tokens, real)
  log_q = _log_probs(first, cfg, tokens, real)
  kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)
  return jnp.sum(kl * is_response[:, 1:])


def _perplexity(params, cfg, tokenizer, texts) -> dict[str, float]:
  rows = [tokenizer.encode(text) for text in texts]
  sums = [
    (_sum_log_probs(params, cfg, tokens, real), real[:, 1:].sum())
    for tokens, real in _batches(rows)
  ]
  if not sums:
    return {}
  log_probs, tokens = map(float, np.sum(sums, axis=0))
  return {"perplexity": math.exp(-log_probs / tokens)}


def _kl(policy, first, cfg, tokenizer, answers) -> float:
  system = smollm2_cpu.get_config().data.system_prompt
  rows, prompts = [], []
  for answer in answers:
    if answer["sample"]:
      continue
    prompt = tokenizer.prompt(answer["problem"], system)
    stop = tokenizer.stop_ids[:1] if answer["finish"] == "stopped" else ()
    rows.append([*prompt, *tokenizer.encode(answer["response"]), *stop])
    prompts.append(len(prompt))
  sums = []
  for i, (tokens, real) in enumerate(_batches(rows)):
    of_prompt = np.zeros(_ROWS, int)
    chosen = prompts[i * _ROWS : (i + 1) * _ROWS]
    of_prompt[: len(chosen)] = chosen
    is_response = real * (np.arange(_LENGTH) >= of_prompt[:, None])
    kl = _sum_kl(policy, first, cfg, tokens, real, is_response)
    sums.append((kl, is_response.sum()))
  divergence, tokens = map(float, np.sum(sums, axis=0))
  return divergence / tokens


def _show(shown: dict, name: str, answers: list[dict]) -> dict:
  """Adds the first responses to some problems, by problem and policy."""
  counts = dict.fromkeys(_SETS, 0)
  for answer in answers:
    if answer["sample"] == 0 and counts[answer["set"]] < _SHOWN:
      counts[answer["set"]] += 1
      response = {"response": answer["response"], "score": answer["score"]}
      shown.setdefault(answer["problem"], {})[name] = response
  return shown


def _tables(found: dict) -> list[str]:
  """Lines of Markdown: the means with intervals, and the responses."""
  before, after = found["before"], found["results"]
  lines = ["| | start | mean of the seeds |", "|---|---|---|"]
  for name in _SETS:
    row = lambda run, name=name: (run[name]["avg"], run[name]["avg_error"])
    start = _interval([row(before)], before[name]["problems"])
    mean = _interval(map(row, after), before[name]["problems"])
    lines.append(f"| rules kept, {name} | {start} | {mean} |")
    for key in ("tokens", "truncated"):
      mean = _interval((run[name][key], 0.0) for run in after)
      start = f"{before[name][key]:.3g}"
      lines.append(f"| {key}, {name} | {start} | {mean} |")
  for key in ("kl", "perplexity"):
    mean = _interval((run[key], 0.0) for run in after)
    lines.append(f"| {key} | {before.get(key, 0):.3g} | {mean} |")
  lines += ["", "| problem | start | first seed |", "|---|---|---|"]
  for problem, responses in found["samples"].items():
    start, policy, *_ = responses.values()
    cells = [
      f"{' '.join(r['response'].split())} ({r['score']:.0f})"
      for r in (start, policy)
    ]
    lines.append(f"| {problem} | {cells[0]} | {cells[1]} |")
  return lines


def _interval(runs, problems: int = 2) -> str:
  """The mean of runs and its 95 % interval, of non-negative values.

  Args:
    runs: (mean over the problems, its standard error) of each.
    problems: how many there are.
  """
  means, errors = np.array(list(runs), float).T
  half = np.mean(errors) * stats.t.ppf(0.975, problems - 1)
  if len(means) > 1:
    error = np.std(means, ddof=1) / math.sqrt(len(means))
    half = math.hypot(half, error * stats.t.ppf(0.975, len(means) - 1))
  mean = np.mean(means)
  return f"{mean:.3g} ({max(mean - half, 0):.3g} to {mean + half:.3g})"


if __name__ == "__main__":
  main()
