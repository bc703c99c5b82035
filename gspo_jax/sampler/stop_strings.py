"""Strings that end a response, found while tokens are sampled.

An Aho-Corasick automaton reads the bytes of the text. Its state, one of A, is
the longest end of the text that begins a stop string. A table has the state
after each token, so a decode step reads one number for each response. A stop
string may begin and end inside tokens.

Dimension key: B responses, A states, V ids of the tokenizer.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.data.tokenizers.base import UNKNOWN, Tokenizer
from gspo_jax.runtime.errors import UserError, prefixed

_MAX_TABLE = 32 << 20  # bytes; a constant of the compiled samplers


@dataclasses.dataclass(frozen=True)
class StopStrings:
  """The stop strings of a sampler, for one tokenizer; made by `build`.

  Only `strings` and `fingerprint` are compared and hashed: static under jit.
  """

  strings: tuple[str, ...]
  fingerprint: str  # of the tokenizer
  # [A, V + 1] unsigned integers: the state after a token, by the state before
  # it and the token's id; plus A if a stop string ended inside the token. The
  # last column is for all ids from V on.
  table: np.ndarray = dataclasses.field(compare=False, repr=False)
  # [V + 1], what each id adds to a text
  token_bytes: Sequence[bytes] = dataclasses.field(compare=False, repr=False)

  def advance(
    self, state: jax.Array, token: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """The states [B] after tokens [B], and whether strings ended in them.

    States and tokens are int32; a response without tokens has state 0.
    """
    token = jnp.minimum(token, self.table.shape[1] - 1)
    entry = jnp.asarray(self.table)[state, token].astype(jnp.int32)
    return entry % len(self.table), entry >= len(self.table)

  def state(self, ids: Sequence[int] | np.ndarray) -> int:
    # Only the last `longest` bytes determine the state.
    longest = max(len(string.encode()) for string in self.strings)
    start, known = len(ids), 0
    while start and known < longest:
      start -= 1
      known += len(self.token_bytes[self._column(ids[start])])
    state = 0
    for i in ids[start:]:
      state = int(self.table[state, self._column(i)]) % len(self.table)
    return state

  def ended(self, ids: Sequence[int] | np.ndarray) -> bool:
    entry = self.table[self.state(ids[:-1]), self._column(ids[-1])]
    return bool(entry >= len(self.table))

  def behind(self, ids: Sequence[int]) -> str:
    """The text after the stop string that ended the response."""
    last = self.token_bytes[self._column(ids[-1])]
    step, ends = _automaton(self.strings)
    state = self.state(ids[:-1])
    for i, byte in enumerate(last):
      state = step[state, byte]
      if ends[state]:
        return last[i + 1 :].decode(errors="replace")
    return ""

  def _column(self, token: int) -> int:
    return min(int(token), len(self.token_bytes) - 1)


class StopFinder:
  """Finds where the first of some strings ends, one token after another.

  For the host. `token_bytes` has what each id adds to a text, and at last what
  all others add.
  """

  def __init__(self, strings: Sequence[str], token_bytes: Sequence[bytes]):
    self._strings = [string.encode() for string in strings]
    self._token_bytes, self._text = token_bytes, b""
    self._longest = max(map(len, self._strings))
    self._lengths: list[int] = []  # of the tokens, in bytes
    self._cut = 0  # letters from the string on

  def ends_in(self, token: int) -> bool:
    """Reads the next token; whether a string ends in it."""
    new = self._token_bytes[min(token, len(self._token_bytes) - 1)]
    self._lengths.append(len(new))
    text = self._text[-self._longest :] + new
    at = [i for s in self._strings if (i := text.find(s)) >= 0]
    self._text = text
    self._cut = len(text[min(at) :].decode(errors="replace")) if at else 0
    return bool(at)

  def before(self, text: str) -> str:
    """The text of the tokens up to the string that was found."""
    return text[: len(text) - self._cut]

  def num_safe(self) -> int:
    """Tokens in which no string can begin that has not ended."""
    held, count = 0, len(self._lengths)
    while count and held < self._longest - 1:
      count -= 1
      held += self._lengths[count]
    return count


def bytes_of_ids(tokenizer: Tokenizer) -> list[bytes]:
  """`Tokenizer.token_bytes`, and at last those of ids that it does not have."""
  return [*tokenizer.token_bytes(), UNKNOWN.encode()]


@functools.lru_cache(maxsize=4)
def build(strings: tuple[str, ...], tokenizer: Tokenizer) -> StopStrings:
  """Builds StopStrings from at least one string, none of them empty.

  UserError if the tokens' bytes are unknown, or the table is too large.
  """
  with prefixed(f"sampler.stop={strings!r}"):
    token_bytes = bytes_of_ids(tokenizer)
  step, ends = _automaton(strings)
  A = len(step)
  dtype = np.min_scalar_type(2 * A - 1)
  if (size := A * len(token_bytes) * dtype.itemsize) > _MAX_TABLE:
    raise UserError(
      f"sampler.stop: {len(strings)} strings of {A - 1} different beginnings "
      f"and {len(token_bytes)} tokens make a table of {size >> 20} MiB: "
      f"expected at most {_MAX_TABLE >> 20} MiB; use fewer or shorter strings"
    )
  return StopStrings(
    strings,
    tokenizer.fingerprint,
    _table(step, ends, token_bytes).astype(dtype),
    token_bytes,
  )


def response_text(
  ids: Sequence[int],
  stopped: bool,
  tokenizer: Tokenizer,
  stop: StopStrings | None,
) -> str:
  """The text up to the stop token, or to the end of the stop string.

  `ids` include the token that ended the response; `stopped`: there is one.
  """
  if stopped and ids[-1] in tokenizer.stop_ids:
    return tokenizer.decode(ids[:-1])
  text = tokenizer.decode(ids)
  if not (stopped and stop):
    return text
  return text[: len(text) - len(stop.behind(ids))]


@functools.lru_cache(maxsize=4)
def _automaton(strings: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
  """The next state [A, 256] by byte, and whether a string ends [A]."""
  children: list[dict[int, int]] = [{}]
  ends = [False]
  for string in strings:
    state = 0
    for byte in string.encode():
      if byte not in children[state]:
        children[state][byte] = len(children)
        children.append({})
        ends.append(False)
      state = children[state][byte]
    ends[state] = True
  # Breadth first: the row of a state's longest proper suffix must be complete.
  step, shorter = np.zeros((len(children), 256), np.int64), [0] * len(children)
  queue = collections.deque([0])
  while queue:
    state = queue.popleft()
    if state:
      step[state] = step[shorter[state]]
      ends[state] |= ends[shorter[state]]
    for byte, child in children[state].items():
      shorter[child] = int(step[state, byte])
      step[state, byte] = child
      queue.append(child)
  return step, np.array(ends)


def _table(step, ends, token_bytes) -> np.ndarray:
  """[A, V + 1], `StopStrings.table`."""
  A = len(step)
  lengths = np.array([len(token) for token in token_bytes])
  longest_first = np.argsort(-lengths, kind="stable")
  state = np.repeat(np.arange(A)[:, None], len(token_bytes), axis=1)
  ended = np.zeros(state.shape, bool)
  for i in range(lengths.max()):
    longer = longest_first[: (lengths > i).sum()]
    bytes_ = np.array([token_bytes[token][i] for token in longer])
    state[:, longer] = step[state[:, longer], bytes_]
    ended[:, longer] |= ends[state[:, longer]]
  return state + A * ended
