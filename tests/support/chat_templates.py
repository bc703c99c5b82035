"""Chat templates in the shape of the families', and what is put into them."""


def user(text="How is it?"):
  return {"role": "user", "content": text}


def tool(name, **properties):
  """A tool with these schemas of its arguments."""
  parameters = {"type": "object", "properties": properties}
  function = {"name": name, "parameters": parameters}
  return {"type": "function", "function": function}


CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
_LAST = (  # the place of the last message of the user
  "{% set ns = namespace(last=0, name=none) %}{% for m in messages %}"
  "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
  "{% endfor %}"
)
# Thoughts and content of a message, from two fields or from one.
_SPLIT = (
  "{% set c = m.content or '' %}{% set r = m.reasoning_content or '' %}"
  "{% if not r and '</think>' in c %}"
  "{% set r = c.split('</think>')[0].split('<think>')[-1] %}"
  "{% set c = c.split('</think>')[-1] %}{% endif %}"
)
HERMES = (  # Qwen2.5; tool messages are answers in a turn of the user
  "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}\n"
  "{{ t | tojson }}{% endfor %}\n</tools> <tool_call><|im_end|>\n{% endif %}"
  "{% for m in messages %}{% if m.role == 'tool' %}"
  "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
  "{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
  "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n"
  "{% endif %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
  + CALLS
  + "{{"
  """ '' if loop.first and not m.content else '\n' }}<tool_call>\n"""
  '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n'
  "</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _thinks(where, opens):
  """HERMES with thinking of answers `where`; as what the prompt `opens` it."""
  calls = HERMES[HERMES.index(CALLS) : HERMES.rindex("{% endif %}{% endfor %}")]
  answer = (
    "{% elif m.role == 'assistant' %}" + _SPLIT + "<|im_start|>assistant\n"
    "{% if " + where + " %}<think>\n{{ r | trim }}\n</think>\n\n{% endif %}"
    "{{ c | trim }}" + calls.replace("not m.content", "not said")
  )
  answer = answer.replace(CALLS, "{% set said = c | trim %}" + CALLS)
  other = "{% else %}<|im_start|>{{ m.role }}"
  prompt = (
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% else %}" + opens + "{% endif %}{% endif %}"
  )
  return _LAST + HERMES.replace(other, answer + other).replace(
    "assistant\n{% endif %}", prompt
  )


# Thinking before the last question of the user is left out.
QWEN3 = _thinks("r and loop.index0 > ns.last", "")
# The prompt opens it, a turn behind the last question has it.
QWEN35 = _thinks("loop.index0 > ns.last", "<think>\n")


def by_tags(template):
  """Of the family of HERMES, with calls as those of Qwen3-Coder."""
  return template.replace(
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n',
    "<function={{ f.name }}>\n{% for k, v in f.arguments | items %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n"
    "</parameter>\n{% endfor %}</function>\n",
  )


LLAMA31 = (  # one call a turn; results as JSON
  "{{ bos_token }}{% for m in messages %}<|start_header_id|>"
  "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
  "{% if tools and loop.first %}{{ tools | tojson }}\n"
  '{"name": f, "parameters": {}}\n{% endif %}'
  "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
  "{{ raise_exception('single tool-calls only') }}{% endif %}"
  "{% set f = m.tool_calls[0].function %}"
  '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
  "{% elif m.role == 'tool' %}{{ m.content | tojson }}"
  "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
  "{% if add_generation_prompt %}"
  "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GLM = (  # no thinking is an empty one; the role of the next turn ends one
  "{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}" + _LAST
  + "{% for m in messages %}{% if m.role == 'assistant' %}" + _SPLIT
  + "<|assistant|>\n<think>{{ r | trim if loop.index0 > ns.last }}</think>"
  "{{ '\n' + c | trim if c | trim }}" + CALLS
  + "{{ '\n<tool_call>' + f.name }}\n{% for k, v in f.arguments | items %}"
  "<arg_key>{{ k }}</arg_key>\n<arg_value>"
  "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}"
  "</tool_call>{% endfor %}{% elif m.role == 'tool' %}"
  "{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
  "\n<tool_response>\n{{ m.content }}\n</tool_response>{% else %}"
  "<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
  "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)  # fmt: skip
HARMONY = (  # gpt-oss: a date, channels; a result has the name of the last call
  _LAST + "<|start|>system<|message|>Today is {{ strftime_now('%d %B') }}.\n"
  "Reasoning: {{ reasoning_effort | default('medium') }}<|end|>{% if tools %}"
  "<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
  "{% for m in messages %}{% set text = m.content or '' %}"
  "{% if m.role == 'tool' %}{% if ns.name is none %}"
  "{{ raise_exception('no call before this tool message') }}{% endif %}"
  "<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary"
  "<|message|>{{ text | tojson }}<|end|>"
  "{% elif '<|channel|>analysis<|message|>' in text or "
  "'<|channel|>final<|message|>' in text %}{{ raise_exception('no') }}"
  "{% elif m.tool_calls %}{% set f = m.tool_calls[0].function %}"
  "{% set ns.name = f.name %}{% if m.thinking or text %}<|start|>assistant"
  "<|channel|>analysis<|message|>{{ m.thinking or text }}<|end|>{% endif %}"
  "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json"
  "<|message|>{{ f.arguments | tojson }}<|call|>{% else %}"
  "<|start|>{{ 'developer' if m.role == 'system' else m.role }}"
  "{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
  "<|message|>{{ text }}"
  "{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}"
  "<|return|>{% else %}<|end|>{% endif %}{% endif %}"
  "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)  # fmt: skip
