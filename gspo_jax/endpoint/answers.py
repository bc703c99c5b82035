"""What the endpoint answers: the JSON of OpenAI's API.

Token ids have vLLM's names: `return_token_ids` adds `prompt_token_ids` and, to
a choice, `token_ids`, which include the stop token.
"""

import dataclasses
import functools
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from gspo_jax.data import tool_calls
from gspo_jax.data.tokenizers.base import UNKNOWN, Tokenizer
from gspo_jax.endpoint.requests import Call, is_text
from gspo_jax.sampler.continuous.engine import STOP, Generation
from gspo_jax.sampler.stop_strings import StopStrings, response_text


@dataclasses.dataclass
class Answer:
  """The answer to a call, whole or in parts, while its tokens are sampled."""

  call: Call
  generation: Generation
  tokenizer: Tokenizer
  stop: StopStrings | None
  model: str
  prompt_text: str = ""  # of messages, as the chat template writes them
  # Of the tokens and of the text, how much the parts had so far.
  _tokens: int = 0
  _letters: int = 0
  _start: int = 0  # of the last part

  def __post_init__(self):
    kind = "chatcmpl" if self.call.messages else "cmpl"
    self._id = f"{kind}-{secrets.token_hex(12)}"
    self._created = int(time.time())

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
    choice = {"index": 0, "finish_reason": self._finish()}
    if self.call.messages:
      choice["message"] = _for_client(self.message)
    else:
      choice["text"] = self._text
    body = self._body({"usage": self._usage()})
    return self._with_tokens(body, choice, 0, len(self.generation.tokens))

  def new_part(self) -> dict[str, Any] | None:
    """What is new since the last one, as a chunk of a stream; not the end."""
    count, finish = self.generation.progress
    if self.call.parses_tools or finish:
      return None  # a text may be a tool call
    first, decode = self._tokens, self.tokenizer.decode
    # Up to three tokens may be the first bytes of a letter.
    for end in range(count, max(first, count - 4), -1):
      # A part is decoded behind the last one: some tokenizers leave out a
      # space before a text.
      text = decode(self.generation.tokens[self._start : end])
      if not text.endswith(UNKNOWN):
        before = decode(self.generation.tokens[self._start : first])
        self._start = first
        return self._part({"content": text[len(before) :]}, end, None)
    return None

  def last_parts(self) -> Iterator[dict[str, Any]]:
    """The rest, when all is sampled."""
    delta = {"content": self._text[self._letters :]}
    if self.call.parses_tools:
      delta = _for_client(self.message)
      for i, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = i
    yield self._part(delta, len(self.generation.tokens), self._finish())
    if self.call.include_usage:
      yield self._body({"usage": self._usage(), "choices": []})

  def _part(self, delta, end: int, finish: str | None) -> dict[str, Any]:
    """A chunk with the tokens up to `end`."""
    first = self._tokens
    self._tokens = end
    self._letters += len(delta["content"] or "")
    choice = {"index": 0, "finish_reason": finish}
    if self.call.messages:
      choice["delta"] = ({} if first else {"role": "assistant"}) | delta
    else:
      choice["text"] = delta["content"]
    return self._with_tokens(self._body({}), choice, first, end)

  def _with_tokens(self, body, choice, first: int, end: int) -> dict[str, Any]:
    """The body with its choice; both get what the call asks of the tokens."""
    choice["logprobs"] = self._logprobs(first, end)
    if self.call.return_token_ids:
      choice["token_ids"] = self.generation.tokens[first:end]
      if not first:
        place = body if self.call.messages else choice
        place["prompt_token_ids"] = self.generation.prompt
    return body | {"choices": [choice]}

  @functools.cached_property
  def _text(self) -> str:
    made = self.generation
    stopped = made.finish == STOP
    return response_text(made.tokens, stopped, self.tokenizer, self.stop)

  def _finish(self) -> str:
    if self.call.messages and "tool_calls" in self.message:
      return "tool_calls"
    return self.generation.finish

  def _body(self, more: Mapping[str, Any]) -> dict[str, Any]:
    kind = "chat.completion" if self.call.messages else "text_completion"
    if self.call.messages and self.call.stream:
      kind += ".chunk"
    names = {"id": self._id, "object": kind, "created": self._created}
    return names | {"model": self.model} | more

  def _usage(self) -> dict[str, int]:
    prompt, new = len(self.generation.prompt), len(self.generation.tokens)
    return {
      "prompt_tokens": prompt,
      "completion_tokens": new,
      "total_tokens": prompt + new,
    }

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
