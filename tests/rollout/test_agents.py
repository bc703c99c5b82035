"""Agents: which sequences their calls make, and what they cannot do."""

import functools
import types

import continuous_sampler
import jax
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.data import pipeline, prompt_batch, tokenizers
from gspo_jax.data.problem import Problem
from gspo_jax.logprobs import token_logprobs
from gspo_jax.rollout import agent
from gspo_jax.rollout.episode import SequenceLimits
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.continuous import engine
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import SamplerConfig

agents = pytest.importorskip("gspo_jax.rollout.agents")

MODULE_NAME = "an_agent"
MODULE = """
import contextlib, json, os, threading, time, urllib.error, urllib.request
from concurrent import futures

def post(url, key, body):
  headers = {"Authorization": f"Bearer {key}"}
  data = body if isinstance(body, bytes) else json.dumps(body).encode()
  try:
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request) as answer:
      return json.load(answer)
  except urllib.error.HTTPError as e:
    return json.load(e) | {"status": e.code}

def play(problem, *, base_url, api_key, model):
  def chat(*messages, key=api_key, **options):
    body = {"model": model, "messages": [
      {"role": role, "content": text} for role, text in messages]}
    body |= {"return_token_ids": True, "max_tokens": 4} | options
    return post(f"{base_url}/chat/completions", key, body)
  said = lambda a: ("assistant", a["choices"][0]["message"]["content"])
  name = problem.text
  if name in ("exits", "kills"): chat(("user", "a"))
  if name == "exits": os._exit(1)
  if name == "kills": os.kill(os.getppid(), 9)  # its worker
  if name == "turns":
    messages = [("user", "a")]
    for text in "bcd":
      messages += [said(chat(*messages)), ("user", text)]
    return 3.0
  if name == "branch":
    first = chat(("user", "a"))
    chat(("user", "other"))
    chat(("user", "a"), said(first), ("user", "more"))
    return 2.0
  if name == "together":
    more = ("user", "a"), said(chat(("user", "a"))), ("user", "b")
    with futures.ThreadPoolExecutor(2) as both:
      list(both.map(lambda _: chat(*more), range(2)))
    return 1.0
  if name == "beyond":
    answers = [chat(("user", text)) for text in ("ab", "cd", "ef")]
    return float(answers[2]["error"]["code"] == "max_sequences")
  if name == "flood":
    codes = [chat(("user", "a"))["status"] for _ in range(30)
             if "status" in (chat(("user", "a")))]
    return float(len(codes))
  if name == "long":
    a = chat(("user", "x" * 20), max_tokens=99)
    b = chat(("user", "x" * 40))
    return float(len(a["choices"][0]["token_ids"])
                 + 100 * (b["error"]["code"] == "context_length_exceeded"))
  if name == "grow":
    first = chat(("user", "a"))
    more = ("user", "a"), said(first), ("user", "b" * 20)
    second = chat(*more, max_tokens=99)
    third = chat(*more, said(second), ("user", "c"))
    return float(third["error"]["code"] == "context_length_exceeded")
  if name in ("ids", "lie"):
    a = chat(("user", "a"))
    ids = a["prompt_token_ids"] + a["choices"][0]["token_ids"]
    if name == "lie": ids[-1] = (ids[-1] + 1) % 256
    body = {"model": model, "prompt": ids + [65], "max_tokens": 3}
    post(f"{base_url}/completions", api_key, body)
    return 1.0
  if name == "garbage":
    for body in (b"", b"{", b"\\xff" * 99, b"[]", b'{"messages": 3}'):
      answer = post(f"{base_url}/chat/completions", api_key, body)
      assert answer["status"] == 400
    chat(("user", "a"))
    return 1.0
  if name == "thief":
    assert chat(("user", "a"), key="x")["status"] == 401
    chat(("user", "a"))
    return 1.0
  if name == "hang": time.sleep(60)
  if name == "raise": raise ValueError("broken agent")
  if name == "nan": return float("nan") * bool(chat(("user", "a")))
  if name == "leaves":
    def go_on():
      while True:
        chat(("user", "a"), max_tokens=1)
    threading.Thread(target=go_on, daemon=True).start()
    chat(("user", "a"))
    return 1.0
  if name == "forge":  # writes to the pipe of the worker's results
    chat(("user", "a"))
    for fd in range(3, 40):
      with contextlib.suppress(OSError):
        os.write(fd, b"[0, NaN, null]\\n[1, 1e99, null]\\n")
  if name == "never": return 1.0
  chat(("user", "a"))
  return 1.0

async def slow(problem, *, base_url, api_key, model):
  import asyncio
  await asyncio.sleep(0.5)
  return play(problem, base_url=base_url, api_key=api_key, model=model)

def wrong(problem):
  return 1.0

def given(problem, *, base_url, api_key, model, reward):
  return reward
"""
BYTES = tokenizers.load("bytes")
CFG = model.variant(
  "tiny",
  vocab_size=260,
  num_layers=1,
  num_experts=0,
  experts_per_token=0,
  dtype="float32",
)
G, S, R = 2, 8, 30
CONFIG = SamplerConfig(G, R, stop_ids=BYTES.stop_ids, pad_id=BYTES.pad_id)
LIMITS = SequenceLimits(turns=6, sequences=2, width=S, longest=R)


