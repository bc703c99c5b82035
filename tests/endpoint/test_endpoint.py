"""OpenAI's own client talks to the endpoint; the answers are scripted."""

import contextlib
import functools
import json
import logging
import random
import re
import socket
import threading
import time
from concurrent import futures

import hf_tokenizers
import httpx
import pytest
from chat_templates import tool, user
from repository import ROOT
from scripted import CONTEXT, Scripted, make_tokenizer

from gspo_jax.endpoint import client as endpoint_client
from gspo_jax.endpoint import requests
from gspo_jax.endpoint.answers import Answer, Choice
from gspo_jax.endpoint.requests import Call
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler import stop_strings
from gspo_jax.sampler.continuous.engine import ABORT, LENGTH, STOP, Generation
from gspo_jax.sampler.samples import SamplerConfig
from gspo_jax.sampler.stop_strings import StopFinder, bytes_of_ids

openai = pytest.importorskip("openai")
app = pytest.importorskip("gspo_jax.endpoint.app")
server = pytest.importorskip("gspo_jax.endpoint.server")

CALC = tool("calc", a={"type": "string"})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def served(tokenizer):
  engine = Scripted(tokenizer)
  config = SamplerConfig(stop_ids=tokenizer.stop_ids, temperature=0.5)
  endpoint = app.Endpoint(tokenizer, config)
  with server.Server(endpoint.app) as s:
    yield engine, endpoint, s.url


@contextlib.contextmanager
def connected(endpoint, url, client):
  """OpenAI's client, with the key of a client of the endpoint."""
  key = endpoint.admit(client)
  with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as api:
    yield api
  endpoint.dismiss(key)


@pytest.fixture
def ask(served, tokenizer):
  """(engine, client) with a key and a transcript of its own."""
  engine, endpoint, url = served
  engine.texts, engine.made = [], []
  with connected(endpoint, url, app.Client(engine, tokenizer)) as client:
    yield engine, client


def chat(client, messages, **options):
  return client.chat.completions.create(
    model="policy", messages=messages, **options
  )


IDS = {"extra_body": {"return_token_ids": True}}


def test_a_chat_has_the_text_ids_and_logps_of_what_was_sampled(ask, tokenizer):
  engine, client = ask
  engine.texts = ["Hällo"]
  answer = chat(client, [user("hi")], logprobs=True, **IDS)
  (choice,) = answer.choices
  ids = [*tokenizer.encode("Hällo"), *tokenizer.stop_ids]
  assert (choice.message.content, choice.finish_reason) == ("Hällo", "stop")
  assert choice.token_ids == ids
  assert answer.prompt_token_ids == tokenizer.chat([user("hi")])
  logps = [token.logprob for token in choice.logprobs.content]
  assert logps == [-i / 100 for i in ids]
  assert answer.usage.completion_tokens == len(ids)


def test_a_stream_adds_up_to_the_answer_and_breaks_no_letter(ask, tokenizer):
  engine, client = ask
  engine.texts = ["aaä中z"] * 2  # a chunk ends inside a letter
  options = {"logprobs": True, "stream_options": {"include_usage": True}}
  parts = [*chat(client, [user("hi")], stream=True, **options, **IDS)]
  whole = chat(client, [user("hi")], **IDS).choices[0]
  deltas = [c for part in parts for c in part.choices]
  assert "".join(c.delta.content for c in deltas) == "aaä中z"
  assert [i for c in deltas for i in c.token_ids] == whole.token_ids
  logps = [x.logprob for c in deltas for x in c.logprobs.content]
  assert logps == [-i / 100 for i in whole.token_ids]
  assert deltas[-1].finish_reason == "stop"
  assert parts[-1].usage.completion_tokens == len(whole.token_ids)
  assert [made.by_token for made in engine.made] == [True, False]


def test_a_completion_takes_text_or_ids(ask, tokenizer):
  engine, client = ask
  engine.texts = [*["yes"] * 4, "no", "yes"]
  ids = tokenizer.encode("a text")
  create = client.completions.create
  for prompt in (["a text"], ids):
    create(model="policy", prompt=prompt)
  (by_text,) = create(model="policy", prompt="a text", logprobs=1).choices
  options = {"max_tokens": 2, "n": 2, **IDS}
  by_ids = create(model="policy", prompt=[ids], **options).choices
  assert [g.prompt for g in engine.made] == [ids] * 5
  assert (by_text.text, by_text.finish_reason) == ("yes", "stop")
  for choice, text in zip(by_ids, ("ye", "no"), strict=True):
    assert (choice.text, choice.finish_reason) == (text, "length")
    assert choice.prompt_token_ids == ids
    assert choice.token_ids == tokenizer.encode(text)
  assert len(by_text.logprobs.token_logprobs) == 4
  parts = create(model="policy", prompt="x", stream=True)
  assert "".join(part.choices[0].text for part in parts) == "yes"


