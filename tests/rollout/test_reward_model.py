"""Scores of a reward model, beside other rewards."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_samples import samples_of
from families import DENSE
from safetensors.numpy import load_file, save_file

from gspo_jax import model
from gspo_jax.data import pipeline, prompt_batch, tokenizers
from gspo_jax.data.problem import Problem
from gspo_jax.model import hf
from gspo_jax.plan import memory
from gspo_jax.program import experiment, settings
from gspo_jax.program.config import parse
from gspo_jax.program.rules import check_training
from gspo_jax.rewards.pool import RewardPool
from gspo_jax.rewards.reward import Response
from gspo_jax.rollout import scoring
from gspo_jax.rollout.reward_model import RewardModel
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError

BYTES = tokenizers.load("bytes")
PROMPTS = prompt_batch.PromptConfig(BYTES, 64, "Add.", "{problem} Go: ")
PROBLEMS = [Problem("6+1=?", "7", ""), Problem("3+5=?", "8", "")]
TEXTS = ["#7", "", "x" * 140, "#8", "#7", "8"]
CFG = dataclasses.replace(DENSE, vocab_size=258, head_dim=8, classifier=True)


@pytest.fixture(scope="module")
def params():
  shapes, rng = model.shapes(CFG), np.random.default_rng(0)
  return jax.tree.map(
    lambda x: jnp.asarray(rng.normal(0, 0.4, x.shape), jnp.float32), shapes
  )


@pytest.fixture(scope="module")
def folder(params, tmp_path_factory):
  path = tmp_path_factory.mktemp("rm") / "model"
  hf.save_hf(params, CFG, path, beside=BYTES.save)
  return path


def one_device():
  return sharding.make_mesh(jax.devices()[:1])


def load(folder, mesh=None, rows=4, **changes):
  options = {"dtype": "float32", "rows": rows} | changes
  return RewardModel(str(folder), PROMPTS, mesh or one_device(), **options)


@pytest.fixture(scope="module")
def scorer(folder):
  return load(folder)


def response(text, problem=PROBLEMS[0]):
  return Response("", text, problem.reference, problem=problem)


RESPONSES = {
  row: response(text, PROBLEMS[row // 3]) for row, text in enumerate(TEXTS)
}


def expected(params, row):
  """By a forward pass of one row, without padding, and numpy."""
  text = f"Add.\n\n{PROBLEMS[row // 3].text} Go: {TEXTS[row]}"
  last = last_hidden(params, jnp.array([[*text.encode(), *BYTES.stop_ids]]))
  return np.float64(last) @ np.float64(params["score"][:, 0])


@jax.jit
def last_hidden(params, ids):
  positions = jnp.arange(ids.shape[1])[None]
  mask = jnp.ones_like(ids)
  return model.hidden_states(params, CFG, ids, positions, mask).hidden[0, -1]


@pytest.fixture(scope="module")
def scores(params):
  return [expected(params, row) for row in RESPONSES]


def test_a_score_is_read_at_the_end_of_the_conversation(scorer, scores):
  """A pass has 4 rows, so that 6 responses take two, of 128 and 256 tokens."""
  rewards = scorer(RESPONSES, 6)
  assert np.abs(rewards.parts["model"] - scores).max() < 1e-5
  assert np.ptp(scores) > 1
  assert not rewards.failed.any()


def test_a_score_does_not_depend_on_the_batch_or_the_mesh(folder, scores):
  mesh = sharding.make_mesh(
    jax.devices(), data=1, fsdp=2, context=2, expert=1, tensor=2
  )
  rewards = load(folder, mesh, rows=1)(RESPONSES, 6)  # 2 devices split rows
  assert np.abs(rewards.parts["model"] - scores).max() < 1e-5


def test_responses_may_be_on_several_hosts(scorer, scores, monkeypatch):
  others = [[row, scorer.ids(RESPONSES[row])] for row in (1, 3, 5)]
  monkeypatch.setattr(
    multihost, "allgather_json", lambda local: [others, local]
  )
  here = {row: RESPONSES[row] for row in (4, 0, 2)}
  rewards = scorer(here, 6)
  assert np.abs(rewards.parts["model"] - scores).max() < 1e-5


def test_the_last_token_is_none_of_the_padding(folder, tmp_path):
  """As in transformers, where the stop token may be the padding."""
  linked(folder, tmp_path, pad_token_id=BYTES.stop_ids[0])
  assert bytes(load(tmp_path).ids(response("7"))) == b"Add.\n\n6+1=? Go: 7"


def linked(folder, copy, **changes):
  """The folder's files, with changes of config.json."""
  config = json.loads((folder / "config.json").read_text()) | changes
  for file in folder.iterdir():
    if file.name != "config.json":
      (copy / file.name).symlink_to(file)
  (copy / "config.json").write_text(json.dumps(config))


