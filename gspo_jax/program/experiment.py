"""What a run consists of before its first step, and what identifies it."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from gspo_jax import model
from gspo_jax.data import datasets, pipeline, readers, sources
from gspo_jax.data.config import DataConfig
from gspo_jax.data.datasets import Datasets
from gspo_jax.data.problem import Problem
from gspo_jax.data.prompt_batch import PromptBatch
from gspo_jax.data.tokenizers.base import RewrittenTurns
from gspo_jax.learner.health import clip_range_warnings
from gspo_jax.learner.objective import DistillationConfig
from gspo_jax.program import load_params, settings
from gspo_jax.program.config import Config
from gspo_jax.program.functions import Program, build_program, check_heads
from gspo_jax.record.checkpoint import checksums
from gspo_jax.record.identity import flatten
from gspo_jax.record.progress import Progress
from gspo_jax.rewards import reward
from gspo_jax.rewards.pool import RewardPool
from gspo_jax.rewards.reward import EXAMPLE
from gspo_jax.rollout import environment, reward_model
from gspo_jax.rollout.config import RolloutConfig
from gspo_jax.rollout.conversations import Conversations
from gspo_jax.rollout.environment_pool import EnvironmentPool
from gspo_jax.rollout.episode import SequenceLimits
from gspo_jax.rollout.player import Player
from gspo_jax.rollout.reward_model import RewardModel
from gspo_jax.runtime import mesh_jit, multihost
from gspo_jax.runtime.errors import UserError, needs_extra, prefixed
from gspo_jax.runtime.key import as_dict
from gspo_jax.workers import sandbox_files
from gspo_jax.workers.pool import Pool

# The version of an RL checkpoint's layout. Raise it when arrays or metadata
# change: a run does not resume from another version.
CHECKPOINT_FORMAT = 3
# Keys that decide what a cold start imitates, and those that decide at which
# step its gate ends it.
_IMITATED = (
  *("data.max_prompt_length", "data.too_long", "data.system_prompt"),
  *("data.instruction", "data.template_args"),
  *("sampler.max_new_tokens", "rollout.environment"),
)
_GATED = "eval.prompts", "reward.names", "reward.pass_threshold", "sampler.stop"
_GATED_TURNS = "rollout.max_turns", "rollout.max_sequences"
# Keys, or sections, that only RL reads, after a cold start.
_OF_RL = (
  *("num_steps", "objective.", "optim.", "checkpoint.", "log."),
  *("eval.every", "learner.minibatches", "reward.weights", "data.drop_solved"),
  *("rollout.max_staleness", "rollout.dynamic_sampling_rounds"),
)
_TRIED = 100  # problems of a source whose prompts are tried


class Keys(NamedTuple):
  """One random key per use; an iteration folds its number into `steps`."""

  init: jax.Array
  cold_start: jax.Array
  evaluate: jax.Array
  steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Experiment:
  """The parts of a run that do not change between steps."""

  config: Config
  workdir: epath.Path
  program: Program
  reward_pool: Pool  # with an environment its pool, else a RewardPool
  datasets: Datasets
  # The first `eval.prompts` held-out problems as one batch; None if neither an
  # evaluation nor a cold start reads them.
  held_out: PromptBatch | None
  # A checkpoint or cold start of this run has the same identity.
  identity: dict
  keys: Keys

  def teachers_of(self, prompts: PromptBatch) -> np.ndarray | None:
    """[P] int32, the teacher of each prompt; None without several."""
    c = self.config.objective.distillation
    if len(c.teachers) < 2:
      return None
    if not c.teacher_key:
      return prompts.positions[:, 1]
    return np.array([teacher_of(c, p) for p in prompts.problems], np.int32)

  @property
  def conversations(self) -> Player | None:
    """What plays the environment or the agents; None without them."""
    rollout, sampler = self.config.rollout, self.program.sampler
    if not rollout.environment:
      return None
    assert sampler is not None
    player: type[Player] = Conversations
    if rollout.plays_agents:
      from gspo_jax.rollout.agents import Agents as player
    limits = SequenceLimits(
      turns=rollout.max_turns,
      sequences=rollout.max_sequences,
      width=self.config.data.max_prompt_length,
      longest=self.config.sampler.max_new_tokens,
    )
    return player(
      pool=self.reward_pool,
      prompt_config=self.program.prompt_config,
      stop=sampler.stop,
      limits=limits,
    )


def teacher_of(c: DistillationConfig, problem: Problem) -> int:
  """The teacher that the problem's column names; UserError if none."""
  names, key = list(c.folders), "objective.distillation.teacher_key"
  name = problem.columns.get(c.teacher_key)
  if name in names:
    return names.index(name)
  has = f"has {c.teacher_key}={name!r}"
  if c.teacher_key not in problem.columns:
    has = f"has no column {c.teacher_key!r} ({key})"
  raise UserError(
    f"the problem {problem.text[:40]!r} {has}: expected one of {names}, the "
    "names of objective.distillation.teachers"
  )


