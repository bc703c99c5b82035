"""`gspo_jax.serve` answers with the weights that it got, until SIGTERM."""

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


@pytest.mark.slow
def test_a_served_policy_samples_as_a_request_says(tmp_path):
  openai = pytest.importorskip("openai")
  cfg = model.variant("tiny", vocab_size=258, dtype="float32")
  params = model.init(jax.random.key(3), cfg)
  hf.save_hf(params, cfg, tmp_path / "hf", dtype="float32", beside=BYTES.save)
  key = "k" * 20
  (tmp_path / "key").write_text(f"{key}\n")
  command = [sys.executable, "-u", "-m", "gspo_jax.serve", CONFIG, "--port=0"]
  command += [f"--checkpoint={tmp_path / 'hf'}"]
  command += [f"--api_key_file={tmp_path / 'key'}"]
  with subprocess.Popen(
    command, cwd=ROOT, stdout=subprocess.PIPE, text=True
  ) as process:
    try:
      url = next(filter(None, map(re.compile("http.*").search, process.stdout)))
      client = openai.OpenAI(base_url=url[0], api_key=key, timeout=120)
      prompt = BYTES.encode("1+1?")
      ask = lambda **options: (
        client.completions.create(
          model="policy",
          prompt=prompt,
          extra_body={"return_token_ids": True},
          **options,
        )
        .choices[0]
        .token_ids
      )
      ids = ask(temperature=0)
      sampled = [ask(temperature=2, seed=seed) for seed in (1, 2, 1)]
      process.send_signal(signal.SIGTERM)
      assert process.wait(60) == 0
    finally:
      process.kill()
  expected = sampler.generate(
    params,
    cfg,
    sampler.Prompts(np.int32([prompt]), np.int32([len(prompt)])),
    jax.random.key(0),
    sampler=sampler.SamplerConfig(
      1, len(ids), stop_ids=BYTES.stop_ids, temperature=0.0
    ),
  )
  assert ids == expected.tokens[0].tolist()
  assert len(ids) > 1
  assert sampled[0] == sampled[2] != sampled[1]


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
