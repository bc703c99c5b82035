"""Changes of a whole config: the method of a paper, or every size for a try.

And the arguments that configs for several models share.
"""

from ml_collections import ConfigDict

from gspo_jax.configs import tiny_cpu


def shrink(c: ConfigDict) -> ConfigDict:
  """A config for any machine: seconds, and nothing is learnt."""
  tiny_cpu.shrink(c)
  c.num_steps = 2
  c.model.variant = "tiny"
  c.model.dtype = "float32"
  c.mesh = ConfigDict(
    {"data": -1, "fsdp": 1, "context": 1, "expert": 1, "tensor": 1}
  )
  c.sampler_mesh = ConfigDict({"devices": 0, "expert": 0, "tensor": 0})
  c.data.eval_source = c.data.tokenizer = ""
  c.data.instruction = "{problem}"
  c.data.system_prompt = ""
  c.data.prompts = 8
  c.learner.micro_batch_size = 8
  c.continuous_batching.slots = 0
  c.rollout.max_staleness = 0
  c.rollout.max_tokens_per_iteration = 0
  c.reward.names = ("final_answer",)
  c.reward.weights = (1.0,)
  c.cold_start.steps = 0
  c.log.profile = ()
  return c


def arguments(arg: str, names, flags) -> tuple[dict[str, str], set[str]]:
  """Parses words with commas between: any of `flags`, and NAME=VALUE."""
  words = [word for word in arg.split(",") if word]
  given = dict(word.split("=", 1) for word in words if "=" in word)
  given_flags = {word for word in words if "=" not in word}
  unknown = sorted((given.keys() - {*names}) | (given_flags - {*flags}))
  if unknown:
    known = ", ".join((*flags, *names))
    raise ValueError(f"{unknown[0]}: expected one of {known}")
  return given, given_flags


def chosen(given: dict[str, str], name: str, choices, where: str = "") -> str:
  """The argument `name`: one of `choices`, by default the first."""
  value = given.get(name, next(iter(choices)))
  if value not in choices:
    raise ValueError(
      f"{name}={value}: expected one of {', '.join(choices)}{where}"
    )
  return value


def train_on_questions(c: ConfigDict, given: dict[str, str]) -> bool:
  """Takes the arguments checkpoint, questions and eval, at any size.

  Returns whether they are there: the run is then one on maths questions.
  """
  checkpoint, questions = given.get("checkpoint"), given.get("questions")
  if bool(checkpoint) != bool(questions) or ("eval" in given and not questions):
    raise ValueError(
      "expected checkpoint= and questions=, or neither of them and no eval="
    )
  if not checkpoint:
    return False
  c.model.checkpoint = checkpoint
  c.data.source = _source(questions)
  c.data.eval_source = _source(given.get("eval", ""))
  c.data.instruction = (
    "{problem}\n\nReason step by step, and put the final answer in \\boxed{}."
  )
  c.data.max_prompt_length = 1024
  c.data.too_long = "drop"
  # DAPO (arXiv 2503.14476, sec. 3.4) punishes the last fifth of the length.
  buffer = c.sampler.max_new_tokens // 5
  c.reward.names = ("math", f"overlong:buffer={buffer}")
  c.reward.weights = (1.0, 1.0)
  c.reward.workers = 16
  return True


def _source(file: str) -> str:
  """A file as `data.source` names it; other sources as they are."""
  if not file or ":" in file.replace("://", ""):
    return file
  return ("parquet:" if file.endswith(".parquet") else "jsonl:") + file


def with_recipe(c: ConfigDict, name: str) -> ConfigDict:
  """The config with the method of a paper: a name of `RECIPES`, or ""."""
  if name and name not in RECIPES:
    raise ValueError(f"recipe={name}: expected one of {', '.join(RECIPES)}")
  if name:
    RECIPES[name](c)
  return c


def _dapo(c: ConfigDict) -> None:
  c.objective.name = "dapo"
  c.rollout.dynamic_sampling_rounds = 3
  buffer = c.sampler.max_new_tokens // 5  # 4,096 of 20,480 in the paper
  c.reward.names = (c.reward.names[0], f"overlong:buffer={buffer}")
  c.reward.weights = (1.0, 1.0)


def _srpo(c: ConfigDict) -> None:
  c.objective.name = "grpo"
  c.objective.truncated = "zero_advantage"
  c.data.drop_solved = True


# Of the papers in configs/dapo.py and configs/srpo.py.
RECIPES = {"dapo": _dapo, "srpo": _srpo}