CALL = '<tool_call>{"name": "calc", "arguments": {"a":"1+1"}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_goes_to_the_agent_and_its_result_behind_it(
  ask, tokenizer, stream
):
  engine, client = ask
  engine.texts = [f"I ask. {CALL}", "2"]
  first = [user("1+1?")]
  made = chat(client, first, tools=[CALC], stream=stream)
  if stream:
    (choice,) = (c for part in made for c in part.choices)
    message = choice.delta
  else:
    (choice,) = made.choices
    message = choice.message
  assert choice.finish_reason == "tool_calls"
  (call,) = message.tool_calls
  assert call.function.name == "calc"
  assert json.loads(call.function.arguments) == {"a": "1+1"}
  assert message.content == "I ask."
  sent = message.model_dump(exclude_none=True) | {"role": "assistant"}
  result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
  chat(client, [*first, sent, result], tools=[CALC])
  # The ids of the policy's own writing, not those of the template's.
  begin = [*engine.made[0].prompt, *engine.made[0].tokens]
  assert engine.made[1].prompt[: len(begin)] == begin
  rest = tokenizer.decode(engine.made[1].prompt[len(begin) :])
  assert rest == "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
  ("text", "options"),
  [(CALL, {}), (CALL, {"tools": [CALC], "tool_choice": "none"}),
   *((text, {"tools": [CALC]}) for text in ("<tool_call>{nonsense</tool_call>",
    CALL.replace("1+1", "\\ud800"), CALL.replace('"1+1"', "NaN"),
    CALL.replace('"1+1"', "1e999")))],
)  # fmt: skip
def test_calls_stay_text_that_nobody_asked_for_or_that_cannot_be_read(
  ask, text, options
):
  """Or that could not be sent back."""
  engine, client = ask
  engine.texts = [text]
  (choice,) = chat(client, [user("1+1?")], **options).choices
  assert (choice.message.content, choice.finish_reason) == (text, "stop")


@pytest.mark.parametrize("tools", [(), (CALC,)])
def test_parts_are_of_one_moment_while_more_is_sampled(tokenizer, tools):
  """The engine adds tokens, and then ends, whenever a part is decoded."""
  text = "aä中🙂 " * 9 if not tools else CALL
  ids = [*tokenizer.encode(text), tokenizer.stop_ids[0]]
  made = Generation([5], len(ids))
  pieces = [ids[i : i + 5] for i in range(0, len(ids), 5)]

  class Growing:
    tool_format, stop_ids = tokenizer.tool_format, tokenizer.stop_ids

    def decode(self, ids):
      if pieces:
        new = pieces.pop(0)
        made.add(new, [-i / 100 for i in new], "" if pieces else STOP)
      return tokenizer.decode(ids)

  options = {"return_token_ids": True, "logprobs": True, "stream": True}
  call = Call([user("q")], tools=tools, parses_tools=bool(tools), **options)
  choice, parts = Choice(call, made, Growing(), None), []
  answer = Answer(call, [choice], "policy")
  while not choice.read():
    parts += answer.new_parts()
    choice.tokenizer.decode([])
  parts += answer.last_parts()
  choices = [part["choices"][0] for part in parts]
  assert [i for c in choices for i in c["token_ids"]] == ids
  said = lambda c: c["delta"]["content"] or ""
  for c in choices[:-1]:
    assert said(c) == tokenizer.decode(c["token_ids"])
    assert len(c["token_ids"]) == len(c["logprobs"]["content"])
  assert "".join(map(said, choices)) == ("" if tools else text)
  ends = [c["finish_reason"] for c in choices if c["finish_reason"]]
  assert ends == ["tool_calls" if tools else "stop"]


def test_a_stream_decodes_each_token_a_few_times(tokenizer):
  made, decoded = Generation([5], 6400), 0

  class Counting:
    tool_format = ""
    stop_ids = tokenizer.stop_ids

    def decode(self, ids):
      nonlocal decoded
      decoded += len(ids)
      return tokenizer.decode(ids)

  call = Call([user("q")], stream=True)
  choice = Choice(call, made, Counting(), None)
  for i in range(100):
    made.add(tokenizer.encode("abcdefgh") * 8, [0.0] * 64, LENGTH * (i == 99))
    choice.read()
    assert bool(choice.new_part()) == (i < 99)
  assert choice.last_part()
  assert decoded < 5 * 6400


