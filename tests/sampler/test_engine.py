"""An engine gives each request what one call of the sampler gives."""

import dataclasses
import functools
import itertools
import threading

import continuous_sampler
import jax
import numpy as np
import pytest
import random_model
from families import FAMILIES

from gspo_jax import model, sampler
from gspo_jax.learner import train_batch
from gspo_jax.runtime.errors import UserError
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.continuous.engine import Engine, Generation
from gspo_jax.sampler.samples import (
  STOPPED,
  Prompts,
  SamplerConfig,
  SamplingParams,
)

CFG = model.variant("tiny", vocab_size=32, num_layers=1, dtype="float32")
GREEDY = SamplerConfig(1, 24, stop_ids=(3, 5), temperature=0, pad_id=7)
SMALL = ContinuousBatchingConfig(
  slots=4, page_size=4, segment_steps=3, prefill_chunk=8
)
S = 16  # a prompt has 17 tokens, and with its response 40
PROMPTS = [[*range(6, 6 + n)] for n in (1, 4, 9, 13, 2, 17, 8, 5)]


@functools.cache
def weights(cfg=CFG):
  if cfg != CFG:
    return random_model.weights(cfg)
  return jax.jit(model.init, static_argnums=1)(jax.random.key(0), CFG)


@functools.cache
def built(config=GREEDY, devices=1, batching=SMALL, cfg=CFG, by_row=False):
  axes = {"data": 2} if devices > 1 else {}
  return continuous_sampler.build(
    cfg, config, batching, S, devices=devices, by_row=by_row, **axes
  )


def opened(devices=1):
  generate = built(devices=devices)
  return generate.open(weights(), jax.random.key(1), SMALL.slots)


static = jax.jit(sampler.generate, static_argnums=1, static_argnames="sampler")


@functools.cache
def expected():
  """The greedy responses of the static sampler."""
  tokens = np.zeros((len(PROMPTS), 17), np.int32)
  for row, prompt in zip(tokens, PROMPTS, strict=True):
    row[17 - len(prompt) :] = prompt
  lengths = np.array([len(p) for p in PROMPTS], np.int32)
  prompts = Prompts(tokens, lengths)
  s = static(weights(), CFG, prompts, jax.random.key(0), sampler=GREEDY)
  s = jax.device_get(s)
  return [
    (row[:n].tolist(), logps[:n])
    for row, logps, n in zip(s.tokens, s.logps, s.lengths, strict=True)
  ]


def ask(open_engine, prompt, count=None):
  most = open_engine.most_new_tokens(len(prompt))
  made = Generation(prompt, count or most, logprobs=True)
  return open_engine.submit(made)


def step(open_engine):
  """Decodes a segment."""
  open_engine._step(lambda: False)


def run(open_engine, *generations):
  open_engine.run(lambda: all(g.finish for g in generations))


@pytest.mark.parametrize("devices", [1, 2])
def test_more_requests_than_rows_get_the_samplers_responses(devices):
  with opened(devices=devices) as e:
    made = [ask(e, prompt) for prompt in PROMPTS]
    run(e, *made)
  for g, (tokens, logps) in zip(made, expected(), strict=True):
    assert g.tokens == tokens
    np.testing.assert_allclose(g.logps, logps, atol=1e-4)
    assert g.finish == ("stop" if tokens[-1] in GREEDY.stop_ids else "length")


@pytest.mark.parametrize(
  "devices", [pytest.param(1, marks=pytest.mark.slow), 2]
)
def test_a_warm_engine_compiles_nothing_for_requests(devices):
  batching = dataclasses.replace(SMALL, slots=16 * devices)
  generate = continuous_sampler.build(
    CFG,
    GREEDY,
    batching,
    S,
    devices=devices,
    **{"data": 2} if devices > 1 else {},
  )
  count = lambda: [f.num_programs for f in vars(generate.jitted).values()]
  with generate.open(weights(), jax.random.key(1), batching.slots) as e:
    e.warm_up()
    before = count()
    for prompts in (PROMPTS[:1], PROMPTS * 2 * devices, PROMPTS[1:3]):
      made = [ask(e, prompt) for prompt in prompts]
      run(e, *made)
      assert len(made[0].tokens) > 1
    # None of them begins as an earlier one.
    for n, number in ((17, 1), (30, 1), (38, 1), (16, 4 * devices), (30, 4)):
      ids = [[20 + i, n % 32, *[i] * (n - 2)] for i in range(number)]
      run(e, *(e.submit(Generation(prompt, 1)) for prompt in ids))
  assert count() == before


