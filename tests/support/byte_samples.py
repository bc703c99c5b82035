"""Samples of given responses, by the tokenizer of bytes."""

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.data import tokenizers
from gspo_jax.sampler.samples import Samples

BYTES = tokenizers.load("bytes")


def samples_of(responses, width=8):
  """Samples of these responses, with garbage after the stop token."""
  tokens = np.full((len(responses), width), ord("9"), np.int32)
  lengths = np.zeros(len(responses), np.int32)
  for i, text in enumerate(responses):
    ids = [*BYTES.encode(text), *BYTES.stop_ids]
    tokens[i, : len(ids)], lengths[i] = ids, len(ids)
  zeros = np.zeros_like(tokens, np.float32)
  samples = Samples(tokens, zeros, lengths, lengths > 0, np.int32(width))
  return jax.tree.map(jnp.asarray, samples)
