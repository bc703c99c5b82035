# %% [markdown]
# # Training the tiny default, and looking at it
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/gspo-jax/gspo_jax/blob/main/colabs/tiny.ipynb)
#
# A Mixture-of-Experts of 0.26M parameters learns chains of arithmetic: it first
# imitates faulty demonstrations, then GSPO takes the faults out. Below: the
# run, its curves, what it says before and after, which characters it changed
# its mind about, and the importance ratios that GSPO clips. It takes 80 s on a
# CPU core, with short chains; `FULL = True` runs `configs/tiny_cpu.py` as it is,
# and takes longer.
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

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from gspo_jax.configs import tiny_cpu
from gspo_jax.data import pipeline
from gspo_jax.learner import train_batch
from gspo_jax.losses.advantages import group_relative_advantages
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.record.checkpoint import Checkpoints
from gspo_jax.rewards import final_answer
from gspo_jax.rollout.scoring import ResponseDecoder
from gspo_jax.runtime import sharding
from gspo_jax.sampler.samples import Prompts, finished_responses
from gspo_jax.tasks.chain import Chain
from gspo_jax.train import train_and_evaluate

plt.rcParams.update({"figure.constrained_layout.use": True, "axes.grid": True})
plt.rcParams.update({"grid.alpha": 0.25, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "figure.dpi": 100})

FULL = False  # True: chains of eight steps

# %% [markdown]
# ## The task
#
# `8a+3b-5?` asks for ((8 + 3) - 5) modulo 10. A worked response names each step
# by its letter. In the demonstrations one step in nine is wrong, so that the
# policy learns the method and not the precision. A verifier reads what follows
# the last `#`.

# %%
config = tiny_cpu.get_config("" if FULL else "debug")
if not FULL:
  config.num_steps = 40
  config.data.source = "chain:steps=2|3,demonstrated=2|3"
  config.data.prompts = 32  # problems an iteration,
  config.rollout.group_size = 8  # and responses to each
  config.data.max_prompt_length = 12
  config.sampler.max_new_tokens = 24
  config.learner.micro_batch_size = 16
  config.cold_start.steps = 400
  config.cold_start.batch = 64
  config.eval.every = 10
  config.eval.prompts = 128

held_out = Chain((8,) if FULL else (2, 3), evaluation=True)
for i in range(3):
  problem = held_out[i]
  print(f"{problem.text:22} {problem.demonstration:45} {problem.reference}")

# %% [markdown]
# ## The run
#
# The straight line of `gspo_jax/train.py`: sample responses, score them,
# compare within each group, update, and again. `workdir` holds all there is to
# keep; `python -m gspo_jax.report WORKDIR` makes a page of it.

# %%
workdir = tempfile.mkdtemp()
state = train_and_evaluate(config, workdir)

# %%
lines = Path(workdir, "metrics.jsonl").read_text().splitlines()
rows = [json.loads(line) for line in lines]


def curve(key):
  found = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
  return np.array(found, float).T


figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8))
left.plot(*curve("reward/mean"), alpha=0.6, label="training, sampled")
left.plot(*curve("eval/pass@1"), "o-", color="C3", label="held out, sampled")
left.plot(*curve("eval/greedy"), "s-", color="C1", label="held out, greedy")
left.set(xlabel="iteration", ylabel="share of right responses", ylim=(0, 1.02))
left.set_title("Precision comes from RL")
first, *_, last = curve("eval/pass@1")[1]
assert first < last
left.legend(loc="lower right")

middle.plot(*curve("policy/entropy"), color="C4")
middle.set(xlabel="iteration", ylabel="entropy (nats a token)")
middle.set(title="It makes up its mind", ylim=(0, None))

for unit, colour in (("token", "C1"), ("sequence", "C0")):
  label = f"of {'tokens' if unit == 'token' else 'responses'}"
  right.plot(*curve(f"ratio/{unit}_std"), color=colour, label=label)
right.axhspan(1e-5, 4e-4, color="C0", alpha=0.1)
right.text(1, 2e-4, "GSPO does not clip here", color="C0", va="center")
right.set(yscale="log", ylim=(1e-4, None), title="Importance ratios")
right.set(xlabel="iteration", ylabel="std over an iteration")
right.legend(loc="upper right")
plt.show()

# %% [markdown]
# ## Before and after
#
# The cold start lies in a checkpoint of its own. `build_program` makes the
# run's own jitted functions: here they answer held-out problems with the
# policy from before RL and with the one after it.

# %%
mesh = sharding.make_mesh(**config.mesh)
jax.set_mesh(mesh)
functions = build_program(parse(config), mesh)
with Checkpoints(Path(workdir, "cold_start")) as checkpoints:
  restored = checkpoints.restore(functions.cold_start.abstract, lambda *_: None)
before, after = restored.state.params, state.params

count, group = config.data.prompts, config.rollout.group_size
batch = pipeline.take(held_out, functions.prompt_config, count)
prompts, problems = Prompts(batch.tokens, batch.lengths), batch.problems


def ask(params):
  """Samples, their texts, and who is right, [problems, responses]."""
  samples = functions.sampler.generate(params, prompts, jax.random.key(1))
  decode = ResponseDecoder(batch, functions.tokenizer, group)
  read = [decode(i, x) for i, x in finished_responses(samples).items()]
  texts = [answer.text for answer in read]
  right = [final_answer("", a.text, a.reference) for a in read]
  return samples, texts, np.array(right).reshape(count, group)


