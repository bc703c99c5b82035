"""JSON schemas: what jsonschema accepts fits, and an error says why not."""

import random
import re

import jsonschema
import pytest

from gspo_jax.data.json_schema import fitted

LEAVES = [None, True, False, 0, 1, 2.0, 2.5, "", "a", "1", "ü\ud83d"]
NAMES = ["integer", "number", "string", "boolean", "null", "array", "object"]


def schemas(draw, depth):
  """A random schema; `#/$defs/x` is one that refers to itself."""
  part = lambda: schemas(draw, depth - 1)
  if not depth or draw.random() < 0.3:
    return draw.choice(
      [
        *({"type": draw.choice(NAMES)}, {"type": draw.sample(NAMES, 2)}),
        *({"enum": draw.sample(LEAVES, 3)}, {"const": draw.choice(LEAVES)}),
        *({"$ref": "#/$defs/x"}, {}, {"type": "string", "enum": ["a", "1"]}),
      ]
    )
  made = [
    {"anyOf": [part(), part()]},
    {"allOf": [part(), part()]},
    {"type": "array", "items": part()},
    {
      "type": "object",
      "properties": {"a": part(), "b": part()},
      "required": draw.choice([[], ["a"]]),
      "additionalProperties": draw.choice([True, False, part()]),
    },
  ]
  return draw.choice(made)


def values(draw, depth):
  if not depth or draw.random() < 0.4:
    return draw.choice(LEAVES)
  some = [values(draw, depth - 1) for _ in range(draw.randrange(4))]
  return draw.choice([some, dict(zip("abc", some, strict=False))])


def test_what_jsonschema_accepts_fits_and_nothing_else():
  draw, seen = random.Random(0), {True: 0, False: 0}
  for _ in range(1200):
    defined = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/x"}}]}
    defined["anyOf"].append(schemas(draw, 0))
    schema = schemas(draw, 3) | {"$defs": {"x": defined}}
    if defined["anyOf"][1] == {"$ref": "#/$defs/x"}:  # it says nothing
      continue
    value = values(draw, 3)
    expected = jsonschema.Draft202012Validator(schema).is_valid(value)
    seen[expected] += 1
    try:
      assert fitted(value, schema) == value
    except ValueError:
      assert not expected, (schema, value)
    else:
      assert expected, (schema, value)
  assert min(seen.values()) > 150


NUMBERS = {
  "properties": {"xs": {"type": "array", "items": {"type": "integer"}}}
}


@pytest.mark.parametrize(
  ("value", "schema", "error"),
  [({"xs": [1, "2"]}, NUMBERS, 'xs.1: expected integer, got "2"'),
   ({"xs": {}}, NUMBERS, "xs: expected array, got an object"),
   (None, {"type": ["integer", "string"]},
    "expected integer or string, got n"),
   (3, {"enum": ["a", "b"]}, 'expected one of ["a", "b"], got 3'),
   ({}, {"required": ["x"]}, "expected 'x', got an object"),
   (3, {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "string, got 3; exp"),
   ({"y": 1}, {"additionalProperties": False}, "y: expected nothing, got 1")],
)  # fmt: skip
def test_an_error_names_the_place_what_was_expected_and_the_value(
  value, schema, error
):
  with pytest.raises(ValueError, match=re.escape(error)):
    fitted(value, schema)


def test_what_is_an_integer_of_json_is_one_of_python():
  xs = fitted({"xs": [1.0, 2]}, NUMBERS)["xs"]
  assert [type(x) for x in xs] == [int, int]
  assert type(fitted(1.0, {"enum": [1]})) is int
  assert fitted(1, {"type": "integer", "enum": [1.0]}) == 1
  for types in ({"type": "integer"}, {"anyOf": [{"type": "integer"}]}):
    assert fitted(None, types | {"nullable": True}) is None


def test_a_schema_that_refers_to_itself_takes_linear_time():
  """Without a memory of what was found this is 2**200 steps."""
  again = {"items": {"$ref": "#"}}
  schema = {
    "anyOf": [again | {"enum": [1]}, again | {"enum": [2]}, {"const": 3}]
  }
  value = []
  for _ in range(60):
    value = [value]
  with pytest.raises(ValueError, match="expected"):
    fitted(value, schema)
  for hopeless in ({"$ref": "#"}, {"allOf": [{"$ref": "#"}]}):
    with pytest.raises(ValueError, match="its own part"):
      fitted(1, hopeless)
  assert fitted(1, {"anyOf": [{"$ref": "#"}, {"type": "integer"}]}) == 1
  # And without the value itself as what fits, of 2**30.
  twice = lambda i: {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2}
  value, defs = {"a": []}, {str(i): twice(i) for i in range(30)}
  assert fitted(value, twice(-1) | {"$defs": defs}) is value
