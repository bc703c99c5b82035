"""A framework for agents plays against the endpoint; answers are scripted."""

import re

import pytest
from repository import ROOT
from scripted import Scripted, make_tokenizer

from gspo_jax.data.problem import Problem
from gspo_jax.rollout.episode import SequenceLimits
from gspo_jax.sampler.samples import SamplerConfig

agents = pytest.importorskip("gspo_jax.rollout.agents")
CALL = (
  '<tool_call>{"name": "height", "arguments": {"mountain": "Zugspitze"}}'
  "</tool_call>"
)


@pytest.mark.slow
def test_the_example_runs_its_tool_and_is_one_sequence(tmp_path, monkeypatch):
  pytest.importorskip("agents", reason="needs the package openai-agents")
  page = (ROOT / "docs/agents.md").read_text()
  example = re.search("(?s)```python\n(import agents\n.*?)```", page)[1]
  (tmp_path / "guide.py").write_text(example)
  monkeypatch.syspath_prepend(tmp_path)
  tokenizer = make_tokenizer(tmp_path / "tokenizer")
  engine = Scripted(tokenizer, context=2000)
  engine.most = 200
  engine.texts = [f"I look. {CALL}", "2962"]
  limits = SequenceLimits(turns=4, sequences=2, width=1000, longest=1000)
  episode = agents.Episode(engine, tokenizer, limits, number=0, size=1)
  config = SamplerConfig(stop_ids=tokenizer.stop_ids)
  spec = "openai:guide.play"
  with agents.AgentPool(
    spec, tokenizer, config, workers=1, seconds=100
  ) as pool:
    key = pool.endpoint.admit(episode)
    problem = Problem("Height of the Zugspitze?", "2962", "")
    (result,) = pool.play([(problem, 0, key)], lambda: None).wait()
  assert (result.value, result.failure) == (1.0, None)
  assert episode.tool_calls == 1
  assert "Answer by a number." in tokenizer.decode(engine.made[0].prompt)
  (sequence,) = episode.end()
  first, second = engine.made
  begin = [*first.prompt, *first.tokens]
  assert second.prompt[: len(begin)] == begin
  read = tokenizer.decode(second.prompt[len(begin) :])
  assert read == "\n<|im_start|>tool\n2962<|im_end|>\n<|im_start|>assistant\n"
  assert sequence.ids == [*second.prompt, *second.tokens]
