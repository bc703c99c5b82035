"""Several processes give the results of one, and end together.

The tests start real processes, each with its own virtual CPU devices. XLA
optimises little here, because compiling takes most of the time. Process 1
always compiles: only process 0 writes JAX's compilation cache, and on CPUs the
cache keys of the two differ.
"""

import contextlib
import json
import shutil
import signal
import time

import jax
import numpy as np
import pytest
from metrics_of import metrics_of, rows_of
from processes import free_port, start
from repository import ROOT

from gspo_jax import model
from gspo_jax.configs import tiny_cpu
from gspo_jax.data import tokenizers
from gspo_jax.model import hf
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.record.checkpoint import Checkpoints
from gspo_jax.runtime import sharding

STEPS = 4
CONTINUOUS_BATCHING = {
  "continuous_batching__slots": 16,
  "continuous_batching__page_size": 4,
  "continuous_batching__prefill_chunk": 8,
}
GUESSING = {
  **CONTINUOUS_BATCHING,
  "data__source": "gspo_jax.tasks.games.guessing_problems",
  "rollout__environment": "guessing", "rollout__max_turns": 3,
  "reward__names": "()", "sampler__max_new_tokens": 32,
  "objective__name": "gspo_token", "objective__credit": "turn",
  "objective__entropy_coef": 0.01,  # it moves, even if no guess is right
}  # fmt: skip
# Half of what is compiled.
ONE_LAYER = """
from gspo_jax.configs import tiny_cpu
def get_config():
  config = tiny_cpu.get_config("debug")
  config.model.num_layers = 1
  return config
"""


class Job:
  """Processes with a log file each; `commands` are their arguments."""

  def __init__(self, commands, logs, devices):
    logs.mkdir(parents=True)
    self.logs = [logs / str(i) for i in range(len(commands))]
    self.processes = []
    for command, log in zip(commands, self.logs, strict=True):
      with log.open("w") as file:
        process = start(*command, devices=devices, stdout=file)
        self.processes.append(process)

  def outputs(self):
    return [log.read_text() for log in self.logs]

  def wait_for(self, text, seconds=120):
    """Waits until process 0 has printed `text`."""
    end = time.monotonic() + seconds
    while text not in self.logs[0].read_text():
      assert time.monotonic() < end, self.outputs()
      assert self.processes[0].poll() is None, self.outputs()
      time.sleep(0.05)

  def finish(self, code=0, seconds=480):
    codes = [process.wait(seconds) for process in self.processes]
    assert codes == [code] * len(codes), "\n".join(self.outputs())
    return self.outputs()


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
  """Starts `count` processes with overrides, __ for a dot."""
  one_layer = tmp_path_factory.mktemp("config") / "one_layer.py"
  one_layer.write_text(ONE_LAYER)
  with contextlib.ExitStack() as stack:

    def launch(count, workdir, *, devices=1, cold_start=None, **overrides):
      link = workdir / "cold_start"
      if cold_start not in (None, link) and not link.exists():
        workdir.mkdir(exist_ok=True)
        link.symlink_to(cold_start)
      port, commands = free_port(), []
      shared = [
        f"--config.{k.replace('__', '.')}={v}" for k, v in overrides.items()
      ]
      for i in range(count):
        debug = "configs/tiny_cpu.py:debug"
        config = debug if "model__variant" in overrides else one_layer
        flags = [f"--config={config}", f"--workdir={workdir}", *shared]
        if count > 1:
          flags += [f"--coordinator=127.0.0.1:{port}", f"--process_id={i}"]
          flags += [f"--num_processes={count}"]
        commands.append(["-u", "-m", "gspo_jax.main", *flags])
      logs = tmp_path_factory.mktemp("logs") / "job"
      job = Job(commands, logs, devices)
      for process in job.processes:
        stack.callback(process.kill)
      return job

    yield launch