# test_next_token.py has others.
SAMPLING = [
  None,
  SamplingParams(0.0),
  SamplingParams(1.5, top_k=9, top_p=0.8, min_p=0.02),
  None,
  SamplingParams(1.2, top_p=0.6),
]
BY_ROW = dataclasses.replace(
  GREEDY, temperature=0.9, kept_ids=0, min_new_tokens=3
)


@pytest.mark.parametrize("devices", [1, 2])
def test_each_request_is_sampled_with_its_params(devices):
  """As `generate` samples with these, whatever the others in the slots have."""
  generate, key = built(BY_ROW, devices, by_row=True), jax.random.key(1)
  with generate.open(weights(), key, SMALL.slots) as e:
    made = []
    for prompt, params in zip(PROMPTS[:5], SAMPLING, strict=True):
      made.append(Generation(prompt[:S], 20, params=params, logprobs=True))
      e.submit(made[-1])
    run(e, *made)
  for g, params in zip(made, SAMPLING, strict=True):
    own = dataclasses.replace(BY_ROW, max_new_tokens=20)
    if params:
      own = dataclasses.replace(own, **params._asdict())
    # The row of `generate` is the number of the request.
    tokens = np.tile(np.int32(g.prompt), (1 + g.response, 1))
    lengths = np.full(len(tokens), len(g.prompt), np.int32)
    s = static(weights(), CFG, Prompts(tokens, lengths), key, sampler=own)
    n = int(s.lengths[g.response])
    assert g.tokens == s.tokens[g.response, :n].tolist()
    np.testing.assert_allclose(g.logps, s.logps[g.response, :n], atol=1e-4)


def test_a_seed_repeats_a_response():
  generate = built(BY_ROW, by_row=True)
  with generate.open(weights(), jax.random.key(1), SMALL.slots) as e:
    made = []
    for seed in (5, None, 6, 5, None, 5 + 2**40):
      made.append(Generation(PROMPTS[2], 20))
      made[-1].seed = seed
      e.submit(made[-1])
    run(e, *made)
  first, *others, large = [g.tokens for g in made]
  assert [tokens == first for tokens in others] == [False, False, True, False]
  assert large == first


def prefilled(monkeypatch):
  """Counts the tokens that engines prefill from now on."""
  count, queue = [0], Engine._prefill_queue

  def counted(self, *args):
    made = queue(self, *args)
    for prefill, tokens, *_ in itertools.chain(*made.values()):
      count[0] += len(tokens) - prefill.num_cached
    return made

  monkeypatch.setattr(Engine, "_prefill_queue", counted)
  return count


@pytest.mark.parametrize("devices", [1, 2])
def test_the_next_call_of_an_agent_prefills_only_what_is_new(
  devices, monkeypatch
):
  with opened(devices=devices) as e:
    first = ask(e, PROMPTS[3], 4)
    run(e, first)
    # Other requests come and go between the calls.
    run(e, *(ask(e, prompt, 3) for prompt in PROMPTS[:3]))
    count = prefilled(monkeypatch)
    prompt = [*first.prompt, *first.tokens, 9, 10]
    second = ask(e, prompt)
    run(e, second)
    assert count[0] == 2  # the last sampled token, and 9; 10 is fed
  with opened() as other:
    alone = ask(other, prompt)
    run(other, alone)
  assert (second.tokens, second.finish) == (alone.tokens, alone.finish)
  np.testing.assert_allclose(second.logps, alone.logps, atol=1e-4)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_group_prefills_its_prompt_once(devices, monkeypatch):
  prompt = PROMPTS[5]
  with opened(devices=devices) as e:
    count = prefilled(monkeypatch)
    made = [
      ask(e, prompt),
      ask(e, PROMPTS[0]),
      *(ask(e, prompt) for _ in "abc"),
    ]
    run(e, *made)
  assert count[0] == devices * (len(prompt) - 1)  # each has its pages
  assert [g.tokens for g in made] == [expected()[i][0] for i in (5, 0, 5, 5, 5)]


