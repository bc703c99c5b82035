"""The benchmarks import, run, and print the documented numbers."""

import importlib
import json
import math
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from repository import ROOT
from scipy import stats

from benchmarks import (
  gpu,
  gpu_kernels,
  lengths,
  peers,
  regression,
  seeds,
  smollm2,
  turns,
)
from gspo_jax import model
from gspo_jax.data import tokenizers

NEEDS = {
  "eager_iteration": "torch",
  "versus_transformers": "torch",
  "peers_trl": "trl",
  "peers_tunix": "tunix",
}
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_imports(name):
  if name in NEEDS:
    pytest.importorskip(NEEDS[name])
  importlib.import_module(f"benchmarks.{name}")


def quick(name, *arguments):
  """The JSON record that a benchmark prints last."""
  command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", *arguments]
  out = subprocess.check_output(command, cwd=ROOT, text=True)
  return json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_serve_load():
  found = quick("serve_load", "--stream")
  least, p50, p95 = found["least_p50_p95"]
  assert 0 < least <= p50 <= p95
  assert found["first_part_least_p50_p95"][1] < p50
  assert 1 < found["tokens_of_an_answer"] <= 64


@pytest.mark.slow
def test_pod():
  (row,) = quick("pod")["rows"]
  received = sum(row["packing_bytes"].values())
  assert 20 * received < row["packing_bytes_by_gathering"]
  seconds = row["seconds_of_a_segment"]
  assert 0 < 2 * seconds["own_shards"] < seconds["all_shards"]


