"""The adapter against the rollout of the `verifiers` package itself."""

import asyncio
import json
import pickle
import sys

import pytest

from gspo_jax.rollout import environment
from gspo_jax.rollout.environment import Question
from gspo_jax.rollout.environments.verifiers import Verifiers, _load
from gspo_jax.runtime.errors import UserError

MODULE = """
import verifiers as vf
from datasets import Dataset

class Guess(vf.MultiTurnEnv):
  async def setup_state(self, state):
    state["tries"] = 0
    return state

  async def env_response(self, messages, state, **kwargs):
    state["tries"] += 1
    said, answer = messages[-1].content, state["answer"]
    if said == answer:
      state["final_env_response"] = [vf.UserMessage(content="right")]
      return state["final_env_response"]
    hint = "higher" if said < answer else "lower"
    return [vf.UserMessage(content=f"{len(messages)} {hint}")]

async def score(prompt, completion, answer, state):
  said = [m.content for m in completion if m.role == "assistant"]
  return float(answer in said) - 0.1 * state["tries"] + 0.01 * len(prompt)

def tool(x: int) -> int:
  "Adds one."
  return x + 1

def load_environment():
  rows = [{"question": f"{i}?", "answer": str(i)} for i in range(9)]
  kwargs = dict(dataset=Dataset.from_list(rows), system_prompt="Guess.")
  kwargs["rubric"] = vf.Rubric(funcs=[score])
  if __name__ == "tools":
    return vf.ToolEnv(tools=[tool], **kwargs)
  if __name__ == "single":
    return vf.SingleTurnEnv(**kwargs | {"rubric": vf.Rubric(funcs=[exact])})
  return Guess(max_turns=4, **kwargs)

async def exact(completion, answer):
  return float(completion[-1].content == answer)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
  """The package, and environments `guess`, `single` and `tools`."""
  pytest.importorskip("verifiers.envs", reason="needs the extra verifiers")
  import verifiers as found

  for name in ("guess", "single", "tools"):
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, name, raising=False)
  monkeypatch.syspath_prepend(tmp_path)
  _load.cache_clear()
  return found


def of_the_package(vf, name, row, script):
  """The conversation of the package's own rollout, and its reward."""
  from verifiers.types import ClientConfig, Response, ResponseMessage

  env, responses = vf.load_environment(name), iter(script)

  async def get_model_response(state, prompt, **kwargs):
    message = ResponseMessage(
      content=next(responses), finish_reason="stop", is_truncated=False
    )
    return Response(id="0", created=0, model="policy", message=message)

  env.get_model_response = get_model_response
  state = asyncio.run(env._run_rollout_state(row, ClientConfig(), "policy", {}))
  whole = [*state["prompt"], *state["completion"]]
  return [(m.role, m.content) for m in whole], state["reward"]


def of_the_adapter(name, row, script):
  """The same by the adapter, pickled between two calls."""
  game = Verifiers(name=name)
  whole = [*game.reset(Question("", "", {"row": row}), 0)]
  for said in script:
    game = pickle.loads(pickle.dumps(game))
    step = asyncio.run(game.step(said))
    whole += [("assistant", said), *step.messages]
    if step.done:
      break
  return whole, step.reward


@pytest.mark.parametrize(
  ("name", "script"),
  [("guess", "513"), ("guess", "3"), ("guess", "11111"), ("single", "3"),
   ("single", "4")],
)  # fmt: skip
def test_a_conversation_is_that_of_the_package(package, name, script):
  """Prompt, replies, end and reward; not the last reply, which no one reads."""
  row = dict(package.load_environment(name).get_dataset()[3])
  row = json.loads(json.dumps(row))  # as the file of problems has it
  expected, reward = of_the_package(package, name, row, script)
  if expected[-1] == ("user", "right"):
    expected.pop()
  assert of_the_adapter(name, row, script) == (expected, pytest.approx(reward))


def test_what_the_adapter_cannot_run_is_named(package):
  with pytest.raises(UserError, match="name=tools: it has 1 tools"):
    Verifiers.prepare(name="tools")
  with pytest.raises(UserError, match="name=nothing:"):
    Verifiers.prepare(name="nothing")
  with pytest.raises(ValueError, match="column `row`"):
    Verifiers(name="guess").reset(Question("3?", "3"), 0)


def test_without_the_package_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "verifiers", None)
  _load.cache_clear()
  made = environment.named("verifiers:name=guess")
  with pytest.raises(UserError, match=r"pip install -e '\.\[verifiers\]'"):
    made.func.prepare(**made.keywords)
