"""A policy that began as a Hugging Face folder is exported as one."""

import dataclasses
import json
import shutil
import signal

import bucket
import hf_tokenizers
import jax
import numpy as np
import pyarrow
import pytest
import transformers
from etils import epath
from metrics_of import metrics_of
from processes import mistake, start
from pyarrow import parquet
from repository import ROOT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gspo_jax import export, model
from gspo_jax.configs import hugging_face, moe_tpu_v5
from gspo_jax.data import readers
from gspo_jax.model import hf
from gspo_jax.program import experiment, load_params
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.record.checkpoint import Checkpoints, checksums
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError

TEMPLATE = (
  "{% for m in messages %}<user>{{ m.content }}<end>{% endfor %}"
  "{% if add_generation_prompt %}<answer>{% endif %}"
)
CONTROL = ("<pad>", "<end>", "<user>", "<answer>")
TINY = f"--config={ROOT}/configs/tiny_cpu.py:debug"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
  """A random Qwen3-MoE from transformers, with a tokenizer of its size."""
  folder = tmp_path_factory.mktemp("hf") / "base"
  golden = ROOT / "tests/support/goldens/qwen3_moe"
  shutil.copytree(golden, folder, ignore=shutil.ignore_patterns("g*"))
  letters = "0123456789+?#. abcdefghijklmnopqrstuvwxyz"
  vocab = {c: i for i, c in enumerate(letters)}
  fast = Tokenizer(models.WordLevel(vocab, unk_token="."))
  fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
  fast.decoder = decoders.Fuse()
  fast.add_special_tokens(list(CONTROL))
  names = {"eos_token": "<end>", "pad_token": "<pad>", "unk_token": "."}
  hf_tokenizers.save(folder, fast, TEMPLATE, ["<end>"], **names)
  return folder


def config_of(base):
  keys = hugging_face.get_config(str(base))
  keys.mesh.update({"data": -1, "fsdp": 1})  # its sizes are not all even
  keys.data.prompts = 8  # eight devices
  keys.data.max_prompt_length = keys.sampler.max_new_tokens = 12
  return keys


def save_run(keys, workdir, step=2):
  """Saves weights that all differ from the first ones: these weights."""
  config, mesh = parse(keys), sharding.make_mesh(**keys.mesh)
  with jax.set_mesh(mesh):
    program = build_program(config, mesh, training=False)
    params = program.init_params(jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.01, params)
    with Checkpoints(workdir / "checkpoints", keep=1) as checkpoints:
      identity = {"identity": load_params.identity(program)}
      checkpoints.save(step, {"params": params}, identity)
  return jax.device_get(params)


@pytest.fixture(scope="module")
def exported(base, tmp_path_factory):
  """The weights of a run that began from the base, and its export."""
  folder = tmp_path_factory.mktemp("run")
  params = save_run(config_of(base), folder)
  out = folder / "out"
  export.export(config_of(base), str(folder), str(out), dtype="float32")
  return params, out


def test_adapters_are_merged_or_written_for_peft(base, tmp_path):
  """The weights below are read again from `model.checkpoint`."""
  keys = config_of(base)
  keys.model.lora.rank, keys.model.dtype = 2, "float32"
  config, mesh = parse(keys), sharding.make_mesh(**keys.mesh)
  with jax.set_mesh(mesh):
    program = build_program(config, mesh, training=False)
    below = program.new_policy(program.init_params(None))
    below, adapters = model.lora.split(below)
    adapters = jax.tree.map(lambda x: x + 0.1, adapters)
    load_params.save_base(below, config, epath.Path(tmp_path))
    assert not (tmp_path / "base").exists()
    identity = load_params.identity(program) | load_params.lora_identity(
      program
    )
    saved = {"identity": identity, "base": checksums(below)}
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
      checkpoints.save(1, {"params": adapters}, saved)
  write = lambda name, **flags: export.export(
    keys, str(tmp_path), str(tmp_path / name), dtype="float32", **flags
  )
  write("merged")
  cfg = hf.config_from_hf(tmp_path / "merged", dtype="float32")
  expected = model.lora.merge(
    model.lora.join(below, adapters), program.cfg.lora
  )
  found = hf.load_hf(tmp_path / "merged", cfg)
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
  jax.tree.map(close, found, expected)
  write("peft", peft=True)
  found = hf.load_peft(tmp_path / "peft", program.cfg)
  jax.tree.map(np.testing.assert_array_equal, found, adapters)
  config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
  assert config["base_model_name_or_path"] == str(base)
  keys.cold_start.steps = 9
  words = r"cold_start\.steps=9: expected a folder"
  with pytest.raises(UserError, match=words):
    write("none", peft=True)
  keys.model.lora.rank = 0
  words = r"--peft: expected model\.lora\.rank above"
  with pytest.raises(UserError, match=words):
    write("none", peft=True)