def test_a_conversation_that_is_too_long_has_no_reward(folder, tmp_path):
  linked(folder, tmp_path, max_position_embeddings=60)
  rewards = load(tmp_path)(RESPONSES, 6)
  np.testing.assert_array_equal(rewards.failed, [0, 0, 1, 0, 0, 0])
  (reason,) = rewards.reasons
  assert reason.startswith(
    "model: 157 tokens of prompt and response, more than the 60"
  )


def test_a_score_that_is_not_finite_is_a_failure(scorer, params, monkeypatch):
  head = params["score"].at[0].set(jnp.nan)
  monkeypatch.setitem(vars(scorer), "params", params | {"score": head})
  rewards = scorer(RESPONSES, 6)
  assert rewards.failed.all()
  assert not rewards.parts["model"].any()
  assert rewards.reasons == ("model: a score is not a number up to 1e+09",)


@pytest.mark.parametrize(
  ("changes", "words"),
  [({"architectures": ["Qwen3ForCausalLM"]},
    r"config.json: architectures=\['Qwen3ForCausalLM'\]: expected "
    r"\['Qwen3ForSequenceClassification'\]"),
   ({"id2label": {"0": "a", "1": "b", "2": "c"}},
    "num_labels=3: expected 1, the score"),
   ({"num_labels": 2}, "num_labels=2: expected 1"),
   ({"id2label": None}, "num_labels=2: expected 1"),
   ({"vocab_size": 200}, "tokenizer has 258 tokens and the model room for"),
   ({"num_hidden_layers": 1}, r"not of this model \(11\): model.layers.1")],
)  # fmt: skip
def test_what_is_no_reward_model_is_refused(
  changes, words, folder, tmp_path, debug_config
):
  linked(folder, tmp_path, **changes)
  refused(tmp_path, words, debug_config)


def test_a_bias_is_refused(folder, tmp_path, debug_config):
  linked(folder, tmp_path)
  file = sorted(tmp_path.glob("*.safetensors"))[-1]
  tensors = load_file(file) | {"score.bias": np.ones(1, np.float32)}
  file.unlink()
  save_file(tensors, file)
  refused(tmp_path, r"not of this model \(1\): score.bias", debug_config)
  refused("nowhere", "'nowhere': no such folder", debug_config)


def refused(folder, words, config):
  config.reward.names = (f"model:{folder}",)
  program = SimpleNamespace(mesh=one_device(), prompt_config=PROMPTS)
  with pytest.raises(UserError, match=rf"^reward.names=\('model:.*{words}"):
    experiment._pool(parse(config), program, None, "")


def test_a_plan_counts_its_weights(folder, scorer, debug_config):
  debug_config.reward.names = (f"model:{folder}",)
  config = parse(debug_config)
  size = sum(x.nbytes for x in jax.tree.leaves(scorer.params))
  assert memory.reward_model_bytes(config, one_device()) == size
  half = config.replace(model={"dtype": "bfloat16"})
  assert memory.reward_model_bytes(half, one_device()) == size // 2
  with pytest.raises(UserError, match=r"reward.names=.*no such folder"):
    memory.reward_model_bytes(
      config.replace(reward={"names": ("model:nowhere",)}), one_device()
    )


def scored(pool, samples, batch, parts):
  """The rewards of rows that finish in several parts."""
  scorer = scoring.Scorer(pool, scoring.ResponseDecoder(batch, BYTES, 3))
  finished = scoring.finished_responses(samples)
  for rows in parts:
    scorer.add({row: finished[row] for row in rows})
  return scorer.scored(samples).rewards


