"""What a test can see of a run: each takes a config; see `made_run`."""

import atexit
import collections
import re
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import jax
import numpy as np
from made_run import MadeRun

from gspo_jax.data import readers as row_readers
from gspo_jax.runtime import run_files

FOLDER = Path(tempfile.mkdtemp(prefix="made_runs_"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
RUNS: dict[str, MadeRun] = {}


def run_of(config) -> MadeRun:
  """Its run: one for all the rows that look at it."""
  key = config.to_json_best_effort()
  if key not in RUNS:
    RUNS[key] = MadeRun(config, FOLDER / str(len(RUNS)))
  return RUNS[key]


def initial_key(config):
  (key, *_) = run_of(config).keys["init"]
  return np.asarray(jax.random.key_data(key))


def update_key(config):
  (key, *_) = run_of(config).keys["update"]
  return np.asarray(jax.random.key_data(key))


def chain_seed(config):
  problems = run_of(config).experiment.datasets
  return problems.stages[0].source.seed, problems.held_out.seed


def questions(config):
  return run_of(config).given("generate")[0]


def imitated(config):
  return run_of(config).given("cold_start")[0]


def imitated_questions(config):
  return imitated(config)["tokens"]


def steps_run(config):
  return run_of(config).rows()


def kinds(asked: list[str]) -> dict[str, int]:
  """Questions by the file they are from; those of the chain begin with "0"."""
  letters = ("0" if q[0].isdigit() else q[0] for q in asked)
  return dict(collections.Counter(letters))


def learnt_kinds(config):
  return kinds(questions(config))


def second_kinds(config):
  return kinds(run_of(config).given("generate")[1])


def held_out_kinds(config):
  (asked,) = run_of(config).given("generate_eval")[:1]
  return set(kinds(asked))


def question_forms(config):
  return {re.sub(r"\d+", "N", question) for question in questions(config)}


def question_lengths(config):
  return {len(question) for question in questions(config)}


def rewards_given(config):
  return float(np.mean(run_of(config).given("rewards")))


def demonstrations(config):
  batch, texts = imitated(config), run_of(config).experiment.program.tokenizer
  ids = zip(batch["response"], batch["response_length"], strict=True)
  return [texts.decode(row[: n - 1]) for row, n in ids]


def demonstration_starts(config):
  return {text[:2] for text in demonstrations(config)}


def demonstrated_steps(config):
  return {text.count(";") for text in demonstrations(config)}


def wrong_demonstrations(config):
  """Whether some show a wrong result of a step."""
  done = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
  wrong = lambda d: done[d[2]](int(d[1]), int(d[3])) % 10 != int(d[5])
  return any(map(wrong, demonstrations(config)))


def tfds_folder(config):
  def read(name, data_dir):
    raise ValueError(f"{name} in {data_dir}")

  with mock.patch.object(row_readers, "tfds", read):
    return run_of(config).error


def asked_at_once(config):
  return len(questions(config)), run_of(config).widths


def drawn_for_a_step(config):
  return len(run_of(config).given("generate"))


def known_again(config):
  """How often a question that is answered right is asked, at most."""
  asked = [q for batch in run_of(config).given("generate") for q in batch]
  known = [q for q in asked if int(q[1:4]) < 8]
  return max(collections.Counter(known).values())


def too_long(config):
  return run_of(config).error.partition(" ")[0]


def order_of_phases(config):
  first = {"generate": "g", "old_logprobs": "s", "update": "u"}
  return "".join(first.get(name, "") for name, _ in run_of(config).events)


def budget(config):
  return set(run_of(config).given("stop_at")[0])


def processes(config):
  return len(run_of(config).pools)


def seconds_given(config):
  return run_of(config).pools[0]["seconds"]


def stopped_by_failures(config):
  """Of what too many rewards failed, and how many may; None: none did."""
  found = re.match(r"(.*): .* expected at most (\d+)", run_of(config).error)
  return found and (found[1], int(found[2]))


def imitations(config):
  return len(run_of(config).given("cold_start"))


def looks(config):
  """Questions of which greedy accuracy was taken, before the first rollout."""
  names = [name for name, _ in run_of(config).events]
  return names[: names.index("generate_eval")].count("generate_greedy")


def cold_start_at(config):
  """Whether it is in the workdir, and whether it is in the folder named."""
  inside = (run_of(config).folder / "cold_start").is_dir()
  named = config.cold_start.dir
  return inside, bool(named) and Path(named).is_dir()


def evaluated_at(config):
  run = run_of(config)
  told = zip(run.rows(), run.rows("eval/greedy"), strict=True)
  return [step for step, greedy in told if greedy is not None]


def questions_tested(config):
  run = run_of(config)
  first, then = (run.given(f"generate_{n}") for n in ("eval", "greedy"))
  half = len(first) // 2  # of the first evaluation; then comes the last
  count = lambda batches: sum(map(len, batches[:half]))
  return count(first), count(then)


def steps_kept(config):
  folder = run_of(config).folder / "checkpoints"
  return sorted(int(path.name) for path in folder.iterdir())


def sample_files(config):
  folder = run_of(config).folder / "samples"
  return sorted(
    int(path.stem.removeprefix("step_")) for path in folder.iterdir()
  )


def samples_shown(config):
  folder = run_of(config).folder / "samples"
  (samples,) = run_files.read_samples(folder).values()
  return len(samples)
