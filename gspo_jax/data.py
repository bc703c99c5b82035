"""Prompts: sources, the byte tokenizer, and the Grain pipeline.

Every pipeline is a Grain `MapDataset`: batch n is a function of (source, seed,
n), so a run resumed at n repeats the uninterrupted one.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence

import grain
import numpy as np

from gspo_jax.errors import UserError
from gspo_jax.tasks import Problem, held_out

PAD, EOS, VOCAB_SIZE = 256, 257, 258


def encode(text: str) -> list[int]:
  """The UTF-8 bytes of a text; PAD and EOS lie outside what text can hold."""
  return list(text.encode())


def decode(ids) -> str:
  """The text of token ids; U+FFFD for PAD, EOS and broken UTF-8.

  A PAD in the middle of an answer has to show: "1", PAD, "2" is not "12".
  """
  ids = [i if i < 256 else 0xFF for i in ids]  # no byte of UTF-8 is 0xFF
  return bytes(ids).decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class JsonLines:
  """A file with one `{"question": ..., "answer": ...}` object a line.

  The reference is what follows the last `####` of `answer` (as in GSM8K), or
  all of it; the demonstration is the whole of `answer`, with `####` before it
  where there is none.

  Attributes:
    path: the file.
    evaluation: True keeps the held-out questions only, False the others, None
      all of them.
  """

  path: str
  evaluation: bool | None = None

  @functools.cached_property
  def sha256(self) -> str:
    """Of the file's bytes."""
    with self._open() as file:
      return hashlib.file_digest(file, "sha256").hexdigest()

  @functools.cached_property
  def _problems(self) -> list[Problem]:
    with self._open() as file:
      numbered = [(i, line) for i, line in enumerate(file, 1) if line.strip()]
    problems = [self._parse(i, line) for i, line in numbered]
    if self.evaluation is not None:
      wanted = lambda p: held_out(p.question) == self.evaluation
      problems = list(filter(wanted, problems))
    if not problems:
      raise UserError(f"data file {self.path!r}: no usable line")
    return problems

  def _open(self):
    try:
      return open(self.path, "rb")
    except OSError as error:
      raise UserError(f"data file {self.path!r}: {error.strerror}") from error

  def _parse(self, number: int, line: bytes) -> Problem:
    try:
      row = json.loads(line)
      question, answer = row["question"], row["answer"]
      # JSON can spell half a surrogate pair, which no UTF-8 text can hold.
      json.dumps([question, answer], ensure_ascii=False).encode()
    except (ValueError, KeyError, TypeError) as error:
      text = line.decode(errors="replace").strip()
      raise UserError(
        f"{self.path}:{number}: expected an object with 'question' and "
        f"'answer', in UTF-8, got {text[:60]!r}"
      ) from error
    if not (isinstance(question, str) and isinstance(answer, str)):
      raise UserError(
        f"{self.path}:{number}: 'question' and 'answer' must be strings"
      )
    reference = answer.rsplit("####", 1)[-1].strip()
    if not (question and reference):
      raise UserError(f"{self.path}:{number}: an empty question or answer")
    if "#" in reference:
      raise UserError(
        f"{self.path}:{number}: the answer {reference[:40]!r} holds a '#', "
        "which marks where an answer begins"
      )
    if "####" not in answer:
      answer = f"#### {reference}"  # else the verifier would not find it
    return Problem(question, reference, answer)

  def __len__(self) -> int:
    return len(self._problems)

  def __getitem__(self, index: int) -> Problem:
    return self._problems[index]


def fingerprint(source: Sequence[Problem]) -> str:
  """Tells one source from another by content and options, wherever it lies.

  A checkpoint carries it, so that a run never resumes on other data.

  Args:
    source: a dataclass, its fields the options.
  """
  options = dataclasses.asdict(source)
  if isinstance(source, JsonLines):
    options["path"] = source.sha256
  text = json.dumps([type(source).__name__, options])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def pad_left(ids: Sequence[int], width: int, what: str) -> np.ndarray:
  """Token ids in a row of `width`, padding first; UserError if too long."""
  if len(ids) > width:
    raise UserError(
      f"{what} has {len(ids)} tokens, more than data.max_prompt_length={width}"
    )
  row = np.full(width, PAD, np.int32)
  row[width - len(ids) :] = ids
  return row


def _prompt(problem: Problem, width: int) -> dict:
  ids = encode(problem.question)
  return {
    "problem": problem,
    "tokens": pad_left(ids, width, f"question {problem.question[:40]!r}"),
    "length": np.int32(len(ids)),
  }


def _demonstration(problem: Problem, prompt_width: int, width: int) -> dict:
  ids = [*encode(problem.demonstration), EOS]
  if len(ids) > width:
    raise UserError(
      f"demonstration {problem.demonstration[:40]!r} has {len(ids)} tokens, "
      f"more than sampler.max_new_tokens={width}"
    )
  padded = np.full(width, PAD, np.int32)
  padded[: len(ids)] = ids
  return _prompt(problem, prompt_width) | {
    "response": padded,
    "response_length": np.int32(len(ids)),
  }


def _stack(rows: Sequence[dict]) -> dict:
  arrays = {
    k: np.stack([r[k] for r in rows]) for k in rows[0] if k != "problem"
  }
  return arrays | {"problems": [r["problem"] for r in rows]}


def prompts(
  source: Sequence[Problem], *, batch: int, width: int, seed: int
) -> grain.DatasetIterator:
  """Endless shuffled batches of prompts.

  Each is a dict: `problems` (a list), `tokens` [batch, width] int32 padded on
  the left, `length` [batch] int32. The iterator's `get_state()` is a small
  dict for the checkpoint.
  """
  return _batches(source, functools.partial(_prompt, width=width), batch, seed)


def demonstrations(
  source: Sequence[Problem],
  *,
  batch: int,
  prompt_width: int,
  width: int,
  seed: int,
) -> grain.DatasetIterator:
  """As `prompts`, with `response` [batch, width] and `response_length`."""
  row = functools.partial(
    _demonstration, prompt_width=prompt_width, width=width
  )
  return _batches(source, row, batch, seed)


def _batches(source, row, batch, seed):
  if len(source) < batch:
    raise UserError(
      f"the data has {len(source)} questions, fewer than a batch of {batch}"
    )
  if isinstance(source, JsonLines):
    for problem in source:
      row(problem)  # one that is too long is told now, not at step 500
  rows = grain.MapDataset.source(source).seed(seed).shuffle().repeat().map(row)
  batches = rows.batch(batch, drop_remainder=True, batch_fn=_stack)
  # Threads read ahead; what comes does not depend on their number.
  options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
  return iter(batches.to_iter_dataset(options))


def take(source: Sequence[Problem], count: int, width: int) -> dict:
  """The first `count` problems as one batch, in order, for evaluation."""
  if len(source) < count:
    raise UserError(
      f"eval.prompts={count}, but only {len(source)} questions are held out"
    )
  return _stack([_prompt(source[i], width) for i in range(count)])
