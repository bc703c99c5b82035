"""A policy with scripted answers; its tokenizer writes a letter a byte."""

import hf_tokenizers

from gspo_jax.sampler.continuous.engine import LENGTH, STOP
from gspo_jax.sampler.samples import SamplingParams

CONTEXT = 300
TEMPLATE = (
  "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}"
  "{% endfor %} <tool_call><|im_end|>\n{% endif %}{% for m in messages %}"
  "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
  '<tool_call>{"name": "{{ c.function.name }}", "arguments": '
  "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(
  folder, template=TEMPLATE, stops=("<|im_end|>",), control=()
):
  """The tokenizer, which is also saved in a folder."""
  fast = hf_tokenizers.of_bytes([*stops, "<|im_start|>", *control])
  names = {"eos_token": stops[0], "pad_token": stops[0]}
  return hf_tokenizers.save(folder, fast, template, stops, **names)


class Scripted:
  """An engine that gives the next text of a list, in two chunks."""

  most = 80  # tokens of an answer
  params = SamplingParams(temperature=0.5)

  def __init__(self, tokenizer, context=CONTEXT):
    self.tokenizer, self.context = tokenizer, context
    self.texts, self.made = [], []

  def most_new_tokens(self, prompt_length):
    return min(self.most, self.context - prompt_length)

  def submit(self, generation):
    ids = self.tokenizer.encode(self.texts.pop(0))
    ids = [*ids, self.tokenizer.stop_ids[0]][: generation.max_new_tokens]
    finish = STOP if ids[-1] in self.tokenizer.stop_ids else LENGTH
    logps = [-i / 100 for i in ids]
    self.made.append(generation)
    generation.add(ids[:3], logps[:3], "")
    generation.add(ids[3:], logps[3:], finish)
    return generation
