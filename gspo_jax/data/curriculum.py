"""Which questions come when: stages of data, and what is left out as known.

The two data recipes of SRPO (Zhang et al. 2025, arXiv 2504.14286): stages, as
of mathematics first and then of code, too; and history resampling, which leaves
a question out of the epochs after one in which all G answers to it were right.
Mixed and all-wrong ones stay, for the policy may come to learn from them.
"""

import base64
import bisect
import zlib
from collections.abc import Sequence

import numpy as np
from absl import logging

from gspo_jax.data import pipeline, prompt_batch
from gspo_jax.data.datasets import Stage
from gspo_jax.data.sources import fingerprint
from gspo_jax.data.tasks import Problem
from gspo_jax.runtime.errors import UserError


class Curriculum:
  """Batches of prompts: a function of stages, seed and what was recorded.

  A question stands once in an epoch of its source, so one that is known when
  its turn comes was answered in an earlier epoch, and is passed over for good.
  Where a stage has fewer left than a batch, all of its questions come back.

  Args:
    stages: the first from iteration 1 on, each other one from a later one on.
      What is known in one stage stays known in the next.
    cfg: how a question becomes tokens.
    batch: questions in one.
    seed: of the order.
    history: whether known questions are left out.

  Raises:
    UserError: the stages do not begin so; as `data.prompts`, now for all.
  """

  def __init__(
    self,
    stages: Sequence[Stage],
    cfg: prompt_batch.PromptConfig,
    *,
    batch: int,
    seed: int,
    history: bool = False,
  ):
    self._begins, self._sources = zip(*stages, strict=True)
    begins = sorted({*self._begins} | {1})
    if begins != [*self._begins] or begins[0] < 1:
      raise UserError(
        f"data.curriculum begin at iterations {[*self._begins]}: expected 1 and "
        "then a later one each"
      )
    self._batch, self._cfg, self._stage = batch, cfg, 0
    self._history = SolvedProblems() if history else None
    self._known, self._fitting, self._streams = [], [], []
    for source in self._sources:
      parts = pipeline.parts(source) if history else ()
      self._known.append([self._history.of(part) for part in parts])
      self._fitting.append(sum(pipeline.fitting(part, cfg) for part in parts))
      self._streams.append(
        pipeline.prompts(
          source, cfg, batch=batch, seed=seed, left_out=self._known[-1]
        )
      )
      # No source is shuffled as another is, or as it was in another stage.
      seed += len(pipeline.parts(source))

  def draw(self, iteration: int, count: int | None = None) -> dict:
    """The next questions of that iteration's stage: a batch, or `count`.

    As of `data.prompts`, with `stage` [count] int32, where they are from.
    """
    self._stage = bisect.bisect_right(self._begins, iteration) - 1
    count = self._batch if count is None else count
    left = self._fitting[self._stage] - self.left_out
    if self._history and left < count:
      logging.warning(
        "data.drop_solved: %d questions are left that were not all answered right, "
        "fewer than a batch of %d: all questions come back",
        left,
        count,
      )
      for known in self._known[self._stage]:
        known[:] = False
    drawn = self._streams[self._stage].draw(count)
    stages = np.full(len(drawn["problems"]), self._stage, np.int32)
    return drawn | {"stage": stages}

  def recall(self, places: Sequence[Sequence[int]]) -> dict:
    """A batch of `draw`, by `stage`, `part` and `index` of each question."""
    rows = []
    for stage, *place in places:
      source = self._sources[stage]
      row = pipeline.again(source, self._cfg, np.array([place], np.int32))
      rows.append(row | {"stage": np.array([stage], np.int32)})
    return prompt_batch.join(rows)

  def record(self, batch: dict, correct: np.ndarray) -> None:
    """Notes how questions were answered.

    Args:
      batch: of `draw`, or rows of several.
      correct: [P, G], 1 for an answer that is right; the same on all hosts.
    """
    if self._history:
      all_right = (correct >= 1).all(axis=1)
      places = (batch[name][all_right] for name in ("stage", "part", "index"))
      for stage, part, index in zip(*places, strict=True):
        self._known[stage][part][index] = True

  @property
  def left_out(self) -> int:
    """Questions of this stage that are known."""
    return sum(int(known.sum()) for known in self._known[self._stage])

  @property
  def epochs(self) -> float:
    """How often the stage has gone through its source; see `data.epochs`."""
    state = self._streams[self._stage].get_state()
    return pipeline.epochs(self._sources[self._stage], state)

  def get_state(self) -> dict:
    """JSON, for a checkpoint between two iterations."""
    positions = [stream.get_state() for stream in self._streams]
    state = {"positions": positions, "stage": self._stage}
    if self._history:
      state["known"] = self._history.get_state()
    return state

  def set_state(self, state: dict) -> None:
    """Goes to where `get_state` was called.

    A state of `data.prompts` will do, as runs of one stage used to save it, and
    one without a history: then nothing is known.
    """
    self._stage = state.get("stage", 0)
    positions = state.get("positions", [state])
    for stream, position in zip(self._streams, positions, strict=True):
      stream.set_state(position)
    if self._history:
      self._history.set_state(state.get("known", {}))


class SolvedProblems:
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