samples, texts, right = ask(before)
_, texts_after, right_after = ask(after)
mark = lambda good: "right" if good else "wrong"
width = max(map(len, texts + texts_after))
print(f"{'':22} {'before':{width + 6}} after")
for i in range(8):
  a, b = texts[i * group], texts_after[i * group]
  ok, ok_after = mark(right[i, 0]), mark(right_after[i, 0])
  print(f"{problems[i].text:22} {a:{width}} {ok} {b:{width}} {ok_after}")

# %% [markdown]
# Left: each problem's share of right responses, before and after; above the
# diagonal it has become better. Right: responses from before RL, and what the
# policy from after RL thinks of each character. Green has become likelier, red
# less likely. A slip shows as one red character; what follows from it is copied
# faithfully, and stays.


# %%
@jax.jit
def log_probs(params, rollout):
  """Of the responses' tokens, [B, R]."""
  temperature = config.sampler.temperature
  scored = train_batch.response_logps(
    params, functions.cfg, rollout, temperature=temperature
  )
  return scored.logps


rollout = train_batch.unpacked(prompts, samples.tokens, samples.lengths)
mask = np.asarray(rollout.response_mask)
change = np.asarray(log_probs(after, rollout) - log_probs(before, rollout))
change = np.where(mask, change, np.nan)

figure, (left, image) = plt.subplots(
  1, 2, figsize=(13, 4.2), width_ratios=(1, 2.4)
)
jitter = np.random.default_rng(0).uniform(-0.02, 0.02, (2, count))
left.scatter(
  *(np.stack([right.mean(1), right_after.mean(1)]) + jitter), alpha=0.6
)
left.plot([0, 1], [0, 1], color="0.5", lw=0.8)
left.set(xlabel="share right before", ylabel="share right after")
left.set(title="Problems", aspect="equal")

# One response each to six problems that it got wrong and six it got right.
chosen = [
  next(i * group + g for g in range(group) if right[i, g] == wanted)
  for wanted in (0, 1)
  for i in np.flatnonzero((right == wanted).any(1))[:6]
]
shown = image.imshow(
  change[chosen], cmap="RdYlGn", vmin=-2, vmax=2, aspect="auto"
)
size = 9 if mask.shape[1] < 30 else 6
for y, row in enumerate(chosen):
  for x, character in enumerate(texts[row]):
    image.text(x, y, character, ha="center", va="center", size=size)
image.set_yticks(range(len(chosen)), [mark(right.ravel()[i]) for i in chosen])
image.set(
  xlabel="character of the response", title="What RL thinks of them now"
)
image.grid(visible=False)
figure.colorbar(shown, ax=image, label="change of the log-prob (nats)")
plt.show()

# %% [markdown]
# ## The ratios of one iteration
#
# An update of the policy from before RL: four optimizer steps on the responses
# above. Left the ratios of all their tokens, right those of the responses. Most
# responses end beyond the clip range, on the side their reward asked for, and
# stop pulling; of the tokens few have moved as far as GRPO's range.

# %%
advantages = group_relative_advantages(right).reshape(-1)
start = functions.learner.init_state(
  jax.tree.map(jnp.copy, before)
)  # which it donates
learner, lengths = functions.learner, np.asarray(samples.lengths)
packing = learner.pack(prompts.lengths, lengths, jax.random.key(2))
packed = learner.make_train_batch(prompts, samples, packing)
start, packed, _ = learner.compute_old_logps(start, packed)
rewards = jnp.float32(right.reshape(-1))
packed = learner.assign_advantages(packed, rewards, samples.finish)
updated, _, metrics = learner.update(start, packed)
old = log_probs(before, rollout)
moved = np.asarray(log_probs(updated.params, rollout) - old)
advantages = np.asarray(advantages)
of_answer = np.where(mask, moved, 0).sum(1) / mask.sum(1)

figure, (left, right) = plt.subplots(1, 2, figsize=(13, 3.8))
bins, style = np.linspace(-1, 1, 81), {"alpha": 0.55}
for sign, colour, name in (
  (1, "C2", "good responses"),
  (-1, "C3", "bad responses"),
):
  chosen = np.sign(advantages) == sign
  tokens = np.clip(moved[chosen][mask[chosen]], -1, 1)
  left.hist(tokens, bins, color=colour, label=name, **style)
  extent = np.quantile(np.abs(of_answer), 0.98)
  inside = np.clip(of_answer[chosen], -extent, extent)
  right.hist(inside, 40, range=(-extent, extent), color=colour, **style)
for bound in np.log((1 - 0.2, 1 + 0.27)):
  left.axvline(bound, color="C1", ls="--", lw=1)
for bound in np.log((1 - 3e-4, 1 + 4e-4)):
  right.axvline(bound, color="C0", ls="--", lw=1)
left.set(xlabel="log ratio of a token", ylabel="tokens", yscale="log")
left.set_title("Tokens; GRPO would clip beyond the dashed lines")
right.set(xlabel="log ratio of a response", ylabel="responses")
right.set_title("Responses; GSPO clips beyond the dashed lines")
left.legend()
plt.show()

token_std, answer_std = moved[mask].std(), of_answer.std()
alone = token_std / np.sqrt(mask.sum(1).mean())
print(
  f"clipped in the update: {metrics['clip_frac/token'].value():.1%} of tokens"
)
print(f"std of the log ratio: {token_std:.4f} of tokens, {answer_std:.4f} of")
print(f"responses; {alone:.4f} if the tokens of a response moved independently")