@pytest.fixture(scope="module")
def reference(launch, tmp_path_factory):
  """The workdir of an uninterrupted run of one process on one device."""
  workdir = tmp_path_factory.mktemp("reference")
  launch(1, workdir).finish()
  return workdir


def final_params(workdir):
  mesh = sharding.make_mesh(jax.devices()[:1])
  config = tiny_cpu.get_config("debug")
  saved = json.loads((workdir / "run_config.json").read_text())
  config.model.variant = saved["model"]["variant"]
  if "num_layers" in saved["model"]:
    config.model.num_layers = saved["model"]["num_layers"]
  abstract = build_program(parse(config), mesh).learner.abstract
  with Checkpoints(workdir / "checkpoints", keep=9) as checkpoints:
    restored = checkpoints.restore(
      {"params": abstract.params}, lambda *_: None, part=True
    )
  assert restored.step == STEPS
  return jax.tree.leaves(restored.state)


def assert_same_run(workdir, reference, atol=1e-5):
  """The same tokens, hence the same rewards; all else up to rounding.

  Where a gradient is almost 0, rounding decides Adam's step: of 65,536 weights
  one differed by 1.3e-5. The root mean square, at most 6e-8 in such an array,
  is bounded by atol / 10. The learning rate is 3e-4.
  """
  actual, expected = metrics_of(workdir), metrics_of(reference)
  assert [row["step"] for row in actual] == list(range(STEPS + 1))
  assert any(row.get("grad/norm", 0) > 0 for row in expected)
  for row, should in zip(actual, expected, strict=True):
    for each in (row, should):
      each.pop("ratio/moved", None)  # counts ratios that are not exactly 1
    assert row == pytest.approx(should, rel=0, abs=5e-6)
    for name in should:
      if name.startswith(("eval/", "reward/", "response/")):
        assert row[name] == should[name], name
  for a, b in zip(final_params(workdir), final_params(reference), strict=True):
    assert np.sqrt(np.mean(np.square(a - b))) < atol / 10
    np.testing.assert_allclose(a, b, rtol=0, atol=10 * atol)


def assert_same_samples(workdir, reference):
  name = f"samples/step_{STEPS:06d}.jsonl"
  assert (workdir / name).read_text() == (reference / name).read_text()


@pytest.mark.slow  # a run that stops and resumes is compared in the default run
@pytest.mark.parametrize(
  ("devices", "mesh"),
  [
    (1, {}), (2, {"mesh__fsdp": 2}), (2, {"mesh__expert": 4}),
    (1, {"mesh__tensor": 2}),  # both processes hold the whole batch
    (1, {"mesh__context": 2}),  # both hold all rows, of half the tokens each
  ],
)  # fmt: skip
def test_two_processes_equal_one(launch, reference, tmp_path, devices, mesh):
  cold = {"cold_start": reference / "cold_start"}
  first, second = launch(2, tmp_path, devices=devices, **cold, **mesh).finish()
  assert "4/4" in first
  assert "/4 " not in second
  assert_same_run(tmp_path, reference)
  assert_same_samples(tmp_path, reference)


