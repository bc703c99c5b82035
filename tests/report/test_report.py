"""The page and the command: complete, self-contained, harmless and small."""

import base64
import functools
import hashlib
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from html import unescape
from html.parser import HTMLParser

import pytest
from make_run import CONFIG, add_sample, make_run, runs
from plotly.offline import get_plotlyjs
from processes import mistake, python

from gspo_jax.report import __main__ as report_main
from gspo_jax.report.page import page

HOSTILE = (
  "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>'\""
)
VOID = {"meta", "link", "input", "img", "br"}
# What makes a browser fetch, and the links inside a page.
LOADING = {"src", "href", "srcset", "poster", "action", "xlink:href", "data"}


class Page(HTMLParser):
  """Elements with their attributes, text by element; every tag closed."""

  def __init__(self, html):
    super().__init__()
    self.open, self.elements, self.texts = [], [], []
    self.feed(html)
    self.close()
    assert self.open == []

  def handle_starttag(self, tag, attrs):
    assert len({name for name, _ in attrs}) == len(attrs), (tag, attrs)
    self.elements.append((tag, dict(attrs)))
    if tag not in VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.texts.append((self.open[-1] if self.open else "", data))

  def all(self, tag):
    return [attrs for name, attrs in self.elements if name == tag]

  def text(self):
    return " ".join(
      t for tag, t in self.texts if tag not in ("script", "style")
    )


def html_of(*folders):
  return page(runs(*folders))


def charts_of(page):
  """{title: figure} of the data of a page."""
  (text,) = (t for tag, t in page.texts if tag == "script" and t[0] == "{")
  return {f["title"]: f for f in json.loads(text)["figures"].values()}


def alone(page):
  """Whether a page loads nothing, whatever it is made of."""
  loading = [
    value
    for _, attrs in page.elements
    for name, value in attrs.items()
    if name in LOADING
  ]
  styles = [t for tag, t in page.texts if tag == "style"]
  styles += [a["style"] for _, a in page.elements if "style" in a]
  inside = all(value.startswith(("#", "data:")) for value in loading)
  return inside and not any("url(" in s or "@import" in s for s in styles)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  return make_run(tmp_path_factory.mktemp("runs") / "tiny", 20)


def test_a_page_is_whole_and_loads_nothing(run):
  page = Page(html_of(run))
  assert alone(page)
  assert not alone(Page('<a href="https://x.y">x</a>'))
  ids = [a["id"] for _, a in page.elements if "id" in a]
  assert len(set(ids)) == len(ids)
  links = [a["href"][1:] for a in page.all("a")]
  assert set(links) <= set(ids)
  assert not any(k.startswith("on") for _, a in page.elements for k in a)
  # The policy allows the two scripts of the page, and no address.
  scripts = [t for tag, t in page.texts if tag == "script" and t[0] != "{"]
  digests = [hashlib.sha256(t.encode()).digest() for t in scripts]
  (policy,) = (a["content"] for a in page.all("meta") if "http-equiv" in a)
  assert policy.startswith("default-src 'none'; ")
  assert [base64.b64decode(h) for h in re.findall("sha256-(.*?)'", policy)] == (
    digests
  )
  assert not re.search(r"https?:|\*", policy)


def test_a_page_has_the_main_results(run):
  text = Page(html_of(run)).text()
  for result in ("tiny · gspo", "20 of 20 steps, finished", "20% →", "80%"):
    assert result in text, result
  for title in ("eval/avg@4", "clip_frac/token", "moe/layer_flip_rate"):
    assert title in text, title
  assert "it is 20" in text
  assert "learning_rate" in text


def test_every_scalar_stands_in_a_table_once(run):
  page = html_of(run)
  rows = [
    json.loads(r) for r in (run / "metrics.jsonl").read_text().splitlines()
  ]
  for name in {k for row in rows for k in row} - {"step"}:
    assert page.count(f"<th scope=row>{name}</th>") == 1, name


def test_every_picture_has_a_description_a_place_and_a_title(run):
  page = Page(html_of(run))
  pictures = page.all("figure")
  assert len(pictures) > 20
  assert all(p["aria-label"] for p in pictures)
  titles = [t for tag, t in page.texts if tag == "figcaption"]
  assert titles == list(charts_of(page))
  places = [a for a in page.all("div") if a.get("class") == "chart"]
  assert len(places) == len({a["id"] for a in places}) == len(pictures)