def test_a_transcript_forgets_the_oldest_answers(tokenizer, monkeypatch):
  monkeypatch.setattr(endpoint_client, "_MOST", 60)
  told = endpoint_client.Transcript(tokenizer)
  answer, sampled = {"role": "assistant", "content": "yes"}, [3, 4]
  for name in "abc":
    ids, text = told.prompt([user(name)], ())
    told.record([user(name)], (), answer, [*ids, *sampled], text)
  assert 60 / 3 < len(ids) + 2 < 60 / 2
  uses = lambda name: told.prompt([user(name), answer, user("more")], ())[0]
  for name, is_known in (("a", False), ("b", True), ("c", True)):
    begin = [*told.prompt([user(name)], ())[0], *sampled]
    assert (uses(name)[: len(begin)] == begin) == is_known


def test_a_message_with_all_private_characters_is_refused(ask, monkeypatch):
  engine, client = ask
  monkeypatch.setattr(engine, "context", 10**5)
  text = "".join(map(chr, range(0xF0000, 0xFFFFE)))
  with pytest.raises(openai.BadRequestError, match="unused"):
    chat(client.with_options(timeout=20), [user(text)])


def test_an_edited_history_is_encoded_anew(ask, tokenizer):
  engine, client = ask
  engine.texts = ["one", "two", "three"]
  chat(client, [user("a")])
  edited = [user("a"), {"role": "assistant", "content": "One"}, user("b")]
  chat(client, edited)
  assert engine.made[1].prompt == tokenizer.chat(edited)
  other = [user("A"), {"role": "assistant", "content": "one"}, user("b")]
  chat(client, other)
  assert engine.made[2].prompt == tokenizer.chat(other)


def test_an_answer_that_was_cut_goes_on_with_its_own_ids(ask, tokenizer):
  engine, client = ask
  engine.texts = ["onetwo", "x"]
  chat(client, [user("a")], max_tokens=3)
  chat(client, [user("a"), {"role": "assistant", "content": "one"}, user("b")])
  begin = [*engine.made[0].prompt, *tokenizer.encode("one")]
  assert engine.made[1].prompt[: len(begin)] == begin
  rest = tokenizer.decode(engine.made[1].prompt[len(begin) :])
  assert rest.startswith("<|im_end|>\n<|im_start|>user\nb")


