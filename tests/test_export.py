"""From a checkpoint of transformers through RL to one that it loads again."""

import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import transformers
from absl.testing import flagsaver
from repository import ROOT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gspo_jax import export, model
from gspo_jax.model import hf
from gspo_jax.program import load_params
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.runtime.checkpoint import Checkpoints
from gspo_jax.runtime.errors import UserError

TEMPLATE = (
  "{% for m in messages %}<user>{{ m.content }}<end>{% endfor %}"
  "{% if add_generation_prompt %}<answer>{% endif %}"
)
CONTROL = ("<pad>", "<end>", "<user>", "<answer>")
TINY = f"--config={ROOT}/configs/tiny_cpu.py:debug"
CONFIG = f"{ROOT}/configs/hugging_face.py"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
  """A random Qwen3-MoE that transformers made, with a tokenizer of its size."""
  folder = tmp_path_factory.mktemp("hf") / "base"
  golden = ROOT / "tests/support/goldens/qwen3_moe"
  shutil.copytree(golden, folder, ignore=shutil.ignore_patterns("g*"))
  letters = "0123456789+?#. abcdefghijklmnopqrstuvwxyz"
  vocab = {c: i for i, c in enumerate(letters)}
  fast = Tokenizer(models.WordLevel(vocab, unk_token="."))
  fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
  fast.decoder = decoders.Fuse()
  fast.add_special_tokens(list(CONTROL))
  wrapped = transformers.PreTrainedTokenizerFast(
    tokenizer_object=fast, eos_token="<end>", pad_token="<pad>", unk_token="."
  )
  wrapped.chat_template = TEMPLATE
  wrapped.save_pretrained(folder)
  stops = json.dumps({"eos_token_id": wrapped.convert_tokens_to_ids("<end>")})
  (folder / "generation_config.json").write_text(stops)
  return folder


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
  """The overrides of a run of two steps, its workdir, and what it said."""
  folder = tmp_path_factory.mktemp("run")
  sums = [
    {"question": f"{a}+{b}?", "answer": f"#### {a + b}"}
    for a in range(10)
    for b in range(10)
  ]
  (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, sums)))
  flags = {
    "data.source": f"jsonl:{folder}/sums.jsonl",
    "data.eval_source": "",
    "data.instruction": "{question}",
    "data.prompts": 8,
    "data.max_prompt_length": 12,
    "sampler.max_new_tokens": 12,
    "rollout.group_size": 4,
    "learner.micro_batch_size": 8,
    "reward.names": "('gsm8k','length')",
    "eval.prompts": 8,
    "optim.learning_rate": 1e-2,
    "num_steps": 2,
  }
  flags = [f"--config.{key}={value}" for key, value in flags.items()]
  said = command("main", base, *flags, f"--workdir={folder}/run")
  return flags, folder / "run", said


def command(module, base, *flags, code=0):
  done = subprocess.run(
    [
      *(sys.executable, "-m", f"gspo_jax.{module}"),
      *(f"--config={CONFIG}:{base}", *flags),
    ],
    cwd=ROOT,
    env=os.environ | {"XLA_FLAGS": ""},
    capture_output=True,
    text=True,
  )
  assert done.returncode == code, done.stderr
  return done.stdout + done.stderr


@pytest.mark.parametrize(
  ("arguments", "missing"),
  [
    ([], "config"),
    ([TINY], "workdir"),
    ([TINY, "--workdir=x"], "to"),
  ],
)
def test_a_missing_flag_names_the_command(monkeypatch, arguments, missing):
  monkeypatch.setattr(sys, "argv", ["gspo", *arguments])
  words = f"--{missing} is missing; for a start: python -m gspo_jax.export --co"
  with flagsaver.flagsaver(), pytest.raises(UserError, match=words):
    export._parse(sys.argv)


def test_a_run_begins_from_the_folder_and_learns(run):
  _, workdir, said = run
  assert "2/2" in said
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  assert max(row["grad/norm"] for row in rows[1:]) > 0
  assert rows[-1]["reward/length"] > 0
  assert rows[-1]["reward/failed"] == 0


