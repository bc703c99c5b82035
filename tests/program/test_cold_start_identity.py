"""What decides a cold start, and what else rounds it: each key of a config."""

import copy
import dataclasses
import json
import os

import jax
import pytest

from gspo_jax.configs import tiny_cpu
from gspo_jax.data.tokenizers import plain
from gspo_jax.program import experiment
from gspo_jax.program.config import all_keys, parse
from gspo_jax.program.experiment import cold_start_identity, cold_start_key
from gspo_jax.record.identity import match
from gspo_jax.runtime import mesh_jit, sharding
from gspo_jax.runtime.errors import UserError

IMITATED = {
  *("data.max_prompt_length", "data.too_long", "data.system_prompt"),
  *("data.instruction", "data.template_args", "sampler.max_new_tokens"),
  *("rollout.environment", "model.checkpoint", "cold_start.steps"),
  *("cold_start.batch", "cold_start.learning_rate", "cold_start.gate"),
}
# With `cold_start.gate`.
GATED = {
  *("eval.prompts", "reward.names", "reward.pass_threshold", "sampler.stop"),
}
# With a conversation, too.
GATED_TURNS = {"rollout.max_turns", "rollout.max_sequences"}
# Another value of what decides the model, the tokenizer and the problems.
PREPARED = {
  "seed": 1, "model.variant": "small", "model.dtype": "bfloat16",
  "model.float32_head": True, "model.float32_router": True,
  "data.source": "jsonl:{files}/B.jsonl", "data.weights": (3.0, 1.0),
  "data.eval_source": "jsonl:{files}/A.jsonl", "data.problem_field": "spoken",
  "data.reference_field": "result", "data.demonstration_field": "worked",
  "data.tokenizer": "bytes",
}  # fmt: skip
# They round a cold start, or its gate's greedy decoding; or nobody would miss
# a cold start that is kept for each value.
ROUNDED = {
  *("model.remat", "model.exact", "model.lora.rank", "model.lora.alpha"),
  "model.lora.targets",
  *("model.lora.checkpoint", "mesh.data", "mesh.fsdp", "mesh.context"),
  *("mesh.expert", "mesh.tensor", "sampler_mesh.devices"),
  *("sampler_mesh.expert", "sampler_mesh.tensor", "data.prompts"),
  *("data.curriculum", "sampler.temperature", "sampler.top_k"),
  *("sampler.top_p", "sampler.min_p", "sampler.kept_ids"),
  *("continuous_batching.slots", "continuous_batching.page_size"),
  *("continuous_batching.num_pages", "continuous_batching.prefill_chunk"),
  *("continuous_batching.speculation", "rollout.group_size"),
  *("rollout.max_tokens_per_iteration", "reward.workers"),
  *("reward.concurrency", "reward.seconds", "reward.max_failed"),
  *("learner.micro_batch_size", "eval.samples"),
}
# Those of RL alone, and sections of them.
OF_RL = (
  *("num_steps", "objective.", "optim.", "checkpoint.", "log.", "eval.every"),
  *("learner.minibatches", "reward.weights", "data.drop_solved"),
  *("rollout.max_staleness", "rollout.dynamic_sampling_rounds"),
)


def prepared(config):
  mesh = sharding.make_mesh(jax.devices()[:1])
  with jax.set_mesh(mesh):
    return experiment.prepare(parse(config), "", mesh)


@pytest.fixture(scope="module", autouse=True)
def no_workers():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(experiment, "_pool", lambda *_: None)
    yield


@pytest.fixture(scope="module")
def base():
  return prepared(tiny_cpu.get_config("debug"))


def changed(base, **values):
  """The experiment with other values of keys, which nothing checks."""
  config = copy.deepcopy(base.config)
  for key, value in values.items():
    *sections, name = key.split(".")
    section = config
    for each in sections:
      section = getattr(section, each)
    object.__setattr__(section, name, value)
  return dataclasses.replace(base, config=config)


def deciding(base, observe):
  """The keys whose change changes what `observe` returns."""
  before = observe(base)
  return {
    key
    for key in all_keys()
    if observe(changed(base, **{key: "other"})) != before
  }


def test_each_key_decides_rounds_or_does_neither():
  decide = IMITATED | GATED | GATED_TURNS | PREPARED.keys()
  of_rl = {key for key in all_keys() if key.startswith(OF_RL)}
  assert decide | ROUNDED | of_rl == {*all_keys()}
  assert len(decide) + len(ROUNDED) + len(of_rl) == len(all_keys())


@pytest.mark.parametrize(
  ("given", "decide"),
  [({"cold_start.gate": 0.0}, IMITATED),
   ({"cold_start.gate": 0.5}, IMITATED | GATED),
   ({"cold_start.gate": 0.5, "rollout.environment": "guessing"},
    IMITATED | GATED | GATED_TURNS)],
  ids=["no gate", "gate", "conversations"],
)  # fmt: skip
def test_what_decides_a_cold_start_is_in_its_identity(base, given, decide):
  base = changed(base, **given)
  assert deciding(base, cold_start_identity) == decide