PARTIAL = {
  **CONTINUOUS_BATCHING,
  "rollout__max_tokens_per_iteration": 6,
  "rollout__max_staleness": 1,
}
GPT_OSS = PARTIAL | {"model__variant": "tiny-gpt-oss", "mesh__tensor": 2}
QWEN = PARTIAL | {
  "model__variant": "tiny-qwen3.5",
  "mesh__tensor": 2,
  "continuous_batching__slots": 4,
}
R3 = {"objective__replay": "r3"}
FILTERED = {
  "objective__kl_coef": 0.1, "objective__reference_every": 2, **R3,
  "rollout__dynamic_sampling_rounds": 3, "data__drop_solved": True,
}  # fmt: skip
CONTINUED = CONTINUOUS_BATCHING | {"rollout__dynamic_sampling_rounds": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("added", "metric", "least"),
  [
    (FILTERED, "dynamic_sampling/rounds", 1),
    (CONTINUED, "dynamic_sampling/rounds", 0),
    # Cut responses, and rewards while others decode.
    (PARTIAL, "rollout/resumed_fraction", 0),
    (PARTIAL | R3 | {"mesh__tensor": 2}, "rollout/resumed_fraction", 0),
    # Each process has the environments of the rows that it reads.
    (GUESSING, "conversation/turns", 1),
    (GUESSING | R3 | {"sampler_mesh__tensor": 2}, "conversation/turns", 1),
    # Windows and sinks, with pages and responses that are resumed.
    (GPT_OSS, "rollout/resumed_fraction", 0),
    # States, copied to slots over several rounds.
    (QWEN, "rollout/resumed_fraction", 0),
  ],
)
def test_rollouts_of_two_processes_equal_those_of_one(
  launch, reference, tmp_path, added, metric, least
):
  """`metric`, above `least` in a row, shows that there is what is compared."""
  own_start = "model__variant" in added or added.items() >= GUESSING.items()
  cold = {} if own_start else {"cold_start": reference / "cold_start"}
  launch(1, tmp_path / "one", devices=2, **cold, **added).finish()
  launch(2, tmp_path / "two", **cold, **added).finish()
  assert any(row[metric] > least for row in metrics_of(tmp_path / "one")[1:])
  atol = 1e-4 if own_start else 1e-5
  assert_same_run(tmp_path / "two", tmp_path / "one", atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("added", [FILTERED, PARTIAL])
def test_a_reward_model_scores_the_responses_of_two_processes(
  launch, reference, tmp_path, added
):
  cfg = model.variant(
    "tiny", num_experts=0, experts_per_token=0, classifier=True
  )
  params = model.init(jax.random.key(0), cfg)
  params["score"] = jax.random.normal(jax.random.key(1), (cfg.embed_dim, 1))
  hf.save_hf(params, cfg, tmp_path / "rm", beside=tokenizers.load("bytes").save)
  added = added | {
    "cold_start": reference / "cold_start",
    "reward__names": f"final_answer,model:{tmp_path / 'rm'}",
    "reward__weights": "1,.1",
  }
  launch(1, tmp_path / "one", devices=2, **added).finish()
  launch(2, tmp_path / "two", **added).finish()
  assert all(row["reward/model"] for row in metrics_of(tmp_path / "one")[1:])
  assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize(
  "added",
  [{"mesh__fsdp": 2}, PARTIAL, {**GUESSING, "rollout__max_staleness": 1}],
)
def test_two_processes_sample_and_train_on_halves_of_their_devices(
  launch, reference, tmp_path, added
):
  """As in turns, in every bit, also where a checkpoint has samples ahead."""
  cold = reference / "cold_start"
  if "rollout__environment" in added:
    cold = tmp_path / "turns/cold_start"
  added = {"cold_start": cold, **added}
  launch(2, tmp_path / "turns", **added).finish()
  split = {"sampler_mesh__devices": 2, **added}
  out, _ = launch(2, tmp_path / "split", devices=2, **split).finish()
  assert "2 more to sample" in out
  assert metrics_of(tmp_path / "split") == metrics_of(tmp_path / "turns")
  shutil.rmtree(tmp_path / f"split/checkpoints/{STEPS}")
  launch(2, tmp_path / "split", devices=2, **split).finish()
  assert metrics_of(tmp_path / "split") == metrics_of(tmp_path / "turns")


@pytest.mark.slow
def test_a_cold_start_of_two_processes_stops_and_resumes(
  launch, reference, tmp_path
):
  """A SIGTERM stops the cold start itself, before RL."""
  job = launch(2, tmp_path)
  job.wait_for("cold start   50/100")
  job.processes[1].send_signal(signal.SIGTERM)
  first, _ = job.finish(code=75)
  assert "stopped: cold start saved" in first
  launch(2, tmp_path).finish()
  assert_same_run(tmp_path, reference, atol=1e-4)  # a hundred steps more: 3e-5


@pytest.fixture(scope="module")
def stopped(launch, reference, tmp_path_factory):
  """The workdir of two processes, of which one got a SIGTERM."""
  workdir = tmp_path_factory.mktemp("stopped")
  cold = {"cold_start": reference / "cold_start"}
  job = launch(2, workdir, checkpoint__every=100, **cold)
  job.wait_for("0/4")
  job.processes[1].send_signal(signal.SIGTERM)
  first, second = job.finish(code=75)
  assert "stopped: saved after step" in first
  assert "/4 " not in second
  return workdir


@pytest.mark.parametrize(
  "count", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]
)
def test_a_sigterm_to_one_stops_all_and_any_number_resumes(
  launch, reference, stopped, tmp_path, count
):
  shutil.copytree(stopped, tmp_path / "run")
  cold = {"cold_start": reference / "cold_start"}
  first, *others = launch(count, tmp_path / "run", **cold).finish()
  assert "resumed after step" in first
  assert "4/4" in first
  assert all("/4 " not in text for text in others)
  assert_same_run(tmp_path / "run", reference)
  assert_same_samples(tmp_path / "run", reference)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_the_death_of_one_ends_the_others(launch, tmp_path, victim):
  job = launch(2, tmp_path)
  job.wait_for("Gloo")  # then they have joined
  job.processes[victim].kill()
  began = time.monotonic()
  survivor = 1 - victim
  code = job.processes[survivor].wait(120)
  assert time.monotonic() - began < 60
  out = job.outputs()[survivor]
  if victim == 1:
    assert code == 1, out
    assert f"process {survivor} ends: " in out
    assert "coordination" not in out  # JAX's page of C++
  else:  # JAX ends the others at once if the first one dies
    assert code != 0, out


