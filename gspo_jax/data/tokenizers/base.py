"""What all tokenizers are, and functions that they share.

The text of a problem never becomes a control token, even if it spells one:
control tokens come only from a chat template and from `stop_ids`.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gspo_jax.runtime.errors import missing_package

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # the text of an id without any

Turn = tuple[str, str]  # the role and the content of a message


class Tokenizer:
  """A tokenizer; `prompt`, `turn` and `check_turns` for no chat template."""

  vocab_size: int  # one more than the largest id
  pad_id: int  # may be a stop id
  stop_ids: tuple[int, ...]  # end a response; the first ends demonstrations
  fingerprint: str  # a hash of everything that decides the ids

  def encode(self, text: str) -> list[int]:
    """The ids of plain text, none of them a control token."""
    raise NotImplementedError

  def decode(self, ids: Iterable[int]) -> str:
    """The text of any ids; control tokens are visible: "1<pad>2"."""
    raise NotImplementedError

  def token_bytes(self) -> list[bytes]:
    """What each of the `vocab_size` ids adds to a text.

    Joined, they are the bytes of `decode`, but for a space before the text that
    some tokenizers leave out. UserError if a token's bytes depend on its
    neighbours, so that there is no table.
    """
    raise NotImplementedError

  def prompt(
    self, user: str, system: str = "", history: Sequence[Turn] = ()
  ) -> list[int]:
    """The ids of a prompt, up to the first token of the response.

    They are those of the chat template. Without one a blank line stands between
    messages, but a message of the assistant follows that of the user at once,
    as the response follows the prompt.

    `user` is the last message of the user, `history` the messages between it
    and the system prompt.
    """
    text = before = ""
    for role, content in [("system", system), *history, ("user", user)]:
      if text and (before, role) != ("user", "assistant"):
        text += "\n\n"
      text, before = text + content, role
    return self.encode(text)

  def turn(self, messages: Sequence[Turn], *, stopped: bool) -> list[int]:
    """The ids behind a response, up to the first token of the next response.

    The ids of a conversation are those of `prompt`, of the first response, of
    this function, of the next response, and so on: what the policy wrote is
    never decoded and encoded again. If `check_turns` accepts the roles, and
    each response has the ids that the tokenizer gives its text, they are those
    of the chat template applied to the whole conversation.

    Args:
      messages: follow the response; none is of the assistant.
      stopped: whether the response ended with a stop token.
    """
    return self.encode("".join("\n\n" + content for _, content in messages))

  def check_turns(self, roles: Sequence[str]) -> None:
    """Checks that the chat template can be applied turn by turn.

    UserError if it writes earlier turns differently once another one follows,
    or leaves out messages of these roles between two responses.
    """

  def save(self, folder: str | Path) -> None:
    """Writes a folder that AutoTokenizer of transformers loads."""
    raise NotImplementedError


def decode_runs(
  ids: Iterable[int],
  decode: Callable[[list[int]], str],
  control: Callable[[int], str | None],
  size: int,
) -> str:
  """Decodes ids, some of which may be control tokens or no tokens at all.

  Args:
    ids: any; one outside 0..size-1 becomes U+FFFD.
    decode: the text of consecutive ids that are text.
    control: the visible form of an id; None if the id is text.
    size: of the vocabulary.
  """
  visible = lambda i: control(i) if 0 <= i < size else UNKNOWN
  runs = itertools.groupby(map(int, ids), key=visible)
  return "".join(
    decode(list(run)) if text is None else text * len(list(run))
    for text, run in runs
  )


def digest(parts: Iterable[bytes]) -> str:
  """A hash of several byte strings and of their lengths."""
  sizes = ((len(part).to_bytes(8), part) for part in parts)
  whole = b"".join(itertools.chain.from_iterable(sizes))
  return hashlib.sha256(whole).hexdigest()[:16]


def import_transformers():
  """The package transformers, imported late: it takes more than a second."""
  # Else it warns that PyTorch is missing.
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  try:
    import transformers
  except ImportError as error:
    raise missing_package(error, "hf", "a tokenizer's folder") from error
  return transformers
