"""A mistake is no outage. A hint names the choice for a typo, and lists all choices otherwise."""

import errno

import pytest
from gcsfs.retry import HttpError

from gspo_jax.runtime.errors import (
  UserError,
  how_to_download,
  mistyped,
  nearest,
  with_reason,
)

METHODS = ("gspo", "gspo_token", "grpo", "dr_grpo", "dapo", "ppo", "gmpo")


@pytest.mark.parametrize(
  ("name", "choice"),
  [
    ("gpso", "gspo"),  # swapped
    ("gsppo", "gspo"),  # one too many
    ("gso", "gspo"),  # one too few
    ("GSPO", "gspo"),
    ("gspo-tokn", "gspo_token"),  # two typos in a long name
    ("drgrpo", "dr_grpo"),
  ],
)
def test_a_typo_names_the_choice(name, choice):
  assert nearest(name, METHODS) == f"did you mean {choice!r}?"


@pytest.mark.parametrize(
  ("name", "choices"),
  [
    ("sppg", METHODS),  # three letters of "gspo"
    ("gspo_tree", METHODS),
    ("k4", ("k1", "k2", "k3")),
    ("qwen3-14b", ("qwen3-4b", "qwen3-8b")),
    ("AIME26", ("AIME24", "AIME25")),
  ],
)
def test_a_similar_name_is_not_a_typo(name, choices):
  assert mistyped(name, choices) == []
  assert nearest(name, choices) == f"choose one of {', '.join(sorted(choices))}"


def test_equally_close_choices_are_all_named():
  assert nearest("v5x", ("v6e", "v5p", "v5e")) == "did you mean 'v5e' or 'v5p'?"
  expected = "did you mean 'gmpo', 'grpo', 'gspo' or 'ppo'?"
  assert nearest("gppo", METHODS) == expected


def test_an_id_of_the_hub_gets_the_line_that_downloads_it():
  hint = how_to_download("Qwen/Qwen3-0.6B")
  assert "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`" in hint


@pytest.mark.parametrize(
  "folder", ["./Qwen3-0.6B", "/Qwen3", "~/Qwen3", "gs://bucket/a", "a/b/c", "a"]
)
def test_another_folder_is_no_id_of_the_hub(folder):
  assert how_to_download(folder) == ""


@pytest.mark.parametrize(
  ("error", "reason"),
  [
    (FileNotFoundError(errno.ENOENT, "No such file"), "No such file"),
    (FileNotFoundError("b/o"), "b/o"),  # of gcsfs
    (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
    (OSError(errno.ENOSPC, "No space left"), "No space left"),
    (OSError("Forbidden: b/o\nno access"), "Forbidden: b/o no access"),
    (ValueError("Bad Request: b/o"), "ValueError: Bad Request: b/o"),
    (HttpError({"code": 401, "message": "who?"}), "HttpError: who?, 401"),
    (HttpError({"code": "404", "message": "no"}), "HttpError: no, 404"),
    (ImportError("Install s3fs"), "ImportError: Install s3fs"),
    (KeyError("x://"), "KeyError: 'x://'"),
    (UserError("a line"), None),
  ],
)
def test_a_mistake_is_a_user_error(error, reason):
  with pytest.raises(UserError) as raised, with_reason("--out=b"):
    raise error
  assert str(raised.value) == (f"--out=b: {reason}" if reason else "a line")


@pytest.mark.parametrize(
  "error",
  [
    HttpError({"code": 503, "message": "unavailable"}),
    HttpError({"code": 429}),
    HttpError(),
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
    OSError("Could not reach the server"),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    TimeoutError(),
    ValueError("a bug"),
    KeyError("a bug"),
  ],
)
def test_an_outage_or_a_bug_is_no_user_error(error):
  """Exit code 2 would keep a JobSet from starting the run again."""
  with pytest.raises(type(error)) as raised, with_reason("--out=b"):
    raise error
  assert raised.value is error
  assert error.__notes__ == ["--out=b"]