def prepare(
  config: Config,
  workdir: str,
  mesh: jax.sharding.Mesh,
  sampler_devices: Sequence[jax.Device] = (),
) -> Experiment:
  """The experiment, after all checks that need no other process.

  `mesh` is the trainer's. Without `sampler_devices` the sampler uses it, too.
  Raises UserError for a mistake in the config or the data.
  """
  _require_hidden(config.data, workdir)
  clips = clip_range_warnings(config.objective)
  for warning in filter(None, (*clips, settings.length_warning(config))):
    multihost.print_once(f"warning: {warning}")
  program = build_program(config, mesh, sampler_devices=sampler_devices)
  if config.rollout.environment and not config.rollout.plays_agents:
    program = _with_tools(program, config.rollout)
  with Progress(f"reading {config.data.source}"):
    problems = datasets.load(config.data, config.seed)
  for note in filter(None, (*problems.notes, _first_weights(config))):
    multihost.print_once(note)
  if not config.rollout.plays_agents:  # they write their prompts
    program.prompt_config.check(_first_problems(problems, _TRIED))
  if config.objective.distillation.teacher_key:
    for problem in _first_problems(problems):
      teacher_of(config.objective.distillation, problem)
  held_out, most = None, config.eval.prompts
  if config.eval.every or config.cold_start.steps:
    held_out = pipeline.take(problems.held_out, program.prompt_config, most)
    if len(held_out) < most:
      multihost.print_once(
        f"eval.prompts={most}: {len(held_out)} problems are held out and fit, "
        "which is all that is evaluated; data.eval_source can name more"
      )
  identity = load_params.identity(program) | {
    "seed": config.seed,
    "data": {"fingerprint": datasets.fingerprint(problems.stages)},
  }
  return Experiment(
    config=config,
    workdir=epath.Path(workdir),
    program=program,
    reward_pool=_pool(config, program, problems, workdir),
    datasets=problems,
    held_out=held_out,
    identity=identity,
    keys=Keys(*jax.random.split(jax.random.key(config.seed), 4)),
  )


def _require_hidden(c: DataConfig, workdir: str) -> None:
  """UserError if programs of the policy could read the run's files."""
  sandbox_files.require_hidden("the current folder", ".")
  sandbox_files.require_hidden("--workdir", workdir)
  specs = [("data.source", c.source), ("data.eval_source", c.eval_source)]
  specs += [("data.curriculum", spec) for _, spec in c.curriculum]
  for key, spec in specs:
    for each in spec.split(","):
      sandbox_files.require_hidden(key, readers.path_of(each.strip()))


def _first_weights(config: Config) -> str:
  """A line about the first weights if they may surprise the user, or ""."""
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


