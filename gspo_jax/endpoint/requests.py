"""What a client sends, checked: what is done with each field of a request.

The fields are those of OpenAI's API, vLLM and SGLang. One that would change the
answer is honoured or refused. `gspo_jax.serve` samples as a request says; in
training the run decides, and `app` logs what a request asks for instead. A
field that is not here is ignored, and `app` logs its name.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gspo_jax.data.json_schema import an_object, fitted
from gspo_jax.data.messages import is_json, read, wrong
from gspo_jax.sampler.samples import SamplingParams

_MOST_ANSWERS, _MOST_STOPS, _LONGEST_STOP = 64, 16, 256
# What is expected of a field, in words and as a test; null is always right.
# First the fields of sampling, which `serve` honours.
_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
  "temperature": ("0, or .001 to 100", lambda x: x == 0 or 0.001 <= x <= 100),
  "top_k": (
    "-1 to 10**6, whole",
    lambda x: type(x) is int and -1 <= x <= 10**6,
  ),
  "top_p": ("more than 0, at most 1", lambda x: 0 < x <= 1),
  "min_p": ("0 to 1", lambda x: 0 <= x <= 1),
  "seed": ("a whole number", lambda x: type(x) is int),
}
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
  **dict.fromkeys(
    ("max_completion_tokens", "max_tokens"),
    ("a whole number of at least 1", lambda x: type(x) is int and x >= 1),
  ),
  **dict.fromkeys(
    ("chat_template_kwargs", "stream_options"),
    ("an object", lambda x: isinstance(x, dict)),
  ),
  "n": (
    f"a whole number from 1 to {_MOST_ANSWERS}",
    lambda x: type(x) is int and 1 <= x <= _MOST_ANSWERS,
  ),
  "stop": (
    f"a text, or at most {_MOST_STOPS}, of 1 to {_LONGEST_STOP} letters",
    lambda x: (
      isinstance(x, list)
      and len(x) <= _MOST_STOPS
      and all(isinstance(s, str) and 0 < len(s) <= _LONGEST_STOP for s in x)
    ),
  ),
}
HONOURED = (*_RANGES, "n", "stop")
# Refused, unless null or one of these values.
_ONLY = {
  name: values
  for values, names in (
    ((0,), "top_logprobs prompt_logprobs"),
    ((1,), "best_of length_penalty"),
    (("",), "suffix"),
    (("medium",), "verbosity"),
    (("none", "auto"), "tool_choice function_call"),
    ((["text"],), "modalities"),
    (({"type": "text"},), "response_format"),
    (({},), "logit_bias"),
    (([],), "functions bad_words documents"),
    ((True,), "add_generation_prompt include_reasoning separate_reasoning"),
    (
      (False,),
      "echo use_beam_search ignore_eos include_stop_str_in_output no_stop_trim "
      "continue_final_message add_special_tokens return_tokens_as_token_ids "
      "return_hidden_states",
    ),
    (
      (),
      "guided_json guided_regex guided_choice guided_grammar json_schema regex "
      "ebnf structured_outputs stop_regex allowed_token_ids logits_processors "
      "custom_logit_processor truncate_prompt_tokens thinking_token_budget "
      "chat_template prompt_embeds input_ids lora_path session_params audio "
      "web_search_options",
    ),
  )
  for name in names.split()
}
# `serve` refuses them likewise; in training they are ignored.
_NEUTRAL: dict[str, tuple] = {
  **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0,)),
  **{"repetition_penalty": (1,), "min_tokens": (0,), "stop_token_ids": ([],)},
}
# Read below; and ignored, for no token of the answer would be another.
_READ, _IGNORED = (
  names.split()
  for names in (
    "model messages prompt tools parallel_tool_calls reasoning_effort logprobs "
    "stream return_token_ids",
    "user metadata store service_tier safety_identifier prompt_cache_key "
    "prompt_cache_retention prompt_cache_options prediction moderation rid "
    "request_id session_id priority cache_salt extra_key stream_reasoning "
    "stream_interval skip_special_tokens spaces_between_special_tokens "
    "truncation_side",
  )
)
FIELDS = frozenset((*_READ, *_KINDS, *_RANGES, *_ONLY, *_NEUTRAL, *_IGNORED))
_SCHEMAS = {"type": "object", "additionalProperties": {"type": "object"}}
_TOOL = an_object(
  type={"const": "function"},
  function={
    "allOf": [an_object(name={"type": "string"})],
    "properties": {
      "parameters": {"type": "object", "properties": {"properties": _SCHEMAS}}
    },
  },
)
_ROLES = "system", "developer", "user", "assistant", "tool"


class ApiError(Exception):
  """What OpenAI's API answers to a wrong request."""

  def __init__(
    self,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    status: int = 400,
  ):
    super().__init__(message)
    self.status = status
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    self.body = {"error": error}