pytestmark = pytest.mark.usefixtures("one_device")


@functools.cache
def policy():
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), CFG)
  batching = ContinuousBatchingConfig(8, 4, prefill_chunk=40, segment_steps=4)
  return continuous_sampler.build(CFG, CONFIG, batching, S), params


@pytest.fixture(scope="module")
def pool(user_module):
  spec = "openai:an_agent.play"
  with agents.AgentPool(spec, BYTES, CONFIG, workers=1, seconds=60) as pool:
    yield pool


def play(pool, *names, key=0):
  """The scored samples, and each episode's sequences as (ids, turns, logps)."""
  config = prompt_batch.PromptConfig(BYTES, S)
  sample = agents.Agents(pool, LIMITS, config, None)
  problems = [Problem(name, "", "") for name in names]
  batch = pipeline.take(problems, config, len(problems))
  scored = sample(*policy(), batch, jax.random.key(key), label="test")
  s = jax.device_get(scored.samples)
  prompts = s.prompts
  rows = []
  for row, n in enumerate(s.lengths):
    prompt = prompts.tokens[row, S - prompts.lengths[row] :].tolist()
    ids = [*prompt, *s.tokens[row, :n].tolist()]
    turns = [*[0] * len(prompt), *s.turns[row, :n].tolist()]
    logps = [*[0.0] * len(prompt), *s.logps[row, :n].tolist()]
    rows.append((ids, turns, logps) if n else None)
  K = LIMITS.sequences
  episodes = [rows[b : b + K] for b in range(0, len(rows), K)]
  return scored, episodes


def calls(row):
  """The lengths of a sequence's runs, (turn, tokens), behind its prompt."""
  _, turns, _ = row
  runs, first = [], turns.index(max(turns[:1], default=0))
  for turn in turns[first:]:
    if runs and runs[-1][0] == turn:
      runs[-1][1] += 1
    else:
      runs.append([turn, 1])
  return [turn for turn, _ in runs]


def test_calls_that_go_on_are_one_sequence_and_others_branches(pool):
  scored, episodes = play(pool, "turns", "branch", "one")
  rewards = scored.rewards.result()
  assert rewards.total.tolist() == [[3, 3], [2, 2], [1, 1]]
  assert not rewards.failed.any()
  for first, second in episodes[:2]:
    assert calls(first) == [0, 1, 0, 2, 0, 3]
    assert second is None
  for first, second in episodes[2:4]:
    assert calls(first) == [0, 1, 0, 3]  # a call about other words between
    assert calls(second) == [0, 2]
  assert scored.conversation["turns"].tolist() == [3, 3, 3, 3, 1, 1]
  assert int(scored.samples.num_sampled) == sum(
    turn > 0 for rows in episodes for row in rows if row for turn in row[1]
  )


