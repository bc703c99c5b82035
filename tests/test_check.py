"""`gspo_jax.check`: what is read and rewarded, or the line of the mistake."""

import json
import re
import sys

import pytest
from absl.testing import flagsaver
from processes import mistake
from repository import ROOT
from scripted import TEMPLATE, make_tokenizer

from gspo_jax import check
from gspo_jax.runtime.mesh_jit import MeshJit

# The tests have 8 devices.
TINY = (
  *(f"--config={ROOT}/configs/tiny_cpu.py:debug", "--config.data.prompts=8"),
  *("--config.learner.micro_batch_size=8", "--config.learner.minibatches=1"),
)
CALCULATOR = (
  "--config.rollout.environment=tools:functions=gspo_jax.tasks.games.calc,"
  "reward=gspo_jax.tasks.games.is_result",
  *("--config.reward.names=()", "--config.reward.weights=()"),
)


@pytest.fixture
def run(monkeypatch, capsys):
  """Runs the command, in which nothing may compile; returns what it prints."""

  def call(*arguments):
    monkeypatch.setattr(MeshJit, "__call__", None)
    monkeypatch.setattr(sys, "argv", ["check", *arguments])
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
      check.main()
    out = capsys.readouterr()
    assert not ended.value.code, out.err
    return out.out

  return call


@pytest.fixture
def conversation(tmp_path):
  """Flags of a tokenizer with tools, and of a problem with a history."""
  make_tokenizer(tmp_path / "tokenizer")
  call = {"function": {"name": "calc", "arguments": '{"expression": "1+1"}'}}
  prompt = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [call]},
    {"role": "tool", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
  ]
  line = json.dumps({"prompt": prompt, "answer": "4"})
  (tmp_path / "a.jsonl").write_text(f"{line}\n" * 8)
  return (
    *(*TINY, f"--config.data.tokenizer={tmp_path}/tokenizer"),
    *(f"--config.data.source=jsonl:{tmp_path}/a.jsonl", "--prompts=1"),
    *(f"--config.data.eval_source=jsonl:{tmp_path}/a.jsonl",),
    *("--config.data.max_prompt_length=999", "--config.cold_start.steps=0"),
    "--config.continuous_batching.slots=8",
    *("--config.sampler.max_new_tokens=99", "--config.eval.every=0"),
  )


def test_the_embedded_task(run):
  out = run(*TINY)
  assert re.search(
    r"^[\d,]+ parameters; stop tokens \['.'\]; 0 tools", out, re.M
  )
  assert "prompts of the first 1,000: " in out
  answer = re.search(r"reference '(\d+)'", out)[1]
  out = run(*TINY, f"--response=#### {answer}", "--prompts=8")
  given = re.findall(r": (\d) of .*reference '(\d+)'", out)
  assert all((reward == "1") == (right == answer) for reward, right in given)
  assert given[0] == ("1", answer)
  assert out.count("\nprompt ") == 8


def test_calls_and_tools_are_shown_as_the_policy_reads_them(run, conversation):
  call = '{"name": "calc", "arguments": {"expression": "2+2"}}'
  said = f"--response=<tool_call>{call}</tool_call>"
  out = run(*conversation, *CALCULATOR, said)
  assert "1 tools, calls as 'hermes'" in out
  _, prompt = out.split("\nprompt 1:\n")
  schema, prompt = prompt.split(" <tool_call><|im_end|>\n", 1)
  assert schema.startswith(
    '<|im_start|>system\n{"type": "function", "function"'
  )
  assert prompt.startswith(
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\n1+1?<|im_end|>\n"
    '<|im_start|>assistant\n<tool_call>{"name": "calc", "arguments": '
    '{"expression": "1+1"}}</tool_call><|im_end|>\n'
    "<|im_start|>tool\n2<|im_end|>\n<|im_start|>user\nAnd 2+2?<|im_end|>\n"
    "<|im_start|>assistant\n\n"
  )
  assert "messages=(('tool', '4', 'calc'),), done=False" in prompt


@pytest.mark.parametrize(
  ("cut", "flags", "words"),
  [
    ("{{ t | tojson }}", CALCULATOR, "leaves out the tool 'calc'"),
    ("{{ c.function.name }}", [],
     "problem 'And 2.*leaves out message 3.*its call of 'calc'"),
    ("", ["--config.data.max_prompt_length=9"], r"problem 'And 2\+2\?' has "),
    ("", ["--config.data.prompts=16"], "data.source has 8 problems"),
    ("", ["--config.reward.names=f"], "reward"),
    ("", ["--config.log.wandb=x"], "wandb"),
    ("", ["--promts=3"], "no such flag|Unknown .*promts"),
  ],
)  # fmt: skip
def test_a_mistake_is_one_line(
  conversation, tmp_path, monkeypatch, cut, flags, words
):
  # wandb keeps the settings of its first use in a process.
  monkeypatch.setitem(sys.modules, "wandb", None)
  path = tmp_path / "tokenizer" / "chat_template.jinja"
  assert path.read_text() == TEMPLATE
  path.write_text(TEMPLATE.replace(cut, "") if cut else TEMPLATE)
  assert re.search(words, mistake(check.main, *conversation, *flags))


def test_a_small_file_evaluates_what_it_holds_out(run, tmp_path):
  lines = (
    json.dumps({"question": f"{i}+1?", "answer": "4"}) for i in range(32)
  )
  (tmp_path / "a.jsonl").write_text("\n".join(lines))
  source = f"--config.data.source=jsonl:{tmp_path}/a.jsonl"
  out = run(*TINY, source, "--config.data.max_prompt_length=64")
  held_out = re.search(
    r"eval.prompts=8: (\d+) problems are held out and f", out
  )
  assert 1 <= int(held_out[1]) < 8
