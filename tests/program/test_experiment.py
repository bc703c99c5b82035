"""What identifies a run, and how it names a mistaken reward."""

import dataclasses
import json
import os
from types import SimpleNamespace

import jax
import pytest
from repository import ROOT

from gspo_jax.data import prompt_batch, sources, tokenizers
from gspo_jax.data.datasets import Datasets, Stage
from gspo_jax.data.problem import Problem
from gspo_jax.data.tokenizers.base import RewrittenTurns
from gspo_jax.evaluate import evaluator
from gspo_jax.program import experiment
from gspo_jax.program.config import parse
from gspo_jax.record.identity import flatten
from gspo_jax.record.identity import match as require_match
from gspo_jax.rollout.config import RolloutConfig
from gspo_jax.runtime import sharding
from gspo_jax.runtime.errors import UserError


def identity(keys, *, reference=None, critic=None):
  abstract = SimpleNamespace(reference=reference, critic=critic)
  program = SimpleNamespace(learner=SimpleNamespace(abstract=abstract))
  return experiment.checkpoint_identity(
    SimpleNamespace(config=parse(keys), program=program, identity={"seed": 3})
  )


def test_a_checkpoint_of_rl_agrees_with_more_than_a_cold_start(debug_config):
  plain = {"seed": 3, "checkpoint format": experiment.CHECKPOINT_FORMAT}
  assert identity(debug_config) == plain
  both = identity(debug_config, reference={}, critic={})
  assert set(both) - set(plain) == {
    "a reference (objective.kl_coef)",
    "a critic (objective.name)",
  }


def test_a_checkpoint_belongs_to_its_optimizer_and_its_format(
  debug_config, monkeypatch
):
  def refused(words):
    saved = {"identity": before}
    with pytest.raises(UserError, match=words):
      require_match(identity(debug_config), saved, "checkpoint", "")

  before = identity(debug_config)
  debug_config.optim.name = "muon"
  refused(r"has optim\.name=None, this")
  before = identity(debug_config)
  monkeypatch.setattr(experiment, "CHECKPOINT_FORMAT", 1)
  refused("this run checkpoint format=1")


@pytest.mark.parametrize(
  "rollout", [{"max_staleness": 1}, {"max_tokens_per_iteration": 6}]
)
def test_pending_responses_belong_to_the_same_prompts(debug_config, rollout):
  before = identity(debug_config)
  debug_config.rollout.update(rollout)
  debug_config.data.template_args = "a=1"
  found = identity(debug_config)
  keys = (
    "data.prompts",
    "data.max_prompt_length",
    "data.system_prompt",
    "data.instruction",
    "data.template_args",
    "rollout.group_size",
    "sampler.max_new_tokens",
  )
  values = flatten(debug_config.to_dict())
  shapes = {key: values[key] for key in keys}
  (kind,) = found.keys() - before.keys() - shapes.keys()
  assert found == before | shapes | {kind: True}


def test_pending_responses_have_drafts_and_experts_or_do_not(debug_config):
  """In their samples."""
  debug_config.continuous_batching.update({"slots": 8, "speculation": 3})
  debug_config.objective.replay = "r3"
  assert identity(debug_config).keys() == {"seed", "checkpoint format"}
  debug_config.rollout.max_staleness = 1
  assert identity(debug_config).keys() >= {
    "drafts (continuous_batching.speculation)",
    "the sampler's experts (objective.replay)",
  }


def test_pending_conversations_have_as_many_turns(debug_config):
  """Their rewards have the shape [B, rollout.max_turns]."""
  debug_config.rollout.environment = "guessing"
  debug_config.continuous_batching.slots = 8
  debug_config.reward.names = ()

  def require_same_turns():
    debug_config.rollout.max_turns = 3
    saved = {"identity": identity(debug_config)}
    debug_config.rollout.max_turns = 4
    require_match(identity(debug_config), saved, "checkpoint", "")

  require_same_turns()  # nothing is pending
  debug_config.rollout.max_staleness = 1
  with pytest.raises(UserError, match=r"has rollout\.max_turns=3, this run"):
    require_same_turns()


def test_a_cold_start_of_a_checkpoint_is_said(debug_config):
  """configs/tiny_cpu.py has one, and its derivatives inherit it."""
  line = lambda: experiment._first_weights(parse(debug_config))
  assert not line()
  debug_config.model.checkpoint = "./folder"
  assert "cold_start.steps=100: the weights of ./folder imitate" in line()
  debug_config.cold_start.steps = 0
  assert not line()
  debug_config.model.checkpoint = ""
  assert "random weights" in line()


def test_texts_longer_than_a_model_takes_are_named(
  debug_config, tmp_path, capsys
):
  """In training and in an evaluation; YaRN makes room."""
  golden = ROOT / "tests/support/goldens/qwen3/config.json"
  raw = json.loads(golden.read_text()) | {"vocab_size": 258}
  c = debug_config
  c.model.checkpoint, c.data.tokenizer = str(tmp_path), "bytes"
  c.cold_start.steps = 0
  width = c.data.max_prompt_length + c.sampler.max_new_tokens
  mesh = sharding.make_mesh(jax.devices()[:1])

  def warnings(**changes):
    config = {"max_position_embeddings": width} | changes
    (tmp_path / "config.json").write_text(json.dumps(raw | config))
    experiment.prepare(parse(c), str(tmp_path / "run"), mesh)
    evaluator._samplers(parse(c), mesh, [])
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith("warning: ")]

  yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
  yarn["original_max_position_embeddings"] = width // 2 + 1
  assert warnings() == []
  short = warnings(max_position_embeddings=width - 1)
  assert short == short[:1] * 2
  assert f"data.max_prompt_length={c.data.max_prompt_length} and " in short[0]
  assert f"sampler.max_new_tokens={c.sampler.max_new_tokens} a" in short[0]
  assert f"{width} tokens, and config.json in model.checkpoint=" in short[0]
  assert f" {width - 1} (max_position_embeddings, " in short[0]
  assert warnings(max_position_embeddings=4, rope_parameters=yarn) == []
  assert warnings(max_position_embeddings=None) == []


