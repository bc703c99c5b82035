"""Thinking, results and white space between a client and its transcript."""

import contextlib
import itertools
import random

import pytest
from chat_templates import GLM, HARMONY, QWEN3, QWEN35, tool, user
from scripted import TEMPLATE, Scripted, make_tokenizer

from gspo_jax.endpoint import client as endpoint_client
from gspo_jax.endpoint.answers import Answer, Choice
from gspo_jax.endpoint.requests import Call
from gspo_jax.rewards import thinking
from gspo_jax.rollout.episode import SequenceLimits
from gspo_jax.sampler.continuous.engine import STOP, Generation
from gspo_jax.sampler.samples import SamplerConfig

openai = pytest.importorskip("openai")
app = pytest.importorskip("gspo_jax.endpoint.app")
server = pytest.importorskip("gspo_jax.endpoint.server")
agents = pytest.importorskip("gspo_jax.rollout.agents")

TOOLS = [tool("weather", x={}), tool("clock", x={})]
WRITTEN = '<tool_call>\n{"name": "%s", "arguments": {"x":1.0}}\n</tool_call>'
ARGUMENT = "<arg_key>x</arg_key>\n<arg_value>1.0</arg_value>"
XML = f"<tool_call>%s\n{ARGUMENT}\n</tool_call>"
COMMENTARY = ' to=functions.%s<|channel|>commentary json<|message|>{"x": 1}'
CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
ROLES = ("<|system|>", "<|assistant|>")
# Template, stop tokens, other control tokens, how thinking begins and ends in
# an answer, and how a call is written.
FAMILIES = {
  # As Magistral's: the thinking of a part is not that of a message.
  "chatml": (TEMPLATE + "{# '[THINK]' + part['thinking'] #}", ["<|im_end|>"],
             (), "<think>", "</think>", WRITTEN),
  "qwen3": (QWEN3, ["<|im_end|>"], (), "<think>\n", "\n</think>\n\n", WRITTEN),
  "qwen3.5": (QWEN35, ["<|im_end|>"], (), "", "\n</think>\n\n", WRITTEN),
  "glm": (GLM, ["<|observation|>", "<|user|>"], ROLES, "\n<think>",
          "</think>\n", XML),
  "harmony": (HARMONY, ["<|call|>", "<|return|>"], CHANNELS,
              "<|channel|>analysis<|message|>", "<|end|><|start|>assistant",
              COMMENTARY),
}  # fmt: skip
FINAL = "<|channel|>final<|message|>"
# Those that write the thinking of an answer to the last question.
KEEP = [name for name in FAMILIES if name != "chatml"]


@pytest.fixture(scope="module")
def family(tmp_path_factory):
  made = {}

  def of(name):
    if name not in made:
      template, stops, control, *_ = FAMILIES[name]
      folder = tmp_path_factory.mktemp("family")
      made[name] = make_tokenizer(folder, template, stops, control)
    return made[name]

  return of


@contextlib.contextmanager
def served(tokenizer, *texts, client=app.Client):
  engine = Scripted(tokenizer, context=4000)
  engine.most, engine.texts = 1000, [*texts]
  config = SamplerConfig(stop_ids=tokenizer.stop_ids)
  endpoint = app.Endpoint(tokenizer, config)
  key = endpoint.admit(client(engine, tokenizer))
  with (
    server.Server(endpoint.app) as s,
    openai.OpenAI(base_url=s.url, api_key=key, max_retries=0) as api,
  ):

    def ask(*messages, tools=TOOLS, **options):
      tools = {"tools": tools} if tools else {}
      create = api.chat.completions.create
      return create(model="policy", messages=messages, **tools, **options)

    yield engine, lambda *m, **options: ask(*m, **options).choices[0].message


def result(call, text="rain"):
  return {"role": "tool", "tool_call_id": call.id, "content": text}