def _with_tools(program: Program, rollout: RolloutConfig) -> Program:
  """The program; its prompts tell the policy of the environment's tools.

  UserError if the tokenizer cannot write conversations turn by turn, and they
  may not be several sequences.
  """
  tokenizer, spec = program.tokenizer, rollout.environment
  with prefixed(f"rollout.environment={spec!r}"):
    tools, tool_format = environment.tools(spec, tokenizer.tool_format)
    if tools and rollout.max_sequences > 1:
      raise UserError(
        f"rollout.max_sequences={rollout.max_sequences}: expected 1 for an "
        "environment with tools"
      )
    try:
      tokenizer.check_turns(environment.roles(spec), tools, tool_format)
    except RewrittenTurns as error:
      # A response of gpt-oss is several channels, which no message holds.
      if tools or tokenizer.tool_format == "openai":
        raise
      if rollout.max_sequences == 1:
        raise UserError(
          f"{error}; or rollout.max_sequences={rollout.max_turns}, which makes "
          "a sequence of each turn"
        ) from error
  prompts = dataclasses.replace(program.prompt_config, tools=tools)
  return dataclasses.replace(program, prompt_config=prompts)


def _pool(
  config: Config, program: Program, problems: Datasets, workdir: str
) -> Pool:
  """A RewardPool; with an environment an `EnvironmentPool` or `AgentPool`."""
  c, spec = config.reward, config.rollout.environment
  typed = f"rollout.environment={spec!r}" if spec else f"reward.names={c.names}"
  scorer = make_reward_model(c.names, typed, config, program)
  limits: dict[str, Any] = {
    "workers": c.workers,
    "seconds": c.seconds,
    "concurrency": c.concurrency,
    "workdir": workdir,
  }
  with prefixed(typed):
    if not spec:
      examples = [EXAMPLE.to(p) for p in _first_problems(problems)]
      more = {"examples": examples, "model": scorer} | limits
      return RewardPool(c.names, c.weights, **more)
    if not config.rollout.plays_agents:
      return EnvironmentPool(
        spec,
        tool_format=program.tokenizer.tool_format,
        schemas=program.prompt_config.tools,
        examples=_first_problems(problems),
        **limits,
      )
    with needs_extra("serve", "an agent"):  # so not at the top
      from gspo_jax.rollout.agents import AgentPool
    sampling = settings.sampler_config(config, program.tokenizer)
    return AgentPool(spec, program.tokenizer, sampling, **limits)


def _first_problems(problems: Datasets, count: int = 1) -> list[Problem]:
  """The first problems of every source."""
  mixtures = [*(stage.source for stage in problems.stages), problems.held_out]
  sources = [source for m in mixtures for source in pipeline.parts(m)]
  return [s[i] for s in sources for i in range(min(count, len(s)))]


def make_reward_model(
  names: Sequence[str], typed: str, config: Config, program: Program
) -> RewardModel | None:
  """The reward model of `names`, if any; a pass has a micro-batch's rows.

  `typed` is the key or flag that has the names, for errors.
  """
  if not (folder := reward_model.folder_of(names)):
    return None
  with prefixed(typed):
    scorer = RewardModel(
      folder,
      program.prompt_config,
      program.mesh,
      dtype=config.model.dtype,
      rows=config.learner.micro_batch_size,
    )
    check_heads(scorer.cfg, program.mesh)
  return scorer


def cold_start_identity(experiment: Experiment) -> dict:
  """What a cold start must agree with: all that decides its weights.

  Not what only rounds them, as devices and the rows of a micro-batch do: a run
  may resume with others.
  """
  config, problems = experiment.config, experiment.datasets
  identity = experiment.identity | {
    "data": {"fingerprint": sources.fingerprint(problems.demonstrations)},
    "cold_start": as_dict(config.cold_start)
    | {"from": config.model.checkpoint},
  }
  names = [*_IMITATED]
  if config.cold_start.gate:
    identity["eval"] = {"fingerprint": sources.fingerprint(problems.held_out)}
    names += [*_GATED, *(_GATED_TURNS if config.rollout.environment else ())]
  keys = flatten(config.as_json())
  return identity | {name: keys[name] for name in names}