@pytest.mark.slow
def test_a_reward_function_that_fails_stops_all(launch, reference, tmp_path):
  flags = {"cold_start": reference / "cold_start"}
  flags["reward__names"] = "('operator.setitem',)"  # fails on strings
  first, second = launch(2, tmp_path, **flags).finish(code=2)
  line = first.strip().splitlines()[-1]
  assert line.startswith("error: the held-out problems: 32 of 32 responses")
  assert "TypeError: 'str' object" in line
  assert "error:" not in second


JOIN = """
import pathlib, sys, time, jax, jax.numpy as jnp, numpy as np
from gspo_jax.record import checkpoint
from gspo_jax.record.checkpoint import Checkpoints
from gspo_jax.runtime import multihost, sharding
from jax.sharding import NamedSharding, PartitionSpec as P
multihost.start(sys.argv[1], 2, int(sys.argv[2]))
folder = pathlib.Path(sys.argv[3])
"""


def run_two(script, folder, devices):
  """The outputs of two processes; arguments: address, index and a folder."""
  address = f"127.0.0.1:{free_port()}"
  commands = [
    ["-u", "-c", JOIN + script, address, i, folder / "work"] for i in (0, 1)
  ]
  job = Job(commands, folder / "logs", devices)
  try:
    return job.finish(seconds=240)
  finally:
    for process in job.processes:
      process.kill()


DAMAGE = """
auto = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((2,), ("x",), auto, devices=jax.devices()[::2])
rows = NamedSharding(mesh, P("x"))
make = lambda step: multihost.to_global(
  {"w": np.arange(2 ** 16, dtype=np.float32).reshape(2, -1) + step}, rows)
like = jax.tree.map(
  lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), make(0))
with Checkpoints(folder / "damaged", keep=9) as checkpoints:
  for step in (1, 2):
    checkpoints.save(step, make(step), {})
multihost.barrier()
if multihost.is_primary():
  for file in (folder / "damaged/2/state/ocdbt.process_1/d").iterdir():
    file.write_bytes(file.read_bytes()[:100])
multihost.barrier()
with Checkpoints(folder / "damaged", keep=9) as checkpoints:
  began = time.monotonic()
  restored = checkpoints.restore(like, lambda *_: None)
  print("restored", restored.step, time.monotonic() - began < 30)
  same = jax.tree.map(
    np.array_equal, *multihost.to_host((restored.state, make(1))))
  assert same == {"w": True}
  checkpoints.save(2, make(20), {})
  restored = checkpoints.restore(like, lambda *_: None)
  print("again", restored.step, multihost.to_host(restored.state["w"])[0, 0])
"""