def test_programs_of_the_policy_can_read_no_file_of_the_run(
  debug_config, tmp_path, monkeypatch
):
  library = os.path.dirname(os.__file__)
  check = lambda: experiment._require_hidden(
    parse(debug_config).data, str(workdir)
  )
  workdir = tmp_path
  check()
  (tmp_path / "link.csv").symlink_to(f"{library}/train.csv")
  for spec in (f"jsonl:{library}/a.jsonl", f"hf:{tmp_path}/link.csv:train"):
    debug_config.data.source = f"jsonl:x, {spec}"
    with pytest.raises(UserError, match=r"^data.source: .*outside of /"):
      check()
  debug_config.data.source = "jsonl:x"
  workdir = f"{library}/json"
  with pytest.raises(UserError, match=r"^--workdir: .*outside of /"):
    check()
  workdir = tmp_path
  monkeypatch.chdir(library)
  with pytest.raises(UserError, match=r"^the current folder: .*outside of /"):
    check()


def test_a_clip_range_of_another_method_is_named_at_the_start(
  debug_config, monkeypatch, capsys
):
  """Before a cold start, that is."""

  def stop(*_, **__):
    raise UserError("the program is next")

  monkeypatch.setattr(experiment, "build_program", stop)
  debug_config.objective.name = "gspo:clip_low=0.2"
  with pytest.raises(UserError, match="the program is next"):
    experiment.prepare(parse(debug_config), "", None)
  assert (
    "warning: objective.name='gspo:clip_low=0.2': hardly"
    in capsys.readouterr().out
  )


def test_a_mistaken_reward_is_named_with_its_key(debug_config):
  debug_config.reward.names = ("operator.neg",)
  message = r"names=\('operator.neg',\): reward 'operator.neg' takes \(a, /\)"
  with pytest.raises(UserError, match=message):
    reward_pool(debug_config, {}, {})


@pytest.mark.parametrize("lacks", [1, 2])
def test_every_source_has_the_columns_of_a_reward(
  debug_config, lacks, tmp_path, monkeypatch
):
  monkeypatch.syspath_prepend(tmp_path)
  text = "def reward(prompt, response, reference, *, level): return level\n"
  (tmp_path / "by_level.py").write_text(text)
  debug_config.reward.names = ("by_level.reward",)
  debug_config.reward.workers = 1
  columns = [{"level": 1}, {"level": 2}, {"level": 3}]
  columns[lacks] = {"lvl": 1}
  message = (
    r"reward.names=\('by_level.reward',\): reward .* no column 'level': choose "
    rf"one of lvl \(the problem 'Problem {lacks}'"
  )
  with pytest.raises(UserError, match=message):
    reward_pool(debug_config, *columns)


def reward_pool(config, *columns):
  problems = datasets_of(*columns)
  return experiment._pool(parse(config), None, problems, "")


def datasets_of(*columns):
  """One problem with each of these columns; the last is held out."""
  problems = [
    Problem(f"Problem {i}", "1", "", each) for i, each in enumerate(columns)
  ]
  *trained, held_out = ([problem] for problem in problems)
  source = sources.mix(trained, ())
  return Datasets([Stage(1, source)], held_out, source)


class Told(tokenizers.plain.Bytes):
  """A tokenizer whose prompts are the names of the tools."""

  tool_format = "hermes"

  def chat(self, messages, tools=()):
    return [tool["function"]["name"] for tool in tools]

  def check_turns(self, roles, tools=(), tool_format=""):
    if tool_format == "glm45":
      raise UserError(f"{roles} {len(tools)}")
    if "user" in roles or tool_format == "qwen3_coder":
      raise RewrittenTurns("the thinking is gone")


def test_the_policy_is_told_of_the_environments_tools():
  made = dataclasses.make_dataclass("Program", ["prompt_config", "tokenizer"])
  program = made(prompt_batch.PromptConfig(Told(), 9), Told())
  prompt = lambda spec, **keys: experiment._with_tools(
    program, RolloutConfig(environment=spec, max_turns=5, **keys)
  ).prompt_config.tokens_of(Problem("x", "1", ""))
  spec = "tools:functions=gspo_jax.tasks.games.calc,reward=gsm8k"
  assert prompt(spec) == ["calc"]
  assert prompt("python") == prompt(f"{spec},format=call") == []
  with pytest.raises(UserError, match=r"rollout\.environment=.*\('tool',\) 1"):
    prompt(f"{spec},format=glm45")
  # A template that rewrites turns needs sequences, and tools one.
  with pytest.raises(UserError, match=r"is gone; or rollout\.max_sequences=5"):
    prompt("guessing")
  assert prompt("guessing", max_sequences=5) == []
  with pytest.raises(UserError, match=r"is gone$"):
    prompt(f"{spec},format=qwen3_coder")
  with pytest.raises(UserError, match=r"max_sequences=5: expected 1 for"):
    prompt(spec, max_sequences=5)
