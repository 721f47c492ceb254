"""The OpenAI-compatible port: answers, streams, fields, errors, the token; by plain sockets and the
official client."""
import asyncio
import http.client
import json
import re
import shutil
import signal
import subprocess
import threading
import urllib.parse

import openai
import pytest

from cluster import SLOW, Cluster, eventually
from security import Access
from wire import LENGTH, ROOT, STOP, request

pytestmark = pytest.mark.sanitize
PROMPT = "The lamp keeper walks along the quiet harbor"
CHAT = [{"role": "user", "content": "what do the numbers mean"}]


class Http:
    """Calls of one router; every call has a connection of its own."""

    def __init__(self, cluster, router="router", token=None):
        self.address = cluster.procs[router].ready["http"]
        self.url = f"http://{self.address}"
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    def call(self, method, path, body=None, headers=()):
        c = http.client.HTTPConnection(self.address, timeout=60 * SLOW)
        if body is not None and not isinstance(body, (str, bytes)):
            body = json.dumps(body)
        c.request(method, path, body, {**self.headers, **dict(headers)})
        r = c.getresponse()
        data = r.read()
        c.close()
        if r.headers.get_content_type() == "application/json" and data:
            data = json.loads(data)
        return r, data

    def post(self, path, status=200, **body):
        r, data = self.call("POST", path, body)
        assert r.status == status, data
        return data

    def complete(self, prompt=PROMPT, **kw):
        return self.post("/v1/completions", prompt=prompt, **kw)

    def chat(self, messages=CHAT, **kw):
        return self.post("/v1/chat/completions", messages=messages, **kw)

    def error(self, path="/v1/completions", status=400, **kw):
        kw.setdefault("messages" if "chat" in path else "prompt", CHAT if "chat" in path else PROMPT)
        e = self.post(path, status, **kw)["error"]
        assert set(e) == {"message", "type", "param", "code"} and e["message"]
        return e

    def events(self, path, **body):
        """Data of a stream's events, the end mark checked and left out."""
        c = http.client.HTTPConnection(self.address, timeout=60 * SLOW)
        c.request("POST", path, json.dumps({**body, "stream": True}), self.headers)
        r = c.getresponse()
        assert r.status == 200, r.read()
        assert r.headers.get_content_type() == "text/event-stream"
        lines = [e for e in r.read().decode().split("\n\n") if e and not e.startswith(":")]
        c.close()
        assert lines[-1] == "data: [DONE]" and all(e.startswith("data: ") for e in lines)
        return [json.loads(e[6:]) for e in lines[:-1]]

    def client(self, **kw):
        return openai.OpenAI(base_url=self.url + "/v1", api_key=kw.pop("api_key", "none"),
                             timeout=60 * SLOW, **kw)

    def metric(self, name):
        _, text = self.call("GET", "/metrics")
        m = re.search(rf"^{re.escape(name)} (\S+)$", text.decode(), re.M)
        assert m, f"{name} is not in /metrics"
        return float(m.group(1))


@pytest.fixture(scope="module")
def c(models):
    """One cluster for all tests here; each test leaves it idle."""
    cluster = Cluster(models("tiny"), router_args=["--http.listen=127.0.0.1:0"])
    yield cluster
    cluster.finish()


@pytest.fixture(scope="module")
def h(c):
    return Http(c)


@pytest.fixture(autouse=True)
def nothing_left(request):
    yield
    if "c" in request.fixturenames:
        request.getfixturevalue("c").pages_back()


def joined(events, key="text", index=0):
    choices = [e["choices"][0] for e in events if e["choices"] and e["choices"][0]["index"] == index]
    return "".join(x["text"] if key == "text" else x["delta"].get("content") or "" for x in choices), choices


# --- answers ------------------------------------------------------------------------------------

