"""The command on a checkpoint: its files, how it continues, its errors."""

import itertools
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from processes import free_port, mistake, python
from repository import ROOT, xla_flags

from gspo_jax.configs import calculator_cpu
from gspo_jax.evaluate import __main__, benchmarks, evaluator
from gspo_jax.evaluate.answers_file import AnswersFile
from gspo_jax.evaluate.policy_sampler import PolicySampler
from gspo_jax.program import load_params
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.record.checkpoint import Checkpoints
from gspo_jax.rewards import judge
from gspo_jax.rewards.pool import PendingCall, PendingRewards, Rewards
from gspo_jax.rewards.reward import Response
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.tasks.chain import Chain
from gspo_jax.workers.pool import Result, Started

TINY = f"--config={ROOT}/configs/tiny_cpu.py:debug"
# Of one dense layer: half of what is compiled.
SMALL = """
from gspo_jax.configs import tiny_cpu
def get_config():
  c = tiny_cpu.get_config("debug")
  c.model.num_layers, c.model.num_experts = 1, 0
  return c
"""


def config():
  exec(SMALL, made := {})
  c = made["get_config"]()
  c.data.prompts = c.learner.micro_batch_size = 8  # eight devices
  return c


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """Of a run that has saved steps 1 and 2, as `train` does."""
  folder = tmp_path_factory.mktemp("run")
  c = config()
  mesh = sharding.make_mesh(**c.mesh)
  with jax.set_mesh(mesh):
    program = build_program(parse(c), mesh, training=False)
    saved = {"identity": load_params.identity(program)}
    with Checkpoints(folder / "checkpoints", keep=2) as checkpoints:
      for step in (1, 2):
        params = program.init_params(jax.random.key(step))
        checkpoints.save(step, {"params": params}, saved)
  return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """Eleven problems of the embedded task, and two rated ones for programs."""
  folder = tmp_path_factory.mktemp("sets")
  problems = map(Chain((1,)).__getitem__, range(11))
  rows = [{"question": p.text, "answer": p.reference} for p in problems]
  rows[4] = rows[0]  # the first of the second batch
  (folder / "chain.jsonl").write_text("\n".join(map(json.dumps, rows)))
  row = {"rating": 900, "tests": [{"input": "1", "output": "1"}]}
  rows = [row | {"description": d, "id": d} for d in "ab"]
  (folder / "code.jsonl").write_text("\n".join(map(json.dumps, rows)))
  return [f"chain={folder}/chain.jsonl", f"CodeForces={folder}/code.jsonl"]


def run(workdir, files, out, **options):
  options = {"samples": 6, "reward": "final_answer"} | options
  c = config()
  c.mesh.data = c.sampler_mesh.devices = 4  # those that train evaluate
  c.reward.seconds = options.pop("seconds", 10.0)
  return evaluator.evaluate(c, str(workdir), files, out=str(out), **options)


def read(out, name="chain"):
  return [json.loads(line) for line in (out / name / "answers.jsonl").open()]


@pytest.fixture(scope="module")
def whole(workdir, files, tmp_path_factory):
  out = tmp_path_factory.mktemp("whole")
  return out, run(workdir, files, out)


def test_each_response_is_written(whole):
  out, summaries = whole
  rows = read(out)
  assert [r["set"] for r in rows] == ["chain"] * 66
  assert len(read(out, "CodeForces")) == 12
  problem = Chain((1,))[10]
  assert (rows[65]["problem"], rows[65]["reference"]) == problem[:2]
  assert (rows[65]["id"], rows[65]["sample"]) == ("11", 5)
  responses = [r["response"] for r in rows]
  assert rows[0]["problem"] == rows[24]["problem"]
  assert responses[:6] != responses[24:30]
  for r in rows:
    assert r["tokens"] <= 12
    assert r["finish"] == "stopped" or r["tokens"] == 12
  scores = [r["score"] for r in rows]
  assert summaries[0]["avg"] == pytest.approx(sum(scores) / 66)
  for results_of_set in summaries:
    path = out / results_of_set["set"] / "results.json"
    results = json.loads(path.read_text())
    assert results["results"] == results_of_set
    assert results["checkpoint"]
    assert results["settings"]["config"]["sampler"]["max_new_tokens"] == 12


