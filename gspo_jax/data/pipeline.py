"""The Grain pipeline: problems of a source become batches of tokens.

Batch n is a function of (source, seed, n), with any number of processes. The
state is a position: a run resumed there repeats the uninterrupted one.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import grain
import numpy as np

from gspo_jax.data.problem import Problem
from gspo_jax.data.prompt_batch import (
  Batch,
  DemonstrationBatch,
  PromptBatch,
  PromptConfig,
  join,
)
from gspo_jax.data.sources import Mixture, ProblemSource
from gspo_jax.runtime.errors import UserError

Source = Sequence[Problem] | Mixture


@dataclasses.dataclass(eq=False)
class Batches(Iterator[Batch]):
  """Endless batches of prompts; the state is a position."""

  prompts: grain.DatasetIterator  # batches of one, in order; may be read ahead
  batch: int  # prompts in a batch
  # For each source, [its length] bool: the problems to pass over. The threads
  # that read ahead must not read it: it changes between batches.
  solved: Sequence[np.ndarray] = ()

  def __next__(self) -> Batch:
    return self.take(self.batch)

  def take(self, count: int) -> Batch:
    unsolved = filter(self._is_unsolved, self.prompts)
    return join(list(itertools.islice(unsolved, count)))

  def _is_unsolved(self, prompt: PromptBatch) -> bool:
    _, part, index = prompt.positions[0]
    return not (self.solved and self.solved[part][index])

  def get_state(self) -> dict:
    return self.prompts.get_state()

  def set_state(self, state: dict) -> None:
    self.prompts.set_state(state)


def prompts(
  source: Source,
  cfg: PromptConfig,
  *,
  batch: int,
  seed: int,
  solved: Sequence[np.ndarray] = (),
) -> Batches[PromptBatch]:
  """Endless batches of prompts, shuffled anew each epoch; see `Batches`.

  UserError: fewer problems fit than a batch, or a problem is too long. The
  embedded task raises for a long problem when it comes, any other source now.
  """
  make = functools.partial(_prompt, cfg=cfg)
  _check(source, make, cfg, batch)
  return Batches(_stream(source, make, seed), batch, solved)


def demonstrations(
  source: Source,
  cfg: PromptConfig,
  *,
  batch: int,
  width: int,
  seed: int,
  conversations: bool = False,
) -> Batches[DemonstrationBatch]:
  """As `prompts`, with responses [batch, width].

  With `conversations` a response includes all `Problem.turns`. UserError as
  well if the chat template has no place for plain text as a response.
  """
  cfg.tokenizer.check_demonstrations()
  make = functools.partial(
    _demonstration, cfg=cfg, width=width, conversations=conversations
  )
  _check(source, make, cfg, batch)
  return Batches(_stream(source, make, seed), batch)


def parts(source: Source) -> tuple[Sequence[Problem], ...]:
  """The sources of a mixture, or the one source."""
  return source.sources if isinstance(source, Mixture) else (source,)


def num_fitting(part: Sequence[Problem], cfg: PromptConfig) -> int:
  """The number of problems that are not dropped."""
  if cfg.too_long == "error":
    return len(part)
  make = functools.partial(_prompt, cfg=cfg)
  return _count(*_with_positions(part), make, len(part))


def take(source: Source, cfg: PromptConfig, count: int) -> PromptBatch:
  """The first problems that fit, at most `count`, as one batch, in order.

  Of a mixture it takes one problem of each source in turn, without weights.
  """
  columns = [
    map(part.__getitem__, range(len(part))) for part in _with_positions(source)
  ]
  in_turn = itertools.chain.from_iterable(itertools.zip_longest(*columns))
  prompts = (_prompt(*item, cfg=cfg) for item in in_turn if item)
  first = list(itertools.islice(filter(None, prompts), count))
  if not first:
    fit = " that fits data.max_prompt_length" * (cfg.too_long == "drop")
    raise UserError(
      f"eval.prompts={count}: no problem{fit} is held out; data.eval_source "
      "can name some"
    )
  return join(first)


def at_positions(
  sources: Sequence[Source], cfg: PromptConfig, positions: Sequence
) -> PromptBatch:
  """The prompts at positions [P, 3]; `sources` are by stage."""
  return join(
    [
      _prompt(parts(sources[stage])[part][index], (stage, part, index), cfg)
      for stage, part, index in positions
    ]
  )


def epochs(source: Source, state: dict) -> float:
  """Passes over the source, dropped problems included.

  Of a mixture, passes over the source that it repeats most.
  """
  position = state["next_index"]
  if not isinstance(source, Mixture):
    return position / len(source)
  shares = (w / sum(source.weights) for w in source.weights)
  sizes = map(len, source.sources)
  return max(position * w / n for w, n in zip(shares, sizes, strict=True))


def _prompt(
  problem: Problem, position: Sequence[int], cfg: PromptConfig
) -> PromptBatch | None:
  """A batch of one prompt; None if it is dropped, which Grain skips."""
  ids = cfg.tokens_of(problem)
  name = f"problem {problem.text[:40]!r}"
  if not cfg.fits(ids, cfg.width, name, "data.max_prompt_length"):
    return None
  tokens = np.full((1, cfg.width), cfg.tokenizer.pad_id, np.int32)
  tokens[0, cfg.width - len(ids) :] = ids
  int32 = lambda x: np.array([x], np.int32)
  return PromptBatch(
    [problem], tokens, int32(len(ids)), int32(position), int32(0)
  )


def _demonstration(
  problem: Problem,
  position: Sequence[int],
  cfg: PromptConfig,
  width: int,
  conversations: bool,
) -> DemonstrationBatch | None:
  text, tokenizer = problem.demonstration, cfg.tokenizer
  if not text:
    raise UserError(
      f"problem {problem.text[:40]!r} has no demonstration to imitate; set "
      "data.demonstration_field to a field that has one in every record"
    )
  ids, turns = [], []
  said = ("assistant", text), *(problem.turns if conversations else ())
  is_policy = lambda message: message[0] == "assistant"
  for imitated, messages in itertools.groupby(said, is_policy):
    if imitated:
      for _, content in messages:
        new = [*tokenizer.encode(content), tokenizer.stop_ids[0]]
        turns += [max(turns, default=0) + 1] * len(new)
        ids += new
    else:
      new = tokenizer.turn([*messages], stopped=True)
      turns += [0] * len(new)
      ids += new
  name = f"demonstration {text[:40]!r}"
  prompt = _prompt(problem, position, cfg)
  fits = cfg.fits(ids, width, name, "sampler.max_new_tokens")
  if not fits or prompt is None:
    return None
  responses = np.full((1, width), tokenizer.pad_id, np.int32)
  responses[0, : len(ids)] = ids
  turns_of_tokens = None
  if conversations:
    turns_of_tokens = np.zeros((1, width), np.int16)
    turns_of_tokens[0, : len(ids)] = turns
  lengths = np.array([len(ids)], np.int32)
  return DemonstrationBatch(
    **vars(prompt),
    responses=responses,
    response_lengths=lengths,
    turns=turns_of_tokens,
  )


def _with_positions(source: Source) -> list[grain.MapDataset]:
  """For each part, its problems with their positions in the data of a stage."""
  # Grain counts on from epoch to epoch.
  at = lambda n, size: lambda i, problem: (problem, (0, n, i % size))
  return [
    grain.MapDataset.source(part).map_with_index(at(n, len(part)))
    for n, part in enumerate(parts(source))
  ]


def _stream(source, make: Callable, seed: int) -> grain.DatasetIterator:
  each = [
    part.seed((seed + n) % 2**32).shuffle().repeat()
    for n, part in enumerate(_with_positions(source))
  ]
  if isinstance(source, Mixture):
    dataset = grain.MapDataset.mix(each, weights=source.weights)
  else:
    (dataset,) = each
  # Threads read ahead; the order does not depend on their number. Batches are
  # cut later, when the dropped prompts are gone.
  options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
  return iter(dataset.map(lambda item: make(*item)).to_iter_dataset(options))


def _check(source, make: Callable, cfg: PromptConfig, batch: int) -> None:
  """UserError now for a pipeline that would fail, or never end, later."""
  total = sum(map(len, parts(source)))
  if total < batch:
    raise UserError(
      f"data.source has {total} problems to train on, fewer than a batch of "
      f"{batch} (data.prompts or cold_start.batch)"
    )
  if cfg.too_long == "error":
    # Raises now for a problem that is too long, not at step 500.
    for part in parts(source):
      if isinstance(part, ProblemSource):
        for problem in part:
          make(problem, (0, 0, 0))
    return
  fitting = [_count(part, make, batch) for part in _with_positions(source)]
  if not all(fitting) or sum(fitting) < batch:
    raise UserError(
      f"of the data's {[*map(len, parts(source))]} problems only {fitting} fit "
      f"data.max_prompt_length={cfg.width}: fewer than a batch of {batch}, or "
      "none of one source"
    )


def _count(part: Sequence, make: Callable, limit: int) -> int:
  """The number of problems that are not dropped, up to `limit`."""
  kept = (i for i in range(len(part)) if make(*part[i]) is not None)
  return sum(1 for _ in itertools.islice(kept, limit))
