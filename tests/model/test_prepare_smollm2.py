"""SmolLM2 as a folder: the errors, and parity with transformers (slow)."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspo_jax import logprobs, model, sampler
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


@pytest.fixture(scope="module")
def ours(theirs):
  folder, _, _ = theirs
  cfg = hf.config_from_hf(folder, dtype="float32")
  return cfg, hf.load_hf(folder, cfg)


@pytest.mark.slow
def test_prompt_is_that_of_the_chat_template(theirs):
  folder, _, ids = theirs
  assert HFTokenizer(folder).prompt(PROMPT) == ids


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(theirs, ours):
  torch = pytest.importorskip("torch")
  _, loaded, ids = theirs
  cfg, params = ours
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


@pytest.mark.slow
def test_logits_and_gradients_are_those_of_transformers(theirs, ours):
  """Logits of a row, and gradients of its mean log-prob by parameter."""
  torch = pytest.importorskip("torch")
  _, loaded, ids = theirs
  cfg, params = ours
  tokens = jnp.array([ids])
  positions, mask = jnp.arange(len(ids))[None], jnp.ones((1, len(ids)), int)
  logits = model.forward(params, cfg, tokens, positions, mask).logits
  # Else the embedding of this token, which prompts hold, gets no gradient.
  loaded.get_input_embeddings().padding_idx = None
  out = loaded(torch.tensor([ids]))
  np.testing.assert_allclose(
    logits[0], out.logits[0].detach().numpy(), atol=1e-3
  )  # logits reach 35

  logps = torch.log_softmax(out.logits[0, :-1], -1)
  logps.gather(-1, torch.tensor(ids)[1:, None]).mean().backward()
  gradient = jax.jit(
    jax.grad(
      lambda params: logprobs.token_logprobs(
        params, cfg, tokens, positions, mask, response_length=len(ids) - 1
      ).logps.mean()
    )
  )(params)
  expected = {n: p.grad.numpy() for n, p in loaded.named_parameters()}
  layers = gradient["layers"]
  D = cfg.embed_dim
  for i in (0, cfg.num_layers - 1):
    prefix = f"model.layers.{i}"
    for name, ours_ in (
      ("self_attn.q_proj", layers["attention"]["q"][i].reshape(D, -1).T),
      ("self_attn.o_proj", layers["attention"]["o"][i].reshape(-1, D).T),
      ("mlp.down_proj", layers["mlp"]["down"][i].T),
      ("input_layernorm", layers["attention_norm"]["scale"][i]),
    ):
      want = expected[f"{prefix}.{name}.weight"]
      np.testing.assert_allclose(ours_, want, atol=1e-4 * np.abs(want).max())
  want = expected["model.embed_tokens.weight"]
  np.testing.assert_allclose(
    gradient["embed"], want, atol=1e-4 * np.abs(want).max()
  )