def test_recorded_ids_and_logps_are_those_of_the_policy(pool):
  """What was read is the template's; what was sampled has the pass's logps."""
  _, episodes = play(pool, "turns", "branch", key=1)
  rows = [row for rows in episodes for row in rows if row]
  width = max(len(ids) for ids, *_ in rows)
  pad = lambda values: [*values, *[0] * (width - len(values))]
  ids, turns, logps = (
    np.array([*map(pad, x)]) for x in zip(*rows, strict=True)
  )
  mask = np.array([pad([1] * len(ids)) for ids, *_ in rows]) > 0
  positions = np.broadcast_to(np.arange(width), ids.shape)
  forced = jax.jit(token_logprobs, static_argnames=("cfg", "response_length"))(
    policy()[1], CFG, ids, positions, mask, response_length=width - 1
  ).logps
  sampled = turns > 0
  np.testing.assert_allclose(
    logps[sampled], np.asarray(forced)[sampled[:, 1:]], atol=1e-4
  )
  assert not logps[~sampled].any()
  assert len({*map(tuple, ids.tolist())}) == len(rows) > 5
  first = episodes[0][0][0]
  assert BYTES.decode(first[:1]) == "a"


def test_ids_go_on_and_changed_ids_are_a_branch(pool):
  _, episodes = play(pool, "ids", "lie")
  for first, second in episodes[:2]:
    assert calls(first) == [0, 1, 0, 2]
    assert second is None
  for first, second in episodes[2:]:
    assert (calls(first), calls(second)) == ([0, 1], [0, 2])


def test_of_two_calls_at_once_one_goes_on_and_one_is_a_branch(pool):
  _, episodes = play(pool, "together")
  for first, second in episodes:
    assert [calls(first), calls(second)] in (
      [[0, 1, 0, 2], [0, 3]],
      [[0, 1, 0, 3], [0, 2]],
    )
    assert len(second[0]) > second[1].index(max(second[1])) > 4


def test_no_clock_runs_while_the_policy_compiles(pool, monkeypatch):
  done, warm_up, start = [], engine.Engine.warm_up, pool.play
  monkeypatch.setattr(pool, "warm", set())
  monkeypatch.setattr(
    engine.Engine, "warm_up", lambda e: (warm_up(e), done.append("warm"))
  )
  monkeypatch.setattr(
    pool, "play", lambda *args: (done.append("play"), start(*args))[1]
  )
  for names in ("branch", "branch", ("branch", "branch")):
    play(pool, *([names] if isinstance(names, str) else names))
  assert done == ["warm", "play", "play", "warm", "play"]


def test_a_call_goes_on_with_the_longest_sequence_that_is_free():
  limits = SequenceLimits(turns=9, sequences=2, width=8, longest=64)
  episode = agents.Episode(None, BYTES, limits, number=5, size=7)

  def answer(generation, *tokens):
    generation.add([*tokens], [0.0] * len(tokens), "stop")
    completion = types.SimpleNamespace(messages=[])
    episode.ended(types.SimpleNamespace(generation=generation, call=completion))

  begun = [engine.Generation(prompt, 9) for prompt in ([1], [1])]
  later = [engine.Generation(ids, 9) for ids in ([1, 2, 3, 4], [1, 2, 3, 5])]
  for calls_at_once, tokens in ((begun, [(2,), (2, 3)]), (later, [(6,), (7,)])):
    for generation in calls_at_once:
      episode.started(generation)
    for generation, ids in zip(calls_at_once, tokens, strict=True):
      answer(generation, *ids)
  assert [g.row for g in (*begun, *later)] == [10, 11, 11, 10]
  assert [g.response for g in begun] == [5, 5 + 7]  # the numbers of its keys
  assert [(g.num_tokens, g.num_recorded) for g in later] == [(3, 2), (3, 1)]
  short, longer = episode.end()
  assert (short.ids, short.turns) == ([1, 2, 3, 5, 7], [1, 0, 0, 4])
  assert (longer.ids, longer.turns) == ([1, 2, 3, 4, 6], [2, 2, 0, 3])


def test_a_call_of_a_lost_attempt_may_end_later():
  episode = agents.Episode(None, BYTES, LIMITS, number=0, size=1)
  episode.started(made := engine.Generation([1], 9))
  episode.end()
  episode.lose()
  episode.gave_up(made)
  assert made.cancelled
  assert not episode.end()