def test_a_cancelled_request_ends_and_the_others_go_on():
  with opened() as e:
    made = [ask(e, prompt) for prompt in PROMPTS]
    step(e)
    longest = max(made[:4], key=lambda g: not g.finish)
    longest.cancelled = made[7].cancelled = True
    sampled = len(longest.tokens)
    run(e, *made)
    assert (longest.finish, made[7].finish) == ("abort", "abort")
    assert len(longest.tokens) == sampled
    assert not made[7].tokens
  for g, (tokens, _) in zip(made, expected(), strict=True):
    assert g.finish == "abort" or g.tokens == tokens


def test_a_cancelled_requests_row_may_have_the_next_one():
  with opened() as e:
    first, second = (Generation(PROMPTS[i], 24) for i in (3, 4))
    first.row = second.row = 2
    e.submit(first)
    step(e)
    first.cancelled = True
    e.submit(second)
    run(e, first, second)
  assert (first.finish, first.tokens) == ("abort", [])
  assert second.tokens == expected()[4][0]


def test_a_run_ends_with_its_condition_whatever_is_open():
  with opened() as e:
    made = [ask(e, prompt) for prompt in PROMPTS]
    e.run(lambda: True)
  assert {g.finish for g in made} == {"abort"}


def test_a_thread_is_told_of_each_segment_and_of_the_end():
  seen = []
  with opened() as e:
    told = lambda: seen.append(g.progress)
    g = Generation(PROMPTS[6], 12, told, streams=True)
    thread = threading.Timer(0.1, lambda: e.submit(g))
    thread.start()
    e.run(lambda: bool(g.finish))
    thread.join()
    waiting = ask(e, [9])
  assert seen == [(3, ""), (6, ""), (9, ""), (12, "length")]
  assert waiting.finish == "abort"  # the engine was closed


@pytest.mark.parametrize("devices", [1, 2])
def test_while_a_request_goes_by_token_a_segment_has_one_step(devices):
  seen = []
  with opened(devices=devices) as e:
    told = lambda: seen.append(g.progress)
    g = Generation(PROMPTS[3], 4, told, streams=True)
    g.by_token = True
    others = [ask(e, PROMPTS[2]) for _ in range(2)]
    run(e, e.submit(g), *others)
  assert seen == [(1, ""), (2, ""), (3, ""), (4, "length")]
  assert [o.tokens for o in others] == [expected()[2][0]] * 2


@pytest.mark.parametrize(
  ("prompt", "count", "words"),
  [([], 1, "prompt of 0 tokens"), ([99], 1, "ids from 0 to 31"),
   ([-1], 1, "ids from 0 to 31"), ([9] * 40, 1, "expected 1 to 0"),
   ([9], 25, "expected 1 to 24"), ([9] * 30, 11, "expected 1 to 10")],
)  # fmt: skip
def test_a_request_without_room_is_refused(prompt, count, words):
  with opened() as e, pytest.raises(UserError, match=words):
    ask(e, prompt, count)


# Episodes of several turns: sequences that own rows.

K, TURNS = 2, 3
ROUTED = SamplerConfig(
  *(2, 24),
  **{"stop_ids": (3, 5, 11), "temperature": 0.9, "top_k": 9, "head_ids": 3},
  record_routing=True,
)
FEW = dataclasses.replace(SMALL, num_pages=14)
DRAFTS = dataclasses.replace(SMALL, slots=16, speculation=2)


