"""`python -m gspo_jax.plan`: what it prints, and when it refuses."""

import json
import sys

import jax
import pytest
from absl.testing import flagsaver
from compilers import absent_devices, needs_libtpu
from processes import mistake, python
from repository import ROOT

from gspo_jax import plan
from gspo_jax.plan import __main__ as door
from gspo_jax.plan import chips, planner
from gspo_jax.plan import table as plan_table
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError

TINY = (
  f"--config={ROOT}/configs/tiny_cpu.py:debug",
  "--config.data.prompts=8",
  "--config.learner.micro_batch_size=8",
  "--config.learner.minibatches=2",
  "--config.model.dtype=bfloat16",
)
SLICE = "--topology=v5e:2x4"


def run(*arguments):
  return python("-m", "gspo_jax.plan", *arguments)


@pytest.fixture(scope="module")
def planned():
  """What a plan that fits has printed."""
  done = run(*TINY, SLICE, "--lengths=lognormal:mean=.4,sigma=1", "--json")
  assert done.returncode == 0, done.stderr
  return done


@pytest.fixture(scope="module")
def fitting(planned):
  """The report of a plan that fits."""
  return json.loads(planned.stdout)


@needs_libtpu
def test_numbers_of_a_plan_fit_together(fitting):
  assert fitting["fits"]
  assert fitting["topology"] == "v5e:2x4"
  assert fitting["devices"] == fitting["mesh"]["data"] == 8
  assert list(fitting["functions"]) == ["update", "old_logps", "generate"]
  for f in fitting["functions"].values():
    memory, seconds = f["memory"], f["seconds"]
    assert memory["needed"] >= memory["peak"] + memory["resident"]
    assert memory["free"] == fitting["hbm"] - memory["needed"]
    assert seconds["roofline"] <= seconds["scheduled"]
    ideal = f["mfu"] * seconds["scheduled"] * chips.CHIPS["v5e"].flops
    assert f["model_flops"] == pytest.approx(ideal)
    assert f["compile_seconds"] > 0
    total = sum(c["seconds"] for c in f["collectives"])
    assert total == pytest.approx(seconds["collectives"])


@needs_libtpu
def test_the_update_is_its_micro_batches_and_its_optimizer_steps(fitting):
  """Of 32 responses, one a row and 8 rows at a time, in two minibatches."""
  for name in ("update", "old_logps"):
    whole = fitting["functions"][name]
    parts = whole["parts"]
    assert parts["most_micro_batches"] == 4
    one, rest = parts["micro_batch"], parts["rest"]
    for measure in ("flops", "hbm_bytes"):
      total = rest[measure] + 4 * one[measure]
      assert whole[measure] == pytest.approx(total)
      assert one[measure] > 0
    for kind in ("roofline", "collectives"):
      total = rest["seconds"][kind] + 4 * one["seconds"][kind]
      assert whole["seconds"][kind] == pytest.approx(total)
    # Nothing is left that data decides.
    assert whole["loops"] == whole["branches"] == []
  update, score = (
    fitting["functions"][name]["parts"] for name in ("update", "old_logps")
  )
  ratio = update["micro_batch"]["flops"] / score["micro_batch"]["flops"]
  assert 2.5 < ratio < 3.5  # forward and backward, against forward
  # Moments are read and written by an update alone.
  assert update["rest"]["hbm_bytes"] > score["rest"]["hbm_bytes"]


@needs_libtpu
def test_an_iteration_is_the_parts_that_its_lengths_need(fitting):
  iteration, functions = fitting["iteration"], fitting["functions"]
  assert iteration["responses"]["count"] == 8 * 4
  one, rest = (
    functions["update"]["parts"][part]["seconds"]["scheduled"]
    for part in ("micro_batch", "rest")
  )
  of, rows = iteration["seconds_of"], iteration["learning"]["update"]
  whole = rest + rows["micro_batches"] * one
  assert of["update"] == pytest.approx(whole)
  # Python 3.12 adds more exactly than a loop: the two may differ in a bit.
  assert iteration["seconds"] == pytest.approx(sum(of.values()))


REFILL = (
  "--config.continuous_batching.slots=16",
  "--config.continuous_batching.prefill_chunk=16",
  "--functions=decode_params,prefill,generate",
)


