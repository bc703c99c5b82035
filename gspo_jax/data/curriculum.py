"""Which problems come when: stages of data, without solved problems.

The two data recipes of SRPO (Zhang et al. 2025, arXiv 2504.14286). Stages: for
example mathematics first, then code too. History resampling: later epochs leave
out a problem whose G responses were all correct.
"""

import base64
import bisect
import zlib
from collections.abc import Sequence

import numpy as np
from absl import logging

from gspo_jax.data import pipeline
from gspo_jax.data.datasets import Stage
from gspo_jax.data.prompt_batch import PromptBatch, PromptConfig
from gspo_jax.data.sources import fingerprint
from gspo_jax.runtime.errors import UserError


class Curriculum:
  """Batches of prompts: a function of stages, seed and recorded rewards.

  Every epoch of a source has each problem once, but no solved problem with
  `drop_solved`. If a stage has fewer unsolved problems than a batch, all its
  problems count as unsolved again. A problem solved in one stage stays solved
  in the next. `batch` is in prompts.

  UserError unless the first stage begins at iteration 1, and each other stage
  later than the one before; and where `pipeline.prompts` raises it.
  """

  def __init__(
    self,
    stages: Sequence[Stage],
    cfg: PromptConfig,
    *,
    batch: int,
    seed: int,
    drop_solved: bool = False,
  ):
    self._begins, self._sources = zip(*stages, strict=True)
    begins = sorted({*self._begins} | {1})
    if begins != [*self._begins] or begins[0] < 1:
      raise UserError(
        f"the stages of data.curriculum begin at iterations {[*self._begins]}: "
        "expected 1 and then a later one each"
      )
    self._batch, self._cfg, self._stage = batch, cfg, 0
    self._drop_solved = drop_solved
    # Arrays [problems of the source] bool, which this class alone writes: by
    # the content of the source, and by stage and place in the mixture. If a
    # source is a part of several mixtures, they share its array.
    self._solved_by_content: dict[str, np.ndarray] = {}
    self._solved, self._num_fitting, self._streams = [], [], []
    for source in self._sources:
      parts = pipeline.parts(source) if drop_solved else ()
      self._solved.append([])
      for part in parts:
        solved = self._solved_by_content.setdefault(
          fingerprint(part), np.zeros(len(part), bool)
        )
        self._solved[-1].append(solved)
      self._num_fitting.append(
        sum(pipeline.num_fitting(part, cfg) for part in parts)
      )
      self._streams.append(
        pipeline.prompts(
          source, cfg, batch=batch, seed=seed, solved=self._solved[-1]
        )
      )
      # Every source of every stage has a different seed.
      seed += len(pipeline.parts(source))

  def next_batch(self, iteration: int, count: int | None = None) -> PromptBatch:
    """The next `count` prompts (default: a batch) for an iteration from 1."""
    self._stage = bisect.bisect_right(self._begins, iteration) - 1
    count = self._batch if count is None else count
    unsolved = self._num_fitting[self._stage] - self.num_solved
    if self._drop_solved and unsolved < count:
      logging.warning(
        "data.drop_solved: %d problems are unsolved, fewer than a batch of %d: "
        "all problems come back",
        unsolved,
        count,
      )
      for solved in self._solved[self._stage]:
        solved[:] = False
    batch = self._streams[self._stage].take(count)
    batch.positions[:, 0] = self._stage
    batch.steps[:] = iteration
    return batch

  def prompts_at(
    self, positions: Sequence[Sequence[int]], steps: Sequence[int] | int
  ) -> PromptBatch:
    """The prompts at [P, 3] positions and [P] steps, as in `PromptBatch`."""
    batch = pipeline.at_positions(self._sources, self._cfg, positions)
    batch.steps[:] = steps
    return batch

  def record(self, batch: PromptBatch, correct: np.ndarray) -> None:
    """Records which problems are solved: all their responses are correct.

    `correct` is [P, G], 1 for a correct response, the same in all processes.
    """
    if self._drop_solved:
      all_correct = (correct >= 1).all(axis=1)
      for stage, part, index in batch.positions[all_correct]:
        self._solved[stage][part][index] = True

  @property
  def num_solved(self) -> int:
    """Solved problems of the current stage; 0 without `drop_solved`."""
    return sum(int(solved.sum()) for solved in self._solved[self._stage])

  @property
  def epochs(self) -> float:
    """Passes over the current stage's source; see `pipeline.epochs`."""
    state = self._streams[self._stage].get_state()
    return pipeline.epochs(self._sources[self._stage], state)

  def get_state(self) -> dict:
    """The state between two iterations as JSON, for a checkpoint."""
    positions = [stream.get_state() for stream in self._streams]
    state = {"positions": positions, "stage": self._stage}
    if self._drop_solved:  # at most 170 kB for a million problems
      state["solved"] = {
        name: _pack(solved) for name, solved in self._solved_by_content.items()
      }
    return state

  def set_state(self, state: dict) -> None:
    """Returns to a state; problems of sources that it lacks become unsolved."""
    self._stage = state["stage"]
    for stream, position in zip(self._streams, state["positions"], strict=True):
      stream.set_state(position)
    saved = state.get("solved", {})
    for name, solved in self._solved_by_content.items():
      # In place: the streams read these arrays.
      packed = saved.get(name)
      solved[:] = _unpack(packed, len(solved)) if packed else False


def _pack(bits: np.ndarray) -> str:
  packed = zlib.compress(np.packbits(bits).tobytes())
  return base64.b64encode(packed).decode()


def _unpack(text: str, count: int) -> np.ndarray:
  packed = zlib.decompress(base64.b64decode(text))
  return np.unpackbits(np.frombuffer(packed, np.uint8), count=count) > 0
