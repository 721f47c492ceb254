"""Chat templates must render as the reference does: jinja2 with the settings that model libraries use."""
import datetime
import json
import os
import pathlib
import random
import re
import struct
import subprocess

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest

from wire import BUILD, ROOT

FILES = sorted((ROOT / "tests/data/chat").glob("*.jinja"))
NOW = 1764432000
LONG = os.environ.get("BATON_TEST_LONG") == "1"
SEED = os.environ.get("BATON_TEST_SEED", "1")


class Refused(Exception):
    pass


class Generation(jinja2.ext.Extension):
    """Marks the assistant's part for training; renders as its body."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def reference():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation])

    def raise_exception(message):
        raise Refused(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda f: datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).strftime(f)
    return env


def theirs(template, all_vars):
    compiled = reference().from_string(template)
    for v in all_vars:
        try:
            yield compiled.render(**v)
        except (Refused, jinja2.UndefinedError, TypeError, ValueError, ZeroDivisionError, IndexError,
                jinja2.exceptions.SecurityError) as e:
            yield e


def ours(template, all_vars, tmp_path):
    """(text, marks) or an exception for each."""
    path = tmp_path / "template"
    path.write_text(template)
    records = b"".join(struct.pack("<I", len(b)) + b for b in (json.dumps(v).encode() for v in all_vars))
    p = subprocess.run([BUILD / "tests/jinja_render", path, str(NOW)], input=records, capture_output=True, timeout=300)
    if p.returncode:
        raise Refused(p.stderr.decode())
    at, out = 0, []
    while at < len(p.stdout):
        n = struct.unpack_from("<I", p.stdout, at)[0]
        at += 4
        if n == 0xFFFFFFFF:
            n = struct.unpack_from("<I", p.stdout, at)[0]
            at += 4
            out.append(Refused(p.stdout[at:at + n].decode()))
        else:
            out.append((p.stdout[at:at + n // 2].decode(), p.stdout[at + n // 2:at + n].decode()))
        at += n
    assert len(out) == len(all_vars)
    return out


def compare(template, all_vars, tmp_path):
    refused = 0
    for v, want, got in zip(all_vars, theirs(template, all_vars), ours(template, all_vars, tmp_path)):
        if isinstance(want, Exception):
            assert isinstance(got, Exception), f"{v}\nreference refuses ({want!r}), we gave {got}"
            if isinstance(want, Refused):
                assert str(want) in str(got)
            refused += 1
            continue
        assert not isinstance(got, Exception), f"{v}\nwe refuse: {got}\nreference: {want!r}"
        assert got[0] == want, v
    return refused


TEXTS = ["", "x", "Hi there", "  spaces \n", "\n\nnew lines\n", "naïve 漢字 🙂", "{{ not }} {% a %} {# tag #}", "it's \"quoted\" \\n",
         "<think>\nhm\n</think>\n\nso", "<tool_response>a</tool_response>", "tab\there", "<|im_end|>", "a</think>b</think>c",
         "line one\nline two\n\nline four", "1 < 2 & 3 > 2"]


def random_vars(rnd):
    def text():
        return rnd.choice(TEXTS) + rnd.choice(["", " ", rnd.choice(TEXTS)])

    def spec(depth=0):
        s = {"type": rnd.choice(["string", "number"]), "description": text()}
        if rnd.random() < 0.3:
            s["enum"] = [rnd.choice([1, "a", None, 2.5, True]) for _ in range(2)]
        if depth < 2 and rnd.random() < 0.5:
            s["properties"] = {rnd.choice("abcdeABCDE") + str(i): spec(depth + 1) for i in range(rnd.randrange(3))}
        return s

    def tool(i):
        return {"type": "function", "function": {"name": f"f{i}", "description": text(), "parameters": spec(),
                                                 "return": "x"}}

    def call(i):
        args = rnd.choice([{"a": 1, "b": [1.5, None, True]}, {}, text(), {"é": text()}])
        return {"id": rnd.choice(["123456789", "short"]), "type": "function", "function": {"name": f"f{i}", "arguments": args}}

    messages = []
    if rnd.random() < 0.5:
        messages.append({"role": "system", "content": text()})
    for i in range(rnd.randrange(0 if messages else 1, 8)):
        kind = rnd.random()
        role = ["user", "assistant"][i % 2] if kind < 0.7 else rnd.choice(["user", "assistant", "tool", "system"])
        m = {"role": role, "content": text()}
        if role == "assistant" and rnd.random() < 0.2:
            m["tool_calls"] = [call(k) for k in range(rnd.randrange(1, 3))]
        messages.append(m)
    v = {"messages": messages, "add_generation_prompt": rnd.random() < 0.7, "bos_token": "<s>", "eos_token": "</s>"}
    if rnd.random() < 0.4:
        v["tools"] = [tool(i) for i in range(rnd.randrange(1, 3))]
    elif rnd.random() < 0.5:
        v["tools"] = None
    if rnd.random() < 0.2:
        v["tools_in_user_message"] = False
    if rnd.random() < 0.2:
        v["enable_thinking"] = rnd.random() < 0.5
    return v


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_families(path, tmp_path):
    rnd = random.Random(f"{SEED} {path.stem}")
    n = 5000 if LONG else 400
    refused = compare(path.read_text(), [random_vars(rnd) for _ in range(n)], tmp_path)
    assert refused < n * 3 // 4


TEMPLATES = os.environ.get("BATON_TEST_TEMPLATES", "")  # a folder
MODELS = sorted(pathlib.Path(TEMPLATES).glob("*.jinja")) if TEMPLATES else []


@pytest.mark.parametrize("path", MODELS, ids=[p.stem for p in MODELS])
def test_templates_of_models(path, tmp_path):
    """A folder of templates as models come with them: each is refused with its line, at the start or always, or
    renders as the reference does."""
    rnd = random.Random(f"{SEED} {path.stem}")
    many = [random_vars(rnd) for _ in range(100)]
    for v in many:
        v["messages"] = [{"role": m["role"], "content": m["content"]} for m in v["messages"]]
        v["tools"] = None
    try:
        got, want = ours(path.read_text(), many, tmp_path), list(theirs(path.read_text(), many))
    except (Refused, jinja2.TemplateError) as e:
        assert re.search(r"line \d+: unsupported|No filter named", str(e)), e
        return
    if not all(isinstance(g, Refused) and re.search(r"line \d+: ", str(g)) for g in got):
        for v, g, w in zip(many, got, want):
            assert isinstance(g, Exception) == isinstance(w, Exception) and (isinstance(w, Exception) or g[0] == w), v


BASE = {"messages": [{"role": "user", "content": " Hi, wörld "}, {"role": "assistant", "content": "a-b-c"}],
        "n": 7, "f": 2.5, "neg": -3, "s": "The quick\nbrown fox", "l": [3, 1, 2, 1], "d": {"b": 1, "a": [1, {"k": None}], "items": 2},
        "t": True, "nothing": None, "empty": "", "tokens": "<a><b>", "mixed": ["b", "A", "c"], "zero": 0,
        "people": [{"name": "x", "age": 3, "in": {"k": 1}}, {"name": "y", "age": 1, "in": {"k": 0}}, {"name": "x", "age": 2, "in": {"k": 2}}]}

CASES = """
{{ n + 1 }} {{ n - 9 }} {{ n * 2 }} {{ n / 2 }} {{ n // 2 }} {{ neg // 2 }} {{ neg % 5 }} {{ n % -4 }} {{ 2 ** 10 }} {{ f * 2 }} {{ -n }} {{ +n }}
{{ 1e0 if false else 1.0 }} {{ 0.1 + 0.2 }} {{ 1 / 3 }} {{ 10.0 ** 20 }} {{ 5 // 2.0 }} {{ 7.5 % 2 }} {{ 100000.0 }} {{ 1.5e3 if none else 3 }}
{{ n ~ '-' ~ f ~ none ~ t ~ missing }} {{ 'a' + 'b' * 3 }} {{ [1] + [2, 3] }} {{ (1, 'x') }} {{ (1,) }} {{ () }} {{ [] }} {{ {} }}
{{ n > 3 }} {{ n >= 7 and n <= 7 }} {{ 3 < n < 9 }} {{ 1 < n < 5 }} {{ n == 7.0 }} {{ true == 1 }} {{ 'a' < 'b' }} {{ not n }} {{ n != 8 }}
{{ 'x' in 'xyz' }} {{ 3 in l }} {{ 'b' in d }} {{ 'q' not in d }} {{ 1 not in l }} {{ '' in 'a' }} {{ 'a' in missing }}
{{ n if t else 0 }} {{ 'yes' if zero }} {{ n and 'last' }} {{ zero or 'other' }} {{ zero and 1 }} {{ empty or nothing or 'z' }}
{{ d }} {{ l }} {{ s }} {{ nothing }} {{ t }} {{ [s, "it's", 'q"q', 'both\\'"'] }} {{ ['\\n\\t', 'é'] }} {{ {'k': "v", 'n': none} }}
{{ l[0] }} {{ l[-1] }} {{ l[9] }} {{ l[1:] }} {{ l[:-1] }} {{ l[::-1] }} {{ l[::2] }} {{ l[-2:] }} {{ l[5:2] }} {{ s[4:9] }} {{ s[::-1] }} {{ s[0] }} {{ s[-3:] }} {{ 'wörld'[1] }} {{ 'wörld'[1:3] }}
{{ d.b }} {{ d['a'][1].k }} {{ d.missing }} {{ d['missing'] is defined }} {{ messages[0].content }} {{ messages[0]['role'] }}
{{ d.items() | list }} {{ d.keys() | list }} {{ d.values() | list }} {{ d.get('b') }} {{ d.get('zz') }} {{ d.get('zz', 5) }}
{{ s.upper() }} {{ s.lower() }} {{ s.title() }} {{ 'HELLO world'.capitalize() }} {{ s.split() }} {{ 'a-b-c'.split('-') }} {{ 'a-b-c'.split('-', 1) }} {{ 'a-b-c'.rsplit('-', 1) }} {{ 'a--b'.split('-') }} {{ ''.split('-') }} {{ ''.split() }}
{{ ' x '.strip() }}| {{ '--x--'.strip('-') }} {{ 'xxabxx'.lstrip('x') }} {{ 'abab'.rstrip('ba') }}| {{ s.startswith('The') }} {{ s.endswith(('dog', 'fox')) }} {{ s.find('quick') }} {{ s.find('zz') }} {{ s.rfind('o') }} {{ 'wörld'.find('r') }} {{ s.count('o') }}
{{ s.replace('quick', 'slow') }} {{ 'aaa'.replace('a', 'b', 2) }} {{ ', '.join(['a', 'b']) }} {{ 'a\\nb\\r\\nc\\n'.splitlines() }} {{ '12'.isdigit() }} {{ 'x1'.isdigit() }} {{ 'prefix-x'.removeprefix('prefix-') }} {{ 'x.py'.removesuffix('.py') }}
{{ s | upper }} {{ s | length }} {{ 'wörld' | length }} {{ l | length }} {{ d | count }} {{ ' x ' | trim }}| {{ s | title }} {{ 'aBC' | capitalize }} {{ s | replace('o', '0') }} {{ n | string ~ 'x' }}
{{ missing | default('dflt') }} {{ empty | default('e', true) }} {{ empty | d('e') }}| {{ '42' | int + 1 }} {{ 'x' | int }} {{ '3.9' | int }} {{ 3.9 | int }} {{ '2.5' | float }} {{ neg | abs }} {{ 2.567 | round(2) }} {{ 2.5 | round }} {{ 3.5 | round | int }}
{{ l | join(',') }} {{ l | first }} {{ l | last }} {{ [] | first }}| {{ l | sort }} {{ l | sort(reverse=true) }} {{ mixed | sort }} {{ mixed | sort(case_sensitive=true) }} {{ l | unique | list }} {{ l | reverse | list }} {{ 'abc' | reverse }} {{ l | min }} {{ l | max }} {{ l | sum }} {{ 'abc' | list }} {{ d | list }}
{{ people | map(attribute='name') | join(' ') }} {{ people | map(attribute='in.k') | list }} {{ mixed | map('upper') | join }} {{ people | sum(attribute='age') }} {{ people | sort(attribute='age') | map(attribute='age') | list }} {{ people | join('|', attribute='name') }}
{{ people | selectattr('name', 'equalto', 'x') | list | length }} {{ people | rejectattr('age', 'gt', 2) | map(attribute='age') | list }} {{ l | select('odd') | list }} {{ l | reject('in', [1]) | list }} {{ [0, 1, '', 'a', none] | select | list }} {{ people | selectattr('missing') | list }}
{{ d | tojson }} {{ s | tojson }} {{ [1, 2.5, none, true, 'é"\\n'] | tojson }} {{ {'a': {'b': []}, 'c': {}} | tojson(indent=2) }} {{ [1, [2]] | tojson(indent=1) }}
{{ s | tojson(ensure_ascii=true) }} {{ ['wörld 漢 🙂', '\x7f\u0080', {'é': 'ü'}] | tojson(ensure_ascii=true) }} {{ d | tojson(ensure_ascii=false, indent=1) }}
{{ 'x' | int(5) }} {{ '7' | int(5) }} {{ none | int(default=3) }} {{ 'x' | float(1.5) }} {{ 'x' | int('y') }}
{{ nothing | selectattr('a') | list }} {{ missing | map('upper') | list }} {{ zero | select | list }} {{ empty | reject('odd') | list }} {{ nothing | rejectattr('a', 'equalto', 1) | list }}
{{ d | dictsort }} {{ d | dictsort(reverse=true) }} {{ 'a\\nb\\n\\nc' | indent }}| {{ 'a\\nb' | indent(2, true) }}
{{ n is number }} {{ f is float }} {{ n is integer }} {{ t is integer }} {{ t is boolean }} {{ s is string }} {{ d is mapping }} {{ l is sequence }} {{ s is iterable }} {{ n is iterable }} {{ nothing is none }} {{ missing is undefined }} {{ missing is not defined }} {{ t is true }} {{ t is false }} {{ n is odd }} {{ n is even }} {{ n is divisibleby 7 }} {{ n is divisibleby(2) }} {{ n is eq 7 }} {{ n is in [7] }} {{ 'a' is lower }} {{ 'A' is upper }} {{ n is gt(3) and n is lt(9) }} {{ range is callable }} {{ raise_exception is defined }}
{% for i in range(3) %}{{ i }}{% if not loop.last %},{% endif %}{% endfor %} {% for i in range(5, 0, -2) %}{{ loop.index }}:{{ i }};{{ loop.revindex }}{% endfor %} {% for a, b in [(1, 2), (3, 4)] %}{{ a + b }} {% endfor %}
{% for k, v in d.items() %}{{ k }}={{ v }} {% endfor %}{% for c in 'añb' %}[{{ c }}]{% endfor %}{% for x in missing %}x{% else %}none{% endfor %}{% for x in d %}{{ x }}{% endfor %}
{% for p in people if p.age > 1 %}{{ loop.index }}/{{ loop.length }}{{ p.age }}{{ loop.previtem.age if loop.previtem is defined }}{{ loop.nextitem.age if loop.nextitem is defined }} {{ loop.cycle('odd', 'even') }};{% endfor %}
{% for i in l %}{% if i == 2 %}{% break %}{% endif %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %} {% for i in l %}{% for j in l %}{% if j == 2 %}{% break %}{% endif %}{{ j }}{% endfor %}/{% endfor %}
{% set x = 1 %}{% for i in l %}{% set x = i %}{% endfor %}{{ x }} {% if true %}{% set x = 5 %}{% endif %}{{ x }} {% set a, b = 1, 2 %}{{ a }}{{ b }} {% set ns = namespace(c=0) %}{% for i in l %}{% set ns.c = ns.c + i %}{% endfor %}{{ ns.c }}
{% set y %}block {{ n }}{% endset %}{{ y | upper }}{% set z | trim %}  trimmed  {% endset %}[{{ z }}]
{% macro m(a, b=2, c=none) %}({{ a }},{{ b }},{{ c }}){% endmacro %}{{ m(1) }}{{ m(1, c=3) }}{{ m(1, 2, 3) }}{{ m('x', b=m(0)) }}{{ m() }} {% macro r(k) %}{{ k }}{% if k > 0 %}{{ r(k - 1) }}{% endif %}{% endmacro %}{{ r(3) }}
{% raw %}{{ not }} {% if %}{% endraw %}|{#- c -#}| x {#- c #} y {# c -#} z
{%- if t -%} a {%- else -%} b {%- endif -%} | {{- n -}} | {{ n -}}   |   {{- n }}
{% filter upper %}text {{ s }}{% endfilter %} {{ namespace(a=1).a }} {{ dict(a=1, b='x') }} {{ dict(d, z=1).z }}
{{ "a" "b" 'c' }} {{ 'esc \\x41\\u00e9' }} {{ 1_000 }} {{ strftime_now('%d %b %Y, %H:%M') }} {{ True }}{{ False }}{{ None }}{{ l.0 }}
{{ people[0]['in'].k }} {{ (l | first) + 1 }} {{ -l[0] }} {{ not t and t }} {{ 'a' ~ 1 + 2 }} {{ 2 + 3 * 4 - 1 }} {{ (2 + 3) * 4 }} {{ 10 - 3 - 2 }} {{ -2 | abs }} {{ 'x' if not missing else 'y' }}
{{ missing.attr }}
{{ missing[0] }}
{{ n + 'x' }}
{{ n / 0 }}
{{ 'a' > 1 }}
{{ 1e3 }} {{ 2.5E-3 }} {{ 1e+2 }}
{{ raise_exception('no ' ~ n) }}
{{ missing + 1 }}
""".strip().split("\n")


@pytest.mark.parametrize("template", CASES)
def test_constructs(template, tmp_path):
    compare(template, [BASE], tmp_path)


WHITE = ["a\n{% if t %}\nb\n{% endif %}\nc", "  {% if t %}  \n x {% endif %}  \n", "a {%+ if t %} b{% endif +%}\n c", "a\n   {{ n }}\n b",
         "{% if t %}\n\n{{ n }}\n{% endif %}\n\n", "x\n\t {# c #}\n y", "x {#- c -#} \n y", "{{ n }}\n", "{{ n }}\n\n", "\n{% if t %}y{% endif %}",
         "   {% set q = 1 %}   {% set r = 2 %}\nz", "a\n  {%- if t %}\n  b\n  {%- endif %}\nc", "{{- n -}}\n\n x", "é\n {% if t %}é{% endif %}"]


@pytest.mark.parametrize("template", WHITE)
def test_white_space(template, tmp_path):
    compare(template, [BASE], tmp_path)


REFUSED = [("{% include 'x' %}", 'tag "include"', 1), ("a\n{{ x | batch(2) }}", 'filter "batch"', 2), ("{{ x | tojson(separators=(',', ':')) }}", 'argument of a filter "separators"', 1), ("\n{{ x | unique(attribute='a') }}", '"attribute"', 2),
           ("{{ x | trim('a', 'b') }}", 'arguments of filter "trim"', 1), ("{% filter upper(1) %}x{% endfilter %}", '"upper"', 1), ("{{ x is filter_y }}", 'test "filter_y"', 1),
           ("\n\n{{ x.format(1) }}", 'method "format"', 3), ("{{ cycler(1) }}", 'function "cycler"', 1), ("{{ f(*a) }}", "unpacked", 1),
           ("{% for x in y recursive %}{% endfor %}", "recursive", 1), ("{% call m() %}{% endcall %}", 'tag "call"', 1), ("{% if x %}", "ends before", 1),
           ("{{ 'a }}", "does not end", 1), ("{{ 1 + }}", "expected an expression", 1), ("{% endif %}", 'tag "endif"', 1), ("{# x", "does not end", 1),
           ("{{ $ }}", "unexpected character", 1), ("{% break %}", "not inside a loop", 1), ("{{ " + "(" * 200 + "1" + ")" * 200 + " }}", "nested too deeply", 1),
           ("{% if a %}" * 200 + "{% endif %}" * 200, "nested too deeply", 1), ("{{ 99999999999999999999 }}", "number", 1), ("{{ '\\ud800' }}", "escape", 1)]


@pytest.mark.parametrize("template,words,line", REFUSED, ids=[r[1] for r in REFUSED])
def test_what_is_unknown_is_refused_by_name_and_line(template, words, line, tmp_path):
    with pytest.raises(Refused) as e:
        ours(template, [BASE], tmp_path)
    assert words in str(e.value) and f"line {line}:" in str(e.value)


BOMBS = ["{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}", "{{ 'x' * 99999999999 }}", "{{ range(99999999999) | list }}",
         "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "{% set ns = namespace(s='xx') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
         "{% for i in range(200000) %}0123456789{% endfor %}", "{% set ns = namespace(l=[1]) %}{% for i in range(64) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
         "{{ [0] * 99999999 }}", "{% set ns = namespace(l=[]) %}{% for i in range(400) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l | tojson }}"]


@pytest.mark.parametrize("template", BOMBS)
def test_work_is_bounded(template, tmp_path):
    assert isinstance(ours(template, [BASE], tmp_path)[0], Refused)


MINE = "<|im_end|>"


@pytest.mark.parametrize("expression", [
    "m", "m | trim", "m ~ ''", "'' + m", "m.strip()", "m | replace('x', 'y')", "m.split('y')[0]", "m[0:]", "m[::1]", "m | upper | lower", "m | string", "[m] | join",
    "m | tojson", "[m]", "{'k': m}", "m | indent", "m.replace('a', m)", "m | list | join", "(m | reverse) | reverse", "m | default('x')", "m if m else 'x'",
    "[m, m] | map('trim') | join(m)", "'|'.join([m])", "m | safe", "m.removeprefix('q')", "m.title()", "'y'.replace('y', m)", "mac(m)", "setm"])
def test_TOK_06_what_came_in_stays_theirs(expression, tmp_path):
    """Whatever a template does with a text, none of its bytes become the template's own."""
    template = "{% macro mac(x) %}{{ x }}{% endmacro %}{% set setm %}{{ m }}{% endset %}<|im_start|>{{ " + expression + " }}<|im_end|>"
    text, marks = ours(template, [{"m": MINE}], tmp_path)[0]
    raw = text.encode()
    assert len(raw) == len(marks) and raw.startswith(b"<|im_start|>") and raw.endswith(b"<|im_end|>")
    assert marks.startswith("1" * 12) and marks.endswith("1" * 10)
    inside = marks[12:-10]
    assert inside.count("0") >= len(MINE)
    for i in range(len(raw) - len(MINE) - 10):
        if raw[i:i + len(MINE)].lower() == MINE.encode():
            assert marks[i:i + len(MINE)] == "0" * len(MINE)
