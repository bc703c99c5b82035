"""What a config makes: a run that takes notes, and a program."""

import atexit
import collections
import functools
import re
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from made_run import MadeRun

from gspo_jax.learner import optimizer
from gspo_jax.program import learner_functions, settings
from gspo_jax.program.config import parse
from gspo_jax.program.functions import build_program
from gspo_jax.runtime import sharding
from gspo_jax.runtime.mesh_jit import MeshJit

FOLDER = Path(tempfile.mkdtemp(prefix="made_runs_"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
OBSERVED: dict[str, "Observed"] = {}


def of(config) -> "Observed":
  key = config.to_json_best_effort()
  return OBSERVED.setdefault(key, Observed(config, FOLDER / str(len(OBSERVED))))


class Observed:
  def __init__(self, config, folder):
    self._config, self.parsed, self._folder = config, parse(config), folder

  # Of a run.

  @functools.cached_property
  def run(self) -> MadeRun:
    return MadeRun(self._config, self._folder)

  def initial_key(self):
    (key, *_) = self.run.keys["init"]
    return np.asarray(jax.random.key_data(key))

  def problems(self):
    """Of the first iteration."""
    return self.run.given("generate")[0]

  def kinds(self) -> dict[str, int]:
    """Their number by their file's letter; "0" for the chain."""
    letters = (t[0] if t[0].isalpha() else "0" for t in self.problems())
    return dict(collections.Counter(letters))

  def repeats_of_solved(self):
    """The largest number of times that a solved problem is sampled."""
    batches = self.run.given("generate")
    solved = [text for batch in batches for text in batch if int(text[1:4]) < 8]
    return max(collections.Counter(solved).values())

  def demonstrations(self):
    """Those of the first batch: prompts, and the texts of responses."""
    prompts, responses, *_ = self.run.given("cold_start")[0]
    tokenizer = self.run.experiment.program.tokenizer
    return prompts.tokens, [*map(tokenizer.decode, responses)]

  def teachers_of_held_out(self):
    experiment = self.run.experiment
    return {*experiment.teachers_of(experiment.held_out).tolist()}

  def mean_reward(self):
    return float(np.mean(self.run.given("rewards")))

  def evaluated_at(self):
    pairs = zip(self.run.rows(), self.run.rows("eval/greedy"), strict=True)
    return [step for step, greedy in pairs if greedy is not None]

  def samples_averaged(self):
    """Each n of eval/avg@n."""
    text = (self.run.folder / "metrics.jsonl").read_text()
    return [int(n) for n in re.findall(r"eval/avg@(\d+)", text)]

  def saved_steps(self):
    folder = self.run.folder / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir())

  def wandb(self):
    """The project of each W&B run, and the steps logged there."""
    made = self.run.wandb
    projects = [call.args[0] for call in made.call_args_list]
    return projects, [call.args[0] for call in made().write.call_args_list]

  def traced(self):
    """The updates in a trace, counted from 1; and the name of its folder."""
    names, traced, updates, on = set(), [], 0, False
    for name, argument in self.run.events:
      if name == "start_trace":
        on = True
        names.add(argument.name)
      on = on and name != "stop_trace"
      updates += name == "update"
      if on and name == "update":
        traced.append(updates)
    return traced, names

  data = property(lambda self: self.run.experiment.datasets)

  # Of a program.

  @functools.cached_property
  def program(self):
    mesh = sharding.make_mesh(jax.devices()[:1])
    return build_program(self.parsed, mesh)

  cfg = property(lambda self: self.program.cfg)
  tokenizer = property(lambda self: self.program.tokenizer)

  def first_weight(self):
    """ "random" if no file is read."""
    init = self.program.init_params
    if isinstance(init, MeshJit):
      return "random"
    return float(init(jax.random.key(0))["embed"][0, 0])

  def samplers(self, field):
    """A field of the sampler of an iteration, and of that of evaluations."""
    both = self.program.sampler.generate, self.program.sampler.respond
    return [getattr(sampler.config, field) for sampler in both]

  def packings(self, field):
    """A field of the rows of an update, and of those of a cold start."""
    both = self.program.learner, self.program.cold_start
    return [getattr(functions.packing, field) for functions in both]

  def given(self, function, key):
    """What a function of the learner was given."""
    made = getattr(self.program.learner, function)
    return made.function.keywords[key]

  def policy(self):
    return settings.policy_learner(self.parsed, self.cfg)

  def critic(self):
    return settings.critic_learner(self.parsed, self.cfg)

  def cold_start_step(self):
    made = self.program
    wrapped = mock.patch.object(
      optimizer, "optimizer", wraps=optimizer.optimizer
    )
    with wrapped as make:
      learner_functions.cold_start_functions(
        self.parsed, self.cfg, made.abstract_params, made.mesh
      )
    return first_step(optimizer.optimizer(*make.call_args.args))


def first_step(optimizer):
  """The change of a weight of 0 in the first step."""
  weights, gradient = {"head": jnp.zeros(2)}, {"head": jnp.ones(2)}
  change, _ = optimizer.update(gradient, optimizer.init(weights), weights)
  return float(-change["head"][0])