def test_an_export_is_a_checkpoint_of_the_trained_policy(base, run, tmp_path):
  flags, workdir, _ = run
  out = tmp_path / "out"
  to = [f"--workdir={workdir}", f"--to={out}"]
  command("export", base, *flags, *to, "--dtype=float32")
  # The same model, configured as its base was.
  cfg = hf.config_from_hf(base)
  assert hf.config_from_hf(out, dtype=cfg.dtype) == cfg
  first, last = hf.load_hf(base, cfg), hf.load_hf(out, cfg)
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), first, last)
  assert min(jax.tree.leaves(moved)) > 0  # every array was trained
  assert max(jax.tree.leaves(moved)) < 0.1
  # Its tokenizer is the base's, file by file.
  theirs = transformers.AutoTokenizer.from_pretrained(str(out))
  asked = [{"role": "user", "content": "1+2?"}]
  ids = theirs.apply_chat_template(
    asked, add_generation_prompt=True, return_dict=False
  )
  assert theirs.decode(ids) == "<user>1+2?<end><answer>"
  config = transformers.AutoConfig.from_pretrained(str(out))
  assert config.model_type == "qwen3_moe"
  # A second export into it would mix two.
  said = command("export", base, *flags, *to, code=2)
  assert "new or empty folder" in said


def test_transformers_computes_what_we_do_with_an_export(base, run, tmp_path):
  torch = pytest.importorskip("torch")
  flags, workdir, _ = run
  out = tmp_path / "out"
  to = [f"--workdir={workdir}/checkpoints/2", f"--to={out}"]
  command("export", base, *flags, *to, "--dtype=float32")
  cfg = hf.config_from_hf(out, dtype="float32")
  tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
  ours = model.forward(
    hf.load_hf(out, cfg), cfg, tokens, np.arange(12)[None].repeat(2, 0),
    np.ones_like(tokens),
  ).logits  # fmt: skip
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    str(out), dtype=torch.float32
  )
  with torch.no_grad():
    expected = theirs(torch.tensor(tokens.astype(np.int64))).logits.numpy()
  np.testing.assert_allclose(ours, expected, atol=5e-5)


def test_a_run_of_bytes_is_exported_with_its_tokenizer(debug_config, tmp_path):
  """No folder to take anything over from."""
  debug_config.data.prompts = debug_config.learner.micro_batch_size = 8
  mesh = sharding.make_mesh(**debug_config.mesh)
  with jax.set_mesh(mesh):
    made = build_program(parse(debug_config), mesh)
    state = made.learner.init_state(made.init_params(jax.random.key(0)))
    with Checkpoints(tmp_path / "checkpoints", every=1, keep=1) as checkpoints:
      saved = {"identity": load_params.identity(made)}
      checkpoints.save(1, state, saved)
  out = str(tmp_path / "out")
  export.export(debug_config, str(tmp_path), out, dtype="float32")
  jax.tree.map(
    np.testing.assert_array_equal, hf.load_hf(out, made.cfg), state.params
  )
  theirs = transformers.AutoTokenizer.from_pretrained(out)
  assert theirs.encode("8a+3?", add_special_tokens=False) == [*b"8a+3?"]
  assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == [
    257
  ]


def test_another_model_is_told(debug_config, tmp_path):
  test_a_run_of_bytes_is_exported_with_its_tokenizer(debug_config, tmp_path)
  debug_config.model.variant = "small"
  with pytest.raises(UserError, match=r"model.vocab_size=258, this run .*2048"):
    export.export(debug_config, str(tmp_path), "to", dtype="float32")


def test_a_workdir_that_is_none(debug_config, tmp_path):
  debug_config.data.prompts = debug_config.learner.micro_batch_size = 8
  with pytest.raises(UserError, match="no such folder"):
    export.export(debug_config, str(tmp_path), "to", dtype="float32")
