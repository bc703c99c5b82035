"""The reward `judge` with a server of this process: what it asks and reads."""

import asyncio
import contextlib
import http.server
import json
import threading
import time

import pytest
from repository import ROOT

from gspo_jax import rewards
from gspo_jax.rewards import judge
from gspo_jax.rewards.pool import RewardPool
from gspo_jax.rewards.reward import Response
from gspo_jax.runtime.errors import UserError

COUNT = 8


class Handler(http.server.BaseHTTPRequestHandler):
  """Replies what the last line of the judge's prompt says."""

  def do_POST(self):
    server, size = self.server, int(self.headers["Content-Length"])
    body = json.loads(self.rfile.read(size))
    server.requests.append((self.path, self.headers["Authorization"], body))
    words = body["messages"][0]["content"].strip().splitlines()[-1].split()
    with server.one_by_one:
      server.running += 1
      server.most = max(server.most, server.running)
    time.sleep(0.05 if words[0] == "slow" else 0)
    with server.one_by_one:
      server.running -= 1
    tries = len([r for r in server.requests if r[2] == body])
    with contextlib.suppress(OSError):  # the client has gone
      self.reply(tries, *words)

  def reply(self, tries, act="", *rest):
    if act == "silent":
      time.sleep(1)
    elif act == "status" and tries <= int(rest[1]):
      self.answer(int(rest[0]), b"the server's\nreason")
    elif act == "moved":
      self.send_response(302)
      self.send_header("Location", "/elsewhere")
      self.end_headers()
    elif act == "hangup" and tries == 1:
      self.close_connection = True
    elif act == "echo":
      said = f"no {self.headers['Authorization']}"
      self.answer(int(rest[0]), said.encode())
    elif act == "odd":
      self.answer(200, b'{"no": "choices"}')
    else:
      text = " ".join(rest[2:] if act == "status" else rest) or "Score: 1"
      choice = {
        "message": {"content": None if text == "null" else text},
        "finish_reason": "length" if act == "cut" else "stop",
      }
      self.answer(200, json.dumps({"choices": [choice]}).encode())

  def answer(self, status, data):
    self.send_response(status)
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, *_):
    pass


@pytest.fixture(scope="module")
def module_server():
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    server.one_by_one = threading.Lock()
    server.url = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
    server.requests, server.running, server.most = [], 0, 0
    threading.Thread(target=server.serve_forever, args=(0.02,)).start()
    yield server
    server.shutdown()


@pytest.fixture
def server(module_server, monkeypatch):
  monkeypatch.setattr(judge, "WAIT", 0.01)
  module_server.requests.clear()
  module_server.most = 0
  return module_server


@pytest.fixture
def template(tmp_path):
  """A template that ends in the response, which tells the server its reply."""
  path = tmp_path / "template.txt"
  path.write_text("{prompt} {reference} 0..{scale} {level}\n{response}\n")
  return str(path)


def ask(server, template, response, *, level=3, **options):
  options = {"url": server.url, "model": "m"} | options
  options = {"template": template, "total": 5.0, "level": level} | options
  return asyncio.run(judge.score("P {level}", response, "R", **options))


SEVEN = (
  *("Score: 7", "It is fine. **Score:** 7", "7", "Score: 7/10"),
  *("Score: 7. A score of 10 was possible.", "Score (0-10): 7"),
  *("Score (10 max): 7", "Score /10: 7", "Score out of 10: 7"),
  *("It deserves 7 out of 10.", '{"score": 7, "errors": 2}'),
  *("Score: 7, for 2 steps are wrong", "Score (0-10) 7", "Score: [7]"),
  *("Score: +7", "Score: 7 (out of 10)"),
  "Score: 7 (on a scale of 0 to 10), as asked",
)
UNCLEAR = (
  *("Score: 7 - 2 steps are wrong", "Score: 1e-1", "Score: .5", "Score: 3,5"),
  *("Score: 7-8", "Score: 7 or 8", "Score: 7%", "Score: 7/100"),
  *("Score (0-100): 7", "Score: good, after a score of 3 before"),
  *("Score: 7 (out of 100)", "Score: 7 on a scale of 0 to 100", "7 percent"),
  *("Score: 7/10 or 8/10", "Score: 1 000", "The score (9) is high"),
  "Score: 8\n\nThe score is 3",
  *("Score: 5\n\nNo wait. Revised score should be 2.", "7 or 8"),
)