@pytest.mark.slow
def test_sampler():
  rows = quick("sampler")["rows"]
  by_case = {(row["responses"], row["sampler"]): row for row in rows}
  useful = lambda *case: by_case[case]["useful"]
  assert useful("8 of 8", "static") == useful("8 of 8", "continuous") == 1
  tail = "long tail of 80"
  assert useful(tail, "continuous") > 2 * useful(tail, "static")
  steady = by_case[tail, "continuous"]["useful_steady"]
  assert useful(tail, "continuous") < steady <= 1
  for row in rows:
    case = row["responses"]
    assert useful(case, "in turn") == useful(case, "continuous")
  at_once = f"{tail}, all at once"
  uncovered = lambda name: by_case[at_once, name]["uncovered_ms"]
  assert 0 <= uncovered("continuous") < uncovered("in turn")
  read = lambda *case: by_case[case]["bytes_per_token"]
  # 4 slots sample 16 responses in 32 steps, 128 tokens. Each attends to 8 to 15
  # tokens, one page of 16, of 2 layers' 4 heads of 16 keys and values. There
  # are 296,320 weights.
  page = 16 * 2 * 2 * 4 * 16 * 4
  assert read("8 of 8", "continuous") == 296_320 * 4 * 32 / 128 + page
  assert read("8 of 80", "continuous") == read("8 of 8", "continuous")
  # With 4 slots or with 1, a step reads the weights once.
  each = lengths.long_tailed(8, 80).repeat(2)
  steps = read(tail, "continuous") * each.sum()
  steps -= sum(-(-(8 + t) // 16) * page for n in each for t in range(n))
  steps /= 296_320 * 4
  assert steps > each.sum() / 4
  assert steps == pytest.approx(round(steps), abs=1e-2)
  # 7 steps of 16 responses (the last token is not fed), a cache of 7 or 64.
  difference = 7 * 16 * (64 - 7) * page / 16 / 128
  assert read("8 of 80", "static") - read("8 of 8", "static") == difference


@pytest.mark.slow
def test_versus_transformers():
  pytest.importorskip("torch")
  rows = quick("versus_transformers")["rows"]
  kinds = [(row["model"], row["responses"]) for row in rows]
  models, answers = ("tiny-dense", "tiny-moe"), ("fixed", "long tail")
  assert kinds == [(m, a) for m in models for a in answers]
  for row in rows:
    rates = row["tokens_per_second"]
    ours = max(rates["our static"], rates["our continuous"])
    theirs = [x for name, x in rates.items() if not name.startswith("our")]
    assert rates[row["best"]] == max(theirs) > 0
    assert row["times"] == pytest.approx(ours / max(theirs), abs=1e-3)


@pytest.mark.slow
def test_peers_without_peers():
  """Responses of the wanted lengths, which are checked there."""
  record = quick("peers")
  assert record["losses"] == []
  assert [row["case"] for row in record["iterations"]] == [*peers.QUICK]
  for row in record["iterations"]:
    assert row["times"] == {}
    forms = row["seconds"]["ours"]
    assert set(forms) == {"static", "continuous"}
    assert all(0 < s["min"] <= s["median"] for s in forms.values())


def test_a_case_measured_again_takes_its_place():
  row = lambda case, seconds: {"case": case, "seconds": seconds}
  rows = peers.with_others(
    [row("b", 3), row("c", 4)], kept=[row("a", 1), row("b", 2)]
  )
  assert rows == [row("a", 1), row("b", 3), row("c", 4)]


def test_a_process_answers_each_turn_with_what_it_was(capsys):
  done = []
  for turn, _ in enumerate(turns.turns(["\n", "\n"], lambda: done)):
    print("a trainer's own words")
    done[:] = [3, turn]
  lines = iter(capsys.readouterr().out.splitlines(keepends=True))
  found = [turns.answer(lines) for _ in range(2)]
  assert [turn["lengths"] for turn in found] == [[0, 3], [1, 3]]
  assert all(turn["seconds"] >= 0 for turn in found)
  with pytest.raises(EOFError):
    turns.answer(lines)


def test_two_commits_take_turns_and_each_round_has_a_ratio(monkeypatch):
  """Of three rounds: 4 / 2, 9 / 3 and 5 / 5 seconds."""
  turns, seconds = [], iter([4, 2, 1, 1, 9, 3, 1, 1, 5, 5, 1, 1])

  def measure(case, checkout, quick):
    turns.append((case, checkout, quick))
    return {"seconds": next(seconds)}

  monkeypatch.setattr(regression, "_measure", measure)
  found = regression.compare(["a", "b"], "before", rounds=3, quick=True)
  order = [(case, of) for case in "ab" for of in (ROOT, "before")]
  assert turns == [(*turn, True) for turn in order] * 3
  assert found == {
    "a, seconds": {"now": 5, "before": 3, "ratio": 2},
    "b, seconds": {"now": 1, "before": 1, "ratio": 1},
  }


def test_keys_that_a_commit_lacks_are_left_out_there(debug_config):
  del debug_config.eval.prompts
  changes = {"eval.every": 0, "eval.prompts": 3, "gone.key": 1, "num_steps": 2}
  found = regression.known(changes, debug_config)
  assert found == {"eval.every": 0, "num_steps": 2}


def test_losses_are_clipped_in_part():
  """So that the peers' clip ranges count."""
  given = peers.losses_given()
  mask = given["mask"]
  for name in peers.METHODS:
    gap = (given[f"{name}/logps"] - given[f"{name}/old_logps"]) * mask
    if name == "gspo":
      gap = gap.sum(1) / mask.sum(1)
    ratio, edges = np.exp(gap), (given[f"{name}/low"], given[f"{name}/high"])
    outside = (ratio < 1 - edges[0]) | (ratio > 1 + edges[1])
    assert 0 < outside.sum() < outside.size


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "forms"),
  [("iteration", {"static", "continuous"}),
   ("instruments", {"with", "without"})],
)  # fmt: skip
def test_the_phases_of_an_iteration_are_parts_of_it(name, forms):
  record = quick(name)
  seconds = record.get("seconds", record)
  assert set(seconds) == forms
  for found in seconds.values():
    whole = found.pop("iteration")
    assert set(found) == {"generate", "score", "logps", "update", "write"}
    assert min(found.values()) > 0
    assert sum(found.values()) <= 1.001 * whole


def test_load_hf():
  record = quick("load_hf")
  # float32 has twice the bytes of bfloat16; the files also contain names.
  assert 0 < 2 * record["files"] - record["params"] < 100_000
  assert 0 < record["beside"] < 200e6  # mostly compiled code, at this size


