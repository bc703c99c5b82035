"""Says what a run would read and reward, before anything compiles.

  python -m gspo_jax.check --config=configs/tiny_cpu.py --response="#### 7"

The checks and errors are those of `gspo_jax.main` before it compiles. Then come
sizes, the first prompts as the policy reads them, and what the response would
get. No checkpoint is read, and no weights but those of a reward model.
"""

import jax
import numpy as np
from absl import flags
from clu import parameter_overview

from gspo_jax import train
from gspo_jax.data import pipeline
from gspo_jax.program import command, settings
from gspo_jax.program.config import parse
from gspo_jax.program.experiment import prepare
from gspo_jax.rewards import thinking
from gspo_jax.rewards.reward import Response
from gspo_jax.rollout.conversations import prompt_ids

_PROMPTS = flags.DEFINE_integer("prompts", 2, "To print.", lower_bound=1)
_RESPONSE = flags.DEFINE_string("response", "", "A text to reward.")


def main() -> None:
  start = "python -m gspo_jax.check --config=configs/tiny_cpu.py"
  command.run(lambda: command.on_hosts(_check), start, __doc__)


def _check() -> None:
  config, workdir = parse(command.CONFIG.value), command.WORKDIR.value or ""
  mesh, own = settings.make_meshes(config)
  print(train.devices(mesh, own))
  train.check_log(config.log)
  with jax.set_mesh(mesh):
    experiment = prepare(config, workdir, mesh, own)
    with experiment.reward_pool:
      curriculum = train.make_curriculum(experiment)
      if config.cold_start.steps:
        train.demonstrations(experiment)
      _print_sizes(experiment)
      batch = curriculum.next_batch(1, _PROMPTS.value)
      for p, problem in enumerate(batch.problems):
        prompt, reward = _reward(experiment, problem, batch.ids(p))
        print(f"\nprompt {p + 1}:\n{prompt}\n\n{_RESPONSE.value!r}: {reward}")


def _print_sizes(experiment) -> None:
  program, data = experiment.program, experiment.datasets
  prompts, tokenizer = program.prompt_config, program.tokenizer
  count = parameter_overview.count_parameters(program.abstract_policy)
  stops = [tokenizer.decode([i]) for i in tokenizer.stop_ids]
  print(
    f"{count:,} parameters; stop tokens {stops}; {len(prompts.tools)} tools, "
    f"calls as {tokenizer.tool_format!r}"
  )
  for source in [*(stage.source for stage in data.stages), data.held_out]:
    for part in filter(len, pipeline.parts(source)):
      some = (part[i] for i in range(min(len(part), 1000)))
      sizes = np.array([len(prompts.tokens_of(problem)) for problem in some])
      use = "held out" if source is data.held_out else "to train on"
      print(
        f"{len(part):,} problems {use}; prompts of the first {len(sizes):,}: "
        f"{sizes.mean():.0f} tokens in the mean, {sizes.max()} at most, "
        f"{(sizes > prompts.width).sum()} beyond data.max_prompt_length"
      )


def _reward(experiment, problem, ids: list[int]) -> tuple[str, str]:
  """A prompt as the policy reads it, and what --response gets."""
  pool, c, text = experiment.reward_pool, experiment.config, _RESPONSE.value
  cfg, size = experiment.program.prompt_config, c.rollout.group_size
  if c.rollout.plays_agents:
    return problem.text, "its agent writes the prompts, and rewards"
  if c.rollout.environment:
    (begun,) = pool.begin([(problem, 1, 0)])
    if begun.failure:
      return problem.text, begun.failure
    ids = prompt_ids(cfg, [begun.step.messages]) or ids
    prompt = cfg.tokenizer.decode(ids)
    response = thinking.opening(prompt) + text
    (answer,) = pool.replies(pool.step([(begun.state, response)]))
    return prompt, answer.failure or str(answer.step)
  read, reference = cfg.tokenizer.decode(ids), problem.reference
  lengths = len(cfg.tokenizer.encode(text)) + 1, c.sampler.max_new_tokens
  more = *lengths, problem.columns, problem, 1
  group = [Response(read, text, reference, *more)] * size
  rewards = pool.submit(group, size).result()
  if pool.model:
    rewards = pool.add_model(rewards, dict(enumerate(group)))
  parts = {name: float(part[0]) for name, part in rewards.parts.items()}
  said = f"{rewards.total[0]:g} of {parts}, reference {reference!r}"
  return read, "; ".join([said, *rewards.reasons])


if __name__ == "__main__":
  main()