def test_the_same_answer_as_grpc(c, h):
    want = c.client.generate(PROMPT, max_tokens=40, temperature=0.9, seed=7, skip_special=True)
    got = h.complete(max_tokens=40, temperature=0.9, seed=7)
    assert got["choices"][0]["text"].encode() == want.text
    assert got["choices"][0]["finish_reason"] == {STOP: "stop", LENGTH: "length"}[want.finish]
    assert got["usage"]["prompt_tokens"] == want.usage.prompt_tokens
    assert got["usage"]["completion_tokens"] == len(want.tokens)
    events = h.events("/v1/completions", prompt=PROMPT, max_tokens=40, temperature=0.9, seed=7)
    text, choices = joined(events)
    assert text.encode() == want.text
    assert [x["finish_reason"] for x in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == got["choices"][0]["finish_reason"]
    assert all("usage" not in e for e in events)


def test_chat_uses_the_template(c, h):
    want = c.client.generate(chat=[("user", CHAT[0]["content"])], max_tokens=20, skip_special=True)
    got = h.chat(max_tokens=20, temperature=0)
    assert got["object"] == "chat.completion"
    assert got["choices"][0]["message"]["content"].encode() == want.text
    assert got["usage"]["prompt_tokens"] == want.usage.prompt_tokens
    parts = [{"role": "user", "content": [{"type": "text", "text": "what do the "},
                                          {"type": "text", "text": "numbers mean"}]}]
    assert h.chat(parts, max_tokens=20, temperature=0)["choices"] == got["choices"]
    events = h.events("/v1/chat/completions", messages=CHAT, max_completion_tokens=20, temperature=0,
                      stream_options={"include_usage": True})
    text, choices = joined(events, "chat")
    assert text.encode() == want.text and choices[0]["delta"]["role"] == "assistant"
    assert all("role" not in x["delta"] for x in choices[1:])
    assert events[-1]["choices"] == [] and events[-1]["usage"] == got["usage"]
    assert all(e["usage"] is None for e in events[:-1])


def test_prompts_of_every_form(c, h):
    ids = c.client.tokenize(PROMPT)
    a = h.complete(max_tokens=9, temperature=0)["choices"][0]["text"]
    assert h.complete(ids, max_tokens=9, temperature=0)["choices"][0]["text"] == a
    for prompts in ([PROMPT, "salt"], [ids, c.client.tokenize("salt")]):
        got = h.complete(prompts, max_tokens=9, temperature=0)
        assert [x["index"] for x in got["choices"]] == [0, 1] and got["choices"][0]["text"] == a
        assert got["usage"]["prompt_tokens"] == len(ids) + len(c.client.tokenize("salt"))


def test_choices_have_answers_of_their_own(c, h):
    got = h.complete(max_tokens=30, temperature=1.0, seed=3, n=3, ignore_eos=True)
    texts = [x["text"] for x in got["choices"]]
    assert [x["index"] for x in got["choices"]] == [0, 1, 2] and len(set(texts)) == 3
    assert texts[0].encode() == c.client.generate(PROMPT, max_tokens=30, temperature=1.0, seed=3,
                                                  ignore_eos=True, skip_special=True).text
    assert got["usage"]["completion_tokens"] == 90
    assert got["usage"]["prompt_tokens"] == len(c.client.tokenize(PROMPT))
    events = h.events("/v1/completions", prompt=PROMPT, max_tokens=30, temperature=1.0, seed=3, n=3,
                      ignore_eos=True)
    assert [joined(events, index=i)[0] for i in range(3)] == texts


def test_sampling_fields_reach_the_sampler(c, h):
    kw = {"temperature": 1.5, "seed": 11, "max_tokens": 40}
    plain = h.complete(**kw)["choices"][0]["text"]
    for field, ours in (({"top_k": 3}, {"top_k": 3}), ({"top_p": 0.3}, {"top_p": 0.3}),
                        ({"min_p": 0.5}, {"min_p": 0.5}),
                        ({"presence_penalty": 2}, {"presence_penalty": 2}),
                        ({"frequency_penalty": 2}, {"frequency_penalty": 2}),
                        ({"repetition_penalty": 5}, {"repetition_penalty": 5}),
                        ({"logit_bias": {"0": -100, "2": -100, "77": 50}},
                         {"bias": {0: -100, 2: -100, 77: 50}}),
                        ({"ignore_eos": True}, {"ignore_eos": True})):
        got = h.complete(**kw, **field)["choices"][0]["text"]
        assert got.encode() == c.client.generate(PROMPT, **kw, **ours, skip_special=True).text, field
        assert got != plain or "ignore_eos" in field or "presence_penalty" in field, field


def test_models_tokens_and_back(c, h):
    _, m = h.call("GET", "/v1/models")
    assert [x["id"] for x in m["data"]] == [c.client.model().name]
    assert m["data"][0]["max_model_len"] == c.client.model().context_tokens
    name = urllib.parse.quote(m["data"][0]["id"], safe="")
    escaped = "".join(f"%{b:02x}" for b in m["data"][0]["id"].encode())
    for path in (name, escaped, name + "?x=1"):
        assert h.call("GET", f"/v1/models/{path}")[1] == m["data"][0]
    for path, want in (("other", 404), (name + "x", 404), (name + "/", 404), (name + "%00", 400), ("%", 400), ("%4", 400),
                       ("%zz", 400), ("", 404)):
        r, e = h.call("GET", f"/v1/models/{path}")
        assert r.status == want and e["error"]["message"], path
    assert h.call("DELETE", f"/v1/models/{name}")[0].status == 405
    ids = c.client.tokenize(PROMPT)
    assert h.post("/tokenize", prompt=PROMPT) == {"count": len(ids), "tokens": ids}
    long = "salt " * 10000
    assert h.post("/tokenize", prompt=long)["tokens"] == c.client.tokenize(long)
    assert h.post("/detokenize", tokens=ids) == {"prompt": PROMPT}
    chat = h.post("/tokenize", messages=CHAT)["tokens"]
    assert h.complete(chat, temperature=0, max_tokens=9)["choices"][0]["text"] == \
        h.chat(temperature=0, max_tokens=9)["choices"][0]["message"]["content"]
    for body in ({}, {"prompt": "x", "messages": CHAT}, {"prompt": "x", "extra": 1}, {"prompt": 3}):
        assert h.call("POST", "/tokenize", body)[0].status == 400
    for body in ({}, {"tokens": [-1]}, {"tokens": [1 << 40]}, {"tokens": "x"}):
        assert h.call("POST", "/detokenize", body)[0].status == 400
    assert h.call("POST", "/tokenize", {"model": "other", "prompt": "x"})[0].status == 404


def test_metrics_count_what_was_relayed(c, h):
    ok, tokens = 'baton_router_requests_total{outcome="ok"}', "baton_router_tokens_total"
    before = h.metric(ok), h.metric(tokens), h.metric("baton_router_time_to_first_token_seconds_count")
    h.complete(max_tokens=13, ignore_eos=True, n=2)
    c.client.generate(PROMPT, max_tokens=5, ignore_eos=True)
    after = h.metric(ok), h.metric(tokens), h.metric("baton_router_time_to_first_token_seconds_count")
    assert [b - a for a, b in zip(before, after)] == [3, 31, 3]
    assert h.metric('baton_router_nodes{state="ready"}') == 2
    assert h.metric("vllm:num_requests_running") == h.metric("vllm:num_requests_waiting") == 0
    _, text = h.call("GET", "/metrics")
    for line in text.decode().splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) [\w:]+ .+|[\w:]+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? [0-9.e+-]+', line), line


