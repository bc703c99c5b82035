"""What the endpoint answers: the JSON of OpenAI's API.

Token ids have vLLM's names: `return_token_ids` adds `prompt_token_ids` and, to
a choice, `token_ids`, which include the stop token.
"""

import bisect
import dataclasses
import functools
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gspo_jax.data import tool_calls
from gspo_jax.data.tokenizers.base import UNKNOWN, Tokenizer
from gspo_jax.endpoint.requests import Call, is_text
from gspo_jax.sampler.continuous.engine import STOP, Generation
from gspo_jax.sampler.stop_strings import StopStrings, response_text


class Answer:
  """The answer to a call: n choices, whole or in parts, while they are made."""

  def __init__(
    self,
    call: Call,
    choices: Sequence["Choice"],
    model: str,
    prompt_text: str = "",
  ):
    """`prompt_text` is of messages, as the chat template writes them."""
    self.call, self.choices, self._model = call, choices, model
    self.prompt_text = prompt_text
    kind = "chatcmpl" if call.messages else "cmpl"
    self._id = f"{kind}-{secrets.token_hex(12)}"
    self._created = int(time.time())

  def whole(self) -> dict[str, Any]:
    made = [choice.whole() for choice in self.choices]
    return self._body(made, usage=self._usage())

  def new_parts(self) -> Iterator[dict[str, Any]]:
    """What is new since the last ones, as chunks of a stream; not the end."""
    for choice in self.choices:
      if part := choice.new_part():
        yield self._body([part])

  def last_parts(self) -> Iterator[dict[str, Any]]:
    """The rest, when all is sampled."""
    for choice in self.choices:
      yield self._body([choice.last_part()])
    if self.call.include_usage:
      yield self._body([], usage=self._usage())

  def _body(self, choices: list[dict], **more) -> dict[str, Any]:
    kind = "chat.completion" if self.call.messages else "text_completion"
    if self.call.messages and self.call.stream:
      kind += ".chunk"
    names = {"id": self._id, "object": kind, "created": self._created}
    names |= {"model": self._model, "choices": choices}
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
  # The tokens up to the first stop string of the call, once there is one.
  cut: int | None = None
  # Of the tokens and of the text, how much the parts had so far.
  _tokens: int = 0
  _letters: int = 0
  _start: int = 0  # of the last part

  @property
  def finish(self) -> str:
    """Why it ended, as `Generation.finish`."""
    return self.generation.finish if self.cut is None else STOP

  @property
  def tokens(self) -> list[int]:
    return self.generation.tokens[: self.cut]

  def look(self) -> str:
    """Ends it at the first of the call's own stop strings; its `finish`."""
    count, _ = self.generation.progress
    ids, decode = self.generation.tokens[:count], self.tokenizer.decode
    count -= bool(ids) and ids[-1] in self.tokenizer.stop_ids
    stops = lambda end: self._stop_at(decode(ids[:end])) is not None
    if self.call.stop and self.cut is None and stops(count):
      self.cut = bisect.bisect_left(range(count), True, key=stops)
      self.generation.cancelled = True
    return self.finish

  def _stop_at(self, text: str) -> int | None:
    """The letters before the first stop string of the call."""
    at = (text.find(string) for string in self.call.stop)
    return min((i for i in at if i >= 0), default=None)

  @functools.cached_property
  def message(self) -> dict[str, Any]:
    """The assistant's message for `Tokenizer.chat`, when all is sampled."""
    text, calls = self._text, ()
    if self.call.parses_tools and self.tokenizer.tool_format:
      functions = [tool["function"] for tool in self.call.tools]
      parameters = {f["name"]: _types(f) for f in functions}
      parsed = tool_calls.parse(text, self.tokenizer.tool_format, parameters)
      calls = parsed.calls
      # A call that cannot be read, or be sent back in a later request, stays
      # in the text, for the agent to see.
      if any(c.error or not is_text((c.name, c.arguments)) for c in calls):
        calls = ()
      text = parsed.content if calls else text
    message = {"role": "assistant", "content": text}
    if calls:
      message["tool_calls"] = [
        {
          # As Mistral's chat templates require.
          "id": f"call{secrets.token_hex(3)[:5]}",
          "type": "function",
          "function": {"name": c.name, "arguments": dict(c.arguments)},
        }
        for c in calls
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
    count, finish = self.generation.progress
    if self.call.parses_tools or finish or self.cut is not None:
      return None  # a text may be a tool call
    first, decode = self._tokens, self.tokenizer.decode
    # Up to three tokens may be the first bytes of a letter.
    for end in range(count, max(first, count - 4), -1):
      # A part is decoded behind the last one: some tokenizers leave out a
      # space before a text.
      text = decode(self.generation.tokens[self._start : end])
      if not text.endswith((UNKNOWN, *self._beginnings)):
        before = decode(self.generation.tokens[self._start : first])
        self._start = first
        return self._part(text[len(before) :], end)
    return None

  @functools.cached_property
  def _beginnings(self) -> tuple[str, ...]:
    """Of stop strings: no part ends with one, for it may be cut."""
    stops = self.call.stop
    return tuple(s[:end] for s in stops for end in range(1, len(s)))

  def last_part(self) -> dict[str, Any]:
    """The rest, when all is sampled."""
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
    is_chat = self.call.messages
    said = {"delta": role | {"content": text}} if is_chat else {"text": text}
    return self._with_tokens(said, first, end, finish)

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
    if self.cut is not None:
      text = self.tokenizer.decode(self.tokens)
      return text[: self._stop_at(text)]
    made = self.generation
    stopped = made.finish == STOP
    return response_text(made.tokens, stopped, self.tokenizer, self.stop)

  def _finish(self) -> str:
    if self.call.messages and "tool_calls" in self.message:
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


def _types(function: Mapping[str, Any]) -> dict[str, Any]:
  """The parameters of a JSON schema, `str` for those that are texts."""
  properties = function.get("parameters", {}).get("properties", {})
  return {
    name: str if schema.get("type") == "string" else object
    for name, schema in properties.items()
  }