def test_hostile_text_stays_text(tmp_path):
  config = {**CONFIG, "note": HOSTILE, HOSTILE: 1}
  run = make_run(tmp_path / "a<b>&", 2, config=config, scalars={HOSTILE: 1.5})
  parts = dict.fromkeys(("problem", "response", "reference"), HOSTILE)
  add_sample(run, 3, **parts)
  add_sample(run, 2, response=f"{HOSTILE}\x00\ud800\u2028")
  for folders in ([run], [run, make_run(tmp_path / "</script>", 3)]):
    page = Page(html_of(*folders))
    assert len(page.all("script")) == 3
    assert not page.all("img")
    assert alone(page)
    assert page.text().count("onerror=alert(2)") >= 6


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("moe", [True, False])
def test_short_runs(tmp_path, steps, moe):
  page = Page(html_of(make_run(tmp_path / "x", steps, moe=moe)))
  assert alone(page)
  assert ("moe/expert_flip_rate" in page.text()) == (moe and steps > 0)


def test_a_run_with_metrics_only(tmp_path):
  (tmp_path / "metrics.jsonl").write_text("")
  assert "No step is done yet" in Page(html_of(tmp_path)).text()
  (tmp_path / "metrics.jsonl").write_text('{"step": 1, "odd": null}\n')
  text = Page(html_of(tmp_path)).text()
  assert "odd was not finite at step 1" in text


def test_long_runs_are_small_and_quick(tmp_path):
  run = make_run(tmp_path / "x", 2000)
  begin = time.process_time()
  html = html_of(run)
  assert time.process_time() - begin < 10
  assert len(html) - len(get_plotlyjs()) < 1e6


def test_several_runs_lie_over_one_another(tmp_path):
  runs = [
    make_run(tmp_path / "gspo", 20),
    make_run(tmp_path / "grpo", 7, moe=False, objective={"name": "grpo"}),
  ]
  html = html_of(*runs)
  page = Page(html)
  assert alone(page)
  assert "2 runs compared" in page.text()
  assert "7 of 20 steps, running or stopped" in page.text()
  differ = html.split("<h2>Config</h2>")[1].split("<details>")[0]
  assert "<th scope=row>objective.name</th><td>gspo</td><td>grpo</td>" in differ
  assert "learning_rate" not in differ
  lines = charts_of(page)["grad/norm"]["data"]
  assert [line["name"] for line in lines] == ["gspo", "grpo"]
  colours = re.findall('class="swatch" style="background:(#.{6})"', html)
  assert [line["line"]["color"] for line in lines] == colours[:2] == colours[2:]


def test_the_command_writes_beside_the_run_or_to_a_file(
  run, tmp_path, monkeypatch, capsys
):
  done = python("-m", "gspo_jax.report", run)
  assert (done.returncode, done.stderr) == (0, "")
  assert done.stdout == f"{run / 'report.html'}\n"
  path = tmp_path / "new/x.html"
  monkeypatch.setattr(sys, "argv", ["report", str(run), f"--to={path}"])
  report_main.main()
  assert capsys.readouterr().out == f"{path}\n"
  assert path.read_text() == (run / "report.html").read_text()


def test_mistakes_are_one_line(run, tmp_path):
  (tmp_path / "file").write_text("")
  for flags, message in (
    ([], "the following arguments are required: workdir"),
    ([tmp_path / "none"], "no such folder"),
    ([run.parent], f"such as '{run}'"),
    ([run, run], "--to is missing"),
    ([run, "--too=x"], "--too=x"),
    ([*[run] * 11, "--to=x"], "at most 10"),
    ([run, f"--to={tmp_path}/file/x.html"], "cannot write"),
  ):
    assert message in mistake(report_main.main, *flags)


def test_without_plotly_it_says_what_to_install(run, monkeypatch):
  monkeypatch.setitem(sys.modules, "plotly", None)
  for name in [n for n in sys.modules if n.startswith("gspo_jax.report.")]:
    monkeypatch.delitem(sys.modules, name)
  monkeypatch.delattr("gspo_jax.report.page")
  assert "pip install -e '.[report]'" in mistake(report_main.main, run)


