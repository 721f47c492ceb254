"""TLS, tokens and what they open, from outside: every method of every service, certificates that are
wrong in each way, exchange under load, hostile bytes, and no secret anywhere it does not belong."""
import concurrent.futures
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import threading
import time

import grpc
import openai
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cluster import SLOW, clean_env, eventually
from fakenode import FakeNode
from security import CLIENT, CLUSTER, GATEWAY, OPERATOR, SCRAPER, Access, Authority, Tokens, credentials
from wire import BUILD, ROOT, Answer, Client, request

PROMPT = "The zanzibar canary lamp keeper walks along the quiet harbor"
S = grpc.StatusCode
REFUSED = (S.UNAUTHENTICATED, S.PERMISSION_DENIED)


class Site:
    """A CA, certificates and tokens of one cluster whose every port is closed, and its clients."""

    def __init__(self, folder):
        self.folder = folder
        self.ca = Authority(folder)
        self.other = Authority(folder, "other")
        self.tokens = Tokens(folder)
        self.server = self.ca.issue("server", "DNS:localhost,IP:127.0.0.1,DNS:baton-node")
        self.router = self.ca.issue("router-0", "DNS:router-0")
        self.operator = self.ca.issue("alice", "DNS:alice")
        tls = [f"--tls.cert_file={self.server[0]}", f"--tls.key_file={self.server[1]}"]
        self.node_args = [*tls, f"--tls.client_ca_file={self.ca.ca}", *self.tokens.node_args, "--log_level=debug"]
        self.router_args = [*tls, *self.tokens.router_args, f"--tls.node_ca_file={self.ca.ca}",
                            f"--tls.node_cert_file={self.router[0]}", f"--tls.node_key_file={self.router[1]}",
                            "--tls.node_name=baton-node", "--http.listen=127.0.0.1:0", "--log_level=debug"]
        self.access = Access(CLIENT, OPERATOR, credentials(self.ca.ca, self.operator))

    def start(self, cluster, **kw):
        more = list(kw.pop("router_args", ()))
        keys = {a.split("=")[0] for a in more}
        router_args = [*(a for a in self.router_args if a.split("=")[0] not in keys), *more]
        node_args = [*self.node_args, *kw.pop("node_args", ())]
        return cluster(router_args=router_args, node_args=node_args, kvstore_args=self.node_args,
                       access=self.access, **kw)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return Site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def c(site, models):
    """One closed cluster for the tests that change nothing of it."""
    from cluster import Cluster
    made = site.start(lambda **kw: Cluster(models("tiny"), **kw), kvstore=1)
    yield made
    made.finish()


def status_of(channel, path, token=None, timeout=5):
    """How a call with one empty message ends; OK if it answers anything."""
    md = [("authorization", f"Bearer {token}")] if token else []
    call = channel.stream_stream(path)(iter([b""]), metadata=md, timeout=timeout * SLOW)
    try:
        for _ in call:
            return S.OK
        return call.code()
    except grpc.RpcError as e:
        return e.code()
    finally:
        call.cancel()


def tls_context(site, ca=None, pair=None):
    ctx = ssl.create_default_context(cafile=str(ca or site.ca.ca))
    if pair:
        ctx.load_cert_chain(*map(str, pair))
    return ctx


def https(site, c, token=CLIENT, ctx=None, router="router"):
    host, port = c.procs[router].ready["http"].split(":")
    conn = http.client.HTTPSConnection(host, int(port), timeout=30 * SLOW, context=ctx or tls_context(site))
    conn.auth = {"Authorization": f"Bearer {token}"} if token else {}
    return conn


def ask(conn, method, path, body=None, **headers):
    conn.request(method, path, json.dumps(body) if body is not None else None, {**conn.auth, **headers})
    r = conn.getresponse()
    return r, r.read()


def openai_client(site, c, token=CLIENT):
    return openai.OpenAI(base_url=f"https://{c.procs['router'].ready['http']}/v1", api_key=token, max_retries=0,
                         http_client=openai.DefaultHttpxClient(verify=tls_context(site)), timeout=60 * SLOW)


# --- it works ------------------------------------------------------------------------------------