# --- reported faults ----------------------------------------------------------------------------

def test_TOK_01_whole_characters_by_stream_and_whole(c, h):
    ids = [3 + b for b in "🙂🙂 naïve 漢字".encode()]  # every byte a token of its own
    text, prompt = bytes(b - 3 for b in ids).decode(), c.client.tokenize(PROMPT)
    for k in range(0, len(ids), 5):  # forced: one token has all the weight
        got = h.complete(prompt, max_tokens=12, temperature=0, ignore_eos=True,
                         logit_bias={str(ids[k]): 100})
        want = c.client.generate(ids=prompt, max_tokens=12, ignore_eos=True, bias={ids[k]: 100},
                                 skip_special=True)
        assert got["choices"][0]["text"].encode() == want.text
        events = h.events("/v1/completions", prompt=prompt, max_tokens=12, temperature=0,
                          ignore_eos=True, logit_bias={str(ids[k]): 100})
        assert joined(events)[0].encode() == want.text
    assert h.post("/detokenize", tokens=ids) == {"prompt": text}


def test_STOP_03_empty_and_many_stop_strings(h):
    for stop in ("", ["", "x"], ["x"] * 20, ["y" * 10240], 3, [3], [None]):
        e = h.error(stop=stop)
        assert e["type"] == "invalid_request_error" and e["param"] == "stop"
    for stop in ([], None, "zzz", ["zzz", "qqq"]):
        h.complete(stop=stop, max_tokens=2)
    text = h.complete(max_tokens=30, temperature=0, ignore_eos=True)["choices"][0]["text"]
    mark = text[8:11]
    for got in (h.complete(max_tokens=30, temperature=0, ignore_eos=True, stop=mark)["choices"][0],
                {"text": joined(h.events("/v1/completions", prompt=PROMPT, max_tokens=30, temperature=0,
                                         ignore_eos=True, stop=[mark]))[0], "finish_reason": "stop"}):
        assert got["text"] == text[:text.index(mark)] and got["finish_reason"] == "stop"