@pytest.mark.slow
def test_replay():
  record = quick("replay")
  assert record["choices"] == 4 * 24 * 4 * 2
  assert record["bytes"]["sample, recorded"] > record["bytes"]["sample"]


@pytest.mark.slow
def test_decode():
  record = quick("decode")
  assert min(record["seconds"].values()) > 0
  one_of_group = 1 / record["group"]
  assert record["shares"] == {"prefilled": one_of_group, "pages": one_of_group}


@pytest.mark.slow
def test_overlap():
  seconds = quick("overlap")["seconds"]
  assert len(seconds) == 4
  for phases in seconds.values():
    parts = sum(phases[k] for k in ("generate", "score", "update"))
    assert 0 < parts <= 1.001 * phases["iteration"]


@pytest.mark.slow
def test_exact():
  """A word of each phase, and what the mode is for."""
  case = quick("exact")["cases"]["dense"]
  assert {"generate", "update", "iteration", "first"} == {*case["times"]}
  assert case["seconds"]["exact"]["logps"] < case["seconds"]["exact"]["update"]
  assert case["gap"]["exact"] == 0 < case["gap"]["ordinary"]


@pytest.mark.slow
def test_sampler_gap():
  """What is rounded to int8 is further from the trainer than what is not."""
  models = quick("sampler_gap")["models"]
  gap = lambda *case: models[case[0]][case[1]]["token"]
  for name, variants in models.items():
    for variant in variants:
      if variant.startswith("int8"):
        assert gap(name, variant) > 10 * gap(name, "as written")
  assert "int8 experts" in models["experts"]


def replace_python(folder, monkeypatch, does):
  """Lets a shell script stand in for Python."""
  command = folder / "command"
  command.write_text(f"#!/bin/sh\n{does}\n")
  command.chmod(0o755)
  monkeypatch.setattr(sys, "executable", str(command))


def train(folder, monkeypatch, rows, *, end="exit 0"):
  """`seeds.train`, where the command writes these rows, then does that."""
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  does = f"""cat > "{folder}/metrics.jsonl" <<'END'
{lines}END
echo "$@" > "{folder}/arguments"
{end}"""
  replace_python(folder, monkeypatch, does)
  return seeds.train("a.py", folder, seed=3)


def iteration(step, seconds, **rest):
  """A row of metrics.jsonl."""
  phases = {"time/iteration": seconds, "time/update": seconds / 2}
  speed = {"throughput/sampler_tokens_per_second": 100 * seconds}
  return {"step": step, "reward/mean": 0.1 * step} | phases | speed | rest


def test_train_reports_what_the_command_wrote(tmp_path, monkeypatch):
  start, end = ({"eval/pass@1": x, "eval/greedy": x / 2} for x in (0.2, 0.6))
  seconds = [40, 10, 12, 30]
  rows = [iteration(i, s) for i, s in enumerate(seconds, 1)]
  rows = [{"step": 0} | start, *rows[:-1], rows[-1] | end]
  wait4 = os.wait4

  def waited(pid, options):
    return *wait4(pid, options)[:2], SimpleNamespace(ru_maxrss=3 * 2**20)

  monkeypatch.setattr(os, "wait4", waited)
  found = train(tmp_path, monkeypatch, rows)
  assert found["seconds of iterations"] == 92
  assert found["seconds per iteration"] == 21
  assert found["seconds per update"] == 10.5
  assert found["sampler tokens/s"] == 2100
  assert (found["pass@1 before"], found["pass@1 after"]) == (0.2, 0.6)
  assert found["pass@1"] == [[0, 0.2], [4, 0.6]]
  assert found["seed"] == 3
  assert found["largest resident set, GiB"] == 3
  arguments = (tmp_path / "arguments").read_text()
  assert "--config=a.py --config.seed=3 --workdir=" in arguments


def test_train_fails_where_the_command_fails(tmp_path, monkeypatch):
  with pytest.raises(subprocess.CalledProcessError, match="exit status 2"):
    train(tmp_path, monkeypatch, [], end="exit 2")