def test_seconds_of_a_reward(monkeypatch):
  monkeypatch.setattr(judge, "_require_server", lambda *_: None)
  c = config()
  c.reward.seconds = 7.0
  of = lambda reward: evaluator._seconds(parse(c), reward)
  assert of("final_answer") == of("length:limit=50") == 7
  assert of("code") == 40
  assert of("code:total=9") == 19
  assert of("judge:url=http://host:1/v1,model=m") == 40
  c.reward.seconds = 90
  assert of("code:total=9") == 90


def test_an_interrupted_command_continues(
  whole, workdir, files, tmp_path, monkeypatch
):
  """One benchmark after the other; the second stands beside the first."""
  append, calls = evaluator.AnswersFile.append, []
  inside, summarize = [], evaluator.summary.summarize
  run_on_all = multihost.run_on_all

  def fails_third(self, records):
    calls.append(records[0]["set"])
    if len(calls) == 3:
      raise KeyboardInterrupt
    append(self, records)

  def watched(work):
    inside.append(True)
    try:
      return run_on_all(work)
    finally:
      inside.pop()

  def checked(*of):
    assert inside, "a fault would end this process alone"
    return summarize(*of)

  monkeypatch.setattr(evaluator.AnswersFile, "append", fails_third)
  monkeypatch.setattr(multihost, "run_on_all", watched)
  monkeypatch.setattr(evaluator.summary, "summarize", checked)
  with pytest.raises(KeyboardInterrupt):
    run(workdir, files, tmp_path)
  assert 0 < len(read(tmp_path)) < 66
  each = [run(workdir, [file], tmp_path)[0] for file in files]
  assert each == whole[1]
  assert calls == ["chain"] * 4 + ["CodeForces"]
  monkeypatch.setattr(PolicySampler, "sample", None)  # all is done
  assert run(workdir, files, tmp_path) == whole[1]
  assert len(calls) == 5
  for name in ("chain", "CodeForces"):
    one, other = (p / name / "answers.jsonl" for p in (whole[0], tmp_path))
    assert one.read_bytes() == other.read_bytes()


def test_a_step_of_the_run(whole, workdir, files):
  # Step 2 is the newest: all of its responses are there.
  assert run(workdir / "checkpoints/2", files, whole[0]) == whole[1]
  with pytest.raises(
    UserError, match=r"weights .--checkpoint.=.*use another --out"
  ):
    run(workdir / "checkpoints/1", files, whole[0])


@pytest.mark.parametrize(
  ("change", "words"),
  [({"samples": 5}, r"chain' .*--samples.=6, this run .*=5"),
   ({"limit": 3}, r"chain' .*--limit.=11, this run .*=3"),
   ({"reward": "gsm8k"}, r"chain' .*--reward.='final_answer'"),
   ({"seconds": 3.0}, r"chain' .*reward.seconds.=10.0, this run .*=3.0")],
)  # fmt: skip
def test_other_settings_are_not_mixed_in(whole, workdir, files, change, words):
  with pytest.raises(UserError, match=words):
    run(workdir, files, whole[0], **change)


@pytest.mark.parametrize(
  ("sets", "options", "words"),
  [(["AIME24"], {}, "--set=AIME24: expected NAME=FILE"),
   (["a/b=x"], {}, "--set=a/b=x: expected NAME=FILE, where NAME names a fo"),
   (["..=FILE"], {}, r"--set=\.\.=.*: expected NAME=FILE"),
   ([f"a=hf:{os.__file__}:train"], {}, "--set=a=.*: expected a path outside"),
   (["a=FILE", "A=FILE", "a=FILE"], {}, "--set=a=.*: a is there twice"),
   (["a=FILE"], {"reward": ""}, "--set=a: no such bench.*needs --reward"),
   (["a=FILE"], {"reward": "final"}, "unknown reward 'final': .*final_answer")],
)  # fmt: skip
def test_mistakes(workdir, files, tmp_path, sets, options, words):
  path = files[0].partition("=")[2]
  sets = [s.replace("FILE", path) for s in sets]
  with pytest.raises(UserError, match=words):
    run(workdir, sets, tmp_path, **options)
  assert not list(tmp_path.iterdir())


