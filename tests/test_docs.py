"""docs/: the site builds, and what its pages name exists."""

import ast
import os
import re
import subprocess
import sys

import pytest
from metrics_page import NAMES, PAGE, ROWS, is_documented
from repository import ROOT

from docs import reference
from gspo_jax.model import ModelConfig
from gspo_jax.program.config import all_keys
from gspo_jax.program.config_reference import describe

DOCS = sorted((ROOT / "docs").glob("*.md"))
FOLDERS = sorted(ROOT.glob("[a-z]*/README.md"))
PAGES = [*DOCS, *sorted(ROOT.glob("*.md")), *FOLDERS]
KEYS = {*all_keys()} | {f"model.{name}" for name in vars(ModelConfig)}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  folder = tmp_path_factory.mktemp("site")
  build = (sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going")
  doctrees = ("-d", folder / "doctrees")
  done = subprocess.run(
    [*build, *doctrees, ROOT / "docs", folder],
    cwd=ROOT,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return folder


def test_the_config_reference_has_every_key(site):
  """The site is built with every warning an error."""
  html = (site / "config.html").read_text()
  shown = set(
    re.findall(r'<td><p><code[^>]*><span class="pre">([\w.]+)<', html)
  )
  assert {key for key, default, _ in describe() if default is not None} <= shown


def test_the_api_has_the_public_losses(site):
  import gspo_jax

  html = (site / "api.html").read_text()
  assert [n for n in gspo_jax.__all__ if f'id="gspo_jax.{n}"' not in html] == []


def test_equations_are_mathml_and_no_page_loads_anything(site):
  html = (site / "objectives.html").read_text()
  assert html.count("<math") > 100
  assert "$$" not in html
  pages = "".join(path.read_text() for path in site.glob("*.html"))
  assert re.findall(r"<(?:script|link)[^>]*(?:src|href)=.https?:", pages) == []


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_reference_page_is_what_the_command_writes(name):
  page = (ROOT / "docs" / name).read_text()
  assert "<!-- reference: " in page
  command = "python docs/reference.py"
  assert page == reference.filled(page, reference.text), command


def test_every_page_is_in_the_index():
  index = (ROOT / "docs" / "index.md").read_text()
  names = {page.stem for page in DOCS} - {"index"}
  assert [n for n in sorted(names) if f"]({n}.md)" not in index] == []


def anchors(page):
  """Those that a forge makes of the headings of a page."""
  text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
  titles = re.findall(r"^#+ (.+)$", text, re.M)
  return {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
  def leads(path, anchor):
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target))

  links = re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text())
  local = [link for link in links if not re.match(r"[a-z]+:", link[0])]
  assert [link for link in local if not leads(*link)] == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
  """Files, modules that are run, and keys of the config."""
  text = page.read_text()
  files = re.findall(
    r"(?<![\w./~-])((?:benchmarks|colabs|configs|gspo_jax|launch|studies|tests)"
    r"/[\w./-]*\w)",
    text,
  )
  # Some are named without the end of their name, as in --out=.
  assert [f for f in files if not [*ROOT.glob(f"{f}*")]] == []
  run = re.findall(r"-m ((?:gspo_jax|benchmarks|studies)[\w.]*\w)", text)
  paths = [ROOT / module.replace(".", "/") for module in run]
  assert [
    p
    for p in paths
    if not (p.with_suffix(".py").exists() or (p / "__main__.py").exists())
  ] == []
  sections = {key.partition(".")[0] for key in KEYS if "." in key}
  typed = re.findall(r"--config\.([a-z_]+(?:\.[a-z_0-9]+)?)(?![\w.])", text)
  quoted = re.findall(r"`([a-z_]+\.[a-z_]\w*)(?:=[^`]*)?`", text)
  quoted = [k for k in quoted if k.partition(".")[0] in sections]
  assert [key for key in typed + quoted if key not in KEYS] == []


def test_every_metric_has_a_unit_and_what_is_healthy():
  assert len(NAMES) == len({*NAMES}) > 60
  # A row that lacks a cell is not found as one.
  assert len(ROWS) == len(re.findall(r"^\| `[^`]+/[^`]+` \|", PAGE, re.M))


def strings(path):
  """The strings of a module, and its f-strings as regular expressions."""
  constants, formatted, parts = set(), [], set()
  for node in ast.walk(ast.parse(path.read_text())):  # parents first
    if isinstance(node, ast.JoinedStr):
      parts |= {*node.values}
      formatted.append(
        "".join(
          re.escape(part.value) if isinstance(part, ast.Constant) else "(.+)"
          for part in node.values
        )
      )
    elif isinstance(node, ast.Constant) and node not in parts:
      constants.add(str(node.value))
  return constants, formatted


def sources():
  wings = ("evaluate", "learner", "losses", "program", "rollout")
  paths = [p for w in wings for p in (ROOT / "gspo_jax" / w).glob("*.py")]
  others = "train.py", "record/metric_writer.py"
  paths += [ROOT / "gspo_jax" / name for name in others]
  return [strings(path) for path in paths]


def test_the_code_writes_every_metric_of_the_page():
  """As a string, or as an f-string with strings of that module in it."""

  def writes(constants, formatted, name):
    matches = (re.fullmatch(pattern, name) for pattern in formatted)
    return name in constants or any(
      all(part in constants or part[0] == "<" for part in match.groups())
      for match in matches
      if match
    )

  modules = sources()
  unknown = [n for n in NAMES if not any(writes(*m, n) for m in modules)]
  assert unknown == []


def test_the_page_has_every_metric_of_the_code():
  sections = {name.partition("/")[0] for name in NAMES}
  written = {
    string
    for constants, _ in sources()
    for string in constants
    if string.partition("/")[0] in sections
    and re.fullmatch(r"\w+/[\w@]+", string)
  }
  assert len(written) > 40
  printed = {"loss/imitation"}  # by the cold start
  assert [n for n in sorted(written - printed) if not is_documented(n)] == []