def test_train_stops_the_command_when_it_is_interrupted(tmp_path, monkeypatch):
  saved = tmp_path / "saved"

  def interrupted(pid, options):
    while not (tmp_path / "ready").exists():
      time.sleep(0.01)
    raise KeyboardInterrupt

  monkeypatch.setattr(os, "wait4", interrupted)
  end = f"""trap 'touch "{saved}"; exit 0' TERM
touch "{tmp_path}/ready"
while :; do sleep 0.05; done"""
  with pytest.raises(KeyboardInterrupt):
    train(tmp_path, monkeypatch, [], end=end)
  assert saved.exists()


@pytest.fixture(scope="module")
def policies():
  """A tokenizer, a config and two policies."""
  chat = tokenizers.load("bytes")
  cfg = model.ModelConfig(
    vocab_size=chat.vocab_size, num_layers=1, embed_dim=16, num_heads=2,
    num_kv_heads=2, head_dim=8, mlp_dim=16,
  )  # fmt: skip
  init = jax.jit(model.init, static_argnums=1)
  return chat, cfg, *(init(jax.random.key(i), cfg) for i in range(2))


def log_probs_of_next(params, cfg, ids):
  """[length - 1, vocabulary] of one text, without padding."""
  ids = np.array([ids])
  positions = np.arange(ids.shape[1])[None]
  forward = jax.jit(model.forward, static_argnums=1)
  logits = forward(params, cfg, ids, positions, np.ones_like(ids)).logits
  return np.asarray(jax.nn.log_softmax(logits[0, :-1]), float)


def test_perplexity_is_of_the_first_tokens_of_each_text(policies):
  chat, cfg, params, _ = policies
  texts = ["a short text", "one that is cut. " * 20]
  found = smollm2._perplexity(params, cfg, chat, texts)["perplexity"]
  logps = []
  for text in texts:
    ids = chat.encode(text)[:192]
    every = log_probs_of_next(params, cfg, ids)
    logps += [every[i, token] for i, token in enumerate(ids[1:])]
  assert found == pytest.approx(math.exp(-np.mean(logps)), rel=1e-4)


def test_kl_is_of_the_tokens_of_the_first_responses_and_their_stop(policies):
  chat, cfg, policy, first = policies
  answers = [
    {"problem": "p", "response": "abc", "finish": "stopped", "sample": 0},
    {"problem": "long", "response": "defg", "finish": "length", "sample": 0},
    {"problem": "long", "response": "xyz", "finish": "stopped", "sample": 1},
  ]
  system = smollm2.smollm2_cpu.get_config().data.system_prompt
  found = smollm2._kl(policy, first, cfg, chat, answers)
  each = []
  for answer, stop in zip(answers, (chat.stop_ids[:1], ()), strict=False):
    prompt = chat.prompt(answer["problem"], system)
    ids = [*prompt, *chat.encode(answer["response"]), *stop]
    log_p, log_q = (log_probs_of_next(p, cfg, ids) for p in (policy, first))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    each += [*kl[len(prompt) - 1 :]]
  assert len(each) == 4 + 4
  assert found == pytest.approx(np.mean(each), rel=1e-4)
  assert found > 1e-3
  assert smollm2._kl(first, first, cfg, chat, answers) == 0


def test_intervals_are_over_seeds_and_over_problems():
  """Without errors over problems, with both, and of one policy."""
  means = [0.5, 0.7, 0.6]
  over_seeds = stats.t.ppf(0.975, 2) * 0.1 / math.sqrt(3)
  over_problems = stats.t.ppf(0.975, 63) * 0.05
  for errors, spread in ((0.0, over_seeds), (0.05, None)):
    half = spread or math.hypot(over_seeds, over_problems)
    found = smollm2._interval([(m, errors) for m in means], 64)
    assert found == f"0.6 ({0.6 - half:.3g} to {0.6 + half:.3g})"
  one = smollm2._interval([(0.6, 0.05)], 64)
  low, high = 0.6 - over_problems, 0.6 + over_problems
  assert one == f"0.6 ({low:.3g} to {high:.3g})"


