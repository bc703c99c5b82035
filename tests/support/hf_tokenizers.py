"""Tokenizers of transformers that tests make and save in folders."""

import itertools
import json

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gspo_jax.data import tokenizers


def of_bytes(control):
  """A token a byte, and the control tokens."""
  letters = sorted(pre_tokenizers.ByteLevel.alphabet())
  fast = Tokenizer(models.BPE({x: i for i, x in enumerate(letters)}, merges=[]))
  fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  fast.decoder = decoders.ByteLevel()
  fast.add_special_tokens([*control])
  return fast


def save(folder, fast, template, stops=(), **names):
  """Saves and loads a tokenizer; generation_config.json has the stop tokens."""
  library = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **names)
  library.chat_template = template
  library.save_pretrained(folder)
  if stops:
    ids = library.convert_tokens_to_ids([*stops])
    text = json.dumps({"eos_token_id": ids})
    (folder / "generation_config.json").write_text(text)
  return tokenizers.load(str(folder))


def templated(library, turns, prompts=True):
  """The ids of a conversation in transformers."""
  return library.apply_chat_template(
    [{"role": role, "content": content} for role, content in turns],
    add_generation_prompt=prompts,
    return_dict=False,
  )


def whole(tokenizer, messages, tools=()):
  """The ids of messages in transformers; arguments as its template has them."""
  messages = json.loads(json.dumps(messages))
  calls = itertools.chain(*(m.get("tool_calls", ()) for m in messages))
  for call in calls if tokenizer._takes_json else ():
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    function["arguments"] = text
  return tokenizer._library.apply_chat_template(
    messages,
    tools=[*tools] or None,
    add_generation_prompt=True,
    return_dict=False,
  )
