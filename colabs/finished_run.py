# %% [markdown]
# # Reading a finished run
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/gspo-jax/gspo_jax/blob/main/colabs/finished_run.ipynb)
#
# A run leaves its numbers in `metrics.jsonl`, its histograms in
# `distributions.jsonl` and what it said now and then in `samples/`;
# `python -m gspo_jax.evaluate` adds every response to a benchmark. Name your
# run's folder below and see its curves, its lengths, what was clipped, which
# problems it solves, and its best and worst responses. Without one, a small run
# is made first, in three minutes on two CPU cores. Curves, histograms and
# samples without a notebook, as one page: `python -m gspo_jax.report WORKDIR`.
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
import collections
import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from gspo_jax.tasks.chain import Chain

plt.rcParams.update({"figure.constrained_layout.use": True, "axes.grid": True})
plt.rcParams.update({"grid.alpha": 0.25, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "figure.dpi": 100})

WORKDIR = ""  # of your run, such as "runs/tiny"; "": a small one is made
EVALUATION = ""  # what was evaluate's --out; "": its own, WORKDIR/evaluation
SET = ""  # of several evaluated sets the one to look at; "": the first

# %% [markdown]
# The small run: chains of two and three sums modulo 10, imitated from faulty
# demonstrations and then practised with GSPO. The same two commands, with your
# config and your problems, make a real one.

# %%
SMALL = (
  "--config.data.source=chain:steps=2|3,demonstrated=2|3",
  "--config.data.max_prompt_length=12",
  "--config.data.prompts=32",
  "--config.rollout.group_size=8",
  "--config.sampler.max_new_tokens=24",
  "--config.learner.micro_batch_size=16",
  "--config.cold_start.steps=400",
  "--config.cold_start.batch=64",
)
LONGER = (
  "--config.num_steps=40",
  "--config.eval.every=10",
  "--config.eval.prompts=128",
  "--config.checkpoint.every=20",
)


def python(*command):
  """Runs a command of the package, and shows the end of what it printed."""
  command = [sys.executable, *command]
  run = subprocess.run(command, capture_output=True, text=True)
  assert run.returncode == 0, run.stderr[-2000:]
  print(*run.stdout.splitlines()[-6:], sep="\n")


def make_run(workdir):
  config = "--config=configs/tiny_cpu.py:debug"
  train = ("-m", "gspo_jax.main", config, f"--workdir={workdir}")
  python(*train, *SMALL, *LONGER)
  chain, file = Chain((2, 3), evaluation=True, seed=1), Path(workdir, "chains")
  problems = [chain[i] for i in range(48)]
  rows = [{"question": p.text, "answer": p.reference} for p in problems]
  file.write_text("\n".join(map(json.dumps, rows)))
  evaluate = ("-m", "gspo_jax.evaluate", config, f"--checkpoint={workdir}")
  benchmark = (f"--set=chains={file}", "--reward=final_answer", "--samples=8")
  python(*evaluate, *benchmark, *SMALL)


# %%
if not WORKDIR:
  WORKDIR = tempfile.mkdtemp()
  make_run(WORKDIR)

# %% [markdown]
# ## The run
#
# One JSON object a step. Means are over the responses of an iteration; `eval/*`
# is on held-out problems.

# %%
lines = Path(WORKDIR, "metrics.jsonl").read_text().splitlines()
rows = [json.loads(line) for line in lines]


def curve(key):
  """Steps and values of a metric, where it was written and finite."""
  found = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
  return np.array(found, float).reshape(-1, 2).T


def plot(axis, key, label=None, **style):
  axis.plot(*curve(key), label=label, **style)


figure, axes = plt.subplots(2, 3, figsize=(13, 6.4), sharex=True)
(reward, length, clip), (ratio, entropy, seconds) = axes
plot(reward, "reward/mean", "reward, training", color="C0", alpha=0.6)
plot(reward, "eval/pass@1", "pass@1, held out", color="C3", marker="o")
plot(reward, "eval/greedy", "greedy, held out", color="C1", marker="s", ms=4)
plot(reward, "reward/mixed_groups", "groups that teach", color="0.6", ls=":")
reward.set(title="Does it learn?", ylabel="share of responses (of groups)")
reward.set_ylim(-0.02, 1.02)

