"""Functions of a config that observe a run of it; see `made_run`."""

import atexit
import collections
import re
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
from made_run import MadeRun

from gspo_jax.record import run_files

FOLDER = Path(tempfile.mkdtemp(prefix="made_runs_"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
RUNS: dict[str, MadeRun] = {}


def run_of(config) -> MadeRun:
  """The run of a config; equal configs share one."""
  key = config.to_json_best_effort()
  if key not in RUNS:
    RUNS[key] = MadeRun(config, FOLDER / str(len(RUNS)))
  return RUNS[key]


def initial_key(config):
  (key, *_) = run_of(config).keys["init"]
  return np.asarray(jax.random.key_data(key))


def mesh_axes(config):
  """The sizes of `data` and `fsdp`."""
  shape = run_of(config).experiment.program.mesh.shape
  return shape["data"], shape["fsdp"]


def chain_seed(config):
  problems = run_of(config).experiment.datasets
  return problems.stages[0].source.seed, problems.held_out.seed


def problems(config):
  return run_of(config).given("generate")[0]


def cold_start_batch(config):
  return run_of(config).given("cold_start")[0]


def cold_start_tokens(config):
  return cold_start_batch(config)[0].tokens


def steps_run(config):
  return run_of(config).rows()


def kinds(texts: list[str]) -> dict[str, int]:
  """The number of problems by their file's letter; "0" for the chain."""
  letters = ("0" if text[0].isdigit() else text[0] for text in texts)
  return dict(collections.Counter(letters))


def trained_kinds(config):
  return kinds(problems(config))


def mean_reward(config):
  return float(np.mean(run_of(config).given("rewards")))


def demonstration_starts(config):
  _, responses, *_ = cold_start_batch(config)
  tokenizer = run_of(config).experiment.program.tokenizer
  return {tokenizer.decode(row[:2]) for row in responses}


def teachers(config):
  """The teachers of the first held-out problems."""
  experiment = run_of(config).experiment
  return {*experiment.teachers_of(experiment.held_out).tolist()}


def repeats_of_solved(config):
  """The largest number of times that a solved problem is sampled."""
  calls = run_of(config).given("generate")
  solved = [text for batch in calls for text in batch if int(text[1:4]) < 8]
  return max(collections.Counter(solved).values())


def processes(config):
  return len(run_of(config).pools)


def scored_by(config):
  """What the workers run, and the mean reward."""
  return run_of(config).pools[0].name, mean_reward(config)


def turns(config):
  """Of conversations with `made_run.Endless`, and their mean reward."""
  (_, found) = run_of(config).rows("conversation/turns")[:2]
  return found, mean_reward(config)


def reward_seconds(config):
  return run_of(config).pools[0].seconds


def reward_concurrency(config):
  return run_of(config).pools[0].concurrency


def cold_start_updates(config):
  return len(run_of(config).given("cold_start"))


def evaluated_at(config):
  run = run_of(config)
  pairs = zip(run.rows(), run.rows("eval/greedy"), strict=True)
  return [step for step, greedy in pairs if greedy is not None]


def problems_evaluated(config):
  """Sampled and greedy, in the first evaluation."""
  return tuple(map(len, run_of(config).given("respond")[:2]))


def samples_averaged(config):
  """Each n of eval/avg@n."""
  text = (run_of(config).folder / "metrics.jsonl").read_text()
  return [int(n) for n in re.findall(r"eval/avg@(\d+)", text)]


def saved_steps(config):
  folder = run_of(config).folder / "checkpoints"
  return sorted(int(path.name) for path in folder.iterdir())


def samples_written(config):
  folder = run_of(config).folder / "samples"
  (samples,) = run_files.read_samples(folder).values()
  return len(samples)


def wandb_projects(config):
  """The project of each W&B run, and the steps logged there."""
  wandb = run_of(config).wandb
  projects = [call.args[0] for call in wandb.call_args_list]
  return projects, [call.args[0] for call in wandb().write.call_args_list]


def traced_iterations(config):
  """The updates while a trace was on, counted from 1; and its folder's name."""
  names, traced, updates, on = set(), [], 0, False
  for name, argument in run_of(config).events:
    if name == "start_trace":
      on = True
      names.add(argument.name)
    on = on and name != "stop_trace"
    updates += name == "update"
    if on and name == "update":
      traced.append(updates)
  return traced, names
