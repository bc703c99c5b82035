"""The seconds that are expected, of the recorded plan of the flagship."""

import functools
import json

import numpy as np
import pytest
from compilers import absent_devices, needs_libtpu
from repository import ROOT

from gspo_jax.configs import moe_tpu
from gspo_jax.learner.packing import RowTokens
from gspo_jax.model import variant
from gspo_jax.plan import chips, measured, skew
from gspo_jax.plan.derates import Derates
from gspo_jax.plan.iteration import cost as iteration_cost
from gspo_jax.plan.iteration.decoding import Decoding, Steps
from gspo_jax.plan.iteration.lengths import Lengths
from gspo_jax.plan.lower import Planned
from gspo_jax.program import settings
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime.errors import UserError

WHERE, DERATES = "v5p:4x4x4", Derates()
RECORD = json.loads((ROOT / "benchmarks/plan_moe_tpu_v5.json").read_text())
pytestmark = needs_libtpu


def recorded():
  """The record's functions, and what its iteration computes."""
  functions, parts = RECORD["functions"], RECORD["iteration"]["parts"]
  generate, numbers = functions["generate"], parts["generate"]
  ints = lambda by: {int(key): value for key, value in by.items()}
  generate["fewer_slots"] = ints(generate["fewer_slots"])
  by_rows = {n: Steps(*x) for n, x in ints(numbers["by_rows"]).items()}
  known = {x: numbers[x] for x in Decoding._fields} | {"by_rows": by_rows}
  keys = "micro_batches", "real_tokens", "computed_tokens"
  rows = {
    name: RowTokens(*(parts[part][key] for key in keys))
    for name, part in (("old_logps", "score"), ("update", "update"))
  }
  needed = parts["update"]["needed_blocks"]
  flops = {x: parts[x]["model_flops"] for x in ("generate", "score", "update")}
  work = iteration_cost._Work(Decoding(**known), rows, needed, flops)
  return functions, work


@pytest.fixture(scope="module")
def flagship():
  """(derates, key=value of the config, ...) -> the cost of its iteration."""
  functions, work = recorded()
  devices = absent_devices(WHERE)

  @functools.cache
  def cost(derates=DERATES, **keys):
    config = moe_tpu.get_config("")
    flat = {name.replace("__", "."): value for name, value in keys.items()}
    config.update_from_flattened_dict(flat)
    config = parse(config)
    mesh, _ = settings.make_meshes(config, devices)
    program = build_program(config, mesh, sampler_devices=())
    planned = Planned(config, program, chips.parse(WHERE))
    lengths = Lengths(np.full(512, 512), np.full(8192, 4096))
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(iteration_cost, "_work", lambda *_: work)
      patch.setattr(skew, "_LAYERS", 32)
      return iteration_cost.cost(functions, planned, lengths, derates)

  return cost


def test_each_part_is_expected_to_take_longer_than_its_bounds(flagship):
  found = flagship()
  best, stated, expected = (
    x["seconds_of"] for x in (found, found["compiler"], found["expected"])
  )
  for part, seconds in best.items():
    assert seconds <= stated[part] <= expected[part]
  recorded = RECORD["iteration"]
  assert found["seconds"] == pytest.approx(recorded["seconds"])
  assert sum(stated.values()) == pytest.approx(recorded["compiler"]["seconds"])


def test_an_audit_by_hand_expected_the_same(flagship):
  """Part by part within 6 %; in all 400 to 470 s."""
  expected = flagship()["expected"]
  by_hand = {
    "steps": 160, "reading": 99.5, "waiting": 15.5, "moves": 3, "score": 32,
    "update": 125, "host": 2,
  }  # fmt: skip
  for part, seconds in by_hand.items():
    assert expected["seconds_of"][part] == pytest.approx(seconds, 0.06, 0.5)
  assert 400 < expected["seconds"] < 470
  assert expected["evaluation"] == pytest.approx(20, rel=0.15)


