"""Where a run with `model.exact` is not exact: a layer is named."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from gspo_jax import train
from gspo_jax.model import paged_cache
from gspo_jax.program import first_difference
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding

SEGMENTS = np.repeat([1, 2, 3, 0], [8, 4, 11, 1]).astype(np.int32)
POSITIONS = np.r_[:8, :4, :11, 0].astype(np.int32)


@pytest.fixture
def config(debug_config):
  """Three dense layers, and an iteration without a cold start."""
  c = debug_config
  c.model.exact, c.model.num_layers = True, 3
  c.model.num_experts = c.model.experts_per_token = 0
  c.continuous_batching.slots = 8
  c.continuous_batching.prefill_chunk = 16
  c.data.prompts = c.learner.micro_batch_size = 8
  c.num_steps, c.cold_start.steps, c.eval.every = 1, 0, 0
  return c


def plant(patch, layer):
  """The sampler's attention is larger by a millionth, in this layer alone."""
  attend = paged_cache.Pages.attend

  def other(self, i, *args, **options):
    out, updated = attend(self, i, *args, **options)
    return out * (1 + 2**-20 * (i == layer)), updated

  patch.setattr(paged_cache.Pages, "attend", other)


@pytest.mark.parametrize(
  ("layer", "found"),
  [
    (0, "the keys of layer 1"),
    pytest.param(2, "the last hidden states", marks=pytest.mark.slow),
    pytest.param(None, "", marks=pytest.mark.slow),
  ],
)
def test_what_differs_first(config, monkeypatch, layer, found):
  """In rows of several sequences, on a mesh."""
  plant(monkeypatch, layer)
  mesh = sharding.make_mesh(jax.devices()[:4], fsdp=2, tensor=2)
  with jax.set_mesh(mesh):
    program = build_program(parse(config), mesh)
    policy = program.init_params(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(3, 64, (1, 1, 4, 24))
    rows = SimpleNamespace(
      tokens=tokens.astype(np.int32),
      positions=np.broadcast_to(POSITIONS, tokens.shape),
      segment_ids=np.broadcast_to(SEGMENTS, tokens.shape),
    )
    batch = SimpleNamespace(rows=rows)
    text = first_difference.find(program, policy, batch)
  expected = f"{found} are the first to differ" if found else "no layer differs"
  assert text == f"reading the tokens again, {expected}"


@pytest.mark.slow
def test_a_run_that_is_not_exact_names_the_layer(config, monkeypatch, tmp_path):
  plant(monkeypatch, 1)
  with pytest.raises(ArithmeticError, match=r"nats; .* keys of layer 2 are"):
    train.train_and_evaluate(config, str(tmp_path))
