"""Changes of a whole config: the method of a paper, or every size for a try."""

from ml_collections import ConfigDict


def shrink(c: ConfigDict) -> ConfigDict:
  """A config for any machine: seconds, and nothing is learnt."""
  c.num_steps = 2
  c.model.variant = "tiny"
  c.model.dtype = "float32"
  c.mesh = ConfigDict(
    {"data": -1, "fsdp": 1, "context": 1, "expert": 1, "tensor": 1}
  )
  c.sampler_mesh = ConfigDict({"devices": 0, "expert": 0, "tensor": 0})
  c.data.source = "chain:steps=1"
  c.data.eval_source = c.data.tokenizer = ""
  c.data.instruction = "{problem}"
  c.data.system_prompt = ""
  c.data.prompts = 8
  c.data.max_prompt_length = 8
  c.rollout.group_size = 4
  c.sampler.max_new_tokens = 12
  c.learner.micro_batch_size = 8
  c.continuous_batching.slots = 0
  c.rollout.max_staleness = 0
  c.rollout.max_tokens_per_iteration = 0
  c.reward.names = ("final_answer",)
  c.reward.weights = (1.0,)
  c.cold_start.steps = 0
  c.eval.prompts = 8
  c.eval.samples = 4
  c.log.profile = ()
  return c


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
  c.objective.zero_truncated = True
  c.data.drop_solved = True


# Of the papers in configs/dapo.py and configs/srpo.py.
RECIPES = {"dapo": _dapo, "srpo": _srpo}