BUSY = """
mesh = sharding.make_mesh(data=2, fsdp=2)
by_row = NamedSharding(mesh, P(("data", "fsdp")))
rows = np.ones((4, 2048), np.float32)

@jax.jit
def program(x):  # sums over `data`, whose first group has both first devices
  def step(_, x):
    x = x.reshape(2, 2, -1).sum(0, keepdims=True) / 2
    x = jnp.broadcast_to(x, (2, 2, x.shape[-1])).reshape(4, -1)
    return jax.lax.with_sharding_constraint(x, by_row)
  return jax.lax.fori_loop(0, 2000, step, x)

with jax.set_mesh(mesh):
  x = jax.make_array_from_callback(rows.shape, by_row, lambda i: rows[i])
  jax.block_until_ready(program(x))
  for i in range(3):
    y = program(x)
    for j in range(5):
      sums = multihost.sum_of_all(np.full(3, i + j, np.float32))
      assert (sums == 2 * (i + j)).all(), sums
  assert (multihost.to_host(y) == 1).all()
print("summed")
"""


COPIES = """
mesh = sharding.make_mesh(data=2, fsdp=2)
copies, rows = (NamedSharding(mesh, P(axis)) for axis in ("fsdp", "data"))
x = np.arange(8, dtype=np.float32).reshape(4, 2) - 3
numbers = {"w": x, "zero": -0.0 * abs(x), "n": x.astype(np.int8), "b": x > 0}
state = multihost.to_global(numbers, copies) | multihost.to_global(
  {"rows": x}, rows)
like = jax.tree.map(
  lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
load, read = checkpoint.ocp.load, []
def spy(path, tree, **options):
  read.extend(name for name, x in tree.items() if x is not ...)
  return load(path, tree, **options)
checkpoint.ocp.load = spy
with Checkpoints(folder / "copies", keep=9) as checkpoints:
  checkpoints.save(1, state, {})
  with jax.set_mesh(mesh):
    restored = checkpoints.restore(like, lambda *_: None)
assert restored.step == 1
for name, x in restored.state.items():
  assert x.sharding == state[name].sharding
  for old, new in zip(state[name].addressable_shards, x.addressable_shards):
    assert np.asarray(old.data).tobytes() == np.asarray(new.data).tobytes()
print("read", sorted(read))
"""


