# %% [markdown]
# # From a Hugging Face folder, and back
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/gspo-jax/gspo_jax/blob/main/colabs/hugging_face.ipynb)
#
# Take a checkpoint folder, look at what is in it, sample a group of responses,
# evaluate it, train it for two RL steps, and export a folder that
# `transformers` loads. Name yours below. Without one, a tiny Qwen3-MoE with
# random weights and a tokenizer of its own is made on the spot: it babbles, but
# it takes the same path, in a minute.
#
# The package takes Qwen2, Qwen2.5, Qwen3, Qwen3-Next, Qwen3.5 and Qwen3.6, dense
# and MoE; DeepSeek-V3, Moonlight and Kimi K2; GLM-4.5 to 4.7, GLM-4.7-Flash,
# MiniMax-M2, gpt-oss, Llama 3, SmolLM2, OLMoE, Mixtral, Mistral, Phi-4,
# SmolLM3, Seed-OSS, dots1, InternLM3, IQuest-Coder and Sarvam; and, for texts,
# Qwen2.5-VL, Qwen3-VL and Mistral Small 3.1 and later
# ([your model](https://github.com/gspo-jax/gspo_jax/blob/main/docs/your_model.md)).

# %%
# Installs what this machine needs, and says what it has. GSPO_JAX names another
# source of the package.
import importlib.util
import os
import subprocess
import sys

if not importlib.util.find_spec("gspo_jax"):
  repository = "git+https://github.com/gspo-jax/gspo_jax"
  package = f"gspo_jax @ {os.environ.get('GSPO_JAX', repository)}"
  command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", package]
  subprocess.run(command, check=True)
  importlib.invalidate_caches()

from gspo_jax.runtime import notebook

DTYPE = notebook.prepare()

# %%
import json
import os
import tempfile
from pathlib import Path

os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that PyTorch is missing
import jax
import matplotlib.pyplot as plt
import numpy as np
import tokenizers
import transformers

from gspo_jax import model
from gspo_jax.configs import common
from gspo_jax.data import sources
from gspo_jax.data.tokenizers import load as load_tokenizer
from gspo_jax.evaluate import summary
from gspo_jax.evaluate.evaluator import evaluate
from gspo_jax.evaluate.policy_sampler import PolicySampler
from gspo_jax.export import export
from gspo_jax.model import hf
from gspo_jax.program.config import parse
from gspo_jax.runtime import sharding
from gspo_jax.train import train_and_evaluate

plt.rcParams.update({"figure.constrained_layout.use": True, "axes.grid": True})
plt.rcParams.update({"grid.alpha": 0.25, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "figure.dpi": 100})

CHECKPOINT = ""  # a folder with config.json, safetensors and a tokenizer
scratch = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A checkpoint
#
# A folder is `config.json`, `*.safetensors` and the files of a tokenizer with a
# chat template. Making one takes no PyTorch.

# %%
CHATML = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer():
  """Byte-level BPE of 300 tokens, with the control tokens of Qwen."""
  fast = tokenizers.Tokenizer(tokenizers.models.BPE())
  level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  fast.pre_tokenizer = level
  fast.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=297, initial_alphabet=level.alphabet(), show_progress=False
  )
  text = "What is the sum of numbers? user assistant End with #### and a number"
  fast.train_from_iterator([text], trainer)
  fast.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
  made = transformers.PreTrainedTokenizerFast(
    tokenizer_object=fast, eos_token="<|im_end|>", pad_token="<|endoftext|>"
  )
  made.chat_template = CHATML
  return made


def make_checkpoint(folder):
  made = make_tokenizer()
  cfg = model.ModelConfig(
    vocab_size=len(made),
    num_layers=4,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=32,
    num_experts=8,
    experts_per_token=2,
  )
  hf.save_hf(model.init(jax.random.key(0), cfg), cfg, folder)
  made.save_pretrained(folder)
  ends = {"eos_token_id": made.eos_token_id, "pad_token_id": made.pad_token_id}
  (folder / "generation_config.json").write_text(json.dumps(ends))
  return folder


folder = CHECKPOINT or str(make_checkpoint(scratch / "checkpoint"))
for file in sorted(Path(folder).iterdir()):
  print(f"{file.stat().st_size:12,} bytes  {file.name}")

# %% [markdown]
# ## What is in it
#
# `config_from_hf` reads the sizes, `load_hf` the weights, a layer at a time and
# straight into their sharding; a tensor that is missing, superfluous or
# misshapen is named. Parameters are a plain dict of arrays, layers stacked.

# %%
cfg = hf.config_from_hf(folder, dtype="float32")
params = hf.load_hf(folder, cfg)
tokenizer = load_tokenizer(folder)
print(cfg)
print("prompt:", tokenizer.decode(tokenizer.prompt("What is 2 + 3?")))
print("tokens:", tokenizer.prompt("What is 2 + 3?"))


def sizes(tree):
  """Slash-joined path -> number of parameters."""
  name = lambda keys: jax.tree_util.keystr(keys, simple=True, separator="/")
  return {name(keys): x.size for keys, x in jax.tree.leaves_with_path(tree)}