plot(length, "response/length", color="C0")
length.set(title="How long does it talk?", ylabel="tokens a response")
length.set_ylim(bottom=0)
cut = length.twinx()
plot(cut, "response/truncated", color="C3", ls=":")
cut.set(ylim=(-0.02, 1.02), ylabel="share cut at the limit (dotted)")
cut.yaxis.label.set_color("C3")
cut.grid(visible=False)

step, low = curve("clip_frac/token_low")
_, high = curve("clip_frac/token_high")
names = ["bad, pushed down enough", "good, pushed up enough"]
clip.stackplot(step, low, high, labels=names, colors=["C3", "C2"], alpha=0.6)
clip.set(title="What is clipped?", ylabel="share of tokens")

plot(ratio, "ratio/token_std", "of tokens", color="C1")
plot(ratio, "ratio/sequence_std", "of responses", color="C0")
noise = "of responses, by rounding alone"
plot(ratio, "mismatch/sequence_abs_mean", noise, color="0.5", ls="--")
ratio.set(title="How far does an iteration go?", ylabel="std of the ratio")
ratio.set(yscale="log", xlabel="iteration")

plot(entropy, "policy/entropy", color="C4")
entropy.set(title="How sure is it?", ylabel="entropy (nats a token)")
entropy.set(xlabel="iteration", ylim=(0, None))

phases = ("generate", "score", "update")
times = [curve(f"time/{phase}") for phase in phases]
seconds.stackplot(times[0][0], *[t[1] for t in times], labels=phases, alpha=0.7)
# The first iteration compiles.
slowest = np.sort(np.sum([t[1] for t in times], axis=0))[-2:][0]
seconds.set(title="Where does the time go?", ylabel="seconds an iteration")
seconds.set(xlabel="iteration", ylim=(0, 1.3 * slowest))
for axis in (reward, clip, ratio, seconds):
  axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# Behind the spread of the ratios: `distributions.jsonl` counts log-ratios in
# bins of a quarter of a decade, from 1e-6 to 10 on either side of 0. Over the
# last tenth of the run, how far an update moved tokens and responses, and the
# gap between trainer and sampler, who are the same policy: where the two are
# alike, rounding is as large as what is learnt. Names that begin with `layer_`
# have a number a layer instead.

# %%
lines = Path(WORKDIR, "distributions.jsonl").read_text().splitlines()
head, *spreads = [json.loads(line) for line in lines]
edges = np.array(head["edges"][1:-1], float)  # the outermost are infinite