@pytest.mark.slow  # test_lower.py lowers it
@needs_libtpu
def test_with_pages_a_segment_is_planned(fitting):
  done = run(*TINY, SLICE, *REFILL, "--json")
  assert done.returncode == 0, done.stderr
  planned = json.loads(done.stdout)
  functions = planned["functions"]
  assert list(functions) == ["decode_params", "prefill", "generate"]
  # The float32 parameters stay beside those that decode, a quarter million.
  resident = lambda name: functions[name]["memory"]["resident"]
  static = fitting["functions"]["generate"]["memory"]["resident"]
  assert resident("decode_params") == static
  assert resident("prefill") == resident("generate")
  assert 1e6 < resident("generate") - resident("decode_params") < 1.2e6
  prefill = functions["prefill"]
  assert 0.5 < prefill["flops"] / prefill["model_flops"] < 2
  decode = functions["generate"]["decode"]
  assert decode["steps"] == 32
  assert functions["generate"]["hbm_bytes"] >= 32 * decode["hbm_bytes"]
  # A device: 2 slots of 2 pages and one more; 2 bytes, keys and values, layers.
  assert decode["pages_bytes"] == 2 * (2 + 1) * 16 * 4 * 16 * 2 * 2 * 2
  assert decode["kernel"] is False  # 4 heads of 16 fill no lanes


@pytest.mark.slow  # two compilations
@needs_libtpu
def test_a_pool_that_is_too_large_is_refused_with_the_largest(tmp_path):
  """By the bytes that the compiler says it would need."""
  config = tmp_path / "wide_heads.py"
  config.write_text(
    "from gspo_jax.configs import tiny_cpu\n"
    "def get_config():\n"
    "  config = tiny_cpu.get_config('debug')\n"
    "  config.model.head_dim = 128\n"
    "  return config\n"
  )
  segment = (f"--config={config}", *TINY[1:], SLICE, *REFILL[:2])
  pool = "--config.continuous_batching.num_pages="
  plan = lambda pages: run(
    *segment, "--functions=generate", "--json", f"{pool}{pages}"
  )
  refused = plan(80000000)
  assert refused.returncode == 1, refused.stderr
  generate = json.loads(refused.stdout)["functions"]["generate"]
  largest = generate["pages"]["largest"]
  assert generate["reason"].endswith(
    f"; continuous_batching.num_pages=80000000: expected at most {largest}, "
    "which leave 8% of the HBM free"
  )
  fits = plan(largest)
  assert fits.returncode == 0, fits.stderr
  planned = json.loads(fits.stdout)
  generate = planned["functions"]["generate"]
  free = generate["memory"]["free"] / planned["hbm"]
  assert free == pytest.approx(0.08, rel=0.05)
  assert generate["pages"]["largest"] == pytest.approx(largest, rel=0.01)


@needs_libtpu
def test_the_table_is_narrow_and_the_compiler_quiet(
  planned, fitting, monkeypatch, capsys
):
  lines = planned.stderr.splitlines()
  assert all(x.startswith(("compiling ", "scheduling ")) for x in lines), lines
  bare = {k: v for k, v in fitting.items() if k not in ("iteration", "lengths")}
  monkeypatch.setattr(door, "plan", lambda *_, **__: bare)
  code, screen, _ = exits([*TINY, SLICE, "--top=3"], monkeypatch, capsys)
  assert code == 0
  assert max(map(len, screen.splitlines())) <= 100
  for words in ("libtpu ", "old_logps: most expensive", "verdict: fits"):
    assert words in screen


@needs_libtpu
def test_what_does_not_fit_is_refused_on_one_screen():
  """1.7 billion parameters and their moments on every chip: 20 GB of 16."""
  large = "--config.model.variant=qwen3-1.7b", "--functions=update"
  done = run(*TINY, *large, "--topology=v5e:2x2", "--json")
  assert done.returncode == 1, done.stderr
  assert "Traceback" not in done.stderr
  told = json.loads(done.stdout)
  assert not told["fits"]
  largest, _ = told["functions"]["update"]["buffers"][0]
  assert largest > 1e8
  screen = plan_table.render(told)
  assert screen.endswith("verdict: does NOT fit: update")
  for words in ("update does not fit: ", "15.75", "largest buffers, GiB"):
    assert words in screen
  assert len(screen.splitlines()) <= 40