def test_conversations_are_not_evaluated_as_single_responses(files, tmp_path):
  c = calculator_cpu.get_config("debug")
  c.rollout.environment = "calculator"
  out, reward = str(tmp_path / "out"), "final_answer"
  with pytest.raises(UserError, match=r"rollout.environment='calculator': exp"):
    evaluator.evaluate(c, str(tmp_path), files, out=out, reward=reward)
  assert not (tmp_path / "out").exists()


def test_folders_without_weights(files, tmp_path):
  with pytest.raises(UserError, match="checkpoint"):
    run(tmp_path / "nothing", files, tmp_path / "out")
  assert not (tmp_path / "out").exists()
  assert not (tmp_path / "nothing").exists()


def test_a_problem_that_is_too_long(workdir, tmp_path):
  row = {"question": "1" * 9, "answer": "1"}
  (tmp_path / "long").write_text(json.dumps(row))
  with pytest.raises(UserError, match=r"9 tokens, more than data.max_prompt"):
    run(workdir, [f"a={tmp_path}/long"], tmp_path / "out")


# A benchmark on a sampler and a reward pool of the test.


class Pool:
  """Is the response the reference? Fails on "fail", hangs on "hang"."""

  def __init__(self):
    self.responses, self.events = [], []

  def submit(self, responses, group_size):
    assert group_size * len({r.reference for r in responses}) == len(responses)
    self.responses += responses
    self.events.append("submit")
    right = np.float32([r.text == r.reference for r in responses])
    failed = np.array(["fail" in r.text for r in responses])
    rewards = Rewards(right, {}, failed, ("why",) * any(failed))
    started = Started(responses, lambda: None)
    for i, response in enumerate(responses):
      if response.text != "hang":
        failure = "why" if "fail" in response.text else None
        started.results[i] = Result([[0.0]], failure)

    def compute():
      assert all(started.results)
      self.events.append("result")
      return rewards

    calls = [[PendingCall("it", started, i, 0)] for i in range(len(responses))]
    return PendingRewards(len(responses), calls, compute)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    pass


class Echo:
  """Responds "1", "2", ... to problems "1", "2", ..., but fails at sample 1."""

  program = None  # of no reward model

  def __init__(self, batch_size, events=None, samples=3):
    self.batch_size, self.samples = batch_size, samples
    self.events, self.keys = [] if events is None else events, []

  def text(self, problem, n):
    return "fail" if n == 1 else problem.text

  def sample(self, params, problems, key, progress):
    self.keys.append(tuple(jax.random.key_data(key).tolist()))
    self.events.append("sample")
    pairs = itertools.product(problems, range(self.samples))
    responses = [
      Response(f"{p.text}<bot>", self.text(p, n), p.reference,
               10 * len(p.text) + n, 99, p.columns)
      for p, n in pairs
    ]  # fmt: skip
    return responses, [r.tokens % 10 == 1 for r in responses]


@pytest.fixture
def five(tmp_path):
  """A benchmark of five problems, three responses each."""
  path = tmp_path / "five.jsonl"
  rows = [
    {"question": str(i), "answer": i, "id": f"no {i}", "level": -i}
    for i in range(1, 6)
  ]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  benchmark = benchmarks.read("mine", str(path), reward="exact")
  return benchmark._replace(samples=3)