def goes_on(engine):
  """Whether the last prompt begins with all tokens of the call before."""
  before, last = engine.made[-2:]
  begin = [*before.prompt, *before.tokens]
  return last.prompt[: len(begin)] == begin


@pytest.mark.parametrize("name", FAMILIES)
def test_an_agent_with_thinking_and_a_tool_is_one_sequence(family, name):
  """With `rollout.max_sequences` 1, as by default."""
  tokenizer, (*_, begin, end, call) = family(name), FAMILIES[name]
  final = FINAL if name == "harmony" else ""
  limits = SequenceLimits(turns=4, sequences=1, width=4000, longest=4000)
  episode = None

  def client(engine, tokenizer):
    nonlocal episode
    episode = agents.Episode(engine, tokenizer, limits, number=0, size=1)
    return episode

  texts = f"{begin}I look{end}{call % 'weather'}", f"{begin}So{end}{final}Rain."
  with served(tokenizer, *texts, client=client) as (engine, ask):
    first = ask(user())
    assert (first.reasoning_content, first.content) == ("I look", None)
    (made,) = first.tool_calls
    # The message as the client has it, which is what frameworks send.
    second = ask(user(), first, result(made))
  assert goes_on(engine)
  assert (second.reasoning_content, second.content) == ("So", "Rain.")
  (sequence,) = episode.end()
  assert sequence.ids == [*engine.made[1].prompt, *engine.made[1].tokens]
  # What was read between is what the template writes.
  read = tokenizer.decode(engine.made[1].prompt)
  assert read.endswith(tokenizer.decode(tokenizer.chat([user("")]))[-9:])
  assert "rain" in read


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_that_drops_thinking_begins_a_sequence(family, name):
  """Of an earlier question; one that does not know thinking keeps its text."""
  tokenizer, (*_, begin, end, _) = family(name), FAMILIES[name]
  final = FINAL if name == "harmony" else ""
  texts = [f"{begin}I add{end}{final}four", "x"]
  with served(tokenizer, *texts) as (engine, ask):
    said = ask(user("2+2?"), tools=()).model_dump(exclude_none=True)
    assert (said["reasoning_content"], said["content"]) == ("I add", "four")
    ask(user("2+2?"), said, user("sure?"), tools=())
  assert goes_on(engine) == (name == "chatml")
  if name in KEEP:
    read = tokenizer.decode(engine.made[1].prompt)
    assert "four" in read
    assert "I add" not in read


@pytest.mark.parametrize("name", KEEP)
def test_a_client_that_drops_thinking_begins_a_sequence(family, name):
  tokenizer, (*_, begin, end, call) = family(name), FAMILIES[name]
  with served(tokenizer, f"{begin}I look{end}{call % 'clock'}", "x") as (
    e,
    ask,
  ):
    first = ask(user())
    kept = first.model_dump(include={"role", "content", "tool_calls"})
    ask(user(), kept, result(first.tool_calls[0]))
  assert not goes_on(e)
  assert "I look" not in tokenizer.decode(e.made[1].prompt)


def test_a_broken_call_of_gpt_oss_can_be_sent_back(family):
  text = (
    f"<|channel|>analysis<|message|>why<|end|><|start|>assistant{COMMENTARY}"
  )
  with served(family("harmony"), (text % "clock")[:-1], "x") as (_, ask):
    said = ask(user()).model_dump(exclude_none=True)
    assert said["reasoning_content"] == "why"
    assert said["content"].startswith("to=functions.clock")
    ask(user(), said, user("again"))


