"""The Grain pipeline: questions of a source to batches of token ids.

Batch n is a function of (source, seed, n), on any number of hosts, and the
state of an iterator is a position: a run resumed there repeats the
uninterrupted one.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import grain
import numpy as np

from gspo_jax.data.prompt_batch import PromptConfig, stack
from gspo_jax.data.sources import Mixture, ProblemSource
from gspo_jax.data.tasks import Problem
from gspo_jax.runtime.errors import UserError

Source = Sequence[Problem] | Mixture


class Batches(Iterator[dict]):
  """Endless batches of the rows of a pipeline; the state is a position.

  Args:
    rows: they may be read ahead.
    batch: rows in a batch.
    passes: whether a row is one to draw. It is asked here, in order, and not
      by the threads that read ahead: the answer may change between batches.
  """

  def __init__(
    self,
    rows: grain.DatasetIterator,
    batch: int,
    passes: Callable[[dict], bool],
  ):
    self._rows, self._batch, self._passes = rows, batch, passes

  def __next__(self) -> dict:
    return self.draw(self._batch)

  def draw(self, count: int) -> dict:
    """The next `count` rows, 1 or more."""
    drawn = filter(self._passes, self._rows)
    return stack(list(itertools.islice(drawn, count)))

  def get_state(self) -> dict:
    """A small dict, for a checkpoint: behind the last row of a batch."""
    return self._rows.get_state()

  def set_state(self, state: dict) -> None:
    """Goes to where `get_state` was called."""
    self._rows.set_state(state)


def prompts(
  source: Source,
  cfg: PromptConfig,
  *,
  batch: int,
  seed: int,
  left_out: Sequence[np.ndarray] = (),
) -> Batches:
  """Endless batches of prompts, shuffled anew each epoch.

  Each is a dict: `problems` (a list), `tokens` [batch, width] int32 padded on
  the left, `length` [batch] int32, and where the questions stand: `part`
  [batch] int32, 0 but in a mixture, and `index` [batch] int32 in that source.

  Args:
    source: of questions.
    cfg: how they become tokens.
    batch: questions in one.
    seed: of the order.
    left_out: for each source of a mixture, or the one, [its length] bool: the
      questions to pass over. They may be changed between batches.

  Raises:
    UserError: fewer questions (that fit) than a batch; one that is too long,
      of the embedded task when it is drawn and of any other source now.
  """
  out = tuple(left_out)
  passes = lambda row: not (out and out[row["part"]][row["index"]])
  row = functools.partial(_prompt, cfg=cfg)
  _check(source, row, cfg, batch)
  return Batches(_rows(_place(source), _placed(row), seed), batch, passes)


def demonstrations(
  source: Source, cfg: PromptConfig, *, batch: int, width: int, seed: int
) -> Batches:
  """As `prompts`, with `response` [batch, width] and `response_length`."""
  row = functools.partial(_demonstration, cfg=cfg, width=width)
  _check(source, row, cfg, batch)
  return Batches(_rows(source, row, seed), batch, lambda row: True)


def parts(source: Source) -> tuple[Sequence[Problem], ...]:
  """The sources of a mixture, or the one."""
  return source.sources if isinstance(source, Mixture) else (source,)


def fitting(part: Sequence[Problem], cfg: PromptConfig) -> int:
  """How many questions of a source are drawn, those too long left out."""
  if cfg.too_long == "error":
    return len(part)
  return _count(part, functools.partial(_prompt, cfg=cfg), len(part))


def take(source: Source, cfg: PromptConfig, count: int) -> dict:
  """The first `count` problems (that fit) as one batch, in order.

  Of a mixture, from each source in turn, whatever the weights.
  """
  columns = [map(p.__getitem__, range(len(p))) for p in parts(source)]
  every = itertools.chain.from_iterable(itertools.zip_longest(*columns))
  rows = (_prompt(problem, cfg) for problem in every if problem is not None)
  first = list(itertools.islice(filter(None, rows), count))
  if len(first) < count:
    raise UserError(
      f"eval.prompts={count}, but only {len(first)} questions are held out"
      + (" and fit" if cfg.too_long == "drop" else "")
    )
  return stack(first)


def again(source: Source, cfg: PromptConfig, places: np.ndarray) -> dict:
  """As a batch of `prompts`: the questions at these places, [N, 2] int32.

  A place is a question's `part` and `index`.
  """
  each = parts(source)
  names = "part", "index"
  rows = [
    _prompt(each[place[0]][place[1]], cfg)
    | dict(zip(names, place, strict=True))
    for place in places
  ]
  return stack(rows)


def epochs(source: Source, state: dict) -> float:
  """How often an iterator in that state has gone through its source.

  Of a mixture, through that of its sources which it repeats most.
  """
  drawn = state["next_index"]
  if not isinstance(source, Mixture):
    return drawn / len(source)
  shares = (w / sum(source.weights) for w in source.weights)
  sizes = map(len, source.sources)
  return max(drawn * w / n for w, n in zip(shares, sizes, strict=True))


def _prompt(problem: Problem, cfg: PromptConfig) -> dict | None:
  """A row; None, which Grain passes over, for one to drop."""
  # No str.format: questions hold braces.
  question = cfg.instruction.replace("{problem}", problem.text)
  ids = cfg.tokenizer.prompt(question, cfg.system)
  what = f"question {problem.text[:40]!r}"
  if not cfg.fits(ids, cfg.width, what, "data.max_prompt_length"):
    return None
  row = np.full(cfg.width, cfg.tokenizer.pad_id, np.int32)
  row[cfg.width - len(ids) :] = ids
  return {"problem": problem, "tokens": row, "length": np.int32(len(ids))}


def _demonstration(
  problem: Problem, cfg: PromptConfig, width: int
) -> dict | None:
  shown, made = problem.demonstration, cfg.tokenizer
  if not shown:
    raise UserError(
      f"question {problem.text[:40]!r} has no demonstration to imitate; "
      "data.demonstration_field says where one is"
    )
  ids = [*made.encode(shown), made.stop_ids[0]]
  what = f"demonstration {shown[:40]!r}"
  row = _prompt(problem, cfg)
  if not cfg.fits(ids, width, what, "sampler.max_new_tokens") or row is None:
    return None
  padded = np.full(width, made.pad_id, np.int32)
  padded[: len(ids)] = ids
  return row | {"response": padded, "response_length": np.int32(len(ids))}


class _Places(Sequence):
  """A source whose problems come with the place where they stand."""

  def __init__(self, part: int, source: Sequence[Problem]):
    self._part, self._source = part, source

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, i: int) -> tuple[Problem, dict]:
    place = {"part": np.int32(self._part), "index": np.int32(i)}
    return self._source[i], place


def _place(source):
  places = tuple(itertools.starmap(_Places, enumerate(parts(source))))
  if isinstance(source, Mixture):
    return Mixture(places, source.weights)
  return places[0]


def _placed(row: Callable) -> Callable:
  """`row` of a problem beside its place, which goes into the row."""

  def make(placed):
    problem, place = placed
    made = row(problem)
    return made and made | place

  return make


def _rows(source, row, seed) -> grain.DatasetIterator:
  seeds = itertools.count(seed)

  def shuffled(part):
    own = next(seeds) % 2**32
    return grain.MapDataset.source(part).seed(own).shuffle().repeat()

  rows = _mixed(source, shuffled).map(row)
  # Threads read ahead; what comes does not depend on their number. Batches are
  # cut behind them, where the dropped rows are gone.
  options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
  return iter(rows.to_iter_dataset(options))


def _mixed(source, dataset: Callable) -> grain.MapDataset:
  """The dataset of a source, or the weighted mix of a mixture's."""
  if not isinstance(source, Mixture):
    return dataset(source)
  each = list(map(dataset, source.sources))
  return grain.MapDataset.mix(each, weights=source.weights)


def _check(source, row, cfg, batch) -> None:
  """UserError for what would fail, or never end, later."""
  total = sum(map(len, parts(source)))
  if total < batch:
    raise UserError(
      f"the data has {total} questions, fewer than a batch of {batch}"
    )
  if cfg.too_long == "error":
    # One that is too long is told now, not at step 500.
    for part in parts(source):
      if isinstance(part, ProblemSource):
        for problem in part:
          row(problem)
    return
  found = [_count(part, row, batch) for part in parts(source)]
  if not all(found) or sum(found) < batch:
    raise UserError(
      f"of the data's {[*map(len, parts(source))]} questions only {found} fit "
      f"data.max_prompt_length={cfg.width}: fewer than a batch of {batch}, or "
      "none of one source"
    )


def _count(part, row, most: int) -> int:
  """How many rows of a source are not dropped, up to `most`."""
  kept = (i for i in range(len(part)) if row(part[i]) is not None)
  return sum(1 for _ in itertools.islice(kept, most))