def test_uneven_experts_are_never_cheaper(flagship):
  skews = 0.0, 0.5, 0.8, 1.2
  found = [flagship(Derates(skew=x))["expected"] for x in skews]
  assert sum(found[0]["added"]["skew"].values()) == 0
  for part in ("steps", "score", "update"):
    seconds = [x["seconds_of"][part] for x in found]
    assert seconds == sorted(set(seconds))
  # Four devices that train, and eight that decode 1,024 rows together.
  learner = [x["loads"][0].busiest for x in found]
  sampler = [x["loads"][1][8192].busiest for x in found]
  assert learner == pytest.approx([1, 1.09, 1.15, 1.22], abs=0.04)
  assert sampler == pytest.approx([1, 1.17, 1.27, 1.37], abs=0.04)


def test_evaluations_and_checkpoints_are_shared_by_the_iterations_between(
  flagship,
):
  plain = flagship()["expected"]
  rare = flagship(eval__every=20, checkpoint__every=40)["expected"]
  assert rare["seconds"] == plain["seconds"]
  assert rare["evaluation"] == pytest.approx(plain["evaluation"] / 2)
  assert rare["checkpoint"] == pytest.approx(plain["checkpoint"] / 4)
  # A quarter of the responses still waits for the longest of them.
  fewer = flagship(eval__prompts=128)["expected"]["evaluation"]
  steps = plain["seconds_of"]["steps"] / 10
  assert fewer - steps == pytest.approx((plain["evaluation"] - steps) / 4, 0.01)


def test_a_fit_finds_the_derates_that_made_the_times(flagship, tmp_path):
  derates = {"hbm": 0.6, "kernels": 0.95}
  made, plain = (flagship(x)["expected"] for x in (Derates(**derates), DERATES))
  of, whole = made["seconds_of"], made["seconds"]
  generate = whole - of["score"] - of["update"] - of["host"]
  # As `rollout.metrics.time_metrics`: the parts are the whole.
  seconds = generate, of["score"] + of["host"], of["update"], whole
  row = dict(zip(measured._TIMES, seconds, strict=True))
  compiling = {name: 9 * value for name, value in row.items()}
  path = tmp_path / "metrics.jsonl"
  lines = (compiling, {"eval/pass@1": 0.5}, row)
  path.write_text("".join(json.dumps(x) + "\n" for x in lines))
  rows = measured.read(str(path))
  found = measured.compare(rows, plain)
  assert found["derates"] == pytest.approx(derates)
  ratio = lambda part: np.divide(*found["seconds"][part])
  assert ratio("generate") > 1 > ratio("update")
  # With devices of its own, the sampler's time is not the wait for it.
  waits = [x | {"time/rollout": 2 * generate} for x in rows]
  assert measured.compare(waits, plain)["derates"]["hbm"] < derates["hbm"]
  # Nothing explains a run that is faster than what no share changes.
  rows = [dict.fromkeys(measured._TIMES, 1e-3)]
  found = measured.compare(rows, plain)["derates"]
  assert found == {"hbm": None, "kernels": None}


CFG = variant("qwen3-30b-a3b")


def test_the_skew_of_a_run_is_that_of_its_busiest_expert(tmp_path):
  """By more tokens than those that are drawn to find it."""
  tokens_LE = skew._tokens_of_experts(0.8, 12_000, CFG, layers=8)
  load = (tokens_LE.max(1) / tokens_LE.mean(1)).mean()
  path = tmp_path / "metrics.jsonl"
  rows = {"moe/load_max": 1.5}, {"moe/load_max": load}, {"step": 2}
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  assert skew.parse(str(path), CFG) == pytest.approx(0.8, abs=0.05)
  assert skew.parse("1.25", CFG) == 1.25


@pytest.mark.parametrize("text", ["-1", "4.5", "nan", "empty", "absent"])
def test_a_skew_that_is_no_number_and_no_run_is_refused(text, tmp_path):
  (tmp_path / "empty").write_text("{}\n")
  text = str(tmp_path / text) if text in ("empty", "absent") else text
  with pytest.raises(UserError, match=rf"--skew={text}: (expected|cannot)"):
    skew.parse(text, CFG)