@pytest.mark.parametrize(
  ("arguments", "missing"),
  [([], "config"), ([TINY], "workdir"), ([TINY, "--workdir=x"], "to")],
)
def test_a_missing_flag_names_the_command(arguments, missing):
  words = f"--{missing} is missing; for a start: python -m gspo_jax.export --co"
  assert words in mistake(export.main, *arguments)


def test_an_export_is_a_checkpoint_of_the_trained_policy(base, exported):
  params, out = exported
  # The same model, configured as its base was.
  cfg = hf.config_from_hf(base)
  assert hf.config_from_hf(out, dtype=cfg.dtype) == cfg
  jax.tree.map(np.testing.assert_array_equal, hf.load_hf(out, cfg), params)
  # Its tokenizer is the base's, file by file.
  theirs = transformers.AutoTokenizer.from_pretrained(str(out))
  messages = [{"role": "user", "content": "1+2?"}]
  ids = theirs.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=False
  )
  assert theirs.decode(ids) == "<user>1+2?<end><answer>"
  config = transformers.AutoConfig.from_pretrained(str(out))
  assert config.model_type == "qwen3_moe"
  # A second export into it would mix two.
  with pytest.raises(UserError, match="new or empty folder"):
    export.export(config_of(base), "run", str(out), dtype="float32")


def test_a_run_of_bytes_is_exported_with_its_tokenizer(debug_config, tmp_path):
  """There is no Hugging Face folder to copy files from."""
  debug_config.data.prompts = 8
  with pytest.raises(UserError, match="no such folder"):
    export.export(debug_config, str(tmp_path), "to", dtype="float32")
  params = save_run(debug_config, tmp_path)
  out = str(tmp_path / "out")
  step = str(tmp_path / "checkpoints/2")
  debug_config.mesh.data = debug_config.sampler_mesh.devices = 4  # of eight
  export.export(debug_config, step, out, dtype="float32")
  cfg = hf.config_from_hf(out)
  jax.tree.map(np.testing.assert_array_equal, hf.load_hf(out, cfg), params)
  theirs = transformers.AutoTokenizer.from_pretrained(out)
  assert theirs.encode("8a+3?", add_special_tokens=False) == [*b"8a+3?"]
  assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == [
    257
  ]
  debug_config.model.variant = "small"
  with pytest.raises(UserError, match=r"model.vocab_size=258, this run .*2048"):
    export.export(debug_config, str(tmp_path), "to", dtype="float32")


SUMS = "\n".join(
  json.dumps({"question": f"{a}+{b}?", "answer": f"#### {a + b}"})
  for a in range(10)
  for b in range(10)
)


def train_flags(folder):
  """Of a run in `folder`, on the sums that lie there."""
  keys = {
    "data.source": f"jsonl:{folder}/sums.jsonl",
    "data.eval_source": "",
    "data.instruction": "{problem}",
    "data.prompts": 8,
    "data.max_prompt_length": 12,
    "sampler.max_new_tokens": 12,
    "rollout.group_size": 4,
    "learner.micro_batch_size": 8,
    "reward.names": "('gsm8k','length')",
    "eval.prompts": 8,
    "optim.learning_rate": 1e-2,
    "num_steps": 4,
  }
  flags = [f"--config.{key}={value}" for key, value in keys.items()]
  return [*flags, f"--workdir={folder}/run"]


def command(module, base, *flags, code=0, sigterm_at=None):
  """What a command prints; it gets SIGTERM at a line that begins so."""
  config = f"--config={ROOT}/configs/hugging_face.py:{base}"
  process = start("-m", f"gspo_jax.{module}", config, *flags)
  lines = []
  for line in process.stdout:
    lines.append(line)
    if sigterm_at and line.startswith(sigterm_at):
      process.send_signal(signal.SIGTERM)
  assert process.wait() == code, "".join(lines)
  return "".join(lines)