@functools.cache
def play(batching, devices=1, cfg=CFG, *, order=0, episodes=4):
  """Episodes of three turns and of one; `order` seeds when requests come."""
  config = dataclasses.replace(ROUTED, speculation=batching.speculation)
  generate = built(config, devices, batching, cfg)
  rng = np.random.default_rng(order)
  ids = {row: [*PROMPTS[row % 8]] for row in range(episodes * K)}
  first = {row: min(len(x), S) for row, x in ids.items()}
  sampled = {row: [0] * (len(x) - first[row]) for row, x in ids.items()}
  left = {row: TURNS if row % K == 0 else 1 for row in ids}
  running, fed = {}, dict.fromkeys(ids, 0)
  with generate.open(weights(cfg), jax.random.key(3), episodes * K) as e:

    def advance():
      for row, g in [*running.items()]:
        if g.finish:
          del running[row]
          left[row] -= g.finish == "stop" or left[row]
          ids[row] += g.tokens
          sampled[row] += [1] * len(g.tokens)
          fed[row] = len(ids[row]) - 1
          if len(sampled[row]) + 2 >= config.max_new_tokens:
            left[row] = 0
          if left[row]:
            ids[row] += [20 + row, 21]
            sampled[row] += [0, 0]
      ready = [row for row in ids if left[row] and row not in running]
      for row in rng.permutation(ready)[: rng.integers(0, 9)].tolist():
        number = len(ids[row]) - first[row]
        g = Generation(ids[row], config.max_new_tokens - number)
        g.row, g.response = row, row // K + row % K * episodes
        g.num_tokens, g.num_recorded = number, fed[row]
        running[row] = e.submit(g)
      return not any(left.values())

    e.run(advance)
    rows = [*ids]
    R = config.max_new_tokens
    pad = lambda values: np.array([[*x, *[0] * R][:R] for x in values])
    samples = e.finish_episodes(
      rows,
      tokens=pad([ids[r][first[r] :] for r in rows]).astype(np.int32),
      turns=pad([sampled[r] for r in rows]).astype(np.int16),
      lengths=np.array([len(sampled[r]) for r in rows], np.int32),
      finish=np.full(len(rows), STOPPED, np.int8),
      prompts=Prompts(
        np.array([[*[0] * S, *ids[r][: first[r]]][-S:] for r in rows]),
        np.array([first[r] for r in rows], np.int32),
      ),
    )
  return jax.device_get(samples)


@functools.cache
def forced(cfg, replay):
  logps = functools.partial(
    train_batch.response_logps,
    cfg=cfg,
    temperature=ROUTED.temperature,
    replay=replay,
  )
  return jax.jit(logps)


@pytest.mark.parametrize(
  ("batching", "devices", "family"),
  [(SMALL, 1, ""), (FEW, 1, ""), (DRAFTS, 1, ""), (SMALL, 2, ""),
   (SMALL, 1, "deepseek-v3"), (SMALL, 1, "qwen3.5")],
  ids=["pages", "few pages", "drafts", "devices", "latents", "states"],
)  # fmt: skip
def test_episodes_have_the_log_probs_and_experts_of_a_forward_pass(
  batching, devices, family
):
  """Behind what they read, whatever the order in which their requests come."""
  cfg = CFG
  if family:
    small = {"vocab_size": 32, "num_layers": 2}
    cfg = dataclasses.replace(FAMILIES[family], **small)
  s = play(batching, devices, cfg)
  sampled = s.turns > 0
  assert sampled.any(1).all()
  assert (~sampled[:, 1:] & sampled[:, :1] & (s.tokens[:, 1:] > 0)).any()
  batch = train_batch.unpacked(s.prompts, s.tokens, s.lengths)
  batch = dataclasses.replace(batch, kept_ids=s.kept_ids)
  column = np.arange(S + ROUTED.max_new_tokens)
  fed = column >= S - s.prompts.lengths[:, None]
  fed &= column < (S + s.lengths - 1)[:, None]
  for replay in (False, True):
    routes = s.experts.swapaxes(0, 1)
    logps = forced(cfg, replay)
    out = jax.device_get(
      logps(weights(cfg), batch=batch, routes=routes, head_ids=s.head_ids)
    )
    np.testing.assert_allclose(s.logps[sampled], out.logps[sampled], atol=2e-5)
    head = lambda x: x.head_logps.swapaxes(1, 2)[sampled]
    np.testing.assert_allclose(head(s), head(out), atol=2e-5)
    if not replay:
      experts = out.experts.transpose(1, 2, 0, 3)
      found = np.sort(s.experts.swapaxes(1, 2)[fed])
      np.testing.assert_array_equal(found, np.sort(experts[fed]))
  other = play(SMALL, cfg=cfg, order=1)
  np.testing.assert_array_equal(other.tokens, s.tokens)
  np.testing.assert_array_equal(other.turns, s.turns)
  np.testing.assert_allclose(other.logps, s.logps, atol=2e-5)
