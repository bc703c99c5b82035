"""A user's own loss and advantage, from outside of the package."""

import re
import sys

import numpy as np
import pytest
from metrics_of import rows_of
from repository import ROOT

from gspo_jax import losses, train
from gspo_jax.learner.objective import ObjectiveConfig
from gspo_jax.program.config import parse
from gspo_jax.program.rules import check_training
from gspo_jax.runtime.errors import UserError

MORE = """
def reward(prompt, response, reference):
  return sum(map(ord, response)) % 7 / 7

def no_default(logps, old_logps, advantages, mask, *, width, normalizer,
               segment_ids, terms):
  pass

def own_dual_clip(logps, old_logps, advantages, mask, *, dual_clip=3.0,
                  normalizer, segment_ids, terms):
  pass

def shifted(logps, old_logps, advantages, mask, *, router_shift, normalizer,
            segment_ids, terms):
  pass

def no_terms(logps, old_logps, advantages, mask, *, normalizer, segment_ids):
  pass
"""


@pytest.fixture
def my_methods(tmp_path, monkeypatch):
  """The module of docs/objectives.md, and more, in a folder on the path."""
  page = (ROOT / "docs/objectives.md").read_text()
  (code,) = re.findall("```python\n(# my_methods.py\n.*?)```", page, re.S)
  (tmp_path / "my_methods.py").write_text(code + MORE)
  monkeypatch.syspath_prepend(tmp_path)
  yield
  sys.modules.pop("my_methods", None)


def test_a_function_is_a_method_and_its_keywords_are_its_numbers(my_methods):
  objective = ObjectiveConfig("my_methods.soft_loss:width=0.1")
  assert objective.loss_numbers == {"width": 0.1}
  assert ObjectiveConfig("my_methods.soft_loss").loss_numbers == {"width": 0.2}
  assert objective.method.advantages is None
  assert not objective.weighs_routers
  assert ObjectiveConfig("my_methods.shifted").weighs_routers
  rng = np.random.default_rng(0)
  logps, old = rng.normal(size=(2, 3, 4)).astype(np.float32)
  advantages, mask = rng.normal(size=3).astype(np.float32), np.ones((3, 4))
  loss, _ = objective.method.loss(
    logps, old, advantages, mask, **objective.loss_numbers
  )
  ratio = 1 + 0.1 * np.tanh((np.exp(logps - old) - 1) / 0.1)
  assert loss == pytest.approx(-(ratio * advantages[:, None]).mean(), rel=1e-5)


@pytest.mark.parametrize(
  ("name", "words"),
  [("my_methods.soft_loss:wdth=1", "no argument 'wdth': did you mean 'width'"),
   ("my_methods.soft_los", "no function 'soft_los': did you mean 'soft_loss'"),
   ("my_method.soft_loss", "importing 'my_method' failed"),
   ("my_methods.no_default", "expected width=..., which has no default"),
   ("my_methods.no_terms", "no keyword-only argument 'terms'"),
   ("my_methods.soft_loss:dual_clip=3", "no argument 'dual_clip'"),
   ("my_methods.soft_loss:width=wide", "width=wide: expected a finite number"),
   ("my_methods.own_dual_clip", "an argument 'dual_clip', which `terms`")],
)  # fmt: skip
def test_what_is_wrong_is_named_as_typed(debug_config, my_methods, name, words):
  debug_config.objective.name = name
  config = parse(debug_config)  # a policy may be evaluated without the module
  with pytest.raises(UserError, match=words) as error:
    check_training(config, 1)
  assert str(error.value).startswith(f"objective.name={name!r}: ")


def test_its_own_advantage_leaves_no_choice_of_the_estimator(
  debug_config, my_methods
):
  c = debug_config.objective
  c.advantage_estimator, c.name = "rloo", "my_methods.soft_loss"
  check_training(parse(debug_config), 1)
  c.name = "my_methods.SOFT"
  with pytest.raises(UserError, match="SOFT', which has its own advantages"):
    check_training(parse(debug_config), 1)


def test_a_run_learns_by_it(debug_config, my_methods, tmp_path):
  c = debug_config
  c.objective.name = "my_methods.SOFT:width=0.1"
  c.reward.names = ("my_methods.reward",)
  c.num_steps, c.cold_start.steps, c.eval.every = 2, 0, 0
  c.data.prompts, c.model.num_layers = 8, 1
  c.learner.minibatches, c.learner.micro_batch_size = 1, 16
  train.train_and_evaluate(c, str(tmp_path / "run"))
  rows = [row for row in rows_of(tmp_path / "run") if "grad/norm" in row]
  assert len(rows) == 2
  for row in rows:
    assert row["grad/norm"] > 0
    assert row["loss/policy"] > 0.1  # ratios are 1, no advantage is above 0


@pytest.mark.parametrize(
  ("fields", "words"),
  [({"clips": "ratio"}, "the loss has no 'clip_low' with a default"),
   ({"clips": "ratios"}, "clips='ratios': expected one of"),
   ({"unit": "response"}, "unit='response': expected one of"),
   ({"critic": True, "advantages": len}, "advantages: expected critic=False")],
)  # fmt: skip
def test_a_row_that_contradicts_itself_is_refused(fields, words):
  with pytest.raises(ValueError, match=words):
    losses.Method(losses.cispo_loss, **fields)
