"""What a run consists of before its first step, and what identifies it."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
from etils import epath

from gspo_jax.data import datasets, pipeline, readers
from gspo_jax.data.config import DataConfig
from gspo_jax.data.datasets import Datasets
from gspo_jax.data.problem import Problem
from gspo_jax.data.prompt_batch import PromptBatch
from gspo_jax.learner.health import clip_range_warnings
from gspo_jax.program import load_params, settings
from gspo_jax.program.config import Config
from gspo_jax.program.functions import Program, build_program
from gspo_jax.record.progress import Progress
from gspo_jax.rewards.config import RewardConfig
from gspo_jax.rewards.pool import RewardPool
from gspo_jax.rewards.reward import EXAMPLE
from gspo_jax.rollout import environment
from gspo_jax.rollout.conversations import Conversations
from gspo_jax.rollout.environment_pool import EnvironmentPool
from gspo_jax.runtime import multihost, sharding
from gspo_jax.runtime.errors import UserError
from gspo_jax.workers import sandbox_files

# Of the metadata and arrays of a checkpoint of RL. A run does not resume from
# another format.
CHECKPOINT_FORMAT = 3


class Keys(NamedTuple):
  """One random key for each use; an iteration folds its number into `steps`."""

  init: jax.Array
  cold_start: jax.Array
  evaluate: jax.Array
  steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Experiment:
  """What stays the same from the first step to the last.

  Attributes:
    config: all the keys.
    workdir: where everything is written.
    program: the jitted functions.
    reward_pool: the processes that compute rewards, or run environments.
    datasets: problems to learn from, to be evaluated on, and to imitate.
    held_out: `eval.prompts` of the held-out problems, as one batch; empty with
      `eval.every=0` and without a cold start, where nothing reads them.
    identity: what a checkpoint and a cold start must agree with to belong to
      this run.
    keys: the random keys.
  """

  config: Config
  workdir: epath.Path
  program: Program
  reward_pool: RewardPool | EnvironmentPool
  datasets: Datasets
  held_out: PromptBatch
  identity: dict
  keys: Keys

  @property
  def conversations(self) -> Conversations | None:
    """What samples conversations; None: there is no environment."""
    if not self.config.rollout.environment:
      return None
    return Conversations(
      pool=self.reward_pool,
      max_turns=self.config.rollout.max_turns,
      prompt_config=self.program.prompt_config,
      batch_sharding=sharding.batch_sharding(self.program.sampler.mesh),
      stop=self.program.sampler.stop,
    )


def prepare(
  config: Config,
  workdir: str,
  mesh: jax.sharding.Mesh,
  sampler_devices: Sequence[jax.Device] = (),
) -> Experiment:
  """What a process can check by itself, before any work.

  Args:
    config: from `config.parse`.
    workdir: of the run.
    mesh: of the trainer.
    sampler_devices: the sampler's own; none: those of `mesh`.

  Raises:
    UserError: the config or the data cannot work as they are.
  """
  _require_hidden(config.data, workdir)
  for warning in _warnings(config):
    multihost.print_once(f"warning: {warning}")
  program = build_program(config, mesh, sampler_devices=sampler_devices)
  with Progress(f"reading {config.data.source}"):
    problems = datasets.load(config.data, config.seed)
  for note in filter(None, (*problems.notes, _first_weights(config))):
    multihost.print_once(note)
  identity = load_params.identity(program) | {
    "seed": config.seed,
    "data": {"fingerprint": datasets.fingerprint(problems.stages)},
  }
  return Experiment(
    config=config,
    workdir=epath.Path(workdir),
    program=program,
    reward_pool=_environment_pool(config, program.tokenizer, problems)
    if config.rollout.environment
    else _reward_pool(config.reward, problems),
    datasets=problems,
    held_out=pipeline.take(
      problems.held_out, program.prompt_config, config.eval.prompts
    )
    if config.eval.every or config.cold_start.steps
    else {},
    identity=identity,
    keys=Keys(*jax.random.split(jax.random.key(config.seed), 4)),
  )


def _require_hidden(c: DataConfig, workdir: str) -> None:
  """UserError if programs of the policy could read files of the run."""
  sandbox_files.require_hidden("the current folder", ".")
  sandbox_files.require_hidden("--workdir", workdir)
  specs = [("data.source", c.source), ("data.eval_source", c.eval_source)]
  specs += [("data.curriculum", spec) for _, spec in c.curriculum]
  for key, spec in specs:
    for each in spec.split(","):
      sandbox_files.require_hidden(key, readers.path_of(each.strip()))


def _warnings(config: Config) -> list[str]:
  clips = clip_range_warnings(config.objective)
  return [*clips, *filter(None, [settings.length_warning(config)])]


def _first_weights(config: Config) -> str:
  """A line about the first weights, where they may be others than expected."""
  checkpoint, steps = config.model.checkpoint, config.cold_start.steps
  if checkpoint and steps:
    return (
      f"cold_start.steps={steps}: the weights of {checkpoint} imitate "
      "demonstrations before RL; 0 leaves that out"
    )
  if not (checkpoint or steps):
    return (
      "no model.checkpoint and no cold_start.steps: this run starts from "
      "random weights, to try the machine"
    )
  return ""


def _environment_pool(
  config: Config, tokenizer, problems: Datasets
) -> EnvironmentPool:
  """The pool, if the conversations can be written turn by turn."""
  c, spec = config.reward, config.rollout.environment
  try:
    tokenizer.check_turns(environment.roles(spec))
    return EnvironmentPool(
      spec,
      examples=_first_problems(problems),
      workers=c.workers,
      seconds=c.seconds,
      concurrency=c.concurrency,
    )
  except UserError as error:
    raise UserError(f"rollout.environment={spec!r}: {error}") from error


def _first_problems(problems: Datasets) -> list[Problem]:
  """That of every source."""
  mixtures = [*(stage.source for stage in problems.stages), problems.held_out]
  sources = [s for m in mixtures for s in getattr(m, "sources", (m,))]
  return [source[0] for source in sources if len(source)]


def _reward_pool(c: RewardConfig, problems: Datasets) -> RewardPool:
  """The pool, with the first problem of every source as an example."""
  try:
    return RewardPool(
      c.names,
      c.weights,
      workers=c.workers,
      seconds=c.seconds,
      concurrency=c.concurrency,
      examples=[EXAMPLE.to(p) for p in _first_problems(problems)],
    )
  except UserError as error:
    raise UserError(f"reward.names={c.names}: {error}") from error


def checkpoint_identity(experiment: Experiment) -> dict:
  """What a checkpoint of RL must agree with, besides `identity`."""
  config, state = experiment.config, experiment.program.learner.abstract
  identity = experiment.identity | {"checkpoint format": CHECKPOINT_FORMAT}
  if state.reference is not None:
    identity["a reference (objective.kl_coef)"] = True
  if config.model.lora.rank:
    identity |= load_params.lora_identity(experiment.program)
  if state.critic is not None:
    identity["a critic (objective.name)"] = True
  name = config.optim.name.partition(":")[0]
  if name != "adamw":
    identity["optim.name"] = name
  rollout = config.rollout
  if rollout.max_staleness:
    identity["batches ahead (rollout.max_staleness)"] = rollout.max_staleness
  if rollout.max_tokens_per_iteration:
    identity["partial responses (rollout.max_tokens_per_iteration)"] = True
  if rollout.is_off_policy:
    # Pending responses belong to these prompts, and have this shape.
    for key in (
      "prompts",
      "max_prompt_length",
      "system_prompt",
      "instruction",
      "template_args",
    ):
      identity[f"data.{key}"] = getattr(config.data, key)
    identity["rollout.group_size"] = rollout.group_size
    identity["sampler.max_new_tokens"] = config.sampler.max_new_tokens
    if rollout.environment:
      identity["rollout.environment"] = rollout.environment
      identity["rollout.max_turns"] = rollout.max_turns
  return identity