@pytest.mark.slow
def test_the_commands_work_in_a_bucket(base, tmp_path, monkeypatch):
  """Train, SIGTERM, resume, evaluate and export: the same as in a folder."""
  with bucket.emulated(monkeypatch) as emulator:
    copy = epath.Path(emulator.url) / "base"
    for path in base.iterdir():
      (copy / path.name).write_bytes(path.read_bytes())
    local, remote = tmp_path, epath.Path(emulator.url)
    for folder in (local, remote):
      (folder / "sums.jsonl").write_text(SUMS)
    flags = train_flags(local)
    assert "4/4" in command("main", base, *flags)
    rows = metrics_of(local / "run")
    assert max(row["grad/norm"] for row in rows[1:]) > 0
    assert rows[-1]["reward/length"] > 0
    assert rows[-1]["reward/failed"] == 0
    outputs(base, local, flags)
    compiled = remote / "compiled"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    flags = train_flags(remote)
    out = command("main", copy, *flags, code=75, sigterm_at="2/4")
    assert "stopped: saved after step" in out
    names = {path.name for path in compiled.iterdir()}
    assert any("_update-" in name for name in names), names
    assert "resumed after step" in command("main", copy, *flags)
    outputs(copy, remote, flags)
    again = {path.name for path in compiled.iterdir()}
    assert not {n for n in again - names if "_update-" in n}
    files = "answers/sums/answers.jsonl", "out/model.safetensors.index.json"
    for name in (*files, "out/tokenizer.json"):
      assert (remote / name).read_bytes() == (local / name).read_bytes()
    cfg = hf.config_from_hf(copy)
    weights = [hf.load_hf(folder / "out", cfg) for folder in (local, remote)]
    jax.tree.map(np.testing.assert_array_equal, *weights)
    first = hf.load_hf(base, cfg)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), first, weights[0])
    assert min(jax.tree.leaves(moved)) > 0
    assert max(jax.tree.leaves(moved)) < 0.1
    steps = [row["step"] for row in metrics_of(remote / "run")]
    assert steps == [*range(5)]
    lora = dataclasses.replace(cfg, lora=model.LoraConfig(2, 4.0, "all-linear"))
    adapters = model.lora.init(jax.random.key(0), lora)
    hf.save_peft(adapters, lora, remote / "peft", base=str(copy))
    again = hf.load_peft(remote / "peft", lora)
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
    with pytest.raises(UserError, match="exists: expected a new or empty"):
      hf.require_new(remote / "out", "float32")
    table = pyarrow.Table.from_pylist([*map(json.loads, SUMS.splitlines())])
    parquet.write_table(table, local / "sums.parquet")
    (remote / "sums.parquet").write_bytes((local / "sums.parquet").read_bytes())
    found = readers.lines(f"parquet:{remote}/sums.parquet")
    assert [line.record for line in found] == table.to_pylist()
    assert emulator.failures.count(503) > 10


def outputs(base, folder, flags):
  """Evaluates and exports a run."""
  command(
    *("evaluate", base, *flags[:-1], f"--checkpoint={folder}/run"),
    *(f"--set=sums={folder}/sums.jsonl", "--reward=gsm8k", "--limit=8"),
    f"--out={folder}/answers",
  )
  command("export", base, *flags, f"--to={folder}/out", "--dtype=float32")


def test_the_flagship_is_ready_to_train_a_folder_on_questions(
  base, tmp_path, capsys
):
  """All that happens before the weights are read, at the size of `debug`."""
  lines = [{"problem": f"{i}+1?", "answer": str(i + 1)} for i in range(200)]
  questions = tmp_path / "questions.jsonl"
  questions.write_text("\n".join(map(json.dumps, lines)))
  keys = moe_tpu_v5.get_config(f"debug,checkpoint={base},questions={questions}")
  mesh = sharding.make_mesh(**keys.mesh)
  with jax.set_mesh(mesh):
    ready = experiment.prepare(parse(keys), str(tmp_path / "run"), mesh)
  assert ready.program.cfg == hf.config_from_hf(
    base, dtype="float32", remat=ready.program.cfg.remat
  )
  prompt = ready.program.tokenizer.decode(ready.held_out.tokens[0])
  assert "+1?" in prompt
  assert "put the final answer in" in prompt
  assert "random weights" not in capsys.readouterr().out
  with jax.set_mesh(mesh):
    experiment.prepare(
      parse(moe_tpu_v5.get_config("debug")), str(tmp_path / "tried"), mesh
    )
  assert "random weights" in capsys.readouterr().out
