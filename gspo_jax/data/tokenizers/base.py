"""The interface of a tokenizer, and functions that tokenizers share.

The text of a problem never becomes a control token, even if it spells one:
control tokens come only from a chat template and from `stop_ids`.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_jax.data import tool_calls
from gspo_jax.runtime.errors import UserError, needs_extra

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # the text of an id without any

# The role and the content of a message; behind them, if the message is the
# result of a tool call, the name of the function.
Turn = tuple[str, ...]
# A message in the form of OpenAI's API: role, content, tool_calls and so on.
Message = Mapping[str, Any]


class RewrittenTurns(UserError):
  """A chat template writes turns differently once another turn follows."""


class Tokenizer:
  """The interface; `chat` and `turn` are for use without a chat template."""

  vocab_size: int  # one more than the largest id
  pad_id: int  # may be a stop id
  stop_ids: tuple[int, ...]  # end a response; the first ends demonstrations
  fingerprint: str  # a hash of everything that decides the ids
  chat_template: str = ""  # in Jinja; "" for none
  template_args: Mapping[str, Any] = {}  # of the chat template

  def encode(self, text: str) -> list[int]:
    """The ids of plain text, none of them a control token."""
    raise NotImplementedError

  def decode(self, ids: Iterable[int]) -> str:
    """The text of any ids; control tokens are visible: "1<pad>2"."""
    raise NotImplementedError

  def token_bytes(self) -> list[bytes]:
    """The bytes that each of the `vocab_size` ids adds to a text.

    Joined, they are the bytes of `decode`, except for a space before the text
    that some tokenizers leave out. UserError if a token's bytes depend on its
    neighbours, so that there is no table.
    """
    raise NotImplementedError

  def prompt(self, user: str, system: str = "") -> list[int]:
    """As `chat`, of a message of the user behind a system prompt, if any."""
    first = [("system", system)] if system else []
    return self.chat(as_messages([*first, ("user", user)]))

  def chat(
    self, messages: Sequence[Message], tools: Sequence[Mapping] = ()
  ) -> list[int]:
    """The ids of messages, up to the first token of the response.

    Args:
      messages: in OpenAI's form, with `role` and `content`; those of the
        assistant may have `reasoning_content`, the thinking, and `tool_calls`,
        whose arguments are a mapping or JSON, and those of a tool `name` and
        `tool_call_id`.
      tools: JSON schemas, `{"type": "function", "function": {...}}`.

    Without a chat template a blank line separates messages, but nothing
    separates a user's message from the assistant's answer; then UserError if
    there are tools or tool calls.
    """
    _require_none(tools, *(message.get("tool_calls") for message in messages))
    text = before = ""
    for message in messages:
      role = message["role"]
      if text and (before, role) != ("user", "assistant"):
        text += "\n\n"
      text, before = text + message["content"], role
    return self.encode(text)

  def conversation(self, messages: Sequence[Message]) -> list[int]:
    """The ids of a whole conversation, which a reward model reads.

    The last two messages are the user's and the assistant's. Without a chat
    template they are one text, and the stop token follows.
    """
    ids = self.chat(messages)
    return ids if self.chat_template else [*ids, self.stop_ids[0]]

  def turn(self, messages: Sequence[Turn], *, stopped: bool) -> list[int]:
    """The ids between a response and the first token of the next response.

    `messages` follow the response; none is of the assistant. If one of them has
    the name of a function, the response called it. `stopped`: the response
    ended with a stop token.

    So a conversation is `prompt`, a response, `turn`, a response, and so on,
    and responses are never decoded and encoded again. The ids equal those of
    the chat template for the whole conversation, if `check_turns` accepts the
    roles and the responses have the ids that the tokenizer gives their text.
    """
    return self.encode("".join("\n\n" + content for _, content, *_ in messages))

  @property
  def tool_format(self) -> str:
    """The format of `data.tool_calls` that the chat template writes.

    "call" without a chat template; "" if it is unknown.
    """
    template = self.chat_template
    return tool_calls.format_of(template) if template else "call"

  def check_turns(
    self,
    roles: Sequence[str],
    tools: Sequence[Mapping] = (),
    tool_format: str = "",
  ) -> None:
    """UserError if the chat template cannot be applied turn by turn.

    It may write earlier turns differently once another turn follows
    (RewrittenTurns), or leave out messages of these roles. If there are
    `tools`, those of the role "tool" follow calls of them, and `tool_format`
    must read what it writes as a call.
    """
    _require_none(tools)

  def check_prompt(
    self, messages: Sequence[Message], tools: Sequence[Mapping] = ()
  ) -> None:
    """UserError if the chat template leaves a part out of the prompt.

    Parts are the messages, the tools and the calls. Thinking is none, nor is
    the text beside a call, which is thinking in gpt-oss.
    """

  def check_demonstrations(self) -> None:
    """UserError if the chat template puts control tokens before a response.

    A demonstration, plain text right behind the prompt, would lack them.
    """

  def save(self, folder: str | Path) -> None:
    """Writes a folder that AutoTokenizer of transformers loads."""
    raise NotImplementedError


def _require_none(*tools: Sequence | None) -> None:
  if any(tools):
    raise UserError(
      "tools and tool calls need a tokenizer with a chat template; expected "
      "none without it"
    )


def as_messages(turns: Sequence[Turn | Message]) -> list[Message]:
  """The messages of turns, for `Tokenizer.chat`; messages stay as they are.

  The n-th message gets the id of an n-th call: nine letters and digits, as
  Mistral's chat templates require.
  """

  def message(n, role, content, *name):
    call = {"name": name[0], "tool_call_id": f"call{n:05}"} if name else {}
    return {"role": role, "content": content} | call

  is_message = lambda turn: isinstance(turn, Mapping)
  return [t if is_message(t) else message(n, *t) for n, t in enumerate(turns)]


def decode_runs(
  ids: Iterable[int],
  decode: Callable[[list[int]], str],
  control: Callable[[int], str | None],
  size: int,
) -> str:
  """Decodes ids; an id outside 0..size-1 becomes U+FFFD.

  `control` gives the visible form of a control token, None for other ids.
  """
  visible = lambda i: control(i) if 0 <= i < size else UNKNOWN
  runs = itertools.groupby(map(int, ids), key=visible)
  return "".join(
    decode(list(run)) if text is None else text * len(list(run))
    for text, run in runs
  )


def digest(parts: Iterable[bytes]) -> str:
  sizes = ((len(part).to_bytes(8), part) for part in parts)
  whole = b"".join(itertools.chain.from_iterable(sizes))
  return hashlib.sha256(whole).hexdigest()[:16]


def import_transformers():
  """The package transformers, imported late: it takes more than a second."""
  # Else it warns that PyTorch is missing.
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  with needs_extra("hf", "a tokenizer's folder"):
    import transformers
  return transformers