WRONG = [
  ({"n": 0}, "n"), ({"n": True}, "n"), ({"stop": ["x", ""]}, "stop"),
  ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
  ({"tools": [CALC], "tool_choice": "required"}, "tool_choice"),
  ({"tools": [{"type": "function"}]}, "tools"),
  ({"tools": [{"type": "function", "function": 1}]}, "tools"),
  ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools"),
  ({"tools": functools.reduce(lambda x, _: [x], range(900))}, "tools"),
  ({"response_format": {"type": "json_object"}}, "response_format"),
  ({"max_tokens": 0}, "max_tokens"),
  ({"max_completion_tokens": "x"}, "max_completion_tokens"),
  ({"logit_bias": {"3": 4}}, "logit_bias"), ({"best_of": True}, "best_of"),
  ({"stream": 1}, "stream"), ({"stream": "yes"}, "stream"),
  ({"stream_options": {"include_usage": 1}}, "include_usage"),
  ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
  ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
  ({"chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
  ({"reasoning_effort": "low"}, "reasoning_effort"),
  ({"guided_json": {}}, "guided_json"), ({"ignore_eos": True}, "ignore_eos"),
  ({"continue_final_message": True}, "continue_final_message"),
  ({"truncate_prompt_tokens": 8}, "truncate_prompt_tokens"),
  ({"presence_penalty": 0.5}, "presence_penalty"),
  ({"min_tokens": 2}, "min_tokens"),
]  # fmt: skip
PICTURE = {"type": "image_url"}
WRONG_MESSAGES = [
  ([], "messages"),
  ([{"role": "robot", "content": ""}], "messages[0].role"),
  ([user(3)], "messages[0].content"),
  ([user([PICTURE])], "messages[0].content"),
  ([user([PICTURE | {"text": "a"}])], "messages[0].content"),
  ([{"role": "user", "reasoning_content": "a"}], "messages[0].content"),
  ([user("a"), {"role": "assistant", "content": "b"}], "messages[1].role"),
]


@pytest.mark.parametrize(
  ("fields", "param"),
  [*WRONG, *(({"messages": x}, param) for x, param in WRONG_MESSAGES)],
)
def test_a_wrong_field_is_named(ask, fields, param):
  _, client = ask
  with pytest.raises(openai.BadRequestError) as error:
    chat(client, [user("a")], extra_body=fields)
  assert error.value.param == param
  assert "expected" in error.value.message


def test_tools_that_the_template_does_not_write_are_refused(served, tmp_path):
  """As SmolLM2's: the prompt is the same with and without them."""
  fast = hf_tokenizers.of_bytes(["<|im_end|>"])
  template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
  mute = hf_tokenizers.save(tmp_path, fast, template, eos_token="<|im_end|>")
  engine, endpoint, url = served
  engine.made = []
  with (
    connected(endpoint, url, app.Client(engine, mute)) as client,
    pytest.raises(openai.BadRequestError, match="out the tool 'calc'"),
  ):
    chat(client, [user("use calc")], tools=[CALC])
  assert not engine.made


@pytest.mark.parametrize(
  "options", [{"echo": True}, {"logprobs": 2}, {"prompt": ["a", "b"]},
              {"suffix": "x"}, {"extra_body": {"logprobs": True}}],
)  # fmt: skip
def test_a_wrong_field_of_a_completion_is_named(ask, options):
  _, client = ask
  with pytest.raises(openai.BadRequestError, match="expected") as error:
    client.completions.create(**{"model": "policy", "prompt": "a"} | options)
  assert error.value.param in (*options, *options.get("extra_body", ()))


NEUTRAL = {
  **{"top_logprobs": 0, "echo": False, "response_format": {"type": "text"}},
  **{"presence_penalty": 0.0, "repetition_penalty": 1, "stop_token_ids": []},
  **{"user": "me", "store": True, "metadata": {"a": "b"}, "priority": 3},
  **{"service_tier": "auto", "skip_special_tokens": False, "verbosity": None},
  **{"tool_choice": "auto", "parallel_tool_calls": True, "ignore_eos": False},
  **{"chat_template_kwargs": {"enable_thinking": None}, "guided_json": None},
}


def test_what_changes_no_answer_is_taken_in_silence(ask, caplog):
  engine, client = ask
  engine.texts = ["yes"]
  with caplog.at_level(logging.WARNING, logger="absl"):
    answer = chat(client, [user("a")], extra_body=NEUTRAL)
  assert answer.choices[0].message.content == "yes"
  assert engine.made[0].params == engine.params
  assert not caplog.records


def test_the_log_names_an_unknown_field_once_short_and_in_one_line(
  tokenizer, caplog
):
  endpoint = app.Endpoint(tokenizer, SamplerConfig())
  engine = Scripted(tokenizer)
  engine.texts = ["a"] * 4
  with (
    server.Server(endpoint.app) as s,
    connected(endpoint, s.url, app.Client(engine, tokenizer)) as client,
    caplog.at_level(logging.WARNING, logger="absl"),
  ):
    for _ in range(2):
      chat(client, [user("a")], extra_body={"x\nFORGED": "y\nFORGED" * 9999})
    many = {f"field {i}": i for i in range(2 * app._MOST_TOLD)}
    chat(client, [user("a")], extra_body=many)
  lines = [r.getMessage() for r in caplog.records]
  assert len([line for line in lines if "FORGED" in line]) == 1
  assert len(lines) <= app._MOST_TOLD
  assert all(len(line) < 150 and line.isprintable() for line in lines)


def test_each_field_of_the_api_is_decided_and_documented():
  params = (
    openai.types.chat.completion_create_params,
    openai.types.completion_create_params,
  )
  for each in params:
    fields = each.CompletionCreateParamsBase.__annotations__.keys()
    assert fields <= requests.FIELDS
  text = (ROOT / "docs/agents.md").read_text()
  table = text.partition("## What is served")[2].partition("\n## ")[0]
  of = lambda text: {*re.findall(r"`(\w+)`", text)}
  assert requests.FIELDS - of(table) == set()
  table = table.partition("| client |")[0]
  first = " ".join(re.findall(r"(?m)^\|([^|]*)\|", table))
  assert of(first) - requests.FIELDS == {"include_usage"}


@pytest.mark.parametrize(
  ("method", "path", "status"),
  [("GET", "", 404), ("GET", "models/", 404), ("GET", "models/gpt", 404),
   ("GET", "chat/completions", 405), ("POST", "models", 405),
   ("GET", "models/policy", 200)],
)  # fmt: skip
def test_each_answer_is_json_and_none_leads_elsewhere(
  ask, method, path, status
):
  _, api = ask
  answer = api._client.request(
    method,
    f"{api.base_url}{path}",
    headers={"Authorization": f"Bearer {api.api_key}", "Host": "evil.org"},
  )
  assert answer.status_code == status
  if status == 200:
    assert answer.json()["id"] == "policy"
  else:
    assert "expected" in answer.json()["error"]["message"]
  assert ("allow" in answer.headers) == (status == 405)


def test_health_needs_no_key_but_somebody_to_ask(tokenizer):
  endpoint = app.Endpoint(tokenizer, SamplerConfig())
  with server.Server(endpoint.app) as s:
    url = s.url.replace("/v1", "/health")
    assert httpx.get(url).status_code == 503
    key = endpoint.admit(app.Client(Scripted(tokenizer), tokenizer))
    assert httpx.get(url).status_code == 200
    endpoint.dismiss(key)
    assert httpx.get(url).status_code == 503


def test_one_call_is_sent_where_calls_are_not_parallel(ask, monkeypatch):
  engine, client = ask
  monkeypatch.setattr(engine, "most", 200)
  monkeypatch.setattr(engine, "context", 900)
  engine.texts = [f"{CALL}\n{CALL}"] * 2
  ask_for = lambda **options: chat(
    client, [user("q")], tools=[CALC], **options
  ).choices[0].message.tool_calls  # fmt: skip
  assert len(ask_for()) == 2
  assert len(ask_for(parallel_tool_calls=False)) == 1


@pytest.mark.parametrize(
  "function",
  [{"parameters": None}, {"parameters": {"properties": None}},
   {"parameters": {"type": "object"}}, {"description": None}],
)  # fmt: skip
def test_a_tool_may_have_null_for_what_it_lacks(ask, tokenizer, function):
  engine, client = ask
  engine.texts = [CALL]
  tool = {"type": "function", "function": {"name": "calc"} | function}
  (choice,) = chat(client, [user("1+1?")], tools=[tool]).choices
  assert choice.finish_reason == "tool_calls"
  assert "null" not in tokenizer.decode(engine.made[0].prompt)


def test_a_prompt_that_cannot_fit_is_refused_before_any_work(
  ask, monkeypatch, tokenizer
):
  _, client = ask
  for name in ("chat", "encode"):
    monkeypatch.setattr(type(tokenizer), name, lambda *_: 1 / 0)
  text = "x" * (CONTEXT * len("<|im_start|>") + 1)
  for ask_for in (
    lambda: chat(client, [user(text)]),
    lambda: client.completions.create(model="policy", prompt=text),
  ):
    with pytest.raises(openai.BadRequestError, match="characters") as error:
      ask_for()
    assert error.value.code == "context_length_exceeded"


def test_long_prompts_of_a_client_are_encoded_one_by_one(ask, monkeypatch):
  """Also if nobody waits any more; short ones need not wait for them."""
  engine, client = ask
  monkeypatch.setattr(engine, "context", 900)
  engine.texts, running, most = ["s"] * 9, [], []
  go_on, encode = threading.Event(), app.Endpoint._prompt

  def slow(self, client, call):
    if len(call.messages) > 1:
      running.append(call)
      most.append(len(running))
      assert go_on.wait(20)
      running.remove(call)
    return encode(self, client, call)

  monkeypatch.setattr(app.Endpoint, "_prompt", slow)
  monkeypatch.setattr(app, "_LONG", 400)
  monkeypatch.setattr(app, "_SECONDS", 0.5)
  long = [user("a"), user("b" * 200), user("c" * 200)]
  with futures.ThreadPoolExecutor() as pool:
    first = pool.submit(chat, client, long)
    wait_for(lambda: running)
    second = pool.submit(chat, client, long)
    assert chat(client, [user("short")]).choices[0].message.content == "s"
    with pytest.raises(openai.APIStatusError, match="408"):
      first.result()
    time.sleep(0.2)
    go_on.set()
    assert second.result()
  assert most == [1, 1]


def test_a_prompt_that_is_too_long_is_refused(ask):
  _, client = ask
  for ask_for in (
    lambda: chat(client, [user("x" * CONTEXT)]),
    lambda: client.completions.create(model="policy", prompt=[0] * CONTEXT),
  ):
    with pytest.raises(openai.BadRequestError) as error:
      ask_for()
    assert error.value.code == "context_length_exceeded"


def test_a_body_that_is_too_long_or_no_json_is_refused(ask):
  _, client = ask
  with pytest.raises(openai.APIStatusError) as error:
    chat(client, [user("x" * 2_000_000)])
  assert error.value.status_code == 413
  for path, body in (
    *(("chat/completions", body) for body in (b"{", b"[1]", b"[" * 100_000)),
    ("chat/completions", b'{"messages": "\\ud800"}'),
    ("chat/completions", b'{"\\ud800": 3, "n": 2}'),
    ("completions", b'{"prompt": "\\ud800"}'),
  ):
    answer = client._client.post(
      f"{client.base_url}{path}",
      content=body,
      headers={"Authorization": f"Bearer {client.api_key}"},
    )
    assert answer.status_code == 400
    assert "expected" in answer.json()["error"]["message"]


def test_another_key_or_model_is_refused(ask, served):
  _, client = ask
  with pytest.raises(openai.AuthenticationError):
    chat(client.with_options(api_key="other"), [user("a")])
  with pytest.raises(openai.NotFoundError, match="policy"):
    client.chat.completions.create(model="gpt", messages=[user("a")])
  (model,) = client.models.list().data
  assert (model.id, model.max_model_len) == ("policy", CONTEXT)


def test_a_client_does_not_see_what_another_was_answered(
  ask, served, tokenizer
):
  engine, client = ask
  _, endpoint, _ = served
  engine.texts = ["one", "two"]
  chat(client, [user("a")], max_tokens=2)
  key = endpoint.admit(app.Client(engine, tokenizer))
  more = [user("a"), {"role": "assistant", "content": "on"}, user("b")]
  chat(client.with_options(api_key=key), more)
  endpoint.dismiss(key)
  assert engine.made[1].prompt == tokenizer.chat(more)
  with pytest.raises(openai.AuthenticationError):
    chat(client.with_options(api_key=key), more)


def test_a_request_chooses_how_a_served_policy_samples(ask):
  engine, client = ask
  engine.texts = ["a", "b"]
  chat(client, [user("a")], top_p=0.9, seed=3, extra_body={"top_k": -1})
  chat(client, [user("a")])
  first, second = engine.made
  assert first.params == engine.params._replace(top_p=0.9, top_k=-1)
  assert (first.seed, second.seed) == (3, None)
  assert second.params == engine.params


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_n_answers_of_which_each_ends_at_its_stop(
  ask, tokenizer, stream
):
  engine, client = ask
  engine.texts = ["ein Hund, zwei", "eins", "ei<|im_start|>"]
  options = {"n": 3, "stop": ["n Kater", "n H", "<|"], "seed": 4} | IDS
  answer = chat(client, [user("a")], **options, stream=stream)
  texts, ids, finish = ["", "", ""], [[], [], []], {}
  for part in answer if stream else [answer]:
    for c in part.choices:
      texts[c.index] += (c.delta if stream else c.message).content or ""
      ids[c.index] += c.token_ids
      if c.finish_reason:
        finish[c.index] = c.finish_reason
  assert texts == ["ei", "eins", "ei"]
  assert finish == {0: "stop", 1: "stop", 2: "stop"}
  assert tokenizer.decode(ids[0]) == "ein H"
  assert [made.seed for made in engine.made] == [4, 5, 6]
  assert [made.cancelled for made in engine.made] == [True, False, True]
  if not stream:
    assert answer.usage.completion_tokens == sum(map(len, ids))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_no_part_goes_beyond_a_stop_string(tokenizer, size):
  """Though more tokens come between a look and the parts."""
  rng, ends = random.Random(size), []
  options = {"stream": True, "return_token_ids": True}
  for _ in range(40):
    draw = lambda k: "".join(rng.choices("ab中 ", k=k))
    text, stop = draw(30), tuple(draw(rng.randint(1, 5)) for _ in range(3))
    ids, call = tokenizer.encode(text), Call([user("q")], stop=stop, **options)
    finder = StopFinder(stop, bytes_of_ids(tokenizer))
    choice = Choice(call, Generation([5], 99), tokenizer, None, finder=finder)
    parts, pieces = [], [ids[i : i + size] for i in range(0, len(ids), size)]
    while pieces:
      choice.generation.add(pieces.pop(0), [], "" if pieces else LENGTH)
      if choice.read():
        break
      if pieces:
        choice.generation.add(pieces.pop(0), [], "" if pieces else LENGTH)
      parts += filter(None, [choice.new_part()])
    choice.read()
    parts.append(choice.last_part())
    beginnings = [text[:i] for i in range(len(text))]
    end = next((len(t) for t in beginnings if t.endswith(stop)), None)
    ends.append(end)
    found = [text[:end].find(s) for s in stop if s in text[:end]] if end else []
    said = "".join(part["delta"]["content"] for part in parts)
    assert said == text[: min(found, default=None)]
    assert parts[-1]["finish_reason"] == (STOP if end else LENGTH)
    assert tokenizer.decode(choice.tokens) == text[:end]
  assert None in ends
  assert len({*ends}) > 9


def test_what_a_stop_string_cut_is_encoded_anew(ask, tokenizer):
  engine, client = ask
  engine.texts = ["yes. no", "b"]
  said = chat(client, [user("a")], stop=".").choices[0].message.content
  history = [
    user("a"), {"role": "assistant", "content": said}, user("c")
  ]  # fmt: skip
  chat(client, history)
  assert said == "yes"
  assert engine.made[1].prompt == tokenizer.chat(history)


def test_a_call_that_was_cut_is_none(ask, tokenizer):
  """By the limit of tokens, or by a stop string."""
  engine, client = ask
  for text, content, calls, stop in (
    (CALL[:-1], CALL[:-1], 0, None),
    (CALL + CALL[:14], CALL + CALL[:14], 0, None),
    (f"{CALL} and th", "and th", 1, None),
    (CALL, CALL.removesuffix("</tool_call>"), 0, "</tool_call>"),
  ):
    engine.texts = [text + "more"]
    options = {"tools": [CALC], "max_tokens": len(tokenizer.encode(text))}
    (choice,) = chat(client, [user("a")], **options, stop=stop).choices
    assert choice.finish_reason == ("stop" if stop else "length")
    assert choice.message.content == content
    assert len(choice.message.tool_calls or ()) == calls


def test_ids_of_calls_are_unique_and_of_nine_letters_and_digits(ask):
  engine, client = ask
  call = '<tool_call>{"name":"f"}</tool_call>'
  engine.texts = [call * 2] * 100
  ids = []
  for _ in range(100):
    (choice,) = chat(client, [user("a")], tools=[CALC]).choices
    ids += [call.id for call in choice.message.tool_calls]
  assert len({*ids}) == 200
  assert len({id[-1] for id in ids}) > 16  # more than digits of base 16
  assert all(re.fullmatch("[0-9A-Za-z]{9}", id) for id in ids)


def test_a_text_without_quotes_has_the_type_of_the_requests_schema():
  class Coder:
    tool_format, stop_ids = "qwen3_coder", [0]
    decode = staticmethod(lambda ids: "".join(map(chr, ids)))

  schema = {
    "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
  }
  tool = {"function": {"name": "f", "parameters": schema}}
  text = "<function=f><parameter=a>%s</parameter></function>"
  for tools, read in ((tool, "12345"), ({"function": {"name": "f"}}, 12345)):
    made = Generation([5], 999)
    made.add([*map(ord, text % "12345"), 0], [0.0] * 64, STOP)
    options = {"tools": [tools], "parses_tools": True}
    choice = Choice(Call([user("q")], **options), made, Coder(), None)
    choice.read()
    (call,) = choice.message["tool_calls"]
    assert call["function"]["arguments"] == {"a": read}


def test_a_training_run_leaves_its_own_stop_string_in_the_text(tokenizer):
  """A call that names it goes on as one that does not."""
  stop = stop_strings.build((".",), tokenizer)
  config = SamplerConfig(stop_ids=tokenizer.stop_ids, stop=stop)
  endpoint = app.Endpoint(tokenizer, config)
  client = app.Client(engine := Scripted(tokenizer), tokenizer)
  client.honours, engine.texts = (), ["yes.", "b"]
  with (
    server.Server(endpoint.app) as s,
    connected(endpoint, s.url, client) as api,
  ):
    said = chat(api, [user("a")], stop=["."]).choices[0].message
    history = [user("a"), {"role": "assistant", "content": said.content}]
    chat(api, [*history, user("c")], stop=["."])
  first, second = engine.made
  assert said.content == "yes."
  begin = [*first.prompt, *first.tokens]
  assert second.prompt[: len(begin)] == begin


@pytest.mark.parametrize(
  "wrong",
  [{"temperature": -0.1}, {"top_p": 0}, {"top_k": 1.5}, {"min_p": 2},
   {"seed": 0.5}, {"temperature": True}, {"temperature": "1"},
   {"temperature": 10**400}, {"temperature": 1e-9}, {"top_k": 10**400}],
)  # fmt: skip
def test_wrong_sampling_is_refused(ask, wrong):
  engine, client = ask
  (name,) = wrong
  with pytest.raises(openai.BadRequestError, match=f"{name}=.*expected"):
    chat(client, [user("a")], extra_body=wrong)
  assert not engine.made


def test_the_run_chooses_how_its_episodes_are_sampled(
  served, tokenizer, caplog
):
  _, endpoint, url = served
  client = app.Client(engine := Scripted(tokenizer), tokenizer)
  client.honours, engine.texts = (), ["a", "b", "c"]
  with (
    caplog.at_level(logging.WARNING, logger="absl"),
    connected(endpoint, url, client) as api,
  ):
    for _ in range(2):
      chat(api, [user("a")], temperature=0.7, top_p=1.0)
    for refused in ({"n": 2}, {"stop": "x"}):
      with pytest.raises(openai.BadRequestError, match="expected"):
        chat(api, [user("a")], **refused)
    assert [*chat(api, [user("a")], stream=True)]
  lines = [r.getMessage() for r in caplog.records]
  assert [line for line in lines if "'temperature': 0.7" in line] == lines
  assert len(lines) == 1
  assert [made.params for made in engine.made] == [None, None, None]
  assert not engine.made[2].by_token  # nor how long a segment is


class Endless(Scripted):
  """An engine that samples one token, and then no more."""

  def submit(self, generation):
    self.made.append(generation)
    generation.add([5], [0.0], "")


@pytest.fixture
def endless(served, tokenizer):
  _, endpoint, url = served
  engine = Endless(tokenizer)
  client = app.Client(engine, tokenizer)
  with connected(endpoint, url, client) as api:
    yield engine, client, api


def wait_for(condition, seconds=10):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_client_leaves_is_cancelled(
  endless, monkeypatch, stream
):
  engine, client, api = endless
  monkeypatch.setattr(client, "gave_up", (given_up := []).append)
  with contextlib.suppress(openai.APITimeoutError):
    api = api.with_options(timeout=0.3)
    made = chat(api, [user("a")], stream=stream, n=2)
    next(iter(made))
    made.close()
  wait_for(lambda: client.open == 0)
  assert [made.cancelled for made in engine.made] == [True, True]
  assert given_up == engine.made


def test_a_request_that_the_engine_refuses_is_given_up(endless, monkeypatch):
  engine, client, api = endless

  def refuse(generation):
    engine.made.append(generation)
    raise UserError("the engine is closed")

  monkeypatch.setattr(engine, "submit", refuse)
  monkeypatch.setattr(client, "gave_up", (given_up := []).append)
  with pytest.raises(openai.BadRequestError, match="closed"):
    chat(api, [user("a")])
  assert given_up == engine.made
  assert given_up


def test_a_client_has_so_many_requests_at_once(endless, monkeypatch):
  _, _, api = endless
  monkeypatch.setattr(app, "_MOST_OPEN", 1)
  with chat(api, [user("a")], stream=True) as first:
    next(iter(first))
    with pytest.raises(openai.RateLimitError, match="fewer than 1"):
      chat(api, [user("a")])


def test_a_request_counts_before_its_body_which_comes_in_time(
  endless, monkeypatch
):
  _, client, api = endless
  monkeypatch.setattr(app, "_MOST_OPEN", 1)
  monkeypatch.setattr(app, "_SECONDS", 0.5)
  host, port = api.base_url.host, api.base_url.port
  head = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"
    f"Authorization: Bearer {api.api_key}\r\n\r\n"
  )
  with socket.create_connection((host, port), 10) as slow:
    slow.sendall(head.encode())
    wait_for(lambda: client.open == 1)
    with pytest.raises(openai.RateLimitError, match="fewer than 1"):
      chat(api, [user("a")])
    assert b" 408 " in slow.recv(99)
  assert client.open == 0
  with socket.create_connection((host, port), 10) as leaver:
    leaver.sendall(head.encode() + b"{")
    wait_for(lambda: client.open == 1)
  wait_for(lambda: client.open == 0, app._SECONDS / 2)


@pytest.mark.parametrize(
  ("most", "seconds", "open_before"), [(2, 60, 2), (99, 0.2, 0)]
)
def test_one_connection_too_many_or_idle_is_closed(
  served, monkeypatch, most, seconds, open_before
):
  monkeypatch.setattr(server, "_HEAD", seconds)
  monkeypatch.setattr(server, "_most_connections", lambda: most)
  with server.Server(served[1].app) as s, contextlib.ExitStack() as stack:
    port = int(s.url.split(":")[2].split("/")[0])
    for _ in range(open_before + 1):
      last = socket.create_connection(("127.0.0.1", port), 10)
      stack.enter_context(last)
    with contextlib.suppress(ConnectionError):
      last.sendall(b"POST /v1/chat")
      assert last.recv(1) == b""


def test_an_answer_when_the_engine_ends_is_an_error(endless):
  engine, _, api = endless
  with chat(api, [user("a")], stream=True, n=2) as made:
    parts = iter(made)
    next(parts)
    next(parts)
    engine.made[-1].add([], [], ABORT)
    with pytest.raises(openai.APIError, match="no more requests"):
      next(parts)
