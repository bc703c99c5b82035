"""Seconds of requests to `gspo_jax.serve`, many at once.

  python -m benchmarks.serve_load

serves the embedded model of configs/tiny_cpu.py, with weights that nobody has
trained, from another process. Each request is a chat of its own, sampled at
temperature 1 until its stop token or `--tokens`. The least, median and 95th
percentile of the seconds from a request to its answer are printed, and tokens
a second; with `--stream` also those to the first part of an answer.
"""

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent import futures
from pathlib import Path

import jax
import numpy as np

from benchmarks import record
from gspo_jax import model
from gspo_jax.data import tokenizers
from gspo_jax.model import hf


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--requests", type=int, default=200)
  parser.add_argument("--at_once", type=int, default=32)
  parser.add_argument("--tokens", type=int, default=64)
  parser.add_argument("--slots", type=int, default=32)
  parser.add_argument("--stream", action="store_true")
  parser.add_argument("--quick", action="store_true", help="12 requests")
  parser.add_argument("--out", type=Path)
  options = parser.parse_args()
  count = 12 if options.quick else options.requests
  with served(options) as (url, key, start):
    begin = time.monotonic()
    with futures.ThreadPoolExecutor(options.at_once) as pool:
      ask_each = lambda i: ask(url, key, i, options)
      answers = [*pool.map(ask_each, range(count))]
    seconds = time.monotonic() - begin
  first, whole, tokens = map(np.array, zip(*answers, strict=True))
  of = lambda x: [round(float(q), 3) for q in np.quantile(x, (0, 0.5, 0.95))]
  found = {
    "requests": count,
    "at_once": options.at_once,
    "seconds_to_the_url": round(start, 1),
    "least_p50_p95": of(whole),
    "tokens_of_an_answer": float(tokens.mean()),
    "tokens_per_second": round(tokens.sum() / seconds, 1),
  }
  if options.stream:
    found["first_part_least_p50_p95"] = of(first)
  record.finish("serve_load", found, options.out)


@contextlib.contextmanager
def served(options):
  """(base URL, key, seconds until they were printed) of a random policy."""
  tokenizer = tokenizers.load("bytes")
  cfg = model.variant("tiny", vocab_size=258, dtype="float32")
  with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary) / "policy"
    params = model.init(jax.random.key(0), cfg)
    hf.save_hf(params, cfg, folder, dtype="float32", beside=tokenizer.save)
    command = [sys.executable, "-u", "-m", "gspo_jax.serve", "--port=0"]
    command += ["--config=configs/tiny_cpu.py", f"--checkpoint={folder}"]
    command += [f"--config.sampler.max_new_tokens={options.tokens}"]
    command += [f"--config.continuous_batching.slots={options.slots}"]
    command += ["--config.data.max_prompt_length=64"]
    begin = time.monotonic()
    with subprocess.Popen(
      command, cwd=record.ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
      try:
        printed = ""
        while not (key := re.search(r"API key: (\S+)", printed)):
          printed += process.stdout.readline()
        url = re.search(r"http\S+", printed)[0]
        yield url, key[1], time.monotonic() - begin
      finally:
        process.terminate()


def ask(url: str, key: str, number: int, options) -> tuple[float, float, int]:
  """Seconds to the first part and to the whole of an answer; its tokens."""
  body = {
    "messages": [{"role": "user", "content": f"What is {number} + {number}?"}],
    "temperature": 1,
    "seed": number,
    "stream": options.stream,
    "stream_options": {"include_usage": True},
  }
  request = urllib.request.Request(
    f"{url}/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": f"Bearer {key}"},
  )
  begin, first, last = time.monotonic(), None, b""
  with urllib.request.urlopen(request) as answer:
    for line in answer:
      first = first or time.monotonic() - begin
      last = line if b"usage" in line else last
  whole = time.monotonic() - begin
  usage = json.loads(last.removeprefix(b"data: "))["usage"]
  return first, whole, usage["completion_tokens"]


if __name__ == "__main__":
  main()
