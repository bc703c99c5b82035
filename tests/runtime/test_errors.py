"""A hint names the choice for a typo, and lists all choices otherwise."""

import errno

import pytest
from google.auth import exceptions as google_auth

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
  ],
)
def test_a_typo_names_the_choice(name, choice):
  assert nearest(name, METHODS) == f"did you mean {choice!r}?"


@pytest.mark.parametrize(
  ("name", "choices"),
  [
    ("sppg", METHODS),  # three letters of "gspo"
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
  for folder in ("./Qwen3", "/Qwen3", "~/Qwen3", "gs://bucket/a", "a/b/c", "a"):
    assert how_to_download(folder) == ""


class Http(Exception):
  """As the error of gcsfs."""

  def __init__(self, code):
    super().__init__(f"code {code}")
    self.code = code


def caused(error, cause):
  error.__cause__ = cause
  return error


@pytest.mark.parametrize(
  "error",
  [
    FileNotFoundError("b/x"),  # gcsfs gives it no errno
    PermissionError(errno.EACCES, "Permission denied"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError("Forbidden: b/x"),
    ValueError("Bad Request: b/x\nan invalid name"),
    OSError(errno.ENOTEMPTY, "Directory not empty"),
    ImportError("no module gcsfs"),
    KeyError("gss://"),  # epath, for an address that it does not know
    *map(Http, (400, 401, 403, 404, "404")),
    google_auth.DefaultCredentialsError("no credentials"),
    google_auth.MalformedError("a file of credentials that is none"),
    UserError("of its own"),
  ],
)
def test_what_the_caller_can_mend_is_a_user_error(error):
  words = "of its own" if isinstance(error, UserError) else r"^gs://b: \w+"
  with pytest.raises(UserError, match=words), with_reason("gs://b"):
    raise error


@pytest.mark.parametrize(
  "error",
  [
    ConnectionResetError(errno.ECONNRESET, "reset"),
    TimeoutError("60 s"),
    OSError(errno.EIO, "Input/output error"),
    OSError("a proxy's"),  # as those of `requests`, without an errno
    *map(Http, (408, 429, 500, 503)),
    # Google's metadata server, from which a VM has its credentials.
    google_auth.TransportError("no answer"),
    google_auth.RefreshError("no answer"),
    caused(Http(401), google_auth.TransportError("no answer")),
    KeyError("a fault of ours"),
  ],
)
def test_an_outage_stays_as_it_is(error):
  """Its exit code is not 2, with which a JobSet does not start again."""
  with pytest.raises(type(error)) as found, with_reason("gs://b"):
    raise error
  assert found.value is error
  assert error.__notes__ == ["gs://b"]