ARGUMENTS = '{"y": {"b": 2, "a": []}, "x": 1}'
# What a client changes in a message before it sends it back.
CHANGES = {
  "nothing": lambda m: {},
  "as vLLM since 0.11": lambda m: {"reasoning": m.pop("reasoning_content")},
  "joined": lambda m: {
    "content": f"<think>{m.pop('reasoning_content')}</think>"
    + (m["content"] or "")
  },
  "stripped": lambda m: {
    k: v.strip() for k, v in m.items() if isinstance(v, str)
  },
  "padded": lambda m: {"content": f" {m['content'] or ''}\n"},
  "emptied": lambda m: {"content": m["content"] or ""},
  "in parts": lambda m: {
    "content": [{"type": "text", "text": m["content"] or ""}]
  },
  # Numbers and the order of keys are its own.
  "by JavaScript": lambda m: {
    "tool_calls": [
      call | {"function": call["function"] | {"arguments": ARGUMENTS}}
      for call in m["tool_calls"]
    ]
  },
  "other ids": lambda m: {
    "tool_calls": [call | {"id": "toolu_1"} for call in m["tool_calls"]]
  },
}
CALL = WRITTEN.replace("1.0", '1.0, "y": {"a": [], "b": 2e0}') % "weather"


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
@pytest.mark.parametrize("text", ["I look.\n\n", ""])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_client_rewrites_breaks_no_sequence(family, name, text, change):
  tokenizer, (*_, begin, end, _) = family(name), FAMILIES[name]
  with served(tokenizer, f"{begin} hm{end}{text}{CALL}", "x") as (engine, ask):
    said = ask(user()).model_dump()
    said = said | CHANGES[change](said)
    (call,) = said["tool_calls"]
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    ask(user(), said, answer)
  assert goes_on(engine)


@pytest.mark.parametrize("sent", ["5", "5\n", " 5"])
def test_white_space_that_a_client_strips_costs_no_sequence(family, sent):
  with served(family("chatml"), "5\n", "x", "y") as (engine, ask):
    assert ask(user(), tools=()).content == "5\n"
    history = (
      user(),
      {"role": "assistant", "content": sent},
      user("more"),
    )
    ask(*history, tools=())
    assert goes_on(engine)
    ask(*history, {"role": "assistant", "content": "x"}, user("on"), tools=())
    assert goes_on(engine)


def test_other_thinking_or_text_is_another_history(family):
  tokenizer = family("qwen3")
  text = f"<think>\nhm\n</think>\n\n{CALL}"
  for change in (
    {"reasoning_content": "h m"},
    {"reasoning_content": None},
    {"content": "5"},
  ):
    with served(tokenizer, text, "x") as (engine, ask):
      said = ask(user()).model_dump() | change
      ask(user(), said, result(ask_call(said)))
    assert not goes_on(engine)


def ask_call(said):
  return openai.types.chat.ChatCompletionMessageToolCall(
    **said["tool_calls"][0]
  )


@pytest.mark.parametrize("max_tokens", [11, None])
@pytest.mark.parametrize(
  ("name", "text"), [("qwen3.5", "I doubt it"), ("chatml", "<think>I do")]
)
def test_thinking_without_an_end_is_no_content(family, name, text, max_tokens):
  """Sent back, the template ends it: the policy would read other text."""
  with served(family(name), text, "x") as (engine, ask):
    said = ask(user(), max_tokens=max_tokens, tools=())
    thoughts = text.removeprefix("<think>")
    assert (said.reasoning_content, said.content) == (thoughts, "")
    ask(user(), said, user("go on"), tools=())
  assert not goes_on(engine)


def test_a_history_with_an_answer_that_was_not_given_is_encoded_whole(family):
  """Though the answer before it was given; its tokens are others."""
  tokenizer = family("chatml")
  told = endpoint_client.Transcript(tokenizer)
  given = {"role": "assistant", "content": "yes"}
  ids, text = told.prompt([user()], ())
  told.record([user()], (), given, [*ids, 1, 2, 3], text)
  more = [user(), given, user("more")]
  assert told.prompt(more, ())[0][: len(ids) + 3] == [*ids, 1, 2, 3]
  more += [{"role": "assistant", "content": "no"}, user("go on")]
  assert told.prompt(more, ())[0] == tokenizer.chat(more)


