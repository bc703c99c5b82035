"""What the endpoint answers: the JSON of OpenAI's API.

Token ids have vLLM's names: `return_token_ids` adds `prompt_token_ids` and, to
a choice, `token_ids`, which include the stop token.
"""

import dataclasses
import functools
import json
import secrets
import string
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gspo_jax.data import tool_calls
from gspo_jax.data.messages import is_json
from gspo_jax.data.tokenizers.base import UNKNOWN, Tokenizer
from gspo_jax.endpoint.requests import Call
from gspo_jax.rewards import thinking
from gspo_jax.sampler.continuous.engine import STOP, Generation
from gspo_jax.sampler.stop_strings import (
  StopFinder,
  StopStrings,
  response_text,
)

_LETTERS = string.ascii_letters + string.digits


@dataclasses.dataclass(eq=False)
class Answer:
  """The answer to a call: n choices, whole or in parts, while they are made."""

  call: Call
  choices: Sequence["Choice"]
  model: str
  prompt_text: str = ""  # of messages, as the chat template writes them

  def __post_init__(self):
    kind = "chatcmpl" if self.call.messages else "cmpl"
    self._id = f"{kind}-{secrets.token_hex(12)}"
    self._created = int(time.time())

  def whole(self) -> dict[str, Any]:
    made = [choice.whole() for choice in self.choices]
    return self._body(made, usage=self._usage())

  def new_parts(self) -> Iterator[dict[str, Any]]:
    """What is new since the last ones, as chunks of a stream."""
    for choice in self.choices:
      if part := choice.last_part() or choice.new_part():
        yield self._body([part])

  def last_parts(self) -> Iterator[dict[str, Any]]:
    """The rest, when all is sampled."""
    yield from self.new_parts()
    if self.call.include_usage:
      yield self._body([], usage=self._usage())

  def _body(self, choices: list[dict], **more) -> dict[str, Any]:
    kind = "chat.completion" if self.call.messages else "text_completion"
    if self.call.messages and self.call.stream:
      kind += ".chunk"
    names = {"id": self._id, "object": kind, "created": self._created}
    names |= {"model": self.model, "choices": choices}
    if self.call.return_token_ids and self.call.messages:
      # As vLLM: in the choices of a completion, beside those of a chat.
      for choice in choices:
        if (prompt := choice.pop("prompt_token_ids", None)) is not None:
          names["prompt_token_ids"] = prompt
    return names | more

  def _usage(self) -> dict[str, int]:
    prompt = len(self.choices[0].generation.prompt)
    new = sum(len(choice.tokens) for choice in self.choices)
    return {
      "prompt_tokens": prompt,
      "completion_tokens": new,
      "total_tokens": prompt + new,
    }


