"""Stop strings: where they end a response, against a search in its bytes."""

import dataclasses
import itertools

import numpy as np
import pytest

from gspo_jax.data import tokenizers
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler import stop_strings

BYTES = tokenizers.load("bytes")


class Pieces:
  """A tokenizer of these pieces; id 0 is a control token without text."""

  stop_ids, fingerprint = (0,), "pieces"

  def __init__(self, *pieces):
    self.pieces = [b"", *pieces]

  def token_bytes(self):
    return self.pieces

  def decode(self, ids):
    return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


AB = Pieces(b"a", b"b", b"c", b"ab", b"ba", b"aab", b"abcab", b"bcb", b"")


def first_end(text: bytes, strings, begin):
  """The least end after `begin` of a string in a text; None without one."""
  ends = [
    end
    for end in range(begin + 1, len(text) + 1)
    if any(text[:end].endswith(s.encode()) for s in strings)
  ]
  return ends[0] if ends else None


@pytest.mark.parametrize(
  "strings", [("ab",), ("aa", "aab"), ("abab", "ba", "c"), ("bcbab", "cb")]
)
def test_a_string_ends_where_a_search_finds_it(strings):
  """In random responses, on the devices and on the host."""
  stop, found = stop_strings.build(strings, AB), []
  ids_NT = np.random.default_rng(0).integers(1, len(AB.pieces), (60, 9))
  state_N = np.zeros(60, np.int32)
  for t, token_N in enumerate(ids_NT.T):
    state_N, ended_N = stop.advance(state_N, token_N)
    for ids, state, ended in zip(ids_NT, state_N, ended_N, strict=True):
      before = b"".join(AB.pieces[i] for i in ids[:t])
      text = before + AB.pieces[ids[t]]
      end = first_end(text, strings, len(before))
      assert stop.state(ids[: t + 1]) == state
      assert stop.ended(ids[: t + 1]) == ended == (end is not None)
      found.append(end is not None)
      if end is not None:
        assert stop.behind(ids[: t + 1]) == text[end:].decode()
  assert 20 < sum(found) < len(found) - 20


def test_the_text_of_a_response_ends_with_its_string():
  text = lambda ids, stopped, stop: stop_strings.response_text(
    ids, stopped, AB, stop
  )
  stop = stop_strings.build(("bc",), AB)
  abcab = AB.pieces.index(b"abcab")
  assert text([1, abcab], True, stop) == "aabc"
  assert text([1, abcab], False, stop) == "aabcab"  # truncated
  assert text([1, abcab, 0], True, stop) == "aabcab"  # by a stop token
  assert text([1, 2, 0], True, None) == "ab"


def test_letters_of_several_bytes():
  stop = stop_strings.build(("é!", "中"), BYTES)
  ids = BYTES.encode("eé?中")
  ended = [stop.ended(ids[: n + 1]) for n in range(len(ids))]
  assert ended.index(True) == len(ids) - 1
  assert stop_strings.response_text(ids, True, BYTES, stop) == "eé?中"


def test_ids_beyond_the_tokenizer_end_a_match():
  """A model may have room for more tokens than its tokenizer has."""
  stop = stop_strings.build(("ab",), BYTES)
  assert stop.ended([*b"ab"])
  assert not stop.ended([ord("a"), 9999, ord("b")])
  state, ended = stop.advance(np.array([1]), np.array([9999]))
  assert (int(state[0]), bool(ended[0])) == (0, False)


def test_samplers_are_equal_by_strings_and_tokenizer():
  build = stop_strings.build
  again = dataclasses.replace(build(("ab",), AB))
  others = build(("ab",), BYTES), build(("b",), AB)
  assert len({build(("ab",), AB), again, *others}) == 3


def test_a_table_that_is_too_large():
  letters = itertools.product("abcdefgh", repeat=5)
  strings = tuple("".join(s) for s in letters)
  with pytest.raises(UserError, match=r"sampler\.stop: 32768 strings .* MiB"):
    stop_strings.build(strings, BYTES)


def test_a_tokenizer_whose_bytes_are_unknown():
  class WordPieces:
    def token_bytes(self):
      raise UserError("tokenizer 'x' decodes by WordPiece")

  with pytest.raises(UserError, match=r"sampler\.stop=\('a',\): .*WordPiece"):
    stop_strings.build(("a",), WordPieces())
