"""Tasksets of `verifiers` 0.4 play against scripted answers."""

import pytest
from scripted import Scripted, make_tokenizer

from gspo_jax.data.problem import Problem
from gspo_jax.rollout.episode import SequenceLimits
from gspo_jax.sampler.samples import SamplerConfig

agents = pytest.importorskip("gspo_jax.rollout.agents")
pytest.importorskip("verifiers.v1", reason="needs the extra verifiers-agent")

MODULE_NAME = "sums"
MODULE = """
import openai
import verifiers.v1 as v1

class Data(v1.TaskData):
  answer: str

class Sum(v1.Task[Data]):
  @v1.reward
  async def right(self, trace) -> float:
    return float(trace.last_reply == self.data.answer) + trace.num_turns / 10

class Sums(v1.Taskset[Sum]):
  def load(self):
    for i in range(9):
      data = Data(prompt=f"{i}+{i}?", system_prompt="Add.", answer=str(2 * i))
      yield Sum(data, self.config.task)

class Twice(v1.Harness[v1.HarnessConfig]):
  APPENDS_SYSTEM_PROMPT = True
  NEEDS_CONTAINER = EXECUTES_CODE = False

  async def launch(
    self, ctx, trace, runtime, endpoint, secret, mcp_urls, data
  ):
    client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
    messages = [{"role": "system", "content": data.system_prompt}]
    for text in (data.prompt, "sure?"):
      messages.append({"role": "user", "content": text})
      answer = await client.chat.completions.create(
        model=ctx.model, messages=messages)
      messages.append(answer.choices[0].message.model_dump())
    return v1.ProgramResult(0, "", "")

__all__ = ["Sums", "Twice"]
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def pool(user_module, tokenizer):
  spec = "openai:verifiers:name=sums,harness=sums,max_turns=2"
  config = SamplerConfig(stop_ids=tokenizer.stop_ids)
  with agents.AgentPool(spec, tokenizer, config, workers=1, seconds=60) as pool:
    yield pool


def play(pool, tokenizer, texts, row, turns=2):
  """The result of an episode, and its sequences."""
  engine = Scripted(tokenizer)
  engine.texts = texts
  limits = SequenceLimits(turns, sequences=2, width=100, longest=200)
  episode = agents.Episode(engine, tokenizer, limits, number=0, size=1)
  key = pool.endpoint.admit(episode)
  problem = Problem("", "", "", {"row": row})
  (result,) = pool.play([(problem, 0, key)], lambda: None).wait()
  pool.endpoint.dismiss(key)
  return result, episode.end()


def rows():
  import sums
  from verifiers.v1 import TasksetConfig

  tasks = sums.Sums(TasksetConfig(id="sums"))
  return [task.data.model_dump(mode="json") for task in tasks]


def test_an_episode_has_the_reward_of_its_task(pool, tokenizer):
  for last, reward in (("6", 1.2), ("7", 0.2)):
    result, (sequence,) = play(pool, tokenizer, ["5", last], rows()[3])
    assert result.failure is None
    assert result.value == pytest.approx(reward)
    text = tokenizer.decode(sequence.ids)
    assert "Add." in text
    assert text.index("3+3?") < text.index("sure?")
    assert text.endswith(f"{last}<|im_end|>")
    assert {*sequence.turns} == {0, 1, 2}


def test_an_episode_that_cannot_be_played_fails(pool, tokenizer):
  result, (sequence,) = play(pool, tokenizer, ["5"], rows()[3], turns=1)
  assert "rollout.max_turns" in result.failure
  assert {*sequence.turns} == {1}
  for row, words in ((None, "column `row`"), ({"prompt": ""}, "answer")):
    result, sequences = play(pool, tokenizer, [], row)
    assert words in result.failure
    assert not sequences