@pytest.mark.parametrize(
  ("arguments", "words"),
  [([*TINY], "--topology is missing; for a start: python -m gspo_jax.plan"),
   ([*TINY, "--topology=v5x:2x4"], "did you mean 'v5e' or 'v5p'?"),
   ([*TINY, SLICE, "--functions="],
    "choose one of decode_params, generate, old_logps, prefill, "),
   ([*TINY, SLICE, "--lengths=nowhere"], "--lengths=nowhere: cannot read "),
   ([*TINY, SLICE, "--measured=a"], "--measured=a: expected --lengths, those"),
   ([*TINY, SLICE, "--measured=/dev/null", "--lengths=lognormal"],
    "--measured=/dev/null: expected a run's metrics.jsonl with two iterations"),
   ([*TINY, SLICE, "--lengths=lognormal", "--functions=update"],
    "--functions=update: expected all of them, the default, with --lengths")],
)  # fmt: skip
def test_a_mistake_is_told_in_one_line(arguments, words, capsys):
  assert words in mistake(door.main, *arguments)
  assert not capsys.readouterr().out


def exits(arguments, monkeypatch, capsys):
  """The exit code of the command, in this process, and what it printed."""
  monkeypatch.setattr(sys, "argv", ["plan", *arguments])
  with flagsaver.flagsaver(), pytest.raises(SystemExit) as error:
    door.main()
  return error.value.code, *capsys.readouterr()


def test_a_fault_is_not_taken_for_a_misfit(monkeypatch, capsys):
  """Python would exit with 1, which says that something does not fit."""
  monkeypatch.setattr(door, "plan", lambda *_, **__: 1 // 0)
  code, out, error = exits([*TINY, SLICE], monkeypatch, capsys)
  assert (code, out) == (3, "")
  assert error.startswith("Traceback")
  assert "ZeroDivisionError" in error


def test_functions_that_a_config_lacks_are_named(monkeypatch):
  has = {"update": None, "generate": None}
  monkeypatch.setattr(planner.lower, "functions", lambda *_, **__: has)
  words = (
    r"--functions=update,prefill: this config has no prefill; choose of "
    r"update, generate \("
  )
  nothing = planner.lower.Planned(None, None, None)
  with pytest.raises(UserError, match=words):
    planner._analyze(["update", "prefill"], nothing)


@pytest.mark.slow  # two compilations
@needs_libtpu
def test_gradients_cross_slices_once_an_optimizer_step():
  """A minibatch of four micro-batches sends what one of one sends."""

  def sent(prompts):
    done = run(
      f"--config={ROOT}/configs/moe_tpu_v5.py:debug",
      *("--topology=v5p:2x2x1", "--slices=2", "--functions=update", "--json"),
      *("--config.mesh.fsdp=2", "--config.mesh.expert=2"),
      f"--config.data.prompts={prompts}",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["mesh"]["data"] == 2
    return [
      (row["count"], row["wire"])
      for row in report["functions"]["update"]["collectives"]
      if row["kind"] == "network"
    ]

  assert sent(8) == sent(32) != []


@needs_libtpu
def test_a_config_that_cannot_work_there(debug_config):
  with pytest.raises(UserError, match=r"prompts = 4 .*share rows = 8"):
    plan.plan(debug_config, chips.parse("v5e:2x4"))


def options_of_update(config, mesh, monkeypatch):
  """The compiler options that `build_program` gives to its update."""
  given, jit = {}, jax.jit

  def spy(function, **keywords):
    name = getattr(getattr(function, "func", function), "__name__", None)
    given[name] = keywords.get("compiler_options")
    return jit(function, **keywords)

  monkeypatch.setattr(jax, "jit", spy)
  build_program(parse(config), mesh)
  return given["_update"]


def test_more_tokens_a_step_than_are_fed(debug_config):
  """A step keeps its own token, and the drafts that it has."""
  where = chips.parse("v5e:2x2")
  for tokens in (0.9, 1.5):
    with pytest.raises(UserError, match=rf"{tokens}: .*speculation=0") as error:
      planner.plan(debug_config, where, speculation=tokens)
    assert "--speculation=" in str(error.value)


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_collectives_go_to_sparse_cores(debug_config, monkeypatch, topology):
  mesh = sharding.make_mesh(absent_devices(topology), fsdp=4)
  options = options_of_update(debug_config, mesh, monkeypatch)
  assert options["xla_allow_excess_precision"] is False
  for kind in ("all_gather", "reduce_scatter", "all_reduce"):
    name = f"xla_tpu_enable_sparse_core_collective_offload_{kind}"
    assert options[name] is True


def test_a_cpu_is_given_no_options_of_a_tpu(debug_config, monkeypatch):
  mesh = sharding.make_mesh(jax.devices()[:4], fsdp=4)
  options = options_of_update(debug_config, mesh, monkeypatch)
  assert options == {"xla_allow_excess_precision": False}
