"""SmolLM2 as a folder: the errors, and parity with transformers (slow)."""

import types

import jax
import numpy as np
import pytest

from gspo_jax import sampler
from gspo_jax.data.tokenizers.hf import HFTokenizer
from gspo_jax.model import hf
from gspo_jax.model.hf import prepare_smollm2
from gspo_jax.runtime.errors import UserError


def test_an_existing_folder_is_kept(tmp_path):
  with pytest.raises(UserError, match=r"--to=.*exists"):
    prepare_smollm2.prepare(tmp_path)


def test_another_file_is_refused_and_nothing_is_left(tmp_path, monkeypatch):
  other = tmp_path / "other.gguf"
  other.write_bytes(b"GGUF")
  monkeypatch.setattr(prepare_smollm2, "_installed", lambda: other)
  with pytest.raises(
    UserError, match=r"other.gguf: sha256 is .* expected b179"
  ):
    prepare_smollm2.prepare(tmp_path / "smollm2")
  assert list(tmp_path.iterdir()) == [other]


def test_queries_and_keys_get_back_their_halves():
  """GGUF interleaves the halves of a head: 0, 32, 1, 33 and so on."""
  rows = np.arange(9 * 64).reshape(9, 2, 32)
  interleaved = rows.swapaxes(1, 2).reshape(-1, 1)
  tensor = types.SimpleNamespace(
    name="blk.7.attn_q.weight", data=interleaved, tensor_type=0
  )
  name, values = prepare_smollm2._named(tensor, lambda data, kind: data)
  assert name == "model.layers.7.self_attn.q_proj.weight"
  np.testing.assert_array_equal(values[:, 0], np.arange(9 * 64))


PROMPT = "What is special about penguins? Use at most 20 words."
NEW = 64


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
  """The folder, transformers' model of it, the ids of a prompt."""
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  pytest.importorskip("gguf")
  folder = tmp_path_factory.mktemp("smollm2") / "model"
  prepare_smollm2.prepare(folder)
  loaded = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager"
  ).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  ids = tokenizer.apply_chat_template(
    [{"role": "user", "content": PROMPT}],
    add_generation_prompt=True,
    return_dict=False,
  )
  return folder, loaded, ids


@pytest.mark.slow
def test_prompt_is_that_of_the_chat_template(theirs):
  folder, _, ids = theirs
  assert HFTokenizer(folder).prompt(PROMPT) == ids


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(theirs):
  torch = pytest.importorskip("torch")
  folder, loaded, ids = theirs
  cfg = hf.config_from_hf(folder, dtype="float32")
  params = hf.load_hf(folder, cfg)
  with torch.inference_mode():
    out = loaded.generate(
      torch.tensor([ids]),
      do_sample=False,
      max_new_tokens=NEW,
      min_new_tokens=NEW,
    )
  expected = out[0, len(ids) :].numpy()
  stop = int(loaded.generation_config.eos_token_id)
  prompts = sampler.Prompts(np.array([ids], np.int32), np.array([len(ids)]))
  config = sampler.SamplerConfig(
    group_size=1,
    max_new_tokens=NEW,
    min_new_tokens=NEW,
    temperature=0.0,
    stop_ids=(stop,),
    pad_id=stop,
  )
  samples = sampler.generate(
    params, cfg, prompts, jax.random.key(0), sampler=config
  )
  np.testing.assert_array_equal(np.asarray(samples.tokens)[0], expected)