@pytest.mark.sanitize
def test_the_whole_path_is_closed_and_works(c, site):
    want = c.client.generate(PROMPT, max_tokens=8).text.decode()
    client = openai_client(site, c)
    got = client.completions.create(model="", prompt=PROMPT, max_tokens=8, temperature=0)
    assert got.choices[0].text == want
    chunks = list(client.completions.create(model="", prompt=PROMPT, max_tokens=8, temperature=0, stream=True))
    assert "".join(x.choices[0].text for x in chunks) == want
    assert client.models.list().data
    with pytest.raises(openai.AuthenticationError):
        openai_client(site, c, "wrong-wrong-wrong-wrong").models.list()
    with pytest.raises(openai.PermissionDeniedError):
        openai_client(site, c, OPERATOR).models.list()
    stream = client.completions.create(model="", prompt=PROMPT, max_tokens=4000, stream=True,
                                       extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()  # leaves in the middle
    c.pages_back()
    assert {n.state for n in c.client.server().nodes} == {"ready"}


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_the_handshake_is_a_modern_one(c, site):
    for port in ("listen", "http"):
        address = c.procs["router"].ready[port].split(":")
        for old in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
            ctx = tls_context(site)
            ctx.minimum_version, ctx.maximum_version = ssl.TLSVersion.TLSv1, old
            ctx.set_ciphers("ALL:@SECLEVEL=0")
            with pytest.raises((ssl.SSLError, OSError)), socket.create_connection(address, 10) as s:
                ctx.wrap_socket(s, server_hostname="localhost")
        ctx = tls_context(site)
        ctx.set_alpn_protocols(["h2", "http/1.1"])
        with socket.create_connection(address, 10) as s, ctx.wrap_socket(s, server_hostname="localhost") as t:
            assert t.version() == "TLSv1.3"
            assert t.selected_alpn_protocol() == ("h2" if port == "listen" else "http/1.1")


# --- who may do what -----------------------------------------------------------------------------

CLIENT_METHODS = {f"/baton.v1.Baton/{m}" for m in ("Generate", "Tokenize", "Detokenize", "GetModel")}
ROLES = {None: 0, "wrong-wrong-wrong-wrong": 0, CLIENT[:-1]: 0, CLIENT + "0": 0, CLIENT: 1, GATEWAY: 1,
         OPERATOR: 2, CLUSTER: 4, SCRAPER: 16}


def access_of(method):
    """Bits of which a caller needs one; what is not named here is for operators alone."""
    if method.startswith("/grpc.health."):
        return 8
    if method.startswith("/grpc.reflection."):
        return 7
    if method in CLIENT_METHODS:
        return 1
    return {"/baton.v1.Node/Session": 4, "/baton.v1.Node/GetStatus": 2 | 4}.get(method, 2)


def methods_of(channel, token):
    """Every method that reflection lists, and its own."""
    intercepted = grpc.intercept_channel(channel, WithToken(token))
    db = ProtoReflectionDescriptorDatabase(intercepted)
    found = []
    for service in db.get_services():
        file = db.FindFileContainingSymbol(service)
        d = next(s for s in file.service if f"{file.package}.{s.name}" == service)
        found += [f"/{service}/{m.name}" for m in d.method]
    return found


class WithToken(grpc.StreamStreamClientInterceptor):
    def __init__(self, token):
        self.md = [("authorization", f"Bearer {token}")]

    def intercept_stream_stream(self, go_on, details, requests):
        return go_on(details._replace(metadata=self.md), requests)


@pytest.mark.sanitize
@pytest.mark.parametrize("name", ["router", "prefill-0", "decode-0", "store-0"])
def test_SEC_01_every_method_of_every_service(c, site, name):
    channel = grpc.secure_channel(c.procs[name].address, site.access.creds)
    at_router = name == "router"
    methods = methods_of(channel, OPERATOR)
    assert len(methods) >= 5 and any("Health" in m for m in methods)
    for method in [*methods, "/baton.v1.Baton/Nothing", "/no.Service/At", "/baton.v1.Baton/Generate/"]:
        # What a service describes but this process does not do is a method that is not there.
        there = method in methods and all(status_of(channel, method, t) != S.UNIMPLEMENTED for t in ROLES)
        need = access_of(method) if there else 7
        for token, role in ROLES.items():
            # Tokens that this process does not know open nothing; a router shows the cluster's, no more.
            known = role in (1, 2, 16) if at_router else role in (2, 4)
            if at_router and token == CLUSTER:
                want = [S.PERMISSION_DENIED]
            else:
                want = [S.PERMISSION_DENIED if known else S.UNAUTHENTICATED]
            got = status_of(channel, method, token)
            if need & 8 or (known and need & role):
                assert got not in REFUSED, (name, method, token, got)
                if not there:
                    assert got == S.UNIMPLEMENTED, (name, method, token, got)
            else:
                assert [got] == want, (name, method, token, got)
    channel.close()


def routes():
    """The paths that the router knows, as its source lists them."""
    text = (ROOT / "router/http/route.c").read_text()
    table = text[text.index("} routes[] = {"):]
    return re.findall(r'\{"(/[^"]*)"', table[:table.index("};")])


@pytest.mark.sanitize
def test_SEC_01_every_path(c, site):
    known = routes()
    assert "/v1/chat/completions" in known and "/metrics" in known
    is_open = {"/health", "/ready"}
    clients = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize"}
    for path in [*known, "/", "/admin", "//v1/models", "/v1%2fmodels", "/health/"]:
        for token, role in ROLES.items():
            for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE"):
                conn = https(site, c, token)
                r, data = ask(conn, method, path, {} if method == "POST" else None)
                conn.close()
                need = 8 if path in is_open else 1 if path in clients else 18 if path == "/metrics" else \
                    2 if path in known else 3
                known_token = role in (1, 2, 16) or token == CLUSTER
                if need & 8 or need & role:
                    assert r.status not in (401, 403), (method, path, token)
                    continue
                assert r.status == (403 if known_token else 401), (method, path, token, r.status)
                assert (r.getheader("WWW-Authenticate") or "").startswith("Bearer" if r.status == 401 else "")
                if method != "HEAD":
                    error = json.loads(data)["error"]
                    assert set(error) == {"message", "type", "param", "code"} and error["message"]


def test_the_tenant_is_what_the_token_says(c, site):
    def go(token, tenant):
        one = Client(c.procs["router"].address, access=Access(token, OPERATOR, site.access.creds))
        try:
            one.generate(PROMPT, max_tokens=1, tenant=tenant)
            return S.OK
        except grpc.RpcError as e:
            return e.code()
        finally:
            one.close()

    assert go(CLIENT, "") == go(CLIENT, "team-a") == S.OK
    assert go(CLIENT, "team-b") == S.PERMISSION_DENIED
    assert go(GATEWAY, "team-b") == go(GATEWAY, "") == S.OK
    conn = https(site, c)
    body = {"prompt": PROMPT, "max_tokens": 1}
    assert ask(conn, "POST", "/v1/completions", {**body, "tenant": "team-a"})[0].status == 200
    r, data = ask(conn, "POST", "/v1/completions", {**body, "tenant": "team-b"})
    assert r.status == 403 and "team-b" in json.loads(data)["error"]["message"]


# --- certificates --------------------------------------------------------------------------------

def reaches(address, creds, name=None, token=OPERATOR):
    """The status of a call, through a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)] + ([("grpc.ssl_target_name_override", name)] if name else [])
    make = grpc.secure_channel if creds else grpc.insecure_channel
    with (make(address, creds, options=options) if creds else make(address, options=options)) as channel:
        return status_of(channel, "/grpc.health.v1.Health/Check", token)


def test_who_is_not_let_in(c, site):
    node, router = c.procs["decode-0"].address, c.procs["router"].address
    old = site.ca.issue("old", "DNS:old", days=-1)
    stranger = site.other.issue("stranger", "DNS:router-0")
    assert reaches(router, credentials(site.ca.ca)) == S.OK
    assert reaches(node, credentials(site.ca.ca, site.router)) == S.OK
    for why, address, creds, name in (
            ("plain text", router, None, None), ("plain text", node, None, None),
            ("another CA", router, credentials(site.other.ca), None),
            ("another name", router, credentials(site.ca.ca), "elsewhere"),
            ("no certificate", node, credentials(site.ca.ca), None),
            ("a certificate of another CA", node, credentials(site.ca.ca, stranger), None),
            ("an expired certificate", node, credentials(site.ca.ca, old), None)):
        assert reaches(address, creds, name) == S.UNAVAILABLE, why
    conn = http.client.HTTPConnection(c.procs["router"].ready["http"], timeout=10)
    conn.request("GET", "/health")
    assert conn.getresponse().status == 400
    with pytest.raises(ssl.SSLError):
        ask(https(site, c, ctx=tls_context(site, site.other.ca)), "GET", "/health")


def batonctl(*args, env=()):
    return subprocess.run([BUILD / "batonctl", *map(str, args)], capture_output=True, text=True, timeout=60 * SLOW,
                          env={**clean_env(), **dict(env)})


def test_batonctl(c, site):
    router, node = c.procs["router"].address, c.procs["decode-0"].address
    token = ["--token-file", site.tokens.operators]
    tls = ["--ca", site.ca.ca]
    own = ["--cert", site.operator[0], "--key", site.operator[1]]
    out = batonctl("status", "--router", router, *tls, *token)
    assert out.returncode == 0 and "decode-0" in out.stdout, out.stderr
    out = batonctl("node", "--node", node, *tls, *own, *token)
    assert out.returncode == 0 and "decode-0" in out.stdout, out.stderr
    out = batonctl("status", "--router", router, "--tls-name", "baton-node", env={
        "BATONCTL_CA": str(site.ca.ca), "BATONCTL_TOKEN_FILE": str(site.tokens.operators)})
    assert out.returncode == 0, out.stderr
    out = batonctl("generate", "--router", router, *tls, "--token-file", site.tokens.clients, "--prompt", "hello",
                   "--max-tokens", 2)
    assert out.returncode == 0 and out.stdout, out.stderr
    for code, args in ((6, [*tls]), (6, [*tls, "--token-file", site.tokens.clients]),
                       (3, []), (3, [*token]), (3, ["--ca", site.other.ca, *token]),
                       (3, [*tls, *token, "--tls-name", "elsewhere"]),
                       (2, [*tls, *own[:2], *token]), (2, [*token, *own]), (2, ["--ca", "/nowhere", *token]),
                       (2, [*tls, "--token-file", site.ca.ca])):
        out = batonctl("status", "--router", router, "--timeout", "3s", *args)
        assert out.returncode == code and out.stderr, (code, args, out)
        assert "canary" not in out.stdout + out.stderr
    out = batonctl("node", "--node", node, "--timeout", "3s", *tls, *token)  # a node wants a certificate
    assert out.returncode == 3 and "--cert" in out.stderr, out.stderr
    for what, args in (("--ca", token), ("CA of --ca", ["--ca", site.other.ca, *token]),
                       ("--tls-name is", [*tls, *token, "--tls-name", "elsewhere"])):
        out = batonctl("status", "--router", router, "--timeout", "3s", *args)
        assert what in out.stderr, out.stderr
    out = batonctl("node", "--node", node, "--timeout", "3s", *tls, *own, *token, "--node-tls-name", "elsewhere")
    assert out.returncode == 3 and "--node-tls-name is" in out.stderr, out.stderr


def test_batonctl_calls_router_and_nodes_by_their_own_names(cluster, tmp_path):
    """A name that the nodes share is not the router's: doctor and flush call both."""
    ca, tokens = Authority(tmp_path), Tokens(tmp_path)
    front, shared = ca.issue("front", "IP:127.0.0.1"), ca.issue("shared", "DNS:baton-node")
    c = cluster(prefill=0, role="both", node_args=[*tokens.node_args, f"--tls.cert_file={shared[0]}", f"--tls.key_file={shared[1]}"],
                router_args=[*tokens.router_args, f"--tls.cert_file={front[0]}", f"--tls.key_file={front[1]}",
                             f"--tls.node_ca_file={ca.ca}", "--tls.node_name=baton-node"],
                access=Access(CLIENT, OPERATOR, credentials(ca.ca)))
    to = ["--router", c.procs["router"].address, "--ca", ca.ca, "--token-file", tokens.operators]
    out = batonctl("doctor", *to)
    assert out.returncode == 1 and "cannot be reached" in out.stdout and "--node-tls-name" in out.stdout, out
    for how in ({"BATONCTL_NODE_TLS_NAME": "baton-node"}, {}):
        name = [] if how else ["--node-tls-name", "baton-node"]
        out = batonctl("doctor", *to, *name, env=how)
        assert out.returncode == 0 and "decode-0" in out.stdout, out
        out = batonctl("cache", "flush", *to, *name, env=how)
        assert out.returncode == 0, out
    out = batonctl("node", "--node", c.procs["decode-0"].address, *to[2:], "--node-tls-name", "baton-node")
    assert out.returncode == 0, out
    c.access = Access(CLIENT, OPERATOR, credentials(ca.ca), name="baton-node")  # what looks at nodes at the end


def test_our_client_takes_no_expired_certificate(site):
    """A stranger's server, since ours would not start with such a certificate."""
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    cert, key = site.ca.issue("expired", days=-1)
    creds = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    port = server.add_secure_port("127.0.0.1:0", creds)
    server.start()
    out = batonctl("status", "--router", f"127.0.0.1:{port}", "--ca", site.ca.ca, "--timeout", "3s")
    assert out.returncode == 3, out
    server.stop(0)
    out = subprocess.run([BUILD / "baton-kvstore", f"--tls.cert_file={cert}", f"--tls.key_file={key}"],
                         capture_output=True, text=True, env=clean_env(), timeout=60 * SLOW)
    assert out.returncode == 2 and "has expired" in out.stderr


def test_names_of_callers(cluster, site):
    c = site.start(cluster, prefill=0, decode=1, role="both", node_args=["--tls.client_names=router-0,alice"])
    assert c.client.generate(PROMPT, max_tokens=2).tokens
    bob = site.ca.issue("bob", "DNS:bob")
    with grpc.secure_channel(c.procs["decode-0"].address, credentials(site.ca.ca, bob)) as channel:
        assert status_of(channel, "/baton.v1.Node/GetStatus", OPERATOR) == S.PERMISSION_DENIED
        assert status_of(channel, "/baton.v1.Node/Session", CLUSTER) == S.PERMISSION_DENIED
        assert status_of(channel, "/grpc.health.v1.Health/Check") == S.OK


def test_a_node_with_another_name_is_not_used(cluster, site):
    c = site.start(cluster, prefill=0, decode=1, role="both", router_args=["--tls.node_name=elsewhere"], wait=False)
    eventually(lambda: c.state_of("decode-0") in ("lost", "connecting") and
               c.client.nodes()["decode-0"].reason, 10, "a reason")
    assert c.client.error(PROMPT, max_tokens=1).code() == S.UNAVAILABLE


def impostor(site, how):
    """What answers at a node's address, with a certificate that is wrong in one way, or right."""
    san = "DNS:elsewhere" if how == "another name" else "DNS:baton-node"
    ca = site.other if how == "another CA" else site.ca
    cert, key = ca.issue(f"impostor-{how.split()[-1]}", san, days=-1 if how == "expired" else 30)
    creds = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    return FakeNode("d0", "both", digest=b"x" * 32, creds=creds)


@pytest.mark.sanitize
@pytest.mark.parametrize("how", ["another CA", "another name", "expired", "plain text", "right"])
def test_SEC_01_an_impostor_is_told_no_token(cluster, site, how):
    node = FakeNode("d0", "both", digest=b"x" * 32) if how == "plain text" else impostor(site, how)
    c = site.start(cluster, prefill=0, decode=0, redis=False, seeds=[node.address], wait=False)
    c.allow("event=node")
    if how == "right":  # so that the others fail for what is wrong with them
        eventually(lambda: node.hellos, 15, "a hello")
        assert node.shown[0] == f"Bearer {CLUSTER}"
    else:
        eventually(lambda: any(n.reason for n in c.client.server().nodes), 15, "a reason")
        time.sleep(1)  # some attempts
        assert not node.shown and not node.hellos
        assert c.client.error(PROMPT, max_tokens=1).code() == S.UNAVAILABLE
    node.stop()


@pytest.mark.sanitize
def test_a_router_with_a_certificate_of_another_CA_is_not_let_in(cluster, site):
    stranger = site.other.issue("stranger-router", "DNS:router-0")
    c = site.start(cluster, prefill=0, decode=1, role="both", wait=False,
                   router_args=[f"--tls.node_cert_file={stranger[0]}", f"--tls.node_key_file={stranger[1]}"])
    c.allow("event=node")
    eventually(lambda: c.client.nodes().get("decode-0") and c.client.nodes()["decode-0"].reason, 15, "a reason")
    time.sleep(1)
    assert not c.ready_nodes() and "event=session " not in c.procs["decode-0"].log.read_text()


@pytest.mark.sanitize
def test_SEC_05_renegotiation_and_cut_handshakes(c, site):
    """New keys asked for in mid-connection (TLS 1.2), and handshakes that end after each of their records: nobody
    else notices."""
    noticed, over = [], threading.Event()

    def others():
        while not over.wait(0.2):
            try:
                c.client.server()
            except grpc.RpcError as e:
                noticed.append(e)
    other = threading.Thread(target=others)
    other.start()
    try:
        cut_handshakes(c, site)
    finally:
        over.set()
        other.join()
    assert not noticed
    assert c.client.generate(PROMPT, max_tokens=2).tokens
    assert ask(https(site, c), "GET", "/v1/models")[0].status == 200
    assert {n.state for n in c.client.server().nodes} == {"ready"}


def cut_handshakes(c, site):
    http_port, grpc_port = c.procs["router"].ready["http"], c.procs["router"].address
    node_port = c.procs["decode-0"].address
    for address in (http_port, grpc_port, node_port):
        own = ["-cert", site.router[0], "-key", site.router[1]] if address == node_port else []
        own += [] if address == http_port else ["-alpn", "h2"]
        p = subprocess.run(["openssl", "s_client", "-connect", address, "-CAfile", str(site.ca.ca), "-tls1_2", *map(str, own)],
                           input="R\nR\nR\n", capture_output=True, text=True, errors="replace",
                           timeout=60 * SLOW)
        assert "RENEGOTIATING" in p.stderr and "error:" in p.stderr and p.returncode != 0, (address, p)
    for address, pair in ((http_port, None), (grpc_port, None), (node_port, site.router)):
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            for cut in range(1, 6):
                ctx = tls_context(site, pair=pair)
                ctx.minimum_version = ctx.maximum_version = version
                incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
                o = ctx.wrap_bio(incoming, outgoing, server_hostname="localhost")
                host, port = address.split(":")
                with socket.create_connection((host, int(port)), 10) as s:
                    s.settimeout(10 * SLOW)
                    for _ in range(cut):
                        try:
                            o.do_handshake()
                            break
                        except ssl.SSLWantReadError:
                            flight = outgoing.read()
                            s.sendall(flight[:-1 if _ == cut - 1 else None])  # the last one a byte short
                            if _ < cut - 1:
                                incoming.write(s.recv(65536))


def test_certificates_of_http_clients(cluster, site):
    c = site.start(cluster, prefill=0, decode=1, role="both",
                   router_args=[f"--http.client_ca_file={site.ca.ca}"])
    ctx = tls_context(site, pair=site.operator)
    ctx.maximum_version = ssl.TLSVersion.TLSv1_2  # a session is resumed by the client's own doing
    address = c.procs["router"].ready["http"].split(":")
    session = None
    for turn in range(2):
        with socket.create_connection(address, 10) as s, \
                ctx.wrap_socket(s, server_hostname="localhost", session=session) as t:
            session = t.session
            assert t.session_reused == (turn == 1)
            t.sendall(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {CLIENT}\r\n\r\n".encode())
            assert t.recv(4096).startswith(b"HTTP/1.1 200")
    stranger = site.other.issue("stranger", "DNS:alice")
    for pair in (None, stranger):
        with pytest.raises((ssl.SSLError, OSError)):
            ask(https(site, c, ctx=tls_context(site, pair=pair)), "GET", "/health")
    assert ask(https(site, c, ctx=tls_context(site, pair=site.operator)), "GET", "/health")[0].status == 200


# --- exchange ------------------------------------------------------------------------------------

def serial_of(address):
    host, port = address.split(":")
    return ssl.get_server_certificate((host, int(port)), timeout=10)


def put(path, source):
    """As a careful operator: written beside, then renamed."""
    beside = path.with_suffix(".new")
    beside.write_bytes(source if isinstance(source, bytes) else source.read_bytes())
    os.replace(beside, path)


@pytest.mark.sanitize
def test_exchange_under_a_running_stream(cluster, tmp_path, models):
    site = Site(tmp_path)
    c = site.start(cluster, model="slow", prefill=1, decode=1, pool="256M")
    router, log = c.procs["router"], c.procs["router"].log
    c.allow("reload_refused")
    stream = c.client.stream(request(PROMPT, ignore_eos=True), timeout=300)
    answer, ended = Answer(), []

    def read():
        try:
            for m in stream:
                answer.add(m)
            ended.append("at its end")
        except (grpc.RpcError, AssertionError) as e:
            ended.append(e)
    reader = threading.Thread(target=read)
    reader.start()
    eventually(lambda: answer.tokens, 10, "a first token")

    before = serial_of(router.address)
    fresh = site.ca.issue("fresh", "DNS:localhost,IP:127.0.0.1,DNS:baton-node")
    put(site.server[0], fresh[0])
    put(site.server[1], fresh[1])
    for port in (router.address, router.ready["http"]):
        eventually(lambda port=port: serial_of(port) != before, 10, "the new certificate")
    new = serial_of(router.address)
    assert serial_of(router.ready["http"]) == new

    for broken in (b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", site.other.ca):
        seen = log.read_text().count("event=reload_refused what=certificates")
        put(site.server[0], broken)
        eventually(lambda: log.read_text().count("event=reload_refused what=certificates") > seen, 10, "refused")
        assert serial_of(router.address) == serial_of(router.ready["http"]) == new
    put(site.server[0], fresh[0])

    site.tokens.clients.write_text(f"next-client-token-canary team-a\n{CLIENT} team-a\n")  # CLIENT has a stream
    router.signal(signal.SIGHUP)

    def allowed(token):
        conn = https(site, c, token)
        status = ask(conn, "GET", "/v1/models")[0].status
        conn.close()
        return status == 200
    eventually(lambda: allowed("next-client-token-canary"), 10, "the new token")
    assert allowed(CLIENT) and not allowed(GATEWAY)
    site.tokens.clients.write_text("short\n")
    router.signal(signal.SIGHUP)
    eventually(lambda: "event=reload_refused what=tokens" in log.read_text(), 10, "refused")
    assert allowed("next-client-token-canary")

    n = len(answer.tokens)
    assert not ended, "the stream should still run"
    eventually(lambda: len(answer.tokens) >= n + 5 or ended, 20, "more tokens")
    assert ended in ([], ["at its end"]), ended
    stream.cancel()
    reader.join()
    site.tokens.clients.write_text(f"{CLIENT}\n")  # for the end of the test


class Streams:
    """A stream of the client and one of the gateway by gRPC; by HTTP a stream and a whole answer of the client."""

    def __init__(self, site, c):
        self.c, self.site, self.ended = c, site, {}
        self.calls, self.sockets, self.closed = {}, [], False
        self.clients = [Client(c.procs["router"].address, access=Access(t, OPERATOR, site.access.creds))
                        for t in (CLIENT, GATEWAY)]
        self.tokens = {"client": 0, "gateway": 0, "http": 0, "whole": 0}
        for name, client in zip(("client", "gateway"), self.clients):
            self.calls[name] = client.stream(request(PROMPT, ignore_eos=True), timeout=300)
            threading.Thread(target=self.read, args=(name,), daemon=True).start()
        for name in ("http", "whole"):
            threading.Thread(target=self.read_http, args=(name, name == "http"), daemon=True).start()
        eventually(lambda: all(self.tokens[n] for n in ("client", "gateway", "http")), 20, "first tokens")
        eventually(lambda: c.client.server().requests_active == 4, 20, "four requests")

    def read(self, name):
        try:
            for m in self.calls[name]:
                self.tokens[name] += len(m.tokens)
            self.ended[name] = S.OK
        except grpc.RpcError as e:
            self.ended[name] = e

    def read_http(self, name, stream):
        conn = https(self.site, self.c)
        conn.request("POST", "/v1/completions", json.dumps({"prompt": PROMPT, "max_tokens": 6000, "stream": stream,
                                                            "ignore_eos": True}), conn.auth)
        self.sockets.append(conn.sock)
        data = b""
        try:
            r = conn.getresponse()
            while part := r.read1(65536):
                data += part
                self.tokens[name] = data.count(b"data: ")
            self.ended[name] = r.status, data
        except (http.client.HTTPException, OSError) as e:
            if not self.closed:
                self.ended[name] = e

    def close(self):
        self.closed = True
        for call in self.calls.values():
            call.cancel()
        for sock in self.sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed by the other side
                pass
        for client in self.clients:
            client.close()


@pytest.mark.sanitize
def test_SEC_01_what_runs_with_a_token_that_is_taken_away_ends(cluster, tmp_path):
    site = Site(tmp_path)
    c = site.start(cluster, model="slow", prefill=1, decode=1, pool="512M")
    s = Streams(site, c)
    put(site.tokens.clients, f"{GATEWAY} *\nnext-client-token-canary team-a\n".encode())
    c.procs["router"].signal(signal.SIGHUP)
    eventually(lambda: {"client", "http", "whole"} <= set(s.ended), 10, "the client's requests end")
    e = s.ended["client"]
    assert e.code() == S.UNAUTHENTICATED and "token" in e.details()
    status, data = s.ended["http"]  # its headers are out: the error is the last event
    error = json.loads(data.rsplit(b"data: ", 1)[1])["error"]
    assert status == 200 and error["code"] == "invalid_api_key" and b"[DONE]" not in data
    status, data = s.ended["whole"]
    assert status == 401 and json.loads(data)["error"]["code"] == "invalid_api_key"
    eventually(lambda: c.client.server().requests_active == 1, 10, "nothing is computed for it any more")
    n = s.tokens["gateway"]
    eventually(lambda: s.tokens["gateway"] > n or "gateway" in s.ended, 20, "others go on")
    assert "gateway" not in s.ended
    lines = [json.loads(x) for x in (c.folder / "router.access").read_text().splitlines()]
    assert len(lines) == 3 and {x["status"] for x in lines} == {"UNAUTHENTICATED"}, lines
    s.close()
    put(site.tokens.clients, f"{CLIENT} team-a\n".encode())  # for the end of the test
    c.procs["router"].signal(signal.SIGHUP)


def test_what_runs_goes_on_if_so_configured(cluster, tmp_path):
    site = Site(tmp_path)
    c = site.start(cluster, model="slow", prefill=1, decode=1, pool="512M",
                   router_args=["--security.end_revoked=off"])
    s = Streams(site, c)
    put(site.tokens.clients, b"next-client-token-canary team-a\n")
    c.procs["router"].signal(signal.SIGHUP)

    def refused():
        return ask(https(site, c), "GET", "/v1/models")[0].status == 401
    eventually(refused, 10, "no new request")
    time.sleep(2.5)  # two looks of whoever would end them
    n = dict(s.tokens)
    eventually(lambda: all(s.tokens[k] > n[k] for k in ("client", "gateway", "http")) or s.ended, 20, "all go on")
    assert not s.ended
    s.close()
    put(site.tokens.clients, f"{CLIENT} team-a\n".encode())
    c.procs["router"].signal(signal.SIGHUP)
    eventually(lambda: ask(https(site, c), "GET", "/v1/models")[0].status == 200, 10, "for the end of the test")


@pytest.mark.sanitize
def test_the_clusters_token_is_exchanged_under_a_running_stream(cluster, tmp_path):
    """As the documentation says it; no session ends. A node that then takes the token of nobody it knows has none."""
    site = Site(tmp_path)
    c = site.start(cluster, model="slow", prefill=1, decode=1, pool="256M", kvstore=1)
    c.allow("event=node .*lost")
    fresh, nodes = "cluster-token-canary-4444", ("prefill-0", "decode-0", "store-0")
    stream = c.client.stream(request(PROMPT, ignore_eos=True), timeout=300)
    next(stream)

    def reload(text, names=tuple(c.procs)):
        put(site.tokens.cluster, text.encode())
        for p in map(c.procs.get, names):
            n = p.log.read_text().count("event=reload what=tokens")
            p.signal(signal.SIGHUP)
            eventually(lambda p=p, n=n: p.log.read_text().count("event=reload what=tokens") > n, 10, "reload")
    reload(f"{CLUSTER}\n{fresh}\n")  # all take it
    reload(f"{fresh}\n{CLUSTER}\n")  # the router shows it
    for name in nodes:
        eventually(lambda name=name: "shows a new token" in c.procs[name].log.read_text(), 10, f"{name} is told")
    reload(f"{fresh}\n")
    time.sleep(2.5)  # two looks
    assert all("event=revoked" not in c.procs[n].log.read_text() for n in nodes)
    next(stream)
    assert "from=ready to=lost" not in c.procs["router"].log.read_text()
    stream.cancel()
    c.pages_back()
    reload("cluster-token-of-nobody-canary\n", nodes)
    for name in nodes:
        eventually(lambda name=name: "event=revoked" in c.procs[name].log.read_text(), 10, f"{name} ends it")
    reload(f"{fresh}\n")
    eventually(lambda: {"prefill-0", "decode-0"} <= set(c.ready_nodes()), 20, "back again")


def test_a_new_CA_for_nodes_and_a_new_token(cluster, tmp_path):
    """Everything that routers and nodes know of each other is exchanged, without a restart of either."""
    site = Site(tmp_path)
    c = site.start(cluster, prefill=0, decode=1, role="both")
    c.allow("session_", "node_lost", "lost")
    assert c.client.generate(PROMPT, max_tokens=2).tokens
    old_ca = site.ca.ca.read_bytes()
    second = Authority(tmp_path, "second")
    both = old_ca + second.ca.read_bytes()
    put(site.ca.ca, both)  # first everybody believes both, then certificates change
    site.tokens.cluster.write_text("cluster-token-canary-4444\n" + CLUSTER + "\n")
    for p in c.procs.values():
        p.signal(signal.SIGHUP)
        eventually(lambda p=p: p.log.read_text().count("event=reload ") >= 2, 10, "reload")
    for old in (site.server, site.router):
        pair = second.issue(f"second-{old[0].stem}", "DNS:localhost,IP:127.0.0.1,DNS:baton-node,DNS:router-0")
        put(old[0], pair[0])
        put(old[1], pair[1])
    put(site.ca.ca, second.ca)
    site.tokens.cluster.write_text("cluster-token-canary-4444\n")
    for p in c.procs.values():
        n = p.log.read_text().count("event=reload ")
        p.signal(signal.SIGHUP)
        eventually(lambda p=p, n=n: p.log.read_text().count("event=reload ") > n, 10, "reload")
    alice = second.issue("alice2", "DNS:alice")
    c.access = Access(CLIENT, OPERATOR, credentials(second.ca, alice))
    for client in c.clients.values():
        client.close()
    c.clients.clear()
    c.client = c.client_of("router")
    assert c.client.generate(PROMPT, max_tokens=2).tokens, "the session of before goes on"
    c.procs["decode-0"].kill()
    c.restart("decode-0")
    eventually(lambda: c.ready_nodes() == ["decode-0"], 20, "connected with what is new")
    assert c.client.generate(PROMPT, max_tokens=2).tokens


# --- refused to start ----------------------------------------------------------------------------

def test_the_clusters_token_does_not_travel_in_the_clear(cluster, site):
    words = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    host = next((w for w in words if ":" not in w and not w.startswith("127.")), None)
    if not host:
        pytest.skip("this machine has no address but loopback")
    tokens = site.tokens
    c = cluster(prefill=0, decode=1, role="both", wait=False, access=Access(CLIENT, OPERATOR),
                node_args=[*tokens.node_args, "--allow_insecure=true", f"--listen={host}:0"],
                router_args=tokens.router_args)
    why = eventually(lambda: c.client.nodes()["decode-0"].reason, 10, "a reason")
    assert "tls.node_ca_file" in why, why
    c.add_router("router2", [*tokens.router_args, "--allow_insecure=true"]).wait_ready()
    other = c.client_of("router2")
    eventually(lambda: other.nodes()["decode-0"].state == "ready", 10, "ready")
    assert other.generate(PROMPT, max_tokens=2).tokens
    out = batonctl("node", "--node", c.procs["decode-0"].address, "--token-file", tokens.operators)
    assert out.returncode == 0 and "in the clear" in out.stderr


@pytest.mark.parametrize("binary", ["baton-router", "baton-prefill", "baton-decode", "baton-kvstore"])
def test_SEC_01_off_loopback(binary, models, site):
    model = [] if binary == "baton-kvstore" else [f"--model={models('tiny')}"]
    tls = [f"--tls.cert_file={site.server[0]}", f"--tls.key_file={site.server[1]}"]
    tokens = site.tokens.router_args[2:] if binary == "baton-router" else site.tokens.node_args
    far = ["--listen=0.0.0.0:0"]
    missing = "security.clients_file" if binary == "baton-router" else "security.cluster_file"
    cases = [([], "tls.cert_file"), (tls, missing), (tls, "security.allow_anonymous"), (tokens, "allow_insecure"),
             (["--allow_insecure=true"], "security.allow_anonymous"), (tls[:1], "tls.key_file")]
    if binary == "baton-router":
        cases.append(([f"--security.cluster_file={site.tokens.cluster}", *tls], missing))
        http_far = ["--listen=127.0.0.1:0", "--http.listen=0.0.0.0:0"]
        cases += [([*http_far], "http.listen"), ([*http_far, *tls], "http.listen"),
                  ([*http_far, *tls, *tokens, "--http.tls=off"], "http.listen")]
    for args, word in cases:
        own = [] if any("listen" in a for a in args) else far
        out = subprocess.run([BUILD / binary, "--redis.address=", *model, *own, *args], capture_output=True, text=True,
                             env=clean_env(), timeout=60 * SLOW)
        last = out.stderr.strip().split("\n")[-1]
        assert out.returncode == 2 and word in last, (args, last)


def test_secrets_are_no_arguments(models, tmp_path):
    for key in ("redis.password", "cluster.secret"):
        env = {"BATON_" + key.upper().replace(".", "_"): "canary"}
        conf = tmp_path / "conf"
        conf.write_text(f"{key} = canary\n")
        for args, extra in (([f"--{key}=canary"], {}), ([f"--{key}", "canary"], {}), ([], env),
                            ([f"--config={conf}"], {})):
            out = subprocess.run([BUILD / "baton-router", f"--model={models('tiny')}", *args], capture_output=True,
                                 text=True, env={**clean_env(), **extra}, timeout=60)
            assert out.returncode == 2 and f"{key}_file" in out.stderr and "canary" not in out.stderr


# --- hostile bytes -------------------------------------------------------------------------------

def rss_mb(p):
    for line in open(f"/proc/{p.p.pid}/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024


def gone(s):
    """The other side has closed."""
    try:
        s.settimeout(30 * SLOW)
        while s.recv(65536):
            pass
        return True
    except socket.timeout:
        return False
    except OSError:
        return True


def hello_bytes(ctx):
    """A client's first flight."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    o = ctx.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        o.do_handshake()
    return outgoing.read()


@pytest.mark.sanitize
def test_SEC_05_hostile_handshakes(cluster, site):
    """Silence, half a greeting, garbage, plain HTTP, drops after each byte: bounded and harmless."""
    c = site.start(cluster, prefill=0, decode=1, role="both",
                   router_args=["--http.header_timeout=1s", "--http.max_connections=64"])
    p = c.procs["router"]
    address = p.ready["http"].split(":")
    hello = hello_bytes(tls_context(site))
    firsts = [b"", hello[:1], hello[:5], hello[:-1], hello, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 64,
              os.urandom(4096), b"\x16\x03\x01\xff\xff" + b"\x01" * 70000, b"\x15\x03\x03\x00\x02\x02\x28",
              b"\x17\x03\x03\x40\x00" + b"x" * 16384]
    assert ask(https(site, c), "GET", "/health")[0].status == 200
    before = rss_mb(p)
    for round_ in range(3):
        held = []
        for first in firsts * 12:  # twice as many as there may be
            s = socket.create_connection(address, 10)
            try:
                s.sendall(first)
            except OSError:
                pass
            held.append(s)
        assert ask(https(site, c), "GET", "/v1/models")[0].status == 200, "silence keeps nobody out"
        assert all(gone(s) for s in held)
        for s in held:
            s.close()
    grpc_port = p.address.split(":")
    held = [socket.create_connection(grpc_port, 10) for _ in firsts * 6]
    for s, first in zip(held, firsts * 6):
        try:
            s.sendall(first)
        except OSError:
            pass
    assert c.client.generate(PROMPT, max_tokens=2).tokens
    assert all(gone(s) for s in held), "core gives a handshake ten seconds"
    for s in held:
        s.close()
    # one byte after the other
    s = socket.create_connection(address, 10)
    t0 = time.monotonic()
    try:
        for byte in hello * 10:
            s.sendall(bytes([byte]))
            time.sleep(0.01)
    except OSError:
        pass
    assert time.monotonic() - t0 < 8 * SLOW and gone(s)
    s.close()
    # whole handshakes that ask for nothing, and a record of garbage behind one
    ctx = tls_context(site)
    for _ in range(20):
        raw = socket.create_connection(address, 10)
        t = ctx.wrap_socket(raw, server_hostname="localhost", do_handshake_on_connect=True)
        os.write(t.fileno(), b"\x17\x03\x03\x00\x20" + os.urandom(32))
        raw2 = socket.socket(fileno=t.detach())
        assert gone(raw2)
        raw2.close()
    assert ask(https(site, c), "GET", "/v1/models")[0].status == 200
    assert rss_mb(p) < before + (30 if SLOW == 1 else 300)


def test_plain_http_at_a_tls_port_is_told_so(cluster, site):
    c = site.start(cluster, prefill=0, decode=1, role="both")
    for request in (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
                    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n" + b"x" * 200000):
        s = socket.create_connection(c.procs["router"].ready["http"].split(":"), 10)
        s.sendall(request)
        answer = b""
        while part := s.recv(4096):
            answer += part
        s.close()
        head, body = answer.split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 "), answer
        assert json.loads(body)["error"]["message"] == "this port speaks TLS: use https"
    assert ask(https(site, c), "GET", "/v1/models")[0].status == 200


@pytest.mark.sanitize
def test_a_slow_reader_over_tls(cluster, site):
    """A client that takes nothing of its answer is dropped; one that takes it slowly gets all of it."""
    c = site.start(cluster, prefill=0, decode=1, role="both", router_args=["--http.stall_timeout=1s",
                                                                            "--http.queued_bytes=64K"])
    body = json.dumps({"prompt": PROMPT, "max_tokens": 3000, "stream": True, "ignore_eos": True, "logprobs": 5,
                       "temperature": 0})
    text = (f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {CLIENT}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}").encode()
    address = c.procs["router"].ready["http"].split(":")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect((address[0], int(address[1])))
    t = tls_context(site).wrap_socket(raw, server_hostname="localhost")
    t.sendall(text)
    c.pages_back()  # given up
    t.close()
    conn = https(site, c)
    conn.request("POST", "/v1/completions", json.dumps({**json.loads(body), "max_tokens": 300}), conn.auth)
    r = conn.getresponse()
    data = b""
    while chunk := r.read(2000):
        data += chunk
        time.sleep(0.001)
    assert data.endswith(b"data: [DONE]\n\n") and data.count(b"data: ") > 250


def test_a_large_body_over_tls(c, site):
    conn = https(site, c)
    words = PROMPT + " harbor" * 20000
    r, data = ask(conn, "POST", "/tokenize", {"prompt": words})
    assert r.status == 200 and len(json.loads(data)["tokens"]) > 20000
    ids = json.loads(data)["tokens"]
    r, data = ask(conn, "POST", "/detokenize", {"tokens": ids})  # the same connection
    assert r.status == 200 and json.loads(data)["prompt"].endswith("harbor harbor")


# --- nothing leaks -------------------------------------------------------------------------------

def test_SEC_01_no_secret_in_logs_metrics_titles(cluster, site):
    c = site.start(cluster, kvstore=1, router_args=["--limits.request_bytes=64K"])
    c.client.generate(PROMPT, max_tokens=4)
    c.client.generate(chat=[("user", PROMPT)], max_tokens=4)
    conn = https(site, c)
    for body in ({"prompt": PROMPT, "max_tokens": 4}, {"prompt": PROMPT, "tools": []},
                 {"prompt": PROMPT, "max_tokens": -1}, {"prompt": [PROMPT, 5]}, {"prompt": PROMPT, "n": 1000},
                 {"prompt": PROMPT, "model": "none"}, {"prompt": PROMPT * 4000}):
        ask(conn, "POST", "/v1/completions", body)
    conn.request("POST", "/v1/completions", '{"prompt": "' + PROMPT, conn.auth)
    conn.getresponse().read()
    for kw in (dict(text=PROMPT, temperature=-1), dict(text=PROMPT * 3000), dict(text=PROMPT, stop=[PROMPT] * 17)):
        c.client.error(kw.pop("text"), max_tokens=2, **kw)
    for token in ("canary-of-nobody-0000", OPERATOR, CLUSTER, SCRAPER):
        ask(https(site, c, token), "GET", "/v1/models")
        with grpc.secure_channel(c.procs["router"].address, site.access.creds) as channel:
            status_of(channel, "/baton.v1.Baton/Generate", token)
            status_of(channel, f"/baton.v1.Baton/{token}", token)
    metrics = ask(https(site, c, OPERATOR), "GET", "/metrics")[1].decode()
    assert "baton" in metrics and "baton" in ask(https(site, c, SCRAPER), "GET", "/metrics")[1].decode()
    texts = {"metrics": metrics}
    for access_log in c.folder.glob("*.access"):
        texts[access_log.name] = access_log.read_text()
    assert texts["router.access"] and texts["decode-0.access"]
    for name, p in c.procs.items():
        log = p.log.read_text(errors="replace")
        assert "level=debug" in log or name.startswith("store"), name
        texts[name] = log
        texts[name + " title"] = open(f"/proc/{p.p.pid}/cmdline").read() + open(f"/proc/{p.p.pid}/comm").read()
        for task in os.listdir(f"/proc/{p.p.pid}/task"):
            texts[name + " threads"] = texts.get(name + " threads", "") + \
                open(f"/proc/{p.p.pid}/task/{task}/comm").read()
    for where, text in texts.items():
        for secret in ("canary", "zanzibar"):
            at = text.find(secret)
            assert at < 0, (where, text[max(0, at - 200):at + 100])