def test_SAMP_01_temperatures_and_ranges(h):
    greedy = [h.complete(temperature=t, max_tokens=10)["choices"][0]["text"]
              for t in (0, -0.0, 0, 0.0)]
    assert len(set(greedy)) == 1
    assert h.complete(temperature=0, top_p=0, max_tokens=10)["choices"][0]["text"] == greedy[0]
    for field in ({"temperature": -1}, {"temperature": "x"}, {"top_p": 1.0001}, {"top_p": -0.1},
                  {"top_k": -2}, {"top_k": 1.5}, {"min_p": 1.1}, {"min_p": -0.1}, {"temperature": True},
                  {"presence_penalty": 3}, {"frequency_penalty": -3}, {"repetition_penalty": 0}):
        assert h.error(**field)["param"] == next(iter(field))
    for raw in ("NaN", "Infinity", "1e999", "-1e400"):
        r, _ = h.call("POST", "/v1/completions", '{"prompt":"x","temperature":%s}' % raw)
        assert r.status == 400, raw


def test_SAMP_03_ids_outside_of_the_vocabulary(c, h):
    alongside = c.client.stream(request(PROMPT, max_tokens=300, ignore_eos=True, seed=1))
    vocab = c.client.model().vocab_size
    for key in ("999999999", "-1", str(vocab), "abc", "", "1.0", " 1", "99999999999999999999"):
        assert h.error(logit_bias={key: 1})["message"]
    for value in ("x", None, [1], 101, -101):
        h.error(logit_bias={"5": value})
    r, _ = h.call("POST", "/v1/completions", '{"prompt":"x","logit_bias":{"5":1e400}}')
    assert r.status == 400
    h.error(prompt=[vocab])
    h.error(prompt=[-1])
    h.error(prompt=[1 << 40])
    h.error(stop_token_ids=[vocab])
    h.complete(logit_bias={str(i): -100 for i in range(min(vocab, 1024))}, max_tokens=4)
    assert sum(len(m.tokens) for m in alongside) == 300