@pytest.mark.parametrize(
  ("reply", "expected"),
  [*((reply, 0.7) for reply in SEVEN), *((reply, None) for reply in UNCLEAR),
   ("The score is **7.5** of 10", 0.75),
   ("Step 3 has score 2, step 4 none. Score: 0", 0.0),
   ("<think>A score of 3? Score: 3</think> Score: 10", 1.0),
   ("<think>2 or 3</think>8", 0.8)],
)  # fmt: skip
def test_the_score_of_a_reply(reply, expected):
  if expected is None:
    with pytest.raises(judge.JudgeError, match=r"^url: expected "):
      judge._read_score("url", reply, 10.0)
  else:
    assert judge._read_score("url", reply, 10.0) == pytest.approx(expected)


@pytest.mark.parametrize(
  ("response", "message"),
  [("say good", "'Score: NUMBER' at the end of the reply, got 'good'"),
   ("say null", "'Score: NUMBER' at the end of the reply, got ''"),
   ("cut Score: 7", "the reply is longer than max_tokens=1024"),
   ("say Score: 11", r"expected a score in 0..10, got 11"),
   ("say Score: -1", r"expected a score in 0..10, got -1"),
   ("status 401 9", r"HTTP status 401: the server's reason \(try 1\)"),
   ("moved", r"HTTP status 302: .*\(try 1\)"),
   ("odd", 'expected a chat completion, got \'{"no": "choices"}')],
)  # fmt: skip
def test_failures_name_the_url_and_are_not_tried_again(
  server, template, response, message
):
  with pytest.raises(judge.JudgeError, match=message) as error:
    ask(server, template, response)
  assert str(error.value).startswith(f"{server.url}: ")
  assert len(server.requests) == 1


@pytest.mark.parametrize(
  "response", ["status 503 2 Score: 5", "status 429 1 Score: 5", "hangup 5"]
)
def test_a_busy_server_is_asked_again(server, template, response):
  assert ask(server, template, response) == 0.5
  assert len(server.requests) > 1


@pytest.mark.parametrize(
  ("response", "message"),
  [("status 500 99", r"HTTP status 500: the server's reason \(try \d+\)"),
   ("silent", r"no answer within 0\.\d s \(try 1\)")],
)  # fmt: skip
def test_it_gives_up_in_time(server, template, response, message):
  began = time.monotonic()
  with pytest.raises(judge.JudgeError, match=message):
    ask(server, template, response, total=0.3)
  assert time.monotonic() - began < 0.9


def test_what_the_server_is_asked(server, template, monkeypatch):
  monkeypatch.setenv("JUDGE_KEY", "2")  # it stays in replies
  options = {"temperature": 0.5, "max_tokens": 9, "scale": 1}
  score = ask(server, template, "say 0.25", key_variable="JUDGE_KEY", **options)
  assert score == 0.25
  ((path, authorization, body),) = server.requests
  assert (path, authorization) == ("/v1/chat/completions", "Bearer 2")
  # What a prompt or a response has in braces is left alone.
  content = "P {level} R 0..1 3\nsay 0.25\n"
  assert body == {
    "messages": [{"role": "user", "content": content}],
    "model": "m",
    "temperature": 0.5,
    "max_tokens": 9,
  }


@pytest.mark.parametrize(
  "response", ["echo 401", "echo 200", "say Bearer sk-secret"]
)
def test_the_key_is_in_no_error(server, template, monkeypatch, response):
  """Not with the line break of a file, and not where the server quotes it."""
  monkeypatch.setenv("JUDGE_KEY", "sk-secret\n")
  with pytest.raises(judge.JudgeError, match=r"Bearer \.\.\.") as error:
    ask(server, template, response, key_variable="JUDGE_KEY")
  assert server.requests[0][1] == "Bearer sk-secret"
  assert "secret" not in str(error.value)


