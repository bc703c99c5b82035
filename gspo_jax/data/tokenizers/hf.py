"""A tokenizer folder of transformers: its ids, chat template and stop ids.

With `apply_chat_template` a message that contains `<|im_end|>` ends its turn.
Here control tokens come from the template alone. A message without such strings
gets exactly the ids of `apply_chat_template`.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jinja2

from gspo_jax.data.tokenizers.base import (
  UNKNOWN,
  decode_runs,
  digest,
  import_transformers,
)
from gspo_jax.data.tokenizers.plain import SPACE, byte_letters
from gspo_jax.runtime.errors import UserError

_LLAMA_STEPS = ("ByteFallback", "Fuse", "Strip")  # of a decoder
_PRIVATE = range(0xF0000, 0xFFFFE)  # private-use characters
# Files that may decide the ids, and files that may also decide a prompt.
_VOCABULARIES = (
  "merges.txt",
  "sentencepiece.bpe.model",
  "spiece.model",
  "tekken.json",
  "tokenizer.json",
  "tokenizer.model",
  "vocab.json",
  "vocab.txt",
)
_SETTINGS = (
  "added_tokens.json",
  "chat_template.jinja",
  "chat_template.json",
  "generation_config.json",
  "special_tokens_map.json",
  "tokenizer_config.json",
)


class HFTokenizer:
  """A fast tokenizer of transformers; see `tokenizers.base.Tokenizer`.

  Raises:
    UserError: the folder has no fast tokenizer, or the tokenizer has no stop
      token.
  """

  def __init__(self, path: Path):
    self._path = path
    self._library = _open(path)
    # Two copies: whether control strings are parsed is a mutable option, and
    # the threads of the pipeline share the tokenizer.
    self._parsing = self._library.backend_tokenizer
    self._plain = type(self._parsing).from_str(self._parsing.to_str())
    for fast, as_data in ((self._parsing, False), (self._plain, True)):
      fast.no_truncation()
      fast.no_padding()
      fast.encode_special_tokens = as_data
    added = self._parsing.get_added_tokens_decoder()
    self._control = {t.content: i for i, t in added.items() if t.special}
    longest_first = sorted(self._control, key=len, reverse=True)
    self._any_control = re.compile(
      "|".join(map(re.escape, longest_first)) or r"(?!)"
    )
    self._forbidden = {*self._control.values()} - {self._library.unk_token_id}
    self.stop_ids = self._stops()
    pad = self._library.pad_token_id
    self.pad_id = self.stop_ids[0] if pad is None else pad
    ids = self._parsing.get_vocab().values()
    self.vocab_size = 1 + max(*ids, *self.stop_ids, self.pad_id)
    self.fingerprint = digest(
      part
      for file in _files(path)
      for part in (file.name.encode(), file.read_bytes())
    )

  def encode(self, text: str) -> list[int]:
    ids = self._plain.encode(text, add_special_tokens=False).ids
    if self._forbidden.isdisjoint(ids):
      return ids
    # A vocabulary with control tokens among its pieces still finds them in a
    # text; letter by letter it cannot.
    return [
      i
      for letter in text
      for i in self._plain.encode(letter, add_special_tokens=False).ids
      if i not in self._forbidden
    ]

  def decode(self, ids: Iterable[int]) -> str:
    fast = self._parsing
    missing = lambda i: UNKNOWN if fast.id_to_token(i) is None else None
    decode = lambda run: fast.decode(run, skip_special_tokens=False)
    return decode_runs(ids, decode, missing, self.vocab_size)

  def token_bytes(self) -> list[bytes]:
    of_piece = self._bytes_of_pieces()
    pieces = map(self._parsing.id_to_token, range(self.vocab_size))
    return [UNKNOWN.encode() if p is None else of_piece(p) for p in pieces]

  def _bytes_of_pieces(self) -> Callable[[str], bytes]:
    """piece -> its bytes in a text, as the decoder of the tokenizer has it."""
    decoder = self._parsing.decoder
    whole = json.loads(decoder.__getstate__()) if decoder else {"type": "none"}
    steps = whole.get("decoders", [whole])
    kinds = tuple(step["type"] for step in steps)
    if kinds == ("ByteLevel",):
      letters = {letter: i for i, letter in enumerate(byte_letters())}
      return lambda piece: (
        bytes(letters[letter] for letter in piece)
        if letters.keys() >= {*piece}
        else piece.encode()
      )
    spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    if kinds == ("Metaspace",) or (
      # The last one strips the text, not each piece.
      steps[0] == spaces
      and kinds[1:] in (("ByteFallback", "Fuse"), _LLAMA_STEPS)
    ):
      byte = re.compile("<0x([0-9A-F]{2})>").fullmatch
      return lambda piece: (
        bytes.fromhex(byte(piece)[1])
        if "ByteFallback" in kinds and byte(piece)
        else piece.replace(SPACE, " ").encode()
      )
    raise UserError(
      f"tokenizer {str(self._path)!r} decodes by {', '.join(kinds)}: expected "
      "byte-level BPE or the pieces of SentencePiece, in which the text of a "
      "token does not depend on its neighbours"
    )

  def prompt(self, user: str, system: str = "") -> list[int]:
    if not self._library.chat_template:
      return self._begin() + self.encode(system + user)
    guarded = self._guard(system, user)
    pieces = list(self._split(self._render(*guarded.texts)))
    rendered = self._render(system, user)
    ids = self._parsing.encode(rendered, add_special_tokens=False).ids
    of_template = [self._control[p.text] for p in pieces if p.control]
    only_control = lambda ids: [i for i in ids if i in self._forbidden]
    if only_control(ids) == only_control(of_template):
      return ids
    return [
      i
      for text, control in pieces
      for i in (
        [self._control[text]]
        if control
        else self.encode(text.translate(guarded.restore))
      )
    ]

  def save(self, folder: str | Path) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for file in _files(self._path):
      shutil.copyfile(file, Path(folder) / file.name)

  def _begin(self) -> list[int]:
    """The ids that the tokenizer puts before every text."""
    begin = self._library.bos_token_id
    ids = self._parsing.encode("", add_special_tokens=True).ids
    return [begin] if ids[:1] == [begin] else []

  def _guard(self, *texts: str) -> "_Guarded":
    """Replaces control strings by characters that occur nowhere else.

    Another such character goes to both ends of each text, so that no control
    string forms together with the text of the template beside it.
    """
    used = {*"".join(texts), *str(self._library.chat_template)}
    free = (chr(i) for i in _PRIVATE if chr(i) not in used)
    edge = next(free)
    strings = {c for text in texts for c in self._any_control.findall(text)}
    signs = dict(zip(sorted(strings), free, strict=False))
    guarded = [
      text and edge + self._any_control.sub(lambda m: signs[m[0]], text) + edge
      for text in texts
    ]
    restore = {ord(edge): ""} | {ord(c): text for text, c in signs.items()}
    return _Guarded(guarded, restore)

  def _split(self, text: str) -> Iterator["_Piece"]:
    end = 0
    for match in self._any_control.finditer(text):
      yield _Piece(text[end : match.start()], False)
      yield _Piece(match[0], True)
      end = match.end()
    yield _Piece(text[end:], False)

  def _render(self, system: str, user: str) -> str:
    messages = [{"role": "user", "content": user}]
    if system:
      messages.insert(0, {"role": "system", "content": system})
    try:
      return self._library.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
      )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
      raise UserError(
        f"tokenizer {str(self._path)!r}: its chat template raised: {error}"
      ) from error

  def _stops(self) -> tuple[int, ...]:
    """The end-of-text token, then the stops of generation_config.json."""
    file = self._path / "generation_config.json"
    try:
      config = json.loads(file.read_bytes()) if file.exists() else {}
      more = config.get("eos_token_id")
      more = more if isinstance(more, list) else [more]
      stops = [i for i in (self._library.eos_token_id, *more) if i is not None]
      if not all(isinstance(i, int) and i >= 0 for i in stops):
        raise ValueError(f"eos_token_id is {more}")
    except (ValueError, AttributeError) as error:
      raise UserError(f"{str(file)!r}: {error}") from error
    if not stops:
      raise UserError(
        f"tokenizer {str(self._path)!r}: no eos_token in it and no "
        "eos_token_id in generation_config.json: nothing ends a response"
      )
    return tuple(dict.fromkeys(stops))


class _Guarded(NamedTuple):
  """Texts without control strings, and the table that restores them."""

  texts: list[str]
  restore: dict[int, str]


class _Piece(NamedTuple):
  """A part of a text, and whether it is a control string."""

  text: str
  control: bool


def _files(path: Path) -> list[Path]:
  """The files of a folder that decide ids, prompts and stops."""
  names = sorted((*_VOCABULARIES, *_SETTINGS))
  return [path / name for name in names if (path / name).is_file()]


def _open(path: Path):
  """The fast tokenizer in a folder."""
  if not any((path / name).is_file() for name in _VOCABULARIES):
    raise UserError(
      f"tokenizer {str(path)!r}: no tokenizer in this folder; expected "
      "tokenizer.json or tokenizer.model"
    )
  try:
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(
      str(path), local_files_only=True, trust_remote_code=False
    )
  except Exception as error:  # the type depends on the files
    reason = " ".join(str(error).split())[:200]
    raise UserError(f"tokenizer {str(path)!r}: {reason}") from error
  if not tokenizer.is_fast:
    raise UserError(
      f"tokenizer {str(path)!r}: {type(tokenizer).__name__} is a slow "
      "tokenizer; expected a fast one (tokenizer.json)"
    )
  return tokenizer