def test_SAMP_04_max_tokens(c, h):
    for path, key in (("/v1/completions", "max_tokens"), ("/v1/chat/completions", "max_tokens"),
                      ("/v1/chat/completions", "max_completion_tokens")):
        for bad in (0, -1, 1.5, "3", 1 << 40):
            assert h.error(path, **{key: bad})["param"] == key
    assert "max_tokens and max_completion_tokens" in h.error("/v1/chat/completions", max_tokens=3,
                                                             max_completion_tokens=4)["message"]
    for field, value, words in (("n", 129, "n: is 129, must be 1 to 128"), ("min_tokens", -1, "is -1, must be 0 to"),
                                ("stop", 5, "must be a string or an array of strings")):
        assert words in h.error(**{field: value})["message"]
    for n in (1, 2):
        got = h.complete(max_tokens=n, ignore_eos=True)
        assert got["usage"]["completion_tokens"] == n
        assert got["choices"][0]["finish_reason"] == "length"
        events = h.events("/v1/completions", prompt=PROMPT, max_tokens=n, ignore_eos=True,
                          stream_options={"include_usage": True})
        assert events[-1]["usage"] == got["usage"]
    assert h.complete(ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_SAMP_04_null_runs_to_the_end_of_the_context(cluster):
    h = Http(cluster("short", router_args=["--http.listen=127.0.0.1:0"]))
    for got in (h.complete("salt", max_tokens=None, ignore_eos=True), h.chat(ignore_eos=True)):
        assert got["usage"]["total_tokens"] == 64 and got["choices"][0]["finish_reason"] == "length"
    assert "context" in h.error(prompt="salt " * 200)["message"]


def test_SAMP_06_empty_prompts(c, h):
    alongside = c.client.stream(request(PROMPT, max_tokens=200, ignore_eos=True, seed=1))
    for prompt in ("", [""], [], [[]], None, 3, [3, "x"], ["x", 3], [["x"]], {}):
        assert h.error(prompt=prompt)["type"] == "invalid_request_error"
    r, e = h.call("POST", "/v1/completions", {"max_tokens": 3})
    assert r.status == 400 and e["error"]["param"] == "prompt"
    assert h.complete("   ", max_tokens=2)["choices"]
    assert h.chat([{"role": "user", "content": ""}], max_tokens=2)["choices"]
    for messages in ([], None, "x", [3], [{}], [{"role": "user"}], [{"content": "x"}],
                     [{"role": "robot", "content": "x"}], [{"role": "user", "content": None}],
                     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]):
        h.error("/v1/chat/completions", messages=messages)
    assert sum(len(m.tokens) for m in alongside) == 200