def test_docs_results_shows_every_recorded_problem_as_the_command_does():
  found = json.loads((ROOT / "benchmarks/smollm2.json").read_text())
  page = (ROOT / "docs/results.md").read_text().splitlines()
  rows = [
    line
    for line in smollm2._tables(found)
    for problem in found["samples"]
    if line.startswith(f"| {problem} |")
  ]
  assert len(rows) == len(found["samples"]) == 8
  assert [row for row in rows if row not in page] == []


def test_rows_of_a_gpu_are_saved_and_kept(tmp_path, monkeypatch):
  """A call ends where no time is left; the next one goes on."""
  out, tried = tmp_path / "gpu.json", []
  results = {"a": {"x": 1}, "b": {"failed": "why"}, "c": None, "d": {"x": 4}}

  def measure(name, quick, seconds):
    tried.append(name)
    return results[name]

  def call(minutes, quick=False):
    args = SimpleNamespace(out=out, minutes=minutes, quick=quick)
    return gpu._measure_all({x: gpu.Row(60.0, None) for x in "abcd"}, args)

  monkeypatch.setattr(gpu, "_measure", measure)
  found = lambda: json.loads(out.read_text())["rows"]
  assert call(0.9) == 75
  assert tried == []
  assert call(2) == 75  # c was ended by the end of the call
  assert found() == {"a": {"x": 1}, "b": {"failed": "why"}}
  assert call(9) == 0
  assert tried == [*"abc", *"cd"]
  assert found() | {"c": 0} == results | {"c": 0}
  assert "240 s" in found()["c"]["failed"]
  with pytest.raises(SystemExit, match="with and without --quick"):
    call(9, quick=True)


@pytest.mark.parametrize(
  ("does", "found"),
  [("echo noise; echo '{\"x\": 1}'", {"x": 1}),
   ("echo it ran out of memory >&2; exit 3", {"failed": ".* 3: .*ran out"}),
   ("exit 0", {"failed": "exit code 0"}), ("exec sleep 60", None)],
)  # fmt: skip
def test_a_row_of_a_gpu_says_why_it_failed(does, found, tmp_path, monkeypatch):
  replace_python(tmp_path, monkeypatch, does)
  got = gpu._measure("a", False, seconds=1)
  if found and "failed" in found:
    assert re.match(found["failed"], got["failed"])
  else:
    assert got == found
  replace_python(tmp_path, monkeypatch, f"exit {gpu._NO_GPU}")
  with pytest.raises(SystemExit):
    gpu._measure("a", False, seconds=5)


def test_the_rows_of_a_gpu_take_at_most_25_minutes():
  seconds = [row.seconds for row in gpu.rows(quick=False).values()]
  assert max(seconds) <= gpu._LONGEST == 240
  assert sum(seconds) <= 25 * 60


@pytest.mark.parametrize("wrong", [1.1, math.nan])
def test_a_kernel_with_a_wrong_gradient_fails(wrong):
  @jax.custom_vjp
  def kernel(x):
    return x * x

  kernel.defvjp(lambda x: (x * x, x), lambda x, dy: (2 * x * dy * wrong,))
  x = jax.numpy.arange(1, 9, dtype="bfloat16")
  call = lambda form: gpu_kernels.compare(
    {"kernel": form}, lambda x: x * x, [x], x, ("y", "dx")
  )
  assert call(lambda x: x * x)["kernel"]["error of dx"] < 0.01
  with pytest.raises(ValueError, match="an error above"):
    call(kernel)


def test_the_flops_of_a_gpus_rows_are_two_a_parameter_and_token_or_more():
  cfg = model.variant("qwen3-0.6b")
  flops = gpu.model_flops(cfg, {"P": 2, "G": 3, "R": 100})
  weights = sum(math.prod(x.shape) for x in jax.tree.leaves(model.shapes(cfg)))
  assert flops["generate"] == pytest.approx(2 * weights * 600, rel=0.1)
  assert flops["update"] == pytest.approx(3 * 2 * weights * 600, rel=0.15)


@pytest.mark.slow
def test_gpu():
  rows = quick("gpu", "--minutes=60")["rows"]
  assert len(rows) == len(gpu.rows(quick=True))
  assert not [row for row in rows.values() if "failed" in row]