@pytest.mark.parametrize("streamed", [False, True])
def test_rewards_are_a_sum_of_rules_and_the_model(scorer, scores, streamed):
  names = ("model:somewhere", "final_answer")
  samples = samples_of(TEXTS, width=160)
  batch = pipeline.take(PROBLEMS, PROMPTS, 2)
  with RewardPool(names, (0.5, 2.0), workers=1, model=scorer) as pool:
    rows = [[4], [1], [0], [5], [2], [3]] if streamed else [range(6)]
    pending = scored(pool, samples, batch, rows)
    (rewards,) = scoring.wait_scored([pending], 0.5, label="it")
  right = np.array([1, 0, 0, 1, 0, 0])
  total = 0.5 * np.array(scores) + 2 * right
  assert np.abs(rewards.total.ravel() - total).max() < 1e-5
  assert list(rewards.parts) == ["model", "final_answer"]
  assert np.abs(rewards.first.ravel() - scores).max() < 1e-5
  assert rewards.total.shape == (2, 3)


def test_a_model_may_be_the_only_reward(folder, tmp_path, scores):
  """And a failure of it gets no more than the others of its group."""
  linked(folder, tmp_path, max_position_embeddings=60)
  samples = samples_of(TEXTS, width=160)
  batch = pipeline.take(PROBLEMS, PROMPTS, 2)
  names = (f"model:{tmp_path}",)
  with RewardPool(names, (2.0,), workers=1, model=load(tmp_path)) as pool:
    pending = scored(pool, samples, batch, [range(6)])
    (rewards,) = scoring.wait_scored([pending], 0.5, label="it")
    pending = scored(pool, samples, batch, [range(6)])
    with pytest.raises(multihost.AgreedError, match=r"it: 1 of 6 .*157 tokens"):
      scoring.wait_scored([pending], 0.1, label="it")
  total = 2 * np.array(scores)
  total[2] = min(0, total[0], total[1])
  assert np.abs(rewards.total.ravel() - total).max() < 2e-5
  np.testing.assert_array_equal(rewards.failed.ravel(), np.arange(6) == 2)


def test_it_cannot_run_beside_a_dynamic_sampler_of_other_devices(debug_config):
  debug_config.reward.names = ("model:somewhere",)
  debug_config.rollout.dynamic_sampling_rounds = 2
  check_training(parse(debug_config), 1)
  debug_config.sampler_mesh.devices = 4
  with pytest.raises(UserError, match="dynamic_sampling_rounds=2: expected 1"):
    check_training(parse(debug_config), 1)


def test_a_policy_is_no_classifier(debug_config):
  debug_config.model.classifier = True
  with pytest.raises(UserError, match=r"classifier: .* reward.names=model:"):
    settings.model_config(parse(debug_config).model)


@pytest.mark.slow  # needs torch
@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_scores_are_those_of_transformers(family, tmp_path):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  config = getattr(transformers, f"{family}Config")(
    vocab_size=258,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    num_labels=1,
    pad_token_id=256,
    rms_norm_eps=1e-5,
  )
  torch.manual_seed(0)
  name = f"{family}ForSequenceClassification"
  theirs = getattr(transformers, name)(config)
  with torch.no_grad():
    for name, x in theirs.named_parameters():
      x.copy_(("norm" in name) + 0.2 * torch.randn_like(x))
  theirs.save_pretrained(tmp_path)
  BYTES.save(tmp_path)
  scorer = load(tmp_path)
  ids = [scorer.ids(each) for each in RESPONSES.values()]
  batch = {"input_ids": ids, "attention_mask": [[1] * len(x) for x in ids]}
  tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
  batch = tokenizer.pad(batch, padding_side="right", return_tensors="pt")
  forward = lambda net: (
    net(batch["input_ids"], attention_mask=batch["attention_mask"])
    .logits[:, 0]
    .numpy()
  )
  with torch.no_grad():
    scores = forward(theirs)
  assert np.ptp(scores) > 0.5
  ours = scorer(RESPONSES, 6).parts["model"]
  assert np.abs(ours - scores).max() < 1e-5
  # And back.
  cfg = dataclasses.replace(scorer.cfg, remat="none")
  hf.save_hf(scorer.params, cfg, tmp_path / "again", beside=BYTES.save)
  back = transformers.AutoModelForSequenceClassification.from_pretrained(
    tmp_path / "again", pad_token_id=256
  )
  with torch.no_grad():
    np.testing.assert_array_equal(forward(back), scores)