@pytest.mark.parametrize("name", ["qwen3.5", "glm"])
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_results_come_in_the_order_of_their_calls(family, name, order):
  tokenizer, (*_, begin, end, call) = family(name), FAMILIES[name]
  names = ("weather", "clock", "weather")
  calls = "\n".join(call % one for one in names)
  with served(tokenizer, f"{begin}hm{end}{calls}", "x") as (engine, ask):
    first = ask(user())
    results = [
      result(c, text)
      for c, text in zip(first.tool_calls, ("rain", "noon", "sun"), strict=True)
    ]
    ask(user(), first, *(results[i] for i in order))
  assert goes_on(engine)
  read = tokenizer.decode(engine.made[1].prompt)
  assert read.index("rain") < read.index("noon") < read.index("sun")


@pytest.mark.parametrize(
  ("results", "param", "says"),
  [("ax", "messages[3].tool_call_id", '"a", "b"'),
   ("aab", "messages[3].tool_call_id", '"a", "b"'),
   ("a-", "messages[3].tool_call_id", '"a", "b"'),
   ("a", "messages[1].tool_calls", "'b'"),
   ("", "messages[1].tool_calls", "'a'"),
   ("abu", "messages[5].tool_call_id", '"u"')],
)  # fmt: skip
def test_a_result_without_its_call_is_refused_and_a_missing_one(
  family, results, param, says
):
  call = lambda i: {"id": i, "type": "function", "function": {"name": "clock"}}
  sent = [
    user(),
    {"role": "assistant", "tool_calls": [call("a"), call("b")]},
  ]
  for own in results:
    message = {"role": "tool", "content": "1", "tool_call_id": own}
    if own == "u":  # of no call
      sent.append(user("more"))
    if own == "-":
      del message["tool_call_id"]
    sent.append(message)
  if results[-1:] != "u":
    sent.append(user("more"))
  with (
    served(family("chatml"), "x") as (engine, ask),
    pytest.raises(openai.BadRequestError, match="expected") as error,
  ):
    ask(*sent)
  assert not engine.made
  assert error.value.param == param
  assert says in error.value.message


STREAMED = (
  *("5 and <b>", " <think>\n a < b\n\n</thin></think>\n\n so 5 \n", "\n",
   "<think"),
  *("<think></think>5", "<think>never", "<", "a<think>b</think>c",
   "</think>d"),
  "<|channel|>analysis<|message|>a<|end|><|start|>assistant" + FINAL + "b <|x",
  "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.f",
  f"{FINAL}5<|end|><|start|>assistant{FINAL}6",
  "<think>a</think> <think>b</think>\n<think>c <think></think>d",
)  # fmt: skip


@pytest.mark.parametrize("opening", ["", "<think>\n"])
@pytest.mark.parametrize("text", STREAMED)
def test_a_stream_adds_up_to_thinking_and_content(family, opening, text):
  tokenizer, rng = family("chatml"), random.Random(0)
  ids = [*tokenizer.encode(text), tokenizer.stop_ids[0]]
  thoughts, content = thinking.split(opening + text)
  for _ in range(20):
    call = Call([user()], stream=True)
    made = Generation([5], len(ids))
    choice = Choice(call, made, tokenizer, None, opening=opening)
    parts, answer, left = [], Answer(call, [choice], "policy"), [*ids]
    while not choice.read():
      new = [left.pop(0) for _ in range(min(rng.randint(1, 9), len(left)))]
      made.add(new, [0.0] * len(new), "" if left else STOP)
      if left:
        parts += answer.new_parts()
    parts += answer.last_parts()
    deltas = [part["choices"][0]["delta"] for part in parts]
    said = [d.get("reasoning_content", "") for d in deltas]
    assert "".join(said) == thoughts
    assert "".join(d["content"] for d in deltas) == content
    assert choice.whole()["message"]["content"] == content