@dataclasses.dataclass(frozen=True)
class Call:
  """One request; `messages` of a chat, or the `prompt` of a completion."""

  messages: Sequence[Mapping] = ()
  prompt: str | Sequence[int] = ""
  tools: Sequence[Mapping] = ()
  parses_tools: bool = False  # whether the answer may have tool calls
  parallel_tool_calls: bool = True  # else the first call alone is sent
  template_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  max_tokens: int | None = None
  n: int = 1  # answers
  stop: Sequence[str] = ()  # an answer ends before the first of them
  stream: bool = False
  include_usage: bool = False
  logprobs: bool = False
  return_token_ids: bool = False
  model: str | None = None
  sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  unknown: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def chat(body: Any) -> Call:
  """The call of /v1/chat/completions."""
  common, tools = _common(body), body.get("tools") or []
  try:
    if isinstance(tools, list):
      tools = [_without_null(tool, 4) for tool in tools]
    fitted(tools, {"type": "array", "items": _TOOL})
  except ValueError as error:
    expected = f"functions as in OpenAI's API ({error})"
    raise wrong("tools", tools, expected) from error
  template_args = body.get("chat_template_kwargs") or {}
  effort = {"reasoning_effort": body.get("reasoning_effort")}  # for it, too
  messages = body.get("messages")
  if not isinstance(messages, list) or not messages:
    raise wrong("messages", messages, "a list of at least one message")
  messages = [read(m, f"messages[{i}]") for i, m in enumerate(messages)]
  for i, message in enumerate(messages):
    if message["role"] not in _ROLES:
      expected = f"one of {', '.join(_ROLES)}"
      raise wrong(f"messages[{i}].role", message["role"], expected)
  if messages[-1]["role"] == "assistant":
    raise wrong(
      f"messages[{len(messages) - 1}].role",
      "assistant",
      "a last message of the user or of a tool",
    )
  _order_results(messages)
  return Call(
    messages=messages,
    tools=tools,
    parses_tools=bool(tools) and body.get("tool_choice") != "none",
    parallel_tool_calls=_boolean(body, "parallel_tool_calls", True),
    template_args=effort | template_args,
    logprobs=_boolean(body, "logprobs"),
    **common,
  )


def completion(body: Any) -> Call:
  """The call of /v1/completions."""
  common = _common(body)
  prompt = body.get("prompt")
  if (
    isinstance(prompt, list) and len(prompt) == 1 and type(prompt[0]) is not int
  ):
    (prompt,) = prompt
  is_ids = isinstance(prompt, list) and all(type(i) is int for i in prompt)
  if not (prompt and (is_ids or isinstance(prompt, str))):
    raise wrong("prompt", prompt, "one text or one list of token ids")
  logprobs = body.get("logprobs")
  if logprobs is not None and not _is_one_of(logprobs, (0, 1)):
    raise wrong(
      "logprobs", logprobs, "0 or 1: the log-prob of the sampled token alone"
    )
  return Call(prompt=prompt, logprobs=logprobs is not None, **common)


