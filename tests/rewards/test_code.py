"""Programs: which block runs, how tests are read, when output is correct."""

import json

import pytest

from gspo_jax import rewards
from gspo_jax.rewards import code
from gspo_jax.runtime.errors import UserError

ADD = "a, b = map(int, input().split())\nprint(a + b)"
PAIRS = json.dumps({"inputs": ["1 2", "5 6\n"], "outputs": ["3\n", "11"]})
ROWS = json.dumps([{"input": "1 2", "output": "3", "kind": "stdin"}])


@pytest.fixture(scope="module")
def passes():
  try:
    return rewards.named("code:seconds=10")
  except UserError as e:
    pytest.skip(str(e))


def fenced(*programs):
  return "".join(f"So:\n```python\n{p}\n```\n" for p in programs)


@pytest.mark.parametrize(
  ("response", "reference"),
  [(fenced(ADD), PAIRS), (fenced(ADD), ROWS), (fenced("print(0)", ADD), PAIRS),
   (fenced(ADD) + "```\nout\n```\nand ```python print(0)```", PAIRS),
   (fenced(ADD).replace("\n", " \r\n"), PAIRS),
   *((fenced(ADD).replace("```python", fence), PAIRS) for fence in (
    *("```py", "```Python", "``` python", "```", '```python title="a.py"'),
    *("```python:main.py", "```{python}", "``` {.python .numberLines}"),
    *("```python3.11", "```pypy3", "1. ```python", "Code: ```python"),
    *("```{.numberLines .python}", "```{code-cell} python"),
    "It takes ~5 s: ```python")),
   (f"~~~python\n{ADD}\n~~~", PAIRS),
   (f"````python\nx = '''\n```\n'''\n{ADD}\n````", PAIRS),
   (f"~~~python\nx = '''\n```python\n'''\n{ADD}\n~~~~", PAIRS),
   (f"```python\nx = '''\n```python\n'''\n{ADD}\n```", PAIRS),
   ("> ```\n> 3\n> ```\n" + fenced(ADD), PAIRS),
   ("- ```python\n  a, b = 1, 2\n  if a:\n    print(3)\n  ```", ROWS),
   (fenced(ADD) + "Not ```python``` and not ~~~ alone.", PAIRS),
   (f"```text\nIt adds.\n```\n```\n{ADD}\n```\n```out\n3\n```", PAIRS),
   (fenced("print(input())"),
    json.dumps({"inputs": ["3", "\n"], "outputs": ["3", ""]})),
   (fenced("print(' 3  \\n\\n')"),
    json.dumps([{"input": "", "output": " 3"}])),
   (fenced("import os, resource; print(3)"), ROWS),
   (fenced("def f(n): return n and f(n - 1) + 1\nprint(f(3))"), ROWS),
   (fenced("print(3)\nraise SystemExit"), ROWS)],
)  # fmt: skip
def test_right(passes, response, reference):
  assert passes("", response, reference) == 1.0


@pytest.mark.parametrize(
  ("response", "reference"),
  [("", PAIRS), (ADD, PAIRS), (f"```c\n{ADD}\n```", PAIRS),
   (f"```bash python\n{ADD}\n```", PAIRS),
   (fenced(ADD) + "> ```python\n> print(0)\n> ```\n", PAIRS),
   pytest.param("`" * 1_000_000 + "x`", PAIRS, id="backticks"),
   (f"```python2\n{ADD}\n```", PAIRS), (f"````python\n{ADD}\n```", PAIRS),
   (f"~~~python\n{ADD}\n```", PAIRS), (f"The end: ```\n{ADD}\n```", PAIRS),
   (f"```python\n{ADD}\n", PAIRS), (fenced(ADD) + f"```python\n{ADD}", PAIRS),
   (fenced(ADD, "print(3)"), PAIRS), (fenced("print(3)"), PAIRS),
   (fenced("print(3); print(4)"), ROWS), (fenced("print(3, end='x')"), ROWS),
   (fenced("print('3\\n\\n3')"), ROWS)],
)  # fmt: skip
def test_wrong(passes, response, reference):
  assert passes("", response, reference) == 0.0


@pytest.mark.parametrize(
  "reference",
  ["", "18", "[]", "{}", '{"inputs": ["1"], "outputs": []}',
   '[{"input": "1"}]', '[{"input": 1, "output": "1"}]', '["1"]'],
)  # fmt: skip
def test_reference_without_tests_is_an_error(reference):
  with pytest.raises(ValueError, match="expected tests as JSON"):
    code.passes("", fenced(ADD), reference)


def test_tests_that_doing_nothing_passes_are_an_error():
  reference = json.dumps([{"input": "1", "output": " \n"}])
  with pytest.raises(ValueError, match="passed by doing nothing"):
    code.passes("", fenced("pass"), reference)


def test_more_time_for_tests_than_for_a_call_is_a_user_error(passes):
  for name, seconds, total in (("code", 30, 30.0), ("code:total=9", 8, 9)):
    with pytest.raises(
      UserError, match=f"total={total} .*{seconds} seconds of"
    ):
      rewards.named(name, seconds)
  rewards.named("code:total=4", 5)


def test_time_for_all_tests_ends_a_series(passes):
  reference = json.dumps([{"input": "", "output": "1"}] * 50)
  response = fenced("import time; time.sleep(.2); print(1)")
  assert code.passes("", response, reference, total=1.0) == 0.0
  assert code.passes("", response, json.dumps(json.loads(reference)[:2])) == 1.0
