"""A checkpoint of another run is refused with the key that differs."""

import json

import pytest
from ml_collections import ConfigDict

from gspo_jax.record import identity
from gspo_jax.runtime.errors import UserError

RUN = {"seed": 0, "model": {"width": 64, "eps": 1e-6, "dtype": "float32"}}


def test_an_identity_survives_json_and_none_is_another_run():
  saved = json.loads(json.dumps({"identity": RUN}))
  identity.match(RUN, saved, "checkpoint", "")
  with pytest.raises(UserError, match="seed=None"):
    identity.match(RUN, {}, "checkpoint", "")


@pytest.mark.parametrize(
  ("saved", "words"),
  [
    (RUN | {"seed": 1}, "checkpoint .* it has seed=1, this run seed=0"),
    (RUN | {"model": {"width": 32}},
     r"model.checkpoint or model.variant changed: it has model\.width=32,"),
    (RUN | {"model": RUN["model"] | {"dtype": "b"}},
     "run: it has model.dtype="),
    (RUN | {"data": {"fingerprint": "a"}},
     r"run: data\.source, the content of .* changed: it"),
    (RUN | {"more": 2}, "it has more=2, this run more=None"),
    ({}, "it has seed=None, this run seed=0"),
  ],
)  # fmt: skip
def test_the_first_difference_is_named(saved, words):
  with pytest.raises(UserError, match=f"{words}.*; remedy$"):
    identity.match(RUN, {"identity": saved}, "checkpoint", "remedy")


def test_changes_are_listed_by_dotted_name():
  now = RUN | {"model": RUN["model"] | {"eps": 1e-5}}
  assert identity.changes(RUN, RUN) == []
  assert identity.changes(RUN, now) == [
    "changed since: model.eps=1e-06 is now 1e-05"
  ]


@pytest.mark.parametrize("kind", [dict, ConfigDict])
def test_flatten_joins_the_keys_with_dots(kind):
  tree = kind({"a": {"b": {"c": 1}, "d": (2, 3)}, "e": None})
  assert identity.flatten(tree) == {"a.b.c": 1, "a.d": (2, 3), "e": None}
