"""The section `data` of a config: problems, and the prompts made of them."""

import dataclasses

from gspo_jax.runtime.errors import UserError
from gspo_jax.runtime.key import AT_LEAST_1, Choice, key


@dataclasses.dataclass(frozen=True)
class DataConfig:
  source: str = key(
    "chain",
    '"chain" (the embedded task), jsonl:FILE, parquet:FILE, hf:NAME[:SPLIT] '
    "(of the Hugging Face Hub, a folder or a file), tfds:NAME[:SPLIT] or "
    "package.module.factory of any Grain source; several with commas between. "
    '"chain:steps=4" sets numbers of the chain, see gspo_jax/tasks/chain.py.',
  )
  weights: tuple[float, ...] = key(
    (), "shares of several sources; (): equal shares"
  )
  eval_source: str = key("", 'held-out problems; "": 1/8 of `source`, by hash')
  problem_field: str = key(
    "",
    "the column with the text of the problem, or with a conversation: a list "
    'of {role, content}. "": the first found, in any case, of question, '
    "problem, prompt, messages.",
  )
  reference_field: str = key(
    "",
    "the column with the reference: the text after its last ####, or all of "
    'it. "": the first found, in any case, of answer, final_answer, solution, '
    "ground_truth, reward_model.ground_truth; a dot names a value in an "
    "object.",
  )
  demonstration_field: str = key(
    "",
    'the column with responses to imitate; "": the assistant\'s message that '
    "ends a conversation, else the column of the reference",
  )
  tokenizer: str = key(
    "", 'a folder, a *.model, "bytes"; "": the one of model.checkpoint'
  )
  system_prompt: str = key(
    "",
    "goes before the problem: the system message of the chat template; without "
    "a template, text with a blank line after it. A conversation's own "
    "replaces it.",
  )
  template_args: str = key(
    "", 'arguments of the chat template: "enable_thinking=False,effort=high"'
  )
  instruction: str = key("{problem}", "the prompt, with {problem} in it")
  prompts: int = key(
    32, "prompts of an RL iteration, over all hosts", AT_LEAST_1
  )
  drop_solved: bool = key(
    False, "SRPO: leave out the problems whose responses were all correct"
  )
  curriculum: tuple[tuple[int, str], ...] = key(
    (),
    "SRPO: ((first iteration, source), ...), the sources that follow `source`",
  )
  max_prompt_length: int = key(
    32, "tokens, the chat template's included", AT_LEAST_1
  )
  too_long: str = key(
    "error",
    'what to do with a longer problem: "error", or "drop" to leave it out',
    Choice(("drop", "error")),
  )

  def __post_init__(self):
    if "{problem}" not in self.instruction:
      raise UserError(
        f"data.instruction={self.instruction!r}: expected {{problem}} in it"
      )