def shares(key):
  """Of the bins between two edges, over the last tenth of the run."""
  counts = [row[key] for row in spreads if key in row]
  total = np.sum(counts[-max(1, len(counts) // 10) :], axis=0)
  return total[1:-1] / total.sum()


figure, axes = plt.subplots(1, 2, figsize=(13, 3.4))
decades = np.arange(0, len(edges) // 2, 8)  # every second one
places = [*decades, (len(edges) - 1) / 2, *(len(edges) - 1 - decades[::-1])]
names = [f"{edges[i]:.0e}" for i in decades]
names = [*names, "0", *(name[1:] for name in reversed(names))]
for axis, unit, of in (
  (axes[0], "token", "tokens"),
  (axes[1], "sequence", "responses"),
):
  for key, label, colour in (
    (f"mismatch/{unit}_gap", "trainer less sampler", "0.5"),
    (f"ratio/{unit}_log", "new less old policy", "C0"),
  ):
    if any(key in row for row in spreads):  # not without log.instruments
      axis.stairs(shares(key), color=colour, label=label, fill=True, alpha=0.5)
  axis.set_xticks(places, names, fontsize=8)
  axis.set(title=f"Log-ratios of {of}", xlabel="log-ratio", ylabel="share")
  axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# What it said along the way, first and last:

# %%
files = sorted(Path(WORKDIR, "samples").glob("step_*.jsonl"))
for file in {files[0]: 0, files[-1]: 0}:
  sample = json.loads(file.read_text().splitlines()[0])
  print(*(f"{name}: {value}" for name, value in sample.items()), sep="\n")

# %% [markdown]
# ## The responses
#
# A line of `answers.jsonl` is a response: its problem, text, reference, score,
# length and how it ended.

# %%
folder = Path(EVALUATION or Path(WORKDIR, "evaluation"))
files = sorted(folder.glob(f"{SET or '*'}/answers.jsonl"))
if not files:
  raise FileNotFoundError(
    f"no responses in {folder}: python -m gspo_jax.evaluate --config=... "
    f"--checkpoint={WORKDIR} --set=NAME=FILE writes them"
  )
responses = [json.loads(line) for line in files[0].read_text().splitlines()]
by_problem = collections.defaultdict(list)
for a in responses:
  by_problem[a["id"]].append(a)
scores = np.array([[a["score"] for a in g] for g in by_problem.values()])
order = np.argsort(-scores.mean(1), kind="stable")
solved = (scores > 0.5).any(1).mean()
print(
  f"{responses[0]['set']}: {len(scores)} problems, {scores.shape[1]} responses "
  f"each, average score {scores.mean():.3f}, solved at least once {solved:.3f}"
)

# %% [markdown]
# Left: every response, its problem on the horizontal axis, the easiest first.
# RL feeds on the middle, where right and wrong stand side by side. Middle: how
# often one of $k$ responses is right. Right: whether length tells right from
# wrong.

# %%
figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), width_ratios=(1.6, 1, 1.2))
ranked = -np.sort(-scores[order], axis=1)
limits = {"vmin": min(0, scores.min()), "vmax": max(1, scores.max())}
style = {"aspect": "auto", "cmap": "RdYlGn", "interpolation": "none"}
image = axes[0].imshow(ranked.T, **style, **limits)
axes[0].set(
  xlabel="problem, by average score", ylabel="its responses, by score"
)
axes[0].set(title="Reward by problem")
axes[0].grid(visible=False)
figure.colorbar(image, ax=axes[0], label="score")

results = json.loads(files[0].with_name("results.json").read_text())
summary = results["results"]
for key, label in (("pass", "one of k is right"), ("majority", "the vote is")):
  if summary[key]:
    k = [int(k) for k in summary[key]]
    axes[1].plot(k, summary[key].values(), "o-", label=label)
    axes[1].set_xticks(k, k)
axes[1].set(xlabel="k responses", ylabel="share of problems", ylim=(0, 1.02))
axes[1].set(title="pass@k")
axes[1].legend()

tokens = np.array([a["tokens"] for a in responses])
right = np.array([a["score"] > 0.5 for a in responses])
width = max(1, tokens.max() // 30)
bins = np.arange(-0.5, tokens.max() + width + 0.5, width)
groups, colours = [tokens[right], tokens[~right]], ["C2", "C3"]
names = ["right", "wrong"]
axes[2].hist(groups, bins, stacked=True, color=colours, label=names)
cut_short = np.mean([a["finish"] == "truncated" for a in responses])
axes[2].set(xlabel="tokens", ylabel="responses")
axes[2].set(title=f"Length ({cut_short:.1%} cut at the limit)")
axes[2].legend()
plt.show()

# %% [markdown]
# The best: right on the problems that are hardest. The worst: wrong where
# nearly every other response is right.


# %%
def show(response, peers, width=300):
  text = response["response"]
  if len(text) > width:
    text = f"{text[: width // 2]} ... {text[-width // 2 :]}"
  print(f"problem   {response['problem'][-width:]}")
  print(f"response     {text}")
  end = "" if response["finish"] == "stopped" else ", cut at the limit"
  print(f"expected   {response['reference'][:width]}")
  print(f"           {response['tokens']} tokens{end}")
  print(f"           {peers:.0%} of the responses to this problem are right\n")


def extremes(right):
  """Responses that are right (wrong) where most are not, and that share."""
  found = []
  for group in by_problem.values():
    share = float(np.mean([a["score"] > 0.5 for a in group]))
    hits = [a for a in group if (a["score"] > 0.5) == right]
    if hits:
      found.append((share, min(hits, key=lambda a: a["tokens"])))
  return sorted(found, key=lambda pair: pair[0] if right else -pair[0])[:3]


for title, right in (("BEST", True), ("WORST", False)):
  print(f"---- {title}\n")
  for share, response in extremes(right):
    show(response, share)
