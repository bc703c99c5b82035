"""What tests of Hugging Face's folders share."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from gspo_jax import model
from gspo_jax.model import hf
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError


def require_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def error_message(function):
  with pytest.raises(UserError) as error:
    function()
  assert "\n" not in str(error.value)
  return str(error.value)


def tensors_of(folder):
  files = sorted(folder.glob("*.safetensors"))
  return {name: x for file in files for name, x in load_file(file).items()}


def load_on_mesh(folder, cfg):
  mesh = sharding.make_mesh(fsdp=2, expert=2, tensor=2)
  place = model.shardings(model.shapes(cfg), mesh)
  return hf.load_hf(folder, cfg, shardings=place)