AGREEMENT = """
print("== agreement")
from etils import epath
from gspo_jax.runtime.errors import UserError
index, shared = int(sys.argv[2]), folder / "agreement"
def attempt(check):
  try:
    print("passed", check())
  except multihost.AgreedError as error:
    print("agreed:", str(error).replace(str(shared), "WORK"))
  except (RuntimeError, TimeoutError) as error:
    print("fault:", error)
def fail():
  if index == 1:
    raise UserError("no such file")
  return index
attempt(lambda: multihost.allgather_json([index] * (1 + index)))
attempt(lambda: multihost.any_process(index == 1))
attempt(lambda: multihost.sum_of_all(np.arange(3) * (1 + index)).tolist())
attempt(lambda: multihost.run_on_all(lambda: "ran"))
attempt(lambda: multihost.run_on_all(fail))
def lose_connection():
  if index == 0:
    raise TimeoutError("no answer")
  fail()
attempt(lambda: multihost.run_on_all(lose_connection))
attempt(lambda: multihost.run_on_all(lambda: index or lose_connection()))
attempt(lambda: multihost.require_same({"steps": 3, "seed": 5}))
attempt(lambda: multihost.require_same({"steps": 3, "seed": index}))
attempt(lambda: multihost.require_same({str(index): 3}))
attempt(lambda: multihost.require_shared(epath.Path(shared)))
attempt(lambda: multihost.require_shared(epath.Path(shared / str(index))))
multihost.barrier()
print(sorted(str(p.relative_to(shared)) for p in shared.rglob("*")))
multihost.print_once("once")
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
  """What two processes print that run all of this, one after the other."""
  folder = tmp_path_factory.mktemp("two")
  script = DAMAGE + BUSY + COPIES + AGREEMENT
  texts = run_two(script, folder, devices=2)
  return [text.split("== agreement\n") for text in texts]


def test_a_checkpoint_that_one_cannot_read_is_skipped_by_all(outputs):
  (first, _), (second, _) = outputs
  for text in (first, second):
    assert "restored 1 True" in text
    assert "again 2 20.0" in text
  assert first.count("checkpoint 2 skipped") == 1
  assert "skipped" not in second


def test_sums_of_processes_wait_for_the_program_before(outputs):
  assert all("\nsummed\n" in before for before, _ in outputs)


def test_one_of_two_copies_is_read_and_the_other_process_gets_it(outputs):
  (first, _), (second, _) = outputs
  assert "read ['b', 'n', 'rows', 'w', 'zero']" in first
  assert "read ['rows']" in second


def test_agreement(outputs):
  """What one process finds wrong, both raise, and only process 0 prints."""
  first, second = (
    [line for line in text.splitlines() if not line.startswith("[Gloo]")]
    for _, text in outputs
  )
  apart = "is not one folder for all hosts: expected a bucket or a network disk"
  expected = [
    "passed [[0], [1, 1]]",
    "passed True",
    "passed [0, 3, 6]",
    "passed ran",
    "agreed: process 1: no such file",
    "fault: no answer",
    "fault: no answer",
    "passed None",
    "agreed: seed is not the same everywhere: process 1 has another value than "
    "process 0",
    "agreed: the processes were started with different config files",
    "passed None",
    f"agreed: --workdir='WORK/0' {apart}",
    "['0', '1']",
    "once",
  ]
  assert first == expected
  # A process raises its own message, else that of the first other process.
  expected[4] = "agreed: no such file"
  expected[5] = expected[6] = "fault: process 0: TimeoutError: no answer"
  expected[11] = f"agreed: process 0: --workdir='WORK/0' {apart}"
  assert second == expected[:-1]


EXACT = CONTINUOUS_BATCHING | {"model__exact": True}


@pytest.mark.slow
@pytest.mark.parametrize("added", [{}, EXACT])
def test_an_unmoved_policy_has_ratio_one_on_two(launch, tmp_path, added):
  """In bfloat16, with the responses of a run; see test_ratio_one."""
  overrides = added | {
    "model__dtype": "bfloat16",
    "mesh__data": 1,
    "mesh__fsdp": 2,
    "optim__learning_rate": 0.0,
    "cold_start__steps": 0,
    "num_steps": 1,
  }
  launch(2, tmp_path, **overrides).finish()
  row = metrics_of(tmp_path)[-1]
  for name in ("ratio/token_std", "ratio/sequence_std", "clip_frac/token"):
    assert row[name] == 0
  assert row["ratio/first_minibatch_std"] == row["ratio/moved"] == 0
  assert (row["mismatch/token_abs_mean"] == 0) == bool(added)
  assert row.get("mismatch/exact_tokens_differ") == (0 if added else None)


@pytest.mark.slow
def test_agents_of_two_processes_play_with_one_policy(launch, tmp_path):
  """Each has its own episodes; what is greedy does not depend on the others."""
  added = CONTINUOUS_BATCHING | {
    "data__source": "gspo_jax.tasks.games.calculator_problems",
    "rollout__environment": "openai:gspo_jax.tasks.calculator_agent.play",
    "reward__names": "()",
    "reward__seconds": 120,
    "sampler__top_k": 1,
    "sampler__kept_ids": 0,
    "optim__learning_rate": 0.0,
    "cold_start__steps": 0,
    "num_steps": 2,
  }
  launch(1, tmp_path / "one", devices=2, **added).finish()
  launch(2, tmp_path / "two", **added).finish()
  one, two = (metrics_of(tmp_path / name)[1:] for name in ("one", "two"))
  same = "response/length", "response/truncated", "conversation/turns"
  for a, b in zip(one, two, strict=True):
    assert [a[name] for name in same] == [b[name] for name in same]
    assert b["reward/failed"] == 0
  # `metrics_of` leaves out how log-probs round.
  for row in rows_of(tmp_path / "two")[1:]:
    assert row["mismatch/token_abs_mean"] < 1e-5


MIGRATION = """
from gspo_jax import model, sampler
from gspo_jax.sampler import continuous
from gspo_jax.sampler.continuous import placement
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import Prompts, SamplerConfig

