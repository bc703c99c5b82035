"""Somebody who calls the policy: an engine, and what it has answered.

What the policy sampled is never encoded again. A call's messages are M, and
M[:j] ends with an answer that the endpoint gave to M[:j-1]: same role, content,
thinking and tool calls, whatever the white space around them. Then the prompt
is the ids of that call, those that were sampled, and the chat template's ids
for M[j:]. Two things must hold: M[j:] has no message of the assistant, and the
template writes M[:j-1] and the answer's text as before, now that M[j:] follows.
Else the whole is rendered and encoded.
"""

import array
import asyncio
import collections
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gspo_jax.data.tokenizers.base import Tokenizer
from gspo_jax.endpoint.answers import Choice
from gspo_jax.endpoint.requests import (
  HONOURED,
  ApiError,
  Call,
  sampling_params,
)
from gspo_jax.rewards import thinking
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.continuous.engine import Engine, Generation

# Tokens of the answers that are remembered and of their prompts: some 64 MiB
# with the texts. An episode has fewer.
_MOST = 1 << 23


class _Answer(NamedTuple):
  ids: array.array  # of the prompt and the answer
  text: str  # as the template wrote the messages before it


class Transcript:
  """The answers given to one client."""

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._has_template = tokenizer.tool_format != "call"
    self._answers: collections.OrderedDict[bytes, _Answer] = (
      collections.OrderedDict()
    )
    self._size = 0  # tokens

  def prompt(
    self, messages: Sequence[Mapping], tools: Sequence[Mapping]
  ) -> tuple[list[int], str]:
    """The ids of a call's prompt, and its text as the template writes it.

    UserError if the template refuses.
    """
    # Without a chat template no prompt tells of the tools.
    told = tools if self._has_template else ()
    whole = self._tokenizer.chat(messages, told)
    text = self._tokenizer.decode(whole) if self._has_template else ""
    keys = _keys(messages, tools)
    for j in range(len(messages) - 1, 0, -1):
      if messages[j]["role"] == "assistant":
        answer = self._answers.get(keys[j])
        follows = messages[j + 1 :]
        if answer:
          stopped = answer.ids[-1] in self._tokenizer.stop_ids
          turns = _turns(follows, messages[j].get("tool_calls", ()))
          between = self._tokenizer.turn(turns, stopped=stopped)
          if self._goes_on(answer, text, between, messages[j]):
            return [*answer.ids, *between], text
        break
    return whole, text

  def record(
    self,
    messages: Sequence[Mapping],
    tools: Sequence[Mapping],
    answer: Mapping,
    ids: Sequence[int],
    text: str,
  ) -> None:
    """Remembers an answer.

    `ids` are those of its prompt and of itself; `text` is that of `prompt`.
    """
    key = _keys([*messages, answer], tools)[-1]
    self._forget(key)
    self._answers[key] = _Answer(array.array("i", ids), text)
    self._size += len(ids)
    while self._size > _MOST:
      self._forget(next(iter(self._answers)))

  def _forget(self, key: bytes) -> None:
    if answer := self._answers.pop(key, None):
      self._size -= len(answer.ids)

  def _goes_on(self, answer: _Answer, text, between, message) -> bool:
    """Whether `text` is the text before the answer, its own, and `between`.

    A tool call may be written in other words.
    """
    if not self._has_template:  # each message is written alone
      return True
    decode = self._tokenizer.decode
    behind = decode(between)
    if not (text.startswith(answer.text) and text.endswith(behind)):
      return False
    own = text[len(answer.text) : len(text) - len(behind)]
    thoughts, content = _said(message)
    wrote, own = thinking.split(thinking.opening(answer.text) + own)
    own, calls = own.strip(), "tool_calls" in message
    if wrote != thoughts or not own.startswith(content):
      return False
    if thoughts and not (content or calls) and thinking.CLOSE in text:
      return False  # the answer's may not have ended
    stops = [decode([i]) for i in self._tokenizer.stop_ids]
    return calls or own.removeprefix(content).strip() in ("", *stops)


class Client:
  honours = HONOURED  # fields of a request

  def __init__(self, engine: Engine, tokenizer: Tokenizer):
    self.engine, self.transcript = engine, Transcript(tokenizer)
    self.open = 0  # requests
    self.encodes = asyncio.Lock()  # one request at a time

  def room(self, prompt: list[int]) -> int:
    """Tokens of an answer at most; a subclass raises ApiError to refuse it."""
    return self.engine.most_new_tokens(len(prompt))

  def sample(
    self,
    call: Call,
    prompt: list[int],
    notify: Callable[[], None] = lambda: None,
    index: int = 0,
  ) -> Generation:
    """Asks the policy for choice `index`; ApiError if that is refused."""
    room = self.room(prompt)
    if room < 1:
      raise ApiError(
        f"the prompt has {len(prompt)} tokens, which leaves no room for an "
        f"answer: expected fewer, of {len(prompt) + room} for both",
        param="messages" if call.messages else "prompt",
        code="context_length_exceeded",
      )
    most = min(room, call.max_tokens or room)
    generation = Generation(
      prompt,
      most,
      notify,
      streams=call.stream or bool(call.stop),
      logprobs=call.logprobs,
    )
    if self.honours:
      generation.by_token = call.stream
      generation.params = sampling_params(call, self.engine.params)
      if "seed" in call.sampling:
        generation.seed = call.sampling["seed"] + index
    self.started(generation)
    try:
      self.engine.submit(generation)
    except UserError as error:
      self.gave_up(generation)
      raise ApiError(str(error)) from error
    return generation

  def started(self, generation: Generation) -> None:
    """Its request is sent to the engine; a subclass sets the row."""

  def ended(self, choice: Choice) -> None:
    """Its request has a whole answer."""

  def gave_up(self, generation: Generation) -> None:
    """Its request ended without a whole answer."""


def _turns(messages, calls) -> list[tuple[str, ...]]:
  """Messages for `Tokenizer.turn`: results have the name of their function."""
  names = {call["id"]: call["function"]["name"] for call in calls}
  turns = []
  for message in messages:
    name = message.get("name") or names.get(message.get("tool_call_id"))
    is_result = message["role"] == "tool" and calls and name
    turn = message["role"], message["content"]
    turns.append((*turn, name) if is_result else turn)
  return turns


def _said(message: Mapping) -> tuple[str, str]:
  """Thinking and content of an answer, without white space around them."""
  thoughts, content = message.get("reasoning_content", ""), message["content"]
  if not thoughts:
    thoughts, content = thinking.split(content)
  return thoughts.strip(), content.strip()


def _keys(messages: Sequence[Mapping], tools: Sequence[Mapping]) -> list[bytes]:
  """A digest of the messages up to each; ids of calls do not count.

  Nor does white space around an answer, or how a client writes JSON.
  """
  digest, keys = hashlib.sha256(_json(tools)), []
  for message in messages:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    is_answer = message["role"] == "assistant"
    said = _said(message) if is_answer else message["content"]
    digest.update(_json([message["role"], said, calls]))
    keys.append(digest.digest())
  return keys


def _json(value) -> bytes:
  # JavaScript writes 3.0 as 3.
  number = lambda x: int(float(x)) if float(x).is_integer() else float(x)
  value = json.loads(json.dumps(value), parse_float=number)
  return json.dumps(value, sort_keys=True).encode() + b"\n"