def test_a_kept_one_agrees_in_all_but_the_keys_that_only_rl_reads(base):
  base = changed(base, **{"cold_start.gate": 0.5})
  same = {*all_keys()} - deciding(base, cold_start_key)
  assert same == {key for key in all_keys() if key.startswith(OF_RL)}
  key = cold_start_key(base)
  assert key.items() > cold_start_identity(base).items()
  assert json.loads(json.dumps(key))["devices"][1] == "cpu"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """Problems whose columns differ, and a tokenizer of bytes."""
  folder = tmp_path_factory.mktemp("files")
  for letter in "AB":
    rows = [
      {
        "question": f"{letter}{n}?",
        "spoken": f"{letter} {n}?",
        "answer": "#### 7",
        "result": "3",
        "worked": "so #### 7",
      }
      for n in range(32)
    ]
    (folder / f"{letter}.jsonl").write_text("\n".join(map(json.dumps, rows)))
  plain.Bytes().save(folder / "bytes")
  return folder


def of_files(files, **changes):
  config = tiny_cpu.get_config("debug")
  config.data.source = f"jsonl:{files}/A.jsonl,jsonl:{files}/B.jsonl"
  config.data.eval_source = f"jsonl:{files}/B.jsonl"
  config.data.tokenizer = f"{files}/bytes"
  config.data.max_prompt_length = 16
  config.cold_start.gate = 0.5
  config.update_from_flattened_dict(changes)
  return cold_start_identity(prepared(config))


@pytest.fixture(scope="module")
def with_files(files):
  return of_files(files)


@pytest.mark.parametrize("key", PREPARED)
def test_problems_model_and_tokenizer_are_in_its_identity(
  key, files, with_files
):
  value = PREPARED[key]
  if isinstance(value, str):
    value = value.replace("{files}", str(files))
  assert of_files(files, **{key: value}) != with_files


def test_a_saved_one_is_the_same_or_the_error_names_the_key(base):
  gate = {"cold_start.gate": 0.5}
  saved = {"identity": json.loads(json.dumps(cold_start_identity(base)))}
  match(cold_start_identity(base), saved, "cold start", "")
  other = {"data.instruction": "Say {problem}"}
  with pytest.raises(
    UserError, match=r"data\.instruction='{problem}', this run .*='Say"
  ):
    match(cold_start_identity(changed(base, **other)), saved, "cold start", "")
  gated = cold_start_identity(changed(base, **gate))
  saved = {"identity": json.loads(json.dumps(gated))}
  match(gated, saved, "cold start", "")
  gated |= {"eval": {"fingerprint": "another"}}
  with pytest.raises(UserError, match=r"run: data\.eval_source, or the cont"):
    match(gated, saved, "cold start", "")


@pytest.mark.parametrize(
  ("given", "kept"),
  [({}, True),
   ({"data.source": "gspo_jax.tasks.games.calculator_problems"}, True),
   ({"rollout.environment": "calculator"}, True),
   ({"model.checkpoint": "folder"}, False),
   ({"data.source": "jsonl:problems"}, False),
   ({"data.source": "gspo_jax_of_mine.problems"}, False),
   ({"data.eval_source": "hf:problems"}, False),
   ({"rollout.environment": "tools:functions=mine.f"}, False),
   ({"reward.names": ("final_answer", "mine.f")}, False),
   ({"reward.names": ("final_answer", "model:folder")}, False),
   ({"reward.names": ("mine.f",), "cold_start.gate": 0.0}, True)],
  ids=lambda x: x if isinstance(x, bool) else " ".join(map(str, x.values())),
)  # fmt: skip
def test_none_is_kept_whose_parts_may_change(base, given, kept):
  key = cold_start_key(changed(base, **{"cold_start.gate": 0.5} | given))
  assert (key is not None) == kept


def test_what_is_kept_is_of_one_code_and_machine(base, monkeypatch):
  keys = [cold_start_key(base)]
  assert str(mesh_jit.process()) == keys[0]["process"]
  monkeypatch.setattr(mesh_jit, "process", lambda: "other")
  keys.append(cold_start_key(base))
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: [0] * 99, False)
  keys.append(cold_start_key(base))
  mesh = sharding.make_mesh(jax.devices()[:2], data=2)
  program = dataclasses.replace(base.program, mesh=mesh)
  keys.append(cold_start_key(dataclasses.replace(base, program=program)))
  texts = {json.dumps(key, sort_keys=True) for key in keys}
  assert len(texts) == len(keys) == 4


def test_none_is_kept_of_several_processes(base, monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  assert cold_start_key(base) is None
