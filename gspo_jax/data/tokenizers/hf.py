"""A tokenizer folder of transformers: its ids, chat template and stops.

To `apply_chat_template` a question that spells `<|im_end|>` ends its turn. Here
control tokens come from the template alone; any other question gets the very
ids of `apply_chat_template`.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import jinja2

from gspo_jax.data.tokenizers.base import (
  decode_runs,
  digest,
  import_transformers,
)
from gspo_jax.runtime.errors import UserError

_PRIVATE = range(0xF0000, 0xFFFFE)  # characters that mean nothing to anybody
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# What a folder may hold to tell its ids, and what more decides on a prompt.
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


class Folder:
  """A fast tokenizer; see `gspo_jax.data.tokenizers.plain.Tokenizer`.

  Raises:
    UserError: the folder holds no fast tokenizer, or none with a stop token.
  """

  def __init__(self, path: Path):
    self._path = path
    self._library = _open(path)
    # Two, since what is control is a switch of the tokenizer's own, and the
    # threads of the pipeline share it.
    self._parsing = self._library.backend_tokenizer
    self._plain = type(self._parsing).from_str(self._parsing.to_str())
    for fast, as_data in ((self._parsing, False), (self._plain, True)):
      fast.no_truncation()
      fast.no_padding()
      fast.encode_special_tokens = as_data
    added = self._parsing.get_added_tokens_decoder()
    self._control = {t.content: i for i, t in added.items() if t.special}
    texts = sorted(self._control, key=len, reverse=True)
    self._any_control = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
    self._forbidden = {*self._control.values()} - {self._library.unk_token_id}
    self.stop_ids = self._stops()
    pad = self._library.pad_token_id
    self.pad_id = self.stop_ids[0] if pad is None else pad
    known = self._parsing.get_vocab().values()
    self.vocab_size = 1 + max(*known, *self.stop_ids, self.pad_id)
    self.fingerprint = digest(
      part
      for file in _files(path)
      for part in (file.name.encode(), file.read_bytes())
    )

  def encode(self, text: str) -> list[int]:
    ids = self._plain.encode(text, add_special_tokens=False).ids
    if self._forbidden.isdisjoint(ids):
      return ids
    # A vocabulary that holds control tokens among its pieces finds them even
    # so; letter by letter it cannot.
    return [
      i
      for letter in text
      for i in self._plain.encode(letter, add_special_tokens=False).ids
      if i not in self._forbidden
    ]

  def decode(self, ids: Iterable[int]) -> str:
    fast = self._parsing
    missing = lambda i: _UNKNOWN if fast.id_to_token(i) is None else None
    decode = lambda run: fast.decode(run, skip_special_tokens=False)
    return decode_runs(ids, decode, missing, self.vocab_size)

  def prompt(self, question: str, system: str = "") -> list[int]:
    if not self._library.chat_template:
      return self._begin() + self.encode(system + question)
    guarded, restore = self._guard(system, question)
    pieces = list(self._split(self._render(*guarded)))
    rendered = self._render(system, question)
    ids = self._parsing.encode(rendered, add_special_tokens=False).ids
    wanted = [self._control[text] for text, control in pieces if control]
    only = lambda ids: [i for i in ids if i in self._forbidden]
    if only(ids) == only(wanted):
      return ids
    return [
      i
      for text, control in pieces
      for i in (
        [self._control[text]] if control else self.encode(restore(text))
      )
    ]

  def save(self, folder: str | Path) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for file in _files(self._path):
      shutil.copyfile(file, Path(folder) / file.name)

  def _begin(self) -> list[int]:
    """What the tokenizer itself puts before a text."""
    begin = self._library.bos_token_id
    ids = self._parsing.encode("", add_special_tokens=True).ids
    return [begin] if ids[:1] == [begin] else []

  def _guard(self, *texts: str):
    """Texts in which nothing is control, and the way back.

    Each control string becomes a character that occurs nowhere, and another
    one stands at both ends: no control string forms with what comes next.
    """
    taken = {*"".join(texts), *str(self._library.chat_template)}
    free = (chr(i) for i in _PRIVATE if chr(i) not in taken)
    edge = next(free)
    found = {c for text in texts for c in self._any_control.findall(text)}
    signs = dict(zip(sorted(found), free, strict=False))
    guarded = [
      text and edge + self._any_control.sub(lambda m: signs[m[0]], text) + edge
      for text in texts
    ]
    back = {ord(edge): ""} | {ord(c): text for text, c in signs.items()}
    return guarded, lambda text: text.translate(back)

  def _split(self, text: str) -> Iterator[tuple[str, bool]]:
    """Its stretches, and whether each is a control string."""
    end = 0
    for match in self._any_control.finditer(text):
      yield text[end : match.start()], False
      yield match[0], True
      end = match.end()
    yield text[end:], False

  def _render(self, system: str, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    if system:
      messages.insert(0, {"role": "system", "content": system})
    try:
      return self._library.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
      )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
      raise UserError(
        f"tokenizer {str(self._path)!r}: its chat template says {error}"
      ) from error

  def _stops(self) -> tuple[int, ...]:
    """The end-of-text token, then those of the generation config."""
    file = self._path / "generation_config.json"
    try:
      found = json.loads(file.read_bytes()) if file.exists() else {}
      more = found.get("eos_token_id")
      more = more if isinstance(more, list) else [more]
      stops = [i for i in (self._library.eos_token_id, *more) if i is not None]
      if not all(isinstance(i, int) and i >= 0 for i in stops):
        raise ValueError(f"eos_token_id is {more}")
    except (ValueError, AttributeError) as error:
      raise UserError(f"{str(file)!r}: {error}") from error
    if not stops:
      raise UserError(
        f"tokenizer {str(self._path)!r}: no eos_token in it and no "
        "eos_token_id in generation_config.json: nothing ends an answer"
      )
    return tuple(dict.fromkeys(stops))


def _files(path: Path) -> list[Path]:
  """The files of a folder that decide on ids, prompts and stops."""
  names = sorted((*_VOCABULARIES, *_SETTINGS))
  return [path / name for name in names if (path / name).is_file()]


def _open(path: Path):
  """The library's fast tokenizer."""
  if not any((path / name).is_file() for name in _VOCABULARIES):
    raise UserError(
      f"tokenizer {str(path)!r}: no tokenizer in this folder; expected "
      "tokenizer.json or tokenizer.model"
    )
  try:
    found = import_transformers().AutoTokenizer.from_pretrained(
      str(path), local_files_only=True, trust_remote_code=False
    )
  except Exception as error:  # of any kind: what the files hold decides
    reason = " ".join(str(error).split())[:200]
    raise UserError(f"tokenizer {str(path)!r}: {reason}") from error
  if not found.is_fast:
    raise UserError(
      f"tokenizer {str(path)!r}: {type(found).__name__} is a slow tokenizer; "
      "expected a fast one (tokenizer.json)"
    )
  return found