def test_a_call_that_begins_as_its_episode_ends_is_not_sampled():
  """It had room, so nothing has refused it."""
  episode = agents.Episode(None, BYTES, LIMITS, number=0, size=1)
  episode.end()
  episode.started(made := engine.Generation([1], 9))
  assert made.cancelled


def test_an_episode_keeps_its_limits(pool):
  scored, episodes = play(pool, "beyond", "flood", "long", "grow")
  total = scored.rewards.result().total
  assert total[0].tolist() == [1, 1]
  # Each call began a sequence: the third of the six was refused.
  assert scored.conversation["turns"][2:4].max() <= LIMITS.turns
  assert (total[1] > 0).all()
  # 20 tokens are 8 of the prompt's columns and 12 of the response's 30.
  lengths = total[2] - 100
  assert ((lengths >= 1) & (lengths <= R - 12)).all()
  for first, _ in episodes[4:6]:
    assert len(first[0]) <= S + R
  assert total[3].tolist() == [1, 1]
  for first, _ in episodes[6:]:
    assert len(first[0]) <= len("a") + R


def test_an_agent_at_fault_costs_its_episode_alone(pool):
  names = ["raise", "nan", "never", "garbage", "thief", "leaves", "one"]
  scored, episodes = play(pool, *names)
  rewards = scored.rewards.result()
  assert rewards.failed[:, 0].tolist() == [True] * 3 + [False] * 4
  assert (rewards.total[:3] == 0).all()
  assert (rewards.total[3:] == 1).all()
  assert episodes[2][0]  # what was sampled before it failed counts
  assert episodes[2 * names.index("never")] == [None, None]
  reasons = " ".join(rewards.reasons)
  assert "an_agent.play" in reasons
  play(pool, "one")  # the next rollout is as good


@pytest.mark.parametrize(
  ("name", "words"),
  [("exits", "ended or blocked"), ("kills", "ended by SIGKILL")],
)
def test_no_episode_is_played_twice_where_an_agent_ends_its_process(
  pool, name, words
):
  pool.take_restarts()
  scored, episodes = play(pool, name, "turns")
  assert pool.take_restarts() == (name == "kills")
  # Of an attempt that was lost with its process nothing is learned.
  assert episodes[:2] == [[None, None]] * 2
  assert scored.rewards.result().failed[0].all()
  assert words in " ".join(scored.rewards.result().reasons)
  for first, second in episodes:
    assert second is None
    # The end of its process may come before any of its calls.
    got = calls(first) if first else []
    assert got == [0, 1, 0, 2, 0, 3][: len(got)]
  play(pool, "one")  # the next rollout is as good


def test_a_forged_result_is_no_reward(pool):
  scored, _ = play(pool, "forge")
  rewards = scored.rewards.result()
  assert rewards.total.tolist() == [[0, 0]]
  assert "gave no reward" in rewards.reasons[0]


def test_an_agent_that_hangs_has_failed(pool):
  spec = "openai:an_agent.play"
  with agents.AgentPool(spec, BYTES, CONFIG, workers=1, seconds=1) as short:
    scored, episodes = play(short, "hang")
  rewards = scored.rewards.result()
  assert rewards.failed.all()
  assert "took over 1 s" in rewards.reasons[0]
  assert episodes == [[None, None]] * G


def test_a_function_that_is_no_agent_is_refused(pool):
  for name, words in (("wrong", "base_url"), ("absent", "absent")):
    with pytest.raises(UserError, match=words):
      agents.AgentPool(f"openai:an_agent.{name}", BYTES, CONFIG, workers=1)


def test_arguments_of_a_spec_are_keywords_of_the_function(pool):
  given = agent.named("openai:an_agent.given:reward=2.5")
  assert given(None, base_url="", api_key="", model="") == 2.5
  for arguments, words in (
    ("", "missing .*'reward'"),
    (":base_url=x", "no argument 'base_url'"),
  ):
    with pytest.raises(UserError, match=words):
      agent.named(f"openai:an_agent.given{arguments}")


def test_async_agents_play_at_once(pool):
  spec = "openai:an_agent.slow"
  with agents.AgentPool(spec, BYTES, CONFIG, workers=1, seconds=60) as slow:
    scored, _ = play(slow, *["one"] * 8)
  assert (scored.rewards.result().total == 1).all()