@pytest.fixture
def run_on(monkeypatch):
  """Runs a benchmark; the batches that it saves."""

  def call(benchmark, sampler, pool):
    monkeypatch.setattr(evaluator, "_reward_pool", lambda *_: pool)
    batches, records = [], []

    def append(batch):
      pool.events.append("save")
      batches.append(batch)
      records.extend(batch)

    file = SimpleNamespace(batches_done=0, records=records, append=append)
    evaluator._run(parse(config()), benchmark, sampler, None, file)
    return batches

  return call


@pytest.mark.parametrize("batch_size", [1, 2, 5, 9])
def test_each_response_keeps_to_its_problem(five, run_on, batch_size):
  pool = Pool()
  sampler = Echo(batch_size)
  batches = run_on(five, sampler, pool)
  assert len(batches) == len(set(sampler.keys)) == -(-5 // batch_size)
  records = list(itertools.chain(*batches))
  assert [(r["id"], r["sample"]) for r in records] == [
    (f"no {i}", n) for i in range(1, 6) for n in range(3)
  ]
  for r, response in zip(records, pool.responses, strict=True):
    number = int(r["id"][3:])
    assert r["problem"] == r["reference"] == str(number)
    assert r["response"] == response.text
    assert r["tokens"] == 10 + r["sample"]
    assert r["score"] == (r["sample"] != 1)
    assert r["failed"] == (r["sample"] == 1)
    assert r["finish"] == ("truncated" if r["sample"] == 1 else "stopped")
    assert r["set"] == "mine"
    assert response.columns["level"] == -number
  json.dumps(records)


def test_a_reward_model_scores_on_every_process(five, run_on, monkeypatch):
  def scorer(responses, size):
    scores = np.float32([len(responses[row].text) for row in range(size)])
    failed = np.arange(size) == 2
    return Rewards(scores, {"model": scores}, failed, ("too long",))

  monkeypatch.setattr(evaluator, "make_reward_model", lambda *_: scorer)
  (records,) = run_on(five, Echo(5), Pool())
  assert [r["score"] for r in records] == [len(r["response"]) for r in records]
  assert [r["failed"] for r in records] == [n == 2 for n in range(15)]
  first, calls = iter([0]), []  # the first process has the file
  monkeypatch.setattr(
    multihost, "allgather_json", lambda value: [next(first, value)]
  )
  score = lambda responses, size: calls.append(size) or scorer(responses, size)
  monkeypatch.setattr(evaluator, "make_reward_model", lambda *_: score)
  evaluator._run(parse(config()), five, Echo(2), None, None)
  assert calls == [6, 6, 3]


def test_a_batch_is_scored_while_the_next_is_sampled(five, run_on):
  pool = Pool()
  run_on(five, Echo(2, pool.events), pool)
  first = ["sample", "submit"]
  later = ["sample", "result", "save", "submit"]
  assert pool.events == [*first, *later, *later, "result", "save"]


def test_tests_of_programs_are_not_written_with_each_response(five, run_on):
  five.problems[1] = five.problems[1]._replace(reference="9" * 1_000_000)
  pool = Pool()
  (records,) = run_on(five, Echo(5), pool)
  references = {r["id"]: r["reference"] for r in records}
  short = {f"no {i}": str(i) for i in (1, 3, 4, 5)}
  assert references == {"no 2": None} | short
  assert pool.responses[3].reference == "9" * 1_000_000  # the reward has it


@pytest.mark.parametrize(
  ("most", "fails", "kept", "words"),
  [
    (0.5, "yyyyyy", 0,
     "--set=chain: 2 of 2 responses could not be scored, .* why$"),
    (0.5, "ynynyy", 4,
     "chain: 4 of 6 responses .* at most 3 .*max_failed=0.5.* why$"),
    (0.4, "yhyyyy", 0, "chain: 1 of 2 .* at most 0 .* first reason: .*why$"),
    (0.5, "nnynyy", 6, ""),  # of all so far, not of the last batch
  ],
)  # fmt: skip
def test_a_reward_that_fails_too_often_stops_it(
  files, tmp_path, monkeypatch, most, fails, kept, words
):
  c = config()
  c.reward.max_failed = most
  (chain,) = evaluator._read(parse(c), files[:1], 1, len(fails), "final_answer")
  texts = iter({"y": "fail", "n": "2", "h": "hang"}[f] for f in fails)
  sampler = Echo(2, samples=1)
  sampler.text = lambda *_: next(texts)
  sizes = [*map(len, evaluator._batches(chain, sampler))]
  monkeypatch.setattr(evaluator, "_reward_pool", lambda *_: Pool())
  stops = nullcontext()
  if words:  # on every process
    stops = pytest.raises(multihost.AgreedError, match=words)
  folder = str(tmp_path / "chain")
  with AnswersFile(folder, {}, sizes, dict) as file, stops:
    evaluator._run(parse(c), chain, sampler, None, file)
  assert len(read(tmp_path)) == kept


# The command itself.


@pytest.fixture(scope="module")
def small(tmp_path_factory):
  path = tmp_path_factory.mktemp("configs") / "small.py"
  path.write_text(SMALL)
  return f"--config={path}"


def test_the_command(workdir, files, small, tmp_path):
  done = python(
    *("-m", "gspo_jax.evaluate", small),
    f"--checkpoint={workdir}",
    f"--set={files[0]}",
    "--reward=final_answer",
    "--samples=2",
    "--limit=5",
    f"--out={tmp_path}",
    "--config.sampler.temperature=0.5",
    "--config.learner.micro_batch_size=3",  # which training would refuse
    env=os.environ | {"XLA_FLAGS": xla_flags(1)},
  )
  assert done.returncode == 0, done.stderr
  head, row = done.stdout.splitlines()
  assert head.split()[:4] == ["set", "problems", "samples", "avg@n"]
  assert row.split()[:3] == ["chain", "5", "2"]
  assert "5 of 5 problems" in done.stderr
  assert "the problem is in 'question', the ref" in done.stderr
  settings = json.loads((tmp_path / "chain/settings.json").read_text())
  assert settings["config"]["sampler"]["temperature"] == 0.5


@pytest.mark.parametrize(
  ("arguments", "words"),
  [([TINY, "--set=a=b"], "--checkpoint is missing; for a start: python -m gs"),
   ([TINY, "--checkpoint=x"], "--set is missing; for a start"),
   ([TINY, "--chekpoint=x"], "; see python -m gspo_jax.evaluate --help"),
   ([TINY, "--checkpoint=x", "--set=a=b", "--samples=0"], "--samples=0"),
   ([TINY, "--checkpoint=x", "--set=AMIE24=b"], "did you mean 'AIME24")],
)  # fmt: skip
def test_flags(arguments, words):
  assert words in mistake(__main__.main, *arguments)


# Several processes.


@pytest.mark.slow
def test_two_processes_respond_as_one(workdir, files, small, tmp_path):
  def start(out, devices, *more):
    return subprocess.Popen(
      [
        *(sys.executable, "-m", "gspo_jax.evaluate", small),
        *("--samples=2", f"--checkpoint={workdir}", f"--set={files[0]}", *more),
        *("--reward=final_answer", f"--out={tmp_path}/{out}"),
      ],
      cwd=ROOT,
      env=os.environ | {"XLA_FLAGS": xla_flags(devices)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )

  where = f"--coordinator=127.0.0.1:{free_port()}"
  pair = (where, "--num_processes=2")
  jobs = [start("one", 2), *(start("two", 1, *pair, f"--process_id={i}")
          for i in range(2))]  # fmt: skip
  try:
    results = [(*job.communicate(timeout=240), job.returncode) for job in jobs]
  finally:
    for job in jobs:
      job.kill()
  assert [code for *_, code in results] == [0, 0, 0], results
  assert results[1][0].endswith(results[0][0])  # after what Gloo prints
  assert "chain" in results[0][0]
  assert "chain" not in results[2][0] + results[2][1]
  assert read(tmp_path / "two") == read(tmp_path / "one")