def test_LOGP_01_one_entry_per_token(c, h):
    kw = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    want = c.client.generate(chat=[("user", CHAT[0]["content"])], max_tokens=12, ignore_eos=True,
                             logprobs=20)
    for top in (0, 1, 20):
        got = h.chat(**kw, logprobs=True, top_logprobs=top)["choices"][0]["logprobs"]["content"]
        assert len(got) == 12
        for item, token, lp in zip(got, want.tokens, want.logprobs):
            assert bytes(item["bytes"]) == c.client.detokenize([token]) or item["token"] == "\ufffd"
            assert abs(item["logprob"] - lp.logprob) < 1e-5
            assert len(item["top_logprobs"]) == top
            for a, b in zip(item["top_logprobs"], lp.top):
                assert bytes(a["bytes"]) == b.text and abs(a["logprob"] - b.logprob) < 1e-5
        events = h.events("/v1/chat/completions", messages=CHAT, logprobs=True, top_logprobs=top, **kw)
        streamed = [x for e in events for x in e["choices"][0]["logprobs"]["content"]]
        assert streamed == got
    assert h.chat(**kw)["choices"][0]["logprobs"] is None
    assert len(h.chat(**kw, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 0
    for field in ({"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 2}, {"logprobs": 3},
                  {"logprobs": True, "top_logprobs": -1}):
        h.error("/v1/chat/completions", **field)
    got = h.complete(**kw, logprobs=3)["choices"][0]["logprobs"]
    assert {len(got[k]) for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {12}
    assert all(t in top for t, top in zip(got["tokens"], got["top_logprobs"]))
    events = h.events("/v1/completions", prompt=PROMPT, logprobs=3, **kw)
    for key in got:
        assert [x for e in events for x in e["choices"][0]["logprobs"][key]] == got[key]
    h.error(logprobs=21)
    h.error(logprobs=True)


def test_unsupported_fields_are_named(h):
    chat = "/v1/chat/completions"
    for path, field, value in (
            (chat, "tools", [{"type": "function", "function": {"name": "f"}}]),
            (chat, "tool_choice", "required"), (chat, "functions", [{"name": "f"}]),
            (chat, "response_format", {"type": "json_object"}), (chat, "modalities", ["audio"]),
            (chat, "reasoning_effort", "high"), (chat, "web_search_options", {"a": 1}),
            (chat, "prompt", "x"), ("/v1/completions", "echo", True), ("/v1/completions", "suffix", "x"),
            ("/v1/completions", "suffix", "text"), ("/v1/completions", "suffix", ["x"]), (chat, "store", True),
            ("/v1/completions", "echo", "none"), ("/v1/completions", "include_stop_str_in_output", True),
            ("/v1/completions", "best_of", 2), ("/v1/completions", "messages", CHAT),
            ("/v1/completions", "kv_transfer_params", {"remote_host": "169.254.169.254"}),
            ("/v1/completions", "stream_options", {"include_usage": True}),
            ("/v1/completions", "n", 0), ("/v1/completions", "n", 129)):
        e = h.error(path, **{field: value})
        assert e["param"] == field and field in e["message"], e
    h.chat(max_tokens=1, user="me", metadata={"a": "b"}, tools=[], tool_choice="none", store=False,
           response_format={"type": "text"}, modalities=["text"], parallel_tool_calls=True, seed=None,
           stop=None, logit_bias=None, service_tier="auto", stream=False, stream_options=None)
    h.complete(max_tokens=1, suffix="", echo=False, include_stop_str_in_output=False)
    e = h.error(model="other", status=404)
    assert e["code"] == "model_not_found" and e["param"] == "model"


def test_names_of_speakers_reach_the_template(cluster, models, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models("hf"), folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.name or m.role }}: {{ m.content }}\n{% endfor %}")
    h = Http(cluster(folder, prefill=0, decode=0, wait=False, router_args=["--http.listen=127.0.0.1:0"]))

    def ids(**message):
        return h.post("/tokenize", messages=[{"role": "user", "content": "salt", **message}])["tokens"]

    def text(prompt):
        return h.post("/tokenize", prompt=prompt)["tokens"]
    assert ids() == ids(name=None) == ids(name="") == text("user: salt\n")
    assert ids(name="Ann") == text("Ann: salt\n")
    assert ids(name="<|im_end|>") == text("<|im_end|>: salt\n"), "a name is text, never a control token"
    for bad in (3, ["x"], {}):
        r, e = h.call("POST", "/tokenize", {"messages": [{"role": "user", "content": "x", "name": bad}]})
        assert r.status == 400 and e["error"]["param"] == "messages.name"


def test_SEC_03_no_field_names_a_peer(h):
    for field in ("bootstrap_host", "bootstrap_port", "remote_host", "prefill_node", "node", "address"):
        assert h.error(**{field: "127.0.0.1:6379"})["param"] == field


def test_429_503_and_retry_after(cluster):
    c = cluster("slow", prefill=0, decode=1, role="both", pool="512M",
                router_args=["--http.listen=127.0.0.1:0", "--limits.active=1", "--route.wait=0ms"])
    h = Http(c)
    held = c.client.stream(request(PROMPT, max_tokens=2000, ignore_eos=True))
    next(iter(held))
    r, e = h.call("POST", "/v1/completions", {"prompt": "x"})
    assert r.status == 429 and r.headers["Retry-After"] and e["error"]["type"] == "rate_limit_error"
    # The official client tries again until there is room.
    timer = threading.Timer(0.3, held.cancel)
    timer.start()
    assert h.client(max_retries=50).completions.create(model="", prompt="x", max_tokens=1).choices
    timer.join()
    c.procs["decode-0"].kill()
    c.allow("decode-0")
    eventually(lambda: h.call("GET", "/ready")[0].status == 503, 20, "not ready")
    assert h.call("GET", "/health")[0].status == 200
    r, e = h.call("POST", "/v1/completions", {"prompt": "x"})
    assert r.status == 503 and r.headers["Retry-After"] and e["error"]["type"] == "server_error"


def test_the_example_of_the_readme(h):
    example = re.search(r"curl -sS http.*?'\n", (ROOT / "README.md").read_text(), re.S).group(0)
    assert "127.0.0.1:8000" in example
    out = subprocess.run(["bash", "-c", example.replace("127.0.0.1:8000", h.address)],
                         capture_output=True, text=True, timeout=60)
    assert out.returncode == 0 and out.stdout.endswith("data: [DONE]\n\n"), out.stdout + out.stderr


# --- the official client ------------------------------------------------------------------------

def test_openai_client(c, h):
    client = h.client()
    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError) as e:
        client.models.retrieve("other")
    assert e.value.code == "model_not_found"
    want = c.client.generate(chat=[("user", CHAT[0]["content"])], max_tokens=30, skip_special=True)
    kw = {"model": model, "messages": CHAT, "max_completion_tokens": 30, "temperature": 0}
    got = client.chat.completions.create(**kw)
    assert got.choices[0].message.content.encode() == want.text
    assert got.usage.completion_tokens == len(want.tokens)
    chunks = list(client.chat.completions.create(**kw, stream=True,
                                                 stream_options={"include_usage": True}))
    text = "".join(x.choices[0].delta.content or "" for x in chunks if x.choices)
    assert text.encode() == want.text and chunks[-1].usage == got.usage
    got = client.completions.create(model=model, prompt=PROMPT, max_tokens=5, temperature=0, logprobs=2)
    assert len(got.choices[0].logprobs.tokens) == 5
    with pytest.raises(openai.NotFoundError) as e:
        client.completions.create(model="other", prompt="x")
    assert e.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model=model, messages=CHAT, tools=[
            {"type": "function", "function": {"name": "f", "parameters": {}}}])
    assert e.value.param == "tools"
    client.close()


def test_openai_client_async(c, h):
    texts = [f"{PROMPT} {i}" for i in range(12)]
    want = [c.client.generate(t, max_tokens=15, skip_special=True).text for t in texts]

    async def one(client, text, stream):
        kw = {"model": "", "prompt": text, "max_tokens": 15, "temperature": 0}
        if not stream:
            return (await client.completions.create(**kw)).choices[0].text
        return "".join([x.choices[0].text async for x in await client.completions.create(**kw, stream=True)])

    async def run():
        async with openai.AsyncOpenAI(base_url=h.url + "/v1", api_key="none",
                                      timeout=60 * SLOW) as client:
            return await asyncio.gather(*(one(client, t, i % 2) for i, t in enumerate(texts)))

    assert [t.encode() for t in asyncio.run(run())] == want


def cancelled(h):
    return h.metric('baton_router_requests_total{outcome="cancelled"}')


def test_STRM_01_client_aborts_in_mid_stream(c, h):
    client, before = h.client(max_retries=0), cancelled(h)
    stream = client.completions.create(model="", prompt=PROMPT, max_tokens=8000, stream=True, n=3,
                                       extra_body={"ignore_eos": True})
    for i, _ in enumerate(stream):
        if i == 5:
            break
    stream.close()
    client.close()
    c.pages_back()
    eventually(lambda: cancelled(h) == before + 3, 10, "three cancelled choices")

    async def run():
        async with openai.AsyncOpenAI(base_url=h.url + "/v1", api_key="none") as client:
            task = asyncio.create_task(client.completions.create(
                model="", prompt=PROMPT, max_tokens=8000, extra_body={"ignore_eos": True}))
            while h.metric("vllm:num_requests_running") < 1:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    asyncio.run(run())
    c.pages_back()
    eventually(lambda: cancelled(h) == before + 4, 10, "a cancelled answer")


# --- the token ----------------------------------------------------------------------------------

ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics", "/tokenize", "/detokenize"]


def test_SEC_01_everything_but_health_asks_for_the_token(cluster, tmp_path):
    token = tmp_path / "token"
    token.write_text("open-sesame-and-more\n")
    operators = tmp_path / "operators"
    operators.write_text("open-sesame-operator\n")
    c = cluster(router_args=["--http.listen=127.0.0.1:0", f"--security.clients_file={token}",
                             f"--security.operators_file={operators}"],
                access=Access(client="open-sesame-and-more", operator="open-sesame-operator"))
    h = Http(c)
    wrong = [{}] + [{"Authorization": v} for v in (
        "Bearer x", "Bearer open-sesame", "Bearer open-sesame-and-more2", "Bearer ", "Bearer",
        "open-sesame-and-more", "Basic open-sesame-and-more", "Bearer " + "x" * 2000)]
    for path in [*ROUTES, "/", "//v1/models", "/v1/models/", "/v1%2fmodels", "/v1/models?x=1", "/admin",
                 "/health/", "//health", "/V1/models"]:
        for headers in wrong:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"):
                r, _ = h.call(method, path, "{}" if method == "POST" else None, headers)
                assert r.status == 401, (method, path, headers)
    for path in ("/health", "/ready"):
        assert h.call("GET", path)[0].status == 200
    good = Http(c, token="open-sesame-and-more")
    assert good.call("GET", "/v1/models")[0].status == 200
    assert good.call("GET", "/metrics")[0].status == 403
    operator = Http(c, token="open-sesame-operator")
    assert operator.call("GET", "/metrics")[0].status == 200
    for path in ("/v1/models", "/tokenize", "/v1/completions"):
        assert operator.call("POST" if path != "/v1/models" else "GET", path, "{}")[0].status == 403
    assert good.call("GET", "//v1/models")[0].status == 404
    assert good.complete(max_tokens=2)["choices"]
    assert h.client(api_key="open-sesame-and-more").models.list().data
    with pytest.raises(openai.AuthenticationError):
        h.client(api_key="wrong").models.list()
    assert "open-sesame" not in c.logs()


def test_SEC_01_off_loopback_needs_a_token(cluster):
    c = cluster()
    p = c.add_router("router2", ["--http.listen=0.0.0.0:0", "--allow_insecure=true"])
    c.allow("security.clients_file")
    assert p.p.wait(30 * SLOW) == 2
    assert "security.clients_file" in p.log.read_text()
    p.killed = True


# --- the end ------------------------------------------------------------------------------------

def test_drain_lets_running_answers_end(cluster):
    c = cluster("slow", prefill=0, decode=1, role="both", pool="512M",
                router_args=["--http.listen=127.0.0.1:0"])
    h = Http(c)
    stream = h.client().completions.create(model="", prompt=PROMPT, max_tokens=60, stream=True,
                                           extra_body={"ignore_eos": True})
    it = iter(stream)
    next(it)
    c.procs["router"].signal(signal.SIGTERM)
    rest = list(it)
    assert rest[-1].choices[0].finish_reason == "length"
    assert c.procs["router"].stop() == 0


def test_drain_has_an_end(cluster):
    c = cluster("slow", prefill=0, decode=1, role="both", pool="512M",
                router_args=["--http.listen=127.0.0.1:0", "--drain_timeout=200ms"])
    stream = Http(c).client().completions.create(model="", prompt=PROMPT, max_tokens=4000, stream=True,
                                                 extra_body={"ignore_eos": True})
    it = iter(stream)
    next(it)
    c.procs["router"].signal(signal.SIGTERM)
    with pytest.raises(openai.APIError):
        list(it)
    assert c.procs["router"].stop() == 0