counts = sizes(params)
figure, axis = plt.subplots(figsize=(9, 0.28 * len(counts) + 1))
axis.barh(list(counts), list(counts.values()), color="C0")
axis.invert_yaxis()
axis.set(xscale="log", xlabel="parameters, all layers")
axis.set_title(f"{sum(counts.values()):,} parameters")
axis.grid(visible=False, axis="y")
plt.show()

# %% [markdown]
# ## A group of responses
#
# A config names the folder, and how problems become prompts. `PolicySampler`
# samples the responses of the policy: texts in, texts out.

# %%
rows = [
  {"question": f"What is {a} + {b}?", "answer": str(a + b)}
  for a in range(2, 10)
  for b in range(2, 10)
]
files = {"train": rows[8:], "test": rows[:8]}
for name, part in files.items():
  (scratch / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))

config = common.get_config()
config.model.checkpoint = folder  # --config.model.checkpoint=FOLDER
config.model.dtype = DTYPE if CHECKPOINT else "float32"
config.data.source = f"jsonl:{scratch}/train.jsonl"
config.data.eval_source = f"jsonl:{scratch}/test.jsonl"
config.data.instruction = "{problem} End with #### and a number."
config.data.prompts = 8
config.data.max_prompt_length = 96
config.rollout.group_size = 8
config.sampler.max_new_tokens = 48
config.learner.micro_batch_size = 16
config.reward.names = ("gsm8k", "length")
config.reward.weights = (1.0, 0.1)
config.optim.learning_rate = 1e-6 if CHECKPOINT else 1e-3
config.num_steps = 2
config.eval.prompts = 8

# %%
mesh = sharding.make_mesh(**config.mesh)
jax.set_mesh(mesh)
parsed, count = parse(config), len(files["test"])
sampler = PolicySampler(parsed, mesh, samples=8, problems=count)
problems = list(sources.load(config.data.eval_source))
responses, _ = sampler.sample(params, problems, jax.random.key(0))
print(f"{problems[0].text}\n")
for response in responses[:8]:
  print(f"{response.tokens:3} tokens  {response.text[:70]!r}")

# %% [markdown]
# ## Evaluation
#
# What `python -m gspo_jax.evaluate` does: eight responses a problem, each
# scored in a separate process and written to `answers.jsonl`.

# %%
sets = [f"sums={scratch}/test.jsonl"]
settings = {"samples": 8, "reward": "gsm8k"}
before = evaluate(config, folder, sets, out=f"{scratch}/before", **settings)
print(summary.render(before))

# %% [markdown]
# ## Two steps of RL
#
# The same `train_and_evaluate` as everywhere; `config.model.checkpoint` makes
# it begin with these weights. A right sum earns 1, brevity up to 0.1, which
# even babble can have: so there is something to learn.

# %%
state = train_and_evaluate(config, f"{scratch}/run")

# %%
later, _ = sampler.sample(state.params, problems, jax.random.key(0))
before, after = ([r.tokens for r in part] for part in (responses, later))
assert CHECKPOINT or np.mean(after) < np.mean(before)
shift = jax.tree.map(
  lambda new, old: np.linalg.norm(new - old) / np.linalg.norm(old),
  jax.device_get(state.params),
  jax.device_get(params),
)
name = lambda keys: jax.tree_util.keystr(keys, simple=True, separator="/")
shifts = {name(k): v for k, v in jax.tree.leaves_with_path(shift)}

figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2))
left.barh(list(shifts), list(shifts.values()), color="C0")
left.invert_yaxis()
left.set(xlabel="norm of the change / norm", title="How far the weights went")
left.grid(visible=False, axis="y")
bins = np.arange(0, config.sampler.max_new_tokens + 4, 3)
right.hist(before, bins, alpha=0.5, label="before")
right.hist(after, bins, alpha=0.5, label="after")
right.set(xlabel="tokens a response", ylabel="responses", title="Lengths")
right.legend()
plt.show()

# %% [markdown]
# ## And back
#
# `python -m gspo_jax.export` writes weights, `config.json` and tokenizer of the
# newest checkpoint. In float32 nothing is lost: loaded again, they are the same
# bits. `transformers` reads config and tokenizer, and with PyTorch
# `AutoModelForCausalLM.from_pretrained` the weights.

# %%
exported = scratch / "exported"
export(config, f"{scratch}/run", str(exported), dtype="float32")

again = hf.load_hf(exported, hf.config_from_hf(exported, dtype="float32"))
jax.tree.map(np.testing.assert_array_equal, again, state.params)

theirs = transformers.AutoTokenizer.from_pretrained(exported)
message = [{"role": "user", "content": "What is 2 + 3?"}]
ids = theirs.apply_chat_template(
  message, add_generation_prompt=True, return_dict=False
)
assert ids == tokenizer.prompt("What is 2 + 3?")
assert any(np.any(v > 0) for v in shifts.values())
print(transformers.AutoConfig.from_pretrained(exported))