placement._MOST = placement._LEAST = placement._SEGMENTS = 1
cfg = model.variant("tiny", vocab_size=32, dtype="float32")
config = SamplerConfig(3, 24, stop_ids=(0, 31), temperature=0.9)
prompts = Prompts(np.full((8, 4), 9, np.int32), np.arange(8) % 4 + 1)
init = lambda: model.init(jax.random.key(0), cfg)
mesh = sharding.make_mesh(jax.devices(), data=2)
place = model.shardings(jax.eval_shape(init), mesh)
generate = continuous.build_continuous_sampler(
  cfg, config, params_sharding=place, mesh=mesh, sampler_mesh=mesh,
  batching=ContinuousBatchingConfig(
    slots=24, page_size=4, segment_steps=3, prefill_chunk=8),
  max_prompt_length=4)
with jax.set_mesh(mesh):
  params = jax.jit(init, out_shardings=place)()
global_prompts = multihost.to_global(prompts, generate.batch_sharding)
samples = multihost.to_host(generate(params, global_prompts, jax.random.key(1)))
print("moved", generate.jitted.move_slots.num_programs)
with jax.default_device(jax.local_devices()[0]):
  expected = sampler.generate(
    init(), cfg, prompts, jax.random.key(1), sampler=config)
for name in ("tokens", "lengths", "finish"):
  np.testing.assert_array_equal(
    getattr(samples, name), np.asarray(getattr(expected, name)))
print("same", len(np.unique(samples.lengths)) > 3)
"""


@pytest.mark.slow
def test_responses_move_between_processes(tmp_path):
  for output in run_two(MIGRATION, tmp_path, devices=1):
    assert output.endswith("moved 1\nsame True\n")


EXPORT = """
from gspo_jax import model
from gspo_jax.model import hf
folder.mkdir(exist_ok=True)
cfg = hf.config_from_hf("GOLDEN")
place = model.shardings(model.shapes(cfg), sharding.make_mesh(fsdp=4))
params = hf.load_hf("GOLDEN", cfg, shardings=place)
hf.save_hf(params, cfg, folder / "out")
try:
  hf.save_hf(params, cfg, folder / "out")
except multihost.AgreedError as error:
  print(error)
multihost.barrier()
"""


@pytest.mark.slow
def test_two_processes_load_and_one_writes_a_model(tmp_path):
  golden = ROOT / "tests/support/goldens/qwen3"
  script = EXPORT.replace("GOLDEN", str(golden))
  first, second = run_two(script, tmp_path, devices=2)
  assert "exists: expected a new or empty folder" in first
  assert "process 0: " in second
  cfg = hf.config_from_hf(golden)
  load = lambda folder: jax.device_get(hf.load_hf(folder, cfg))
  same = np.testing.assert_array_equal
  jax.tree.map(same, load(tmp_path / "work/out"), load(golden))