@dataclasses.dataclass
class Choice:
  """One of the answers to a call, while its tokens are sampled."""

  call: Call
  generation: Generation
  tokenizer: Tokenizer
  stop: StopStrings | None  # of the run
  index: int = 0
  opening: str = ""  # of the prompt, as of `thinking`
  finder: StopFinder | None = None  # of the call's own stop strings
  finish: str = ""  # as `Generation.finish`, since `read` was called
  # The tokens up to the first of the call's stop strings, once there is one.
  cut: int | None = None
  # Of the tokens and of the text, how much was read, and the parts had so far.
  _read: int = 0
  _tokens: int = 0
  _letters: int = 0
  _start: int = 0  # of the last part
  # The parts of the text until it is behind its thinking: those before its last
  # `<think>`, and the others; whether it thinks, and may have ended that.
  _past: list[str] = dataclasses.field(default_factory=list)
  _held: list[str] | None = dataclasses.field(default_factory=list)
  _thinks: bool = False
  _closed: bool = False
  _has_ended: bool = False  # whether the last part was made

  @property
  def tokens(self) -> list[int]:
    return self.generation.tokens[: self.cut]

  def read(self) -> str:
    """Reads what is new; its `finish`. A stop string ends the generation."""
    if self.finish:
      return self.finish
    count, self.finish = self.generation.progress
    first, self._read = self._read, count
    for i in range(first, count) if self.finder else ():
      token = self.generation.tokens[i]
      if token not in self.tokenizer.stop_ids and self.finder.ends_in(token):
        self.cut, self.finish = i + 1, STOP
        self.generation.cancelled = True
        break
    return self.finish

  @functools.cached_property
  def message(self) -> dict[str, Any]:
    """The assistant's message for `Tokenizer.chat`, when all is sampled."""
    whole, calls = self.opening + self._text, ()
    form = self.tokenizer.tool_format
    thoughts, text = thinking.split(whole)
    if self.call.parses_tools and form:
      functions = [tool["function"] for tool in self.call.tools]
      schemas = {f["name"]: f.get("parameters") or {} for f in functions}
      parsed = tool_calls.parse(whole, form, schemas)
      calls = parsed.calls
      # A call that cannot be read, or be sent back in a later request, stays
      # in the text, for the agent to see.
      if any(c.error or not is_json((c.name, c.arguments)) for c in calls):
        calls = ()
        if form == "openai":  # without what a template refuses in a content
          start = max(0, self._text.rfind("to=functions."))
          text = self._text[
            start : thinking.END.search(self._text, start).start()
          ]
      text = parsed.content if calls else text
      calls = calls if self.call.parallel_tool_calls else calls[:1]
    message = {"role": "assistant", "content": text}
    if thoughts:
      message["reasoning_content"] = thoughts
    if calls:
      before = sum(len(m.get("tool_calls", ())) for m in self.call.messages)
      message["tool_calls"] = [
        {
          "id": _call_id(form, c.name, before + i),
          "type": "function",
          "function": {"name": c.name, "arguments": dict(c.arguments)},
        }
        for i, c in enumerate(calls)
      ]
    return message

  def whole(self) -> dict[str, Any]:
    if self.call.messages:
      said = {"message": _for_client(self.message)}
    else:
      said = {"text": self._text}
    return self._with_tokens(said, 0, len(self.tokens), self._finish())

  def new_part(self) -> dict[str, Any] | None:
    """What is new since the last one; not the end."""
    if self.call.parses_tools or self.finish:
      return None  # a text may be a call
    count = self.finder.num_safe() if self.finder else self._read
    first, decode = self._tokens, self.tokenizer.decode
    # Up to three tokens may be the first bytes of a letter.
    for end in range(count, max(first, count - 4), -1):
      # A part is decoded behind the last one: some tokenizers leave out a
      # space before a text.
      text = decode(self.generation.tokens[self._start : end])
      if not text.endswith(UNKNOWN):
        before = decode(self.generation.tokens[self._start : first])
        self._start = first
        return self._part(text[len(before) :], end)
    return None

  def last_part(self) -> dict[str, Any] | None:
    """The rest, once, when all is sampled."""
    if not self.finish or self._has_ended:
      return None
    self._has_ended = True
    end, finish = len(self.tokens), self._finish()
    if not self.call.parses_tools:
      return self._part(self._text[self._letters :], end, finish)
    delta = _for_client(self.message)
    for i, call in enumerate(delta.get("tool_calls", ())):
      call["index"] = i
    return self._with_tokens({"delta": delta}, 0, end, finish)

  def _part(self, text: str, end: int, finish: str | None = None):
    """A chunk with the text and the tokens up to `end`."""
    first = self._tokens
    self._tokens = end
    self._letters += len(text)
    role = {} if first else {"role": "assistant"}
    said = {"text": text}
    if self.call.messages:
      said = {"delta": role | self._fields(text, bool(finish))}
    return self._with_tokens(said, first, end, finish)

  def _fields(self, text: str, is_last: bool) -> dict[str, str]:
    """What a part of the text adds to a message; its thinking comes whole."""
    if self._held is None:
      return {"content": text}
    self._held += filter(None, [text] if self._held else [self.opening, text])
    newest = "".join(self._held[-len(thinking.CLOSE) :])
    self._closed |= thinking.CLOSE in newest
    waits = not text.strip() or (self._thinks and not self._closed)
    # The channels of gpt-oss are read when all are there.
    waits |= self.tokenizer.tool_format == "openai"
    waits |= "".join(self._held[:9]).lstrip().startswith("<|")
    if waits and not is_last:
      return {"content": ""}
    held = "".join(self._held)
    self._thinks = held.lstrip().startswith(thinking.OPEN)
    _, rest = thinking.split(held)
    if thinking.OPEN.startswith(rest.lstrip()) and not is_last:
      self._closed = bool(rest) or newest.rstrip().endswith(thinking.CLOSE)
      if self._thinks and not self._closed:  # it begins to think, or again
        at = held.rindex(thinking.OPEN)
        self._past.append(held[:at])
        self._held = [held[at:]]
      return {"content": ""}
    thoughts, rest = thinking.split("".join([*self._past, held]))
    self._held = None
    said = {"reasoning_content": thoughts} if thoughts else {}
    return said | {"content": rest}

  def _with_tokens(
    self, said: dict[str, Any], first: int, end: int, finish: str | None
  ) -> dict[str, Any]:
    """The choice, with what the call asks of the tokens."""
    choice = {"index": self.index, "finish_reason": finish} | said
    choice["logprobs"] = self._logprobs(first, end)
    if self.call.return_token_ids:
      choice["token_ids"] = self.generation.tokens[first:end]
      if not first:
        choice["prompt_token_ids"] = self.generation.prompt
    return choice

  @functools.cached_property
  def _text(self) -> str:
    if self.finder and self.cut:
      return self.finder.before(self.tokenizer.decode(self.tokens))
    stopped = self.finish == STOP
    return response_text(self.tokens, stopped, self.tokenizer, self.stop)

  def _finish(self) -> str:
    is_chat = self.call.messages and self.finish == STOP
    if is_chat and "tool_calls" in self.message:
      return "tool_calls"
    return self.finish

  def _logprobs(self, first: int, end: int) -> dict[str, Any] | None:
    """Of tokens; None unless they were asked for."""
    if not self.call.logprobs:
      return None
    tokens = self.generation.tokens[first:end]
    logps = self.generation.logps[first:end]
    texts = [self.tokenizer.decode([i]) for i in tokens]
    if not self.call.messages:
      return {
        "tokens": texts,
        "token_logprobs": logps,
        "top_logprobs": None,
        "text_offset": None,
      }
    content = [
      {"token": text, "logprob": x, "bytes": None, "top_logprobs": []}
      for text, x in zip(texts, logps, strict=True)
    ]
    return {"content": content, "refusal": None}


def _for_client(message: Mapping[str, Any]) -> dict[str, Any]:
  """The message with arguments as text, as OpenAI's API has them."""
  if not (calls := message.get("tool_calls")):
    return dict(message)
  as_text = lambda f: (
    f | {"arguments": json.dumps(f["arguments"], ensure_ascii=False)}
  )
  calls = [call | {"function": as_text(call["function"])} for call in calls]
  return {**message, "content": message["content"] or None, "tool_calls": calls}


def _call_id(form: str, name: str, number: int) -> str:
  """Nine letters and digits, as Mistral's chat templates require."""
  if form == "kimi_k2":  # its template writes the id as the call's name
    return f"functions.{name}:{number}"
  return "".join(secrets.choice(_LETTERS) for _ in range(9))