def test_a_key_that_is_no_header_is_not_printed(server, monkeypatch):
  monkeypatch.setenv("JUDGE_KEY", "sk-secret\nX: y")
  spec = f"judge:url={server.url},model=m,key_variable=JUDGE_KEY"
  with pytest.raises(UserError, match=r"visible ASCII.*got JUDGE_KEY") as error:
    rewards.named(spec)
  assert "secret" not in str(error.value)


def test_no_key_is_sent_unless_it_is_named(server, template, monkeypatch):
  monkeypatch.setenv("OPENAI_API_KEY", "secret")
  ask(server, template, "say 1")
  assert server.requests[0][1] is None


def test_the_default_prompt_has_problem_reference_response_and_scale():
  values = {"prompt": "<p>", "response": "<a>", "reference": "<r>"}
  text = judge._fill(judge.TEMPLATE, values | {"scale": "10"})
  assert all(value in text for value in values.values())
  assert "to 10" in text
  assert "{" not in text


def test_a_template_with_an_unknown_column(server, tmp_path):
  path = tmp_path / "template"
  path.write_text("{response} {levle}")
  with pytest.raises(LookupError, match=r"{levle}.*did you mean 'level'"):
    ask(server, str(path), "say 1")


def test_a_pool_asks_several_times_at_once(server, template):
  responses = [
    Response("", f"slow Score: {i}", "", 1, 1, {"level": i})
    for i in range(COUNT)
  ]
  responses.append(responses[0]._replace(text="status 404 9"))
  spec = f"judge:url={server.url},model=a/b-1.5,template={template},total=4"
  options = {"workers": 1, "seconds": 5, "concurrency": 4}
  with pytest.raises(UserError, match="the problem has no column 'level'"):
    RewardPool([spec], [1.0], **options)
  with RewardPool([spec], [1.0], **options, examples=responses[:1]) as pool:
    scored = pool.submit(responses).result()
  tenths = [i / 10 for i in range(COUNT)]
  assert scored.total.tolist() == pytest.approx([*tenths, 0])
  assert scored.failed.tolist() == [False] * COUNT + [True]
  (reason,) = scored.reasons
  assert reason.startswith(f"judge: JudgeError: {server.url}: HTTP status 404")
  assert server.most == 4
  assert server.requests[-1][2]["model"] == "a/b-1.5"


@pytest.mark.parametrize(
  ("arguments", "message"),
  [("", "'judge:url=http://HOST:PORT/v1/chat/completions,model=NAME'"),
   ("url={url}", "model=NAME', got .*model=None"),
   ("url=localhost:80/v1,model=m", "url='localhost:80/v1'"),
   ("url=file:///etc/passwd,model=m", "url='file:///etc/passwd'"),
   ("url={url},model=m,scale=0", "scale to be a number above 0, got 0"),
   ("url={url},model=m,total=x", "total to be a number above 0, got x"),
   ("url={url},model=m,temperature=-1", "temperature to be 0 or more"),
   ("url={url},model=m,max_tokens=0", "max_tokens to be 1 token or more"),
   ("url={url},model=m,template=nowhere.txt", "template to be a text file"),
   ("url={url},model=m,template=setup.cfg", "with {{response}} in it"),
   ("url={url},model=m,key_variable=NO_SUCH", "variable that is set.*NO_SUCH"),
   ("url={url},model=m,total=9", "total=9 seconds .*reward.seconds"),
   ("url={url},model=m,modle=1", "no argument 'modle': did you mean 'model'"),
   ("url=http://127.0.0.1:1/v1,model=m", "Connection refused .*running Open")],
)  # fmt: skip
def test_mistakes_are_reported_before_training(
  server, arguments, message, monkeypatch
):
  monkeypatch.chdir(ROOT)
  spec = f"judge:{arguments.format(url=server.url)}".removesuffix(":")
  with pytest.raises(UserError, match=message.format()) as error:
    rewards.named(spec, 8.0)
  assert "\n" not in str(error.value)


def test_a_server_without_the_model_is_reported_before_training(
  server, monkeypatch
):
  monkeypatch.setattr(judge, "_body", lambda *_: json.dumps(
    {"messages": [{"content": "status 404 9"}]}).encode())  # fmt: skip
  message = "HTTP status 404: the server's reason .expected a running OpenAI"
  with pytest.raises(UserError, match=message):
    rewards.named(f"judge:url={server.url},model=m")
