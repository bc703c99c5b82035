"""`gspo_jax.serve` answers with the weights that it got, until SIGTERM."""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from repository import ROOT

from gspo_jax import model, sampler, serve
from gspo_jax.data import tokenizers
from gspo_jax.model import hf
from gspo_jax.runtime.errors import UserError

BYTES = tokenizers.load("bytes")
CONFIG = "--config=configs/tiny_cpu.py:debug"


KEY = "k" * 20


@functools.cache
def policy():
  cfg = model.variant("tiny", vocab_size=258, dtype="float32")
  return model.init(jax.random.key(3), cfg), cfg


def greedy(prompt, count):
  """The ids that the sampler gives."""
  ids = BYTES.encode(prompt)
  samples = sampler.generate(
    *policy(),
    sampler.Prompts(np.int32([ids]), np.int32([len(ids)])),
    jax.random.key(0),
    sampler=sampler.SamplerConfig(
      1, count, stop_ids=BYTES.stop_ids, temperature=0.0
    ),
  )
  return samples.tokens[0, : samples.lengths[0]].tolist()


@contextlib.contextmanager
def served(tmp_path):
  """(the base URL, what was printed before it, the process)."""
  hf.save_hf(*policy(), tmp_path / "hf", dtype="float32", beside=BYTES.save)
  (tmp_path / "key").write_text(f"{KEY}\n")
  command = [sys.executable, "-u", "-m", "gspo_jax.serve", CONFIG, "--port=0"]
  command += [f"--checkpoint={tmp_path / 'hf'}"]
  command += [f"--api_key_file={tmp_path / 'key'}"]
  with subprocess.Popen(
    command, cwd=ROOT, stdout=subprocess.PIPE, text=True
  ) as process:
    try:
      lines = []
      for line in process.stdout:
        if url := re.search("http.*", line):
          break
        lines.append(line.strip())
      yield url[0], lines, process
    finally:
      process.kill()


@pytest.mark.slow
def test_a_served_policy_samples_as_a_request_says(tmp_path):
  openai = pytest.importorskip("openai")
  with served(tmp_path) as (url, lines, process):
    assert "compiling" in lines
    client = openai.OpenAI(base_url=url, api_key=KEY, timeout=120)
    prompt = "1+1?"
    create = lambda **options: client.completions.create(
      model="policy",
      prompt=BYTES.encode(prompt),
      extra_body={"return_token_ids": True},
      **options,
    )
    ask = lambda **options: create(**options).choices[0].token_ids
    ids = ask(temperature=0)
    sampled = [ask(temperature=2, seed=seed) for seed in (1, 2, 1)]
    parts = [*create(temperature=0, stream=True)]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
  assert ids == greedy(prompt, len(ids))
  assert len(ids) > 1
  assert sampled[0] == sampled[2] != sampled[1]
  ids_of_parts = [part.choices[0].token_ids for part in parts]
  assert [i for part in ids_of_parts for i in part] == ids
  assert len(parts) > len(ids) / 4  # a letter of UTF-8 has up to 4 tokens


@pytest.mark.slow
@pytest.mark.parametrize("api", ["completions", "chat-completions"])
def test_lm_evaluation_harness_runs_a_task(tmp_path, api):
  """Its answers are those of the sampler, up to a stop string."""
  for name in ("lm_eval", "tenacity", "aiohttp"):
    pytest.importorskip(name)
  questions = [f"{i}+{i}=" for i in range(6)]
  ids = lambda q: [i for i in greedy(q, 6) if i not in BYTES.stop_ids]
  text = lambda q: BYTES.decode(ids(q)).split("W")[0]
  rows = [{"question": q, "answer": text(q)} for q in questions]
  (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
  task = {
    "task": "sums",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["W"], "max_gen_toks": 6},
    "metric_list": [{"metric": "exact_match"}],
  }
  (tmp_path / "sums.yaml").write_text(json.dumps(task))  # JSON is YAML
  with served(tmp_path) as (url, *_):
    path = api.replace("-", "/")
    arguments = f"base_url={url}/{path},model=policy,num_concurrent=3"
    command = [sys.executable, "-m", "lm_eval", "--tasks=sums"]
    command += [f"--model=local-{api}", f"--include_path={tmp_path}"]
    command += [f"--model_args={arguments},tokenizer_backend=None"]
    command += [f"--output_path={tmp_path / 'out'}"]
    if api == "chat-completions":
      command += ["--apply_chat_template"]
    names = {"OPENAI_API_KEY": KEY, "HF_HOME": str(tmp_path / "hub")}
    names |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    subprocess.run(command, env=os.environ | names, check=True, timeout=500)
  (results,) = (tmp_path / "out").rglob("results*.json")
  sums = json.loads(results.read_text())["results"]["sums"]
  assert sums["exact_match,none"] == 1


def test_each_line_of_a_file_is_a_key(tmp_path):
  (tmp_path / "keys").write_text(f"{'a' * 16}\n\n {'b' * 20}\r\n")
  assert serve.read_keys(str(tmp_path / "keys")) == ["a" * 16, "b" * 20]


@pytest.mark.parametrize(
  "text", ["short", "two words of a key file", "", f"{'a' * 16}\nshort"]
)
def test_a_key_that_is_no_key_is_refused(tmp_path, text):
  (tmp_path / "key").write_text(text)
  with pytest.raises(UserError, match="one word of at least 16"):
    serve.read_keys(str(tmp_path / "key"))
  with pytest.raises(UserError, match=r"absent: No such file"):
    serve.read_keys(str(tmp_path / "absent"))