def cold_start_key(experiment: Experiment) -> dict | None:
  """What decides a cold start to the last bit, for `record.kept`.

  None if a name hides a part of it: what a folder, a file or a function of the
  user's holds may change. And None of several processes, which may share no
  folder.
  """
  config, mesh = experiment.config, experiment.program.mesh
  names = [
    *(config.model.checkpoint, config.rollout.environment),
    *(config.data.source.partition(":")[0], config.data.eval_source),
    *(config.reward.names if config.cold_start.gate else ()),
  ]
  ours = {"", *datasets.BUILT_IN, *environment.BUILT_IN, *reward.BUILT_IN}
  is_ours = lambda name: name in ours or re.fullmatch(r"gspo_jax(\.\w+)+", name)
  if jax.process_count() > 1 or not all(map(is_ours, names)):
    return None
  keys, cores = flatten(config.as_json()), os.cpu_count()
  if hasattr(os, "sched_getaffinity"):  # not on macOS
    cores = len(os.sched_getaffinity(0))
  return cold_start_identity(experiment) | {
    "config": {k: x for k, x in keys.items() if not k.startswith(_OF_RL)},
    "devices": [str(mesh), mesh.devices.flat[0].device_kind],
    "cores": cores,  # among which XLA on a CPU splits sums
    "process": str(mesh_jit.process()),
  }


def checkpoint_identity(
  experiment: Experiment, teachers: Sequence[model.Params] = ()
) -> dict:
  """What a checkpoint of RL must agree with: `identity` and more."""
  assert experiment.program.learner is not None
  config, state = experiment.config, experiment.program.learner.abstract
  identity = experiment.identity | {"checkpoint format": CHECKPOINT_FORMAT}
  if config.model.lora.rank:
    identity |= load_params.lora_identity(experiment.program)
  rollout, optimizer = config.rollout, config.optim.name.partition(":")[0]
  parts = {  # those that are not false
    "a reference (objective.kl_coef)": state.reference is not None,
    "a critic (objective.name)": state.critic is not None,
    "optim.name": optimizer != "adamw" and optimizer,
    "frozen routers (optim.freeze_moe_router)": config.optim.freeze_moe_router,
    "batches ahead (rollout.max_staleness)": rollout.max_staleness,
    "partial responses (rollout.max_tokens_per_iteration)": (
      rollout.max_tokens_per_iteration > 0
    ),
  }
  if teachers:
    sums = json.dumps(checksums(teachers), sort_keys=True).encode()
    name = "weights of objective.distillation.teachers"
    parts[name] = hashlib.sha256(sums).hexdigest()[:16]
  if rollout.is_off_policy:
    # These keys decide the prompts and the shape of pending responses.
    data = "prompts max_prompt_length system_prompt instruction template_args"
    for key in data.split():
      identity[f"data.{key}"] = getattr(config.data, key)
    identity["rollout.group_size"] = rollout.group_size
    identity["sampler.max_new_tokens"] = config.sampler.max_new_tokens
    if config.sampler.keeps_ids:
      kept = config.sampler.num_kept(experiment.program.cfg.vocab_size)
      identity["ids of a token (sampler.kept_ids, sampler.top_k)"] = kept
    parts |= {
      "objective.score_centering": config.objective.score_centering,
      "drafts (continuous_batching.speculation)": (
        config.continuous_batching.speculation > 0
      ),
      "the sampler's experts (objective.replay)": (
        config.objective.replay == "r3"
      ),
      "rollout.environment": rollout.environment,
      "rollout.max_turns": rollout.environment and rollout.max_turns,
    }
  return identity | {name: part for name, part in parts.items() if part}
