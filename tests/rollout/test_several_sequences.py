"""Conversations that do not wait, of one or of several sequences."""

import functools

import continuous_sampler
import jax
import numpy as np
import pytest

from gspo_jax import model
from gspo_jax.data import pipeline, prompt_batch, tokenizers
from gspo_jax.data.problem import Problem
from gspo_jax.logprobs import token_logprobs
from gspo_jax.rollout.conversations import Conversations
from gspo_jax.rollout.environment_pool import EnvironmentPool
from gspo_jax.rollout.episode import SequenceLimits
from gspo_jax.sampler.continuous.config import ContinuousBatchingConfig
from gspo_jax.sampler.samples import STOPPED, TRUNCATED, SamplerConfig

MODULE_NAME = "asking_game"
MODULE = """
import pathlib
import time

ENDED = pathlib.Path(__file__).with_name("ended")

class Asks:
  def reset(self, problem, seed):
    self.count, self.text = 0, problem.text
    if self.text == "waits": ENDED.unlink(missing_ok=True)
  def step(self, response):
    self.count += 1
    if self.text == "waits":
      while not ENDED.exists(): time.sleep(0.01)
    if self.text == "ends" and self.count == 3: ENDED.touch()
    return [("user", f"and {self.count}?")], self.count == 3, 0.5
"""
CFG = model.variant(
  "tiny",
  vocab_size=258,
  num_layers=1,
  num_experts=0,
  experts_per_token=0,
  dtype="float32",
)
G, S, R = 2, 24, 64
STOP_IDS = tuple(range(128, 258))  # so that responses are short, and ASCII


class Template(type(tokenizers.load("bytes"))):
  """Each message in brackets; rewrites earlier responses, or keeps them."""

  tool_format = "hermes"  # of a tokenizer with a chat template
  stop_ids = STOP_IDS

  def __init__(self, rewrites):
    self.rewrites = rewrites

  def chat(self, messages, tools=()):
    texts = [m["content"] for m in messages]
    if self.rewrites:
      is_response = [m["role"] == "assistant" for m in messages]
      pairs = zip(texts, is_response, strict=True)
      texts = ["#" + text[:2] if x else text for text, x in pairs]
    return self.encode("".join(f"[{text}]" for text in texts) + "[")

  def turn(self, messages, *, stopped):
    text = "".join(f"[{content}]" for _, content in messages)
    return self.encode("]" + text + "[")


pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def pool(user_module):
  with EnvironmentPool("asking_game.Asks", workers=4, seconds=60) as pool:
    yield pool


@functools.cache
def weights():
  return jax.jit(model.init, static_argnums=1)(jax.random.key(0), CFG)


@functools.cache
def sampler():
  config = SamplerConfig(G, R, stop_ids=STOP_IDS, pad_id=256)
  batching = ContinuousBatchingConfig(slots=4, page_size=4, prefill_chunk=16)
  return continuous_sampler.build(CFG, config, batching, S)


def converse(pool, *names, sequences=1, rewrites=False, turns=4):
  tokenizer = Template(rewrites)
  problems = [Problem(name, "ref", "") for name in names]
  config = prompt_batch.PromptConfig(tokenizer, S)
  batch = pipeline.take(problems, config, len(problems))
  limits = SequenceLimits(turns, sequences, S, R)
  play = Conversations(pool, limits, config, None)
  return play(sampler(), weights(), batch, jax.random.key(1), label="test")


def sequences_of(scored):
  """By row: the prompt, the tokens behind it, their log-probs and turns."""
  samples = jax.device_get(scored.samples)
  prompts = samples.prompts
  for row, n in enumerate(samples.lengths):
    prompt = prompts.tokens[row, S - prompts.lengths[row] :]
    yield prompt, *(x[row, :n] for x in (samples.tokens, samples.logps,
                                         samples.turns))  # fmt: skip


def test_no_conversation_waits_for_the_environment_of_another(pool):
  # The environment of the first answers once the second has ended.
  rewards = converse(pool, "waits", "ends").rewards.result()
  assert rewards.total.tolist() == [[1.5] * G] * 2, rewards.reasons


def test_a_response_is_learned_behind_what_the_policy_read(pool):
  scored = converse(pool, "a", "bc", sequences=3, rewrites=True)
  rows = [*sequences_of(scored)]
  assert len(rows) == 2 * G * 3
  ids = [np.concatenate(row[:2]) for row in rows]
  tokens_BT = np.stack([np.pad(x, (0, S + R - len(x))) for x in ids])
  columns = np.broadcast_to(np.arange(S + R), tokens_BT.shape)
  mask = columns < np.array([*map(len, ids)])[:, None]
  forced = jax.jit(token_logprobs, static_argnames=("cfg", "response_length"))(
    *(weights(), CFG, tokens_BT, columns, mask), response_length=S + R - 1
  ).logps
  for row, (prompt, _, logps, turns) in enumerate(rows):
    expected = forced[row, len(prompt) - 1 :][: len(turns)]
    sampled = turns > 0
    np.testing.assert_allclose(logps[sampled], expected[sampled], atol=1e-4)
    assert {*turns[sampled].tolist()} == {row % 3 + 1}
  # The context of a later response has the earlier ones as the template does.
  decode = Template(True).decode
  for row in range(0, len(rows), 3):
    name, history = "a" if row < 6 else "bc", ""
    for turn, (prompt, tokens, _, turns) in enumerate(rows[row : row + 3]):
      context = decode([*prompt, *tokens[turns == 0]])
      assert context == f"[{name}]{history}["
      new = tokens[turns > 0].tolist()
      said = decode(new[:-1])
      history += f"[#{said[:2]}][and {turn + 1}?]"


def test_a_template_that_keeps_turns_has_one_sequence(pool):
  scored = converse(pool, "a", sequences=2)
  rows = [*sequences_of(scored)]
  assert [len(tokens) > 0 for _, tokens, *_ in rows] == [True, False] * G
  assert [*map(max, (turns for *_, turns in rows[::2]))] == [3, 3]
  finish = np.asarray(scored.samples.finish)
  assert scored.rewards.result().total.tolist() == [[1.5, 1.5]]
  assert scored.conversation["turns"].tolist() == [3, 3]
  assert (finish == STOPPED).all()


@pytest.mark.parametrize(
  ("sequences", "turns"), [(2, 4), (3, 2)], ids=["sequences", "turns"]
)
def test_a_conversation_beyond_a_limit_is_truncated(pool, sequences, turns):
  scored = converse(pool, "a", sequences=sequences, turns=turns, rewrites=True)
  assert scored.rewards.result().total.tolist() == [[1.0, 1.0]]
  assert (np.asarray(scored.samples.finish) == TRUNCATED).all()