def sampling_params(call: Call, default: SamplingParams) -> SamplingParams:
  """What the call says of sampling, else the default; or WrongField."""
  said = dict(call.sampling)
  for name, value in said.items():
    if name in _NEUTRAL:
      raise wrong(name, value, _words(_NEUTRAL[name]))
    expected, is_right = _RANGES[name]
    if type(value) not in (int, float) or not is_right(value):
      raise wrong(name, value, expected)
  said.pop("seed", None)
  return default._replace(**said)


def _common(body: Any) -> dict:
  if not isinstance(body, dict):
    raise ApiError("the body: expected a JSON object")
  if not is_json(body):
    raise ApiError("the body: expected JSON that UTF-8 can encode")
  stop = body.get("stop") if body.get("stop") != "" else None
  given = body | {"stop": [stop] if isinstance(stop, str) else stop}
  for name, (expected, is_right) in _KINDS.items():
    if (value := given.get(name)) is not None and not is_right(value):
      raise wrong(name, value, expected)
  for name, values in _ONLY.items():
    value = body.get(name)
    if value is not None and not _is_one_of(value, values):
      raise wrong(name, value, _words(values))
  options = body.get("stream_options") or {}
  unknown = {f"stream_options.{k}": v for k, v in options.items() if v}
  unknown.pop("stream_options.include_usage", None)
  return {
    "max_tokens": body.get("max_completion_tokens") or body.get("max_tokens"),
    "n": body.get("n") or 1,
    "stop": tuple(given["stop"] or ()),
    "stream": _boolean(body, "stream"),
    "include_usage": _boolean(options, "include_usage"),
    "return_token_ids": _boolean(body, "return_token_ids"),
    "model": body.get("model"),
    "sampling": {
      k: v
      for k in (*_RANGES, *_NEUTRAL)
      if (v := body.get(k)) is not None
      and not _is_one_of(v, _NEUTRAL.get(k, ()))
    },
    "unknown": unknown | {k: body[k] for k in body if k not in FIELDS},
  }


def _is_one_of(value: Any, values: Sequence) -> bool:
  """Where true and 1 are not the same."""
  is_bool = isinstance(value, bool)
  return any(value == v and is_bool == isinstance(v, bool) for v in values)


def _words(values: Sequence) -> str:
  return " or ".join(["null", *map(json.dumps, values)])


def _boolean(body: Mapping, name: str, default: bool = False) -> bool:
  value = body.get(name)
  if value is not None and not isinstance(value, bool):
    raise wrong(name, value, "true or false")
  return default if value is None else value


def _without_null(value: Any, depth: int) -> Any:
  """What a tool lacks is null to some clients, `parameters` above all."""
  if not (depth and isinstance(value, dict)):
    return value
  given = {k: v for k, v in value.items() if v is not None}
  return {k: _without_null(v, depth - 1) for k, v in given.items()}


def _order_results(messages: list[dict]) -> None:
  """Puts results of tool calls in the order of the calls, as templates expect.

  WrongField unless each call has one. A call that was sent as text has no id.
  """
  ids: list[str] = []  # of the newest calls
  left, results, caller = {}, {}, ""  # calls by id, results by place
  for i, message in enumerate([*messages, {"role": ""}]):
    if message["role"] == "tool":
      own = message.get("tool_call_id", "")
      if own in left:
        results[left.pop(own)] = message
      elif ids or own:
        known = f"one of {json.dumps(ids)[:200]}, each once"
        raise wrong(f"messages[{i}].tool_call_id", own, known)
      continue
    for own in left:
      raise wrong(caller, ids, f"the result of {own!r:.80} behind it")
    messages[i - len(results) : i] = [results[n] for n in sorted(results)]
    ids = [call["id"] for call in message.get("tool_calls", ())]
    left, results = {own: n for n, own in enumerate(ids)}, {}
    caller = f"messages[{i}].tool_calls"
    if len(left) < len(ids):
      raise wrong(caller, ids, "calls with ids of their own")
