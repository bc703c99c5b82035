"""What `model.exact` costs: iterations of exact and ordinary arithmetic in turns.

  taskset -c 0 python -m benchmarks.exact [--quick] [--out=FILE.json]

The sampler is continuous batching, 64 prompts of 32 tokens with a response of
64 tokens, four minibatches of packed rows, random weights. The ordinary run
computes old log-probs with a scoring pass; the exact one takes the sampler's,
which are the same. Numbers are CPU seconds, the median of the iterations, and
what exact takes over ordinary; `differ` counts the tokens whose log-prob in the
forward pass of the first minibatch is not the sampler's, of all of them.
"""

import argparse
import contextlib
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks import record
from benchmarks.iteration import Iterations
from gspo_jax.configs import tiny_cpu


class Case(NamedTuple):
  dtype: str
  width: int
  vocabulary: int
  experts: int = 0
  layers: int = 4
  prompts: int = 16
  slots: int = 64


CASES = {
  "dense, width 128": Case("float32", 128, 512),
  "8 experts, width 128": Case("float32", 128, 512, experts=8),
  "dense, width 256": Case("float32", 256, 2048),
  "8 experts, width 256": Case("float32", 256, 2048, experts=8),
  "dense, width 256, bfloat16": Case("bfloat16", 256, 2048),
}


def config_of(case: Case, exact: bool, quick: bool):
  c = tiny_cpu.get_config()
  c.model.dtype = case.dtype
  c.model.exact = exact
  return c
