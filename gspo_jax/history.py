"""History resampling: which questions a policy has answered all right."""

import base64
import zlib
from collections.abc import Sequence

import numpy as np

from gspo_jax.sources import fingerprint
from gspo_jax.tasks import Problem


class History:
  """For each source, by its content, which questions are known.

  A source that stands in several mixtures has one history.
  """

  def __init__(self):
    self._known: dict[str, np.ndarray] = {}

  def of(self, source: Sequence[Problem]) -> np.ndarray:
    """[len(source)] bool, true where a question is known: to be written to."""
    fresh = np.zeros(len(source), bool)
    return self._known.setdefault(fingerprint(source), fresh)

  def get_state(self) -> dict[str, str]:
    """JSON; 170 kB at most for a million questions."""
    return {name: _pack(known) for name, known in self._known.items()}

  def set_state(self, state: dict[str, str]) -> None:
    """Takes over what was saved, and nothing else is known."""
    for name, known in self._known.items():
      known[:] = _unpack(state[name], len(known)) if name in state else False


def _pack(bits: np.ndarray) -> str:
  packed = zlib.compress(np.packbits(bits).tobytes())
  return base64.b64encode(packed).decode()


def _unpack(text: str, count: int) -> np.ndarray:
  packed = zlib.decompress(base64.b64decode(text))
  return np.unpackbits(np.frombuffer(packed, np.uint8), count=count) > 0