def test_a_line_that_is_cut_short_is_left_out(tmp_path):
  run = make_run(tmp_path / "x", 3)
  with (run / "metrics.jsonl").open("a") as file:
    file.write('{"step": 4, "gr')  # a run that is writing
  assert "3 of 20 steps" in html_of(run)


CHROMIUM = next(
  filter(
    None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
  ),
  None,
)


def browse(folder, *flags):
  """(stdout, console lines, requests) of a browser at folder/page.html."""
  seen = []

  class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
      seen.append(self.path)

  handler = functools.partial(Handler, directory=folder)
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  try:
    done = subprocess.run(
      [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu",
       "--enable-logging=stderr", f"--user-data-dir={folder}/profile",
       "--virtual-time-budget=3000", *flags,
       f"http://127.0.0.1:{server.server_port}/page.html"],
      capture_output=True, text=True, timeout=120,
    )  # fmt: skip
  finally:
    server.shutdown()
    server.server_close()
  console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
  return done.stdout, console, seen


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
def test_a_browser_complains_of_nothing_and_fetches_nothing(tmp_path):
  run = make_run(tmp_path / "run", 300)
  add_sample(run, 300, response=HOSTILE)
  html = html_of(run)
  (tmp_path / "page.html").write_text(html)
  dom, console, requests = browse(tmp_path, "--dump-dom")
  assert console == []
  assert requests == ["/page.html"]
  # The script has run: it shows one step, a slider, and the charts in sight.
  shown = re.findall(r'<section data-step="(\d+)"( hidden="")?', dom)
  assert [step for step, hidden in shown if not hidden] == ["300"]
  assert '<p class="picker"><label>' in dom
  drawn = dom.count('class="chart js-plotly-plot"')
  assert 0 < drawn < dom.count('class="chart')
  # plotly's logo and its links to elsewhere are off.
  body = re.sub("(?s)<script.*?</script>", "", dom)
  assert "download plot as a png" in body.lower()
  links = [a.get("href") for a in Page(body).all("a")]
  assert all(link is None or link.startswith("#") for link in links)
  assert not re.search("(?i)chart studio|produced with|cloud", body)
  # The two checks see a forbidden script and a forbidden picture.
  bad = html.replace("<main>", "<main><img src=/x.png><script>oops()</script>")
  (tmp_path / "page.html").write_text(bad)
  _, console, requests = browse(tmp_path, "--dump-dom")
  assert len(console) == 2
  assert requests == ["/page.html"]


HOVER = """<script>
setTimeout(() => Plotly.Fx.hover(document.querySelector(".chart"),
  {xval: 0, yval: 0.2}, "xy"), 1000);
</script></body>"""
TAGS = "<b>a<img src=x onerror=oops()>"


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
def test_a_pointer_reads_numbers_and_names_stay_text(tmp_path):
  runs = [make_run(tmp_path / name, 20) for name in ("run", TAGS)]
  for folders, texts in (
    (runs[:1], ["step 0", "0.2"]),
    (runs, ["step 0", "run : 0.2", f"{TAGS} : 0.2"]),
  ):
    html = re.sub(r"<meta http-equiv[^>]*>", "", html_of(*folders))
    (tmp_path / "page.html").write_text(html.replace("</body>", HOVER))
    dom, console, requests = browse(tmp_path, "--dump-dom")
    assert (console, requests) == ([], ["/page.html"])
    hover = dom[dom.index('class="hoverlayer"') :]
    hover = hover[: hover.index("</svg>")]
    found = re.findall("<text[^>]*>(.*?)</text>", hover)
    found = [unescape(re.sub("<[^>]*>", "", text)) for text in found]
    assert [t.replace("\u200b", "") for t in found if t] == texts


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
def test_light_and_dark_pages(tmp_path):
  import matplotlib.image

  (tmp_path / "page.html").write_text(html_of(make_run(tmp_path / "run", 60)))
  size = "--window-size=1280,2000"
  shots = []
  for scheme in (1, 0):  # light, dark
    shot = tmp_path / f"{scheme}.png"
    flag = f"--blink-settings=preferredColorScheme={scheme}"
    browse(tmp_path, f"--screenshot={shot}", size, flag)
    shots.append(matplotlib.image.imread(shot)[..., :3].mean())
  light, dark = shots
  assert light > 200 / 255
  assert dark < 60 / 255
