"""batonctl against a double of the Kubernetes API server that checks TLS, tokens, rights, versions."""
import base64
import json
import queue
import re
import subprocess
import threading
import time

import pytest

from cluster import clean_env, eventually
from kubeapi import ApiServer, Failure
from security import Authority
from wire import BUILD

TOKEN = "operator.token-0123456789abcdef"
RIGHTS = [(verb, f"{kind}{sub}", "llm") for kind in ("statefulsets", "deployments")
          for verb, sub in (("get", ""), ("get", "/scale"), ("update", "/scale"))]


def yaml_config(api, ca, user, path, **cluster):
    """A kubeconfig as kubectl writes them, block style."""
    lines = ["apiVersion: v1", "kind: Config", "current-context: here", "clusters:", "- name: c", "  cluster:",
             f"    server: {cluster.pop('server', api.url)}"]
    if ca:
        lines.append(f"    certificate-authority-data: {base64.b64encode(ca.read_bytes()).decode()}")
    lines += [f"    {k}: {v}" for k, v in cluster.items()]
    lines += ["contexts:", "- name: here", "  context: {cluster: c, user: u, namespace: llm}",
              "- name: there", "  context: {cluster: c, user: u, namespace: \"elsewhere\"}",
              "users:", "- name: u", "  user:", *[f"    {line}" for line in user], ""]
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    return path


class Kube:
    def __init__(self, folder):
        self.folder = folder
        self.ca = Authority(folder)
        self.people = Authority(folder, "people")
        self.api = ApiServer(self.ca, self.people, users={TOKEN: "alice", "weak": "bob", "operator-cn": "carol"},
                             rules={"alice": RIGHTS, "carol": RIGHTS, "bob": RIGHTS[:1]})
        self.config = yaml_config(self.api, self.ca.ca, [f"token: {TOKEN}"], folder / "config")

    def ctl(self, *args, config=None, env=None, router="127.0.0.1:1"):
        source = ["--kubeconfig", str(config or self.config)] if config is not False else []
        return subprocess.run([BUILD / "batonctl", *args, *source, "--router", router], capture_output=True, text=True,
                              timeout=60, env={**clean_env(), **(env or {})})


@pytest.fixture
def kube(tmp_path):
    k = Kube(tmp_path)
    k.api.add("statefulsets", "baton-prefill", 1)
    k.api.add("statefulsets", "baton-decode", 2)
    k.api.add("deployments", "baton-decode", 4)
    yield k
    k.api.close()


def test_scale_writes_the_scale_subresource(kube):
    out = kube.ctl("scale", "prefill=3", "decode=4", "-o", "json")
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout)["roles"] == {"prefill": {"from": 1, "to": 3}, "decode": {"from": 2, "to": 4}}
    assert (kube.api.replicas("baton-prefill"), kube.api.replicas("baton-decode")) == (3, 4)
    assert {p for _, p in kube.api.requests} == {f"/apis/apps/v1/namespaces/llm/statefulsets/baton-{r}/scale"
                                                 for r in ("prefill", "decode")}
    assert {v for v, _ in kube.api.requests} == {"GET", "PUT"}
    out = kube.ctl("scale", "decode=5", "--kind", "deployment")
    assert out.returncode == 0 and kube.api.replicas("baton-decode", "deployments") == 5
    assert kube.ctl("scale", "decode=4").returncode == 0  # nothing to do


def test_dry_run_only_reads(kube):
    out = kube.ctl("scale", "decode=1", "--dry-run")
    assert out.returncode == 0 and "would drain and stop baton-decode-1" in out.stdout
    assert kube.api.replicas("baton-decode") == 2 and {v for v, _ in kube.api.requests} == {"GET"}


@pytest.mark.parametrize("n", [10**18, -(2**63), 2**63 - 1])
def test_a_server_that_tells_fairy_tales(kube, n):
    kube.api.add("statefulsets", "baton-decode", n)
    for args in (["decode=1"], ["decode=1", "--dry-run"]):
        out = kube.ctl("scale", *args)
        assert out.returncode == 1 and "not to be believed" in out.stderr and out.stdout == ""
    assert kube.api.replicas("baton-decode") == n


def test_wait_ends_when_the_controller_is_done(kube):
    out = kube.ctl("scale", "decode=3", "--wait", "--timeout", "700ms")
    # The time may also end within a question to the server.
    assert out.returncode == 4 and re.search("not as it should be|timed out", out.stderr) and out.stdout == ""
    got = []
    t = threading.Thread(target=lambda: got.append(kube.ctl("scale", "decode=6", "--wait", "--timeout", "30s")))
    t.start()
    eventually(lambda: kube.api.replicas("baton-decode") == 6)
    time.sleep(0.3)
    assert not got
    kube.api.settle("baton-decode")
    t.join()
    assert got[0].returncode == 0 and "router cannot be asked" in got[0].stderr, got[0]
    t = threading.Thread(target=lambda: got.append(kube.ctl("scale", "decode=0", "--wait", "--timeout", "30s")))
    t.start()
    eventually(lambda: kube.api.replicas("baton-decode") == 0)
    kube.api.settle("baton-decode")
    t.join()
    assert got[1].returncode == 0, got[1]


def test_a_conflict_is_tried_again_but_no_decision_is_overwritten(kube):
    kube.api.on_write = kube.api.touch  # somebody writes a label in between
    out = kube.ctl("scale", "decode=5")
    assert out.returncode == 0 and out.stderr.count("Conflict") == 0, out.stderr
    assert kube.api.replicas("baton-decode") == 5
    assert [v for v, _ in kube.api.requests].count("PUT") == 2

    def other(o):
        o["spec"]["replicas"] = 9
        kube.api.touch(o)
    kube.api.on_write = other
    out = kube.ctl("scale", "decode=2")
    assert out.returncode == 1 and "somebody else has scaled it to 9" in out.stderr and out.stdout == ""
    assert kube.api.replicas("baton-decode") == 9


def test_half_of_it_is_no_success(kube):
    kube.api.rules["alice"] = [r for r in RIGHTS if r[0] == "get"]
    out = kube.ctl("scale", "decode=3")
    assert out.returncode == 6 and 'cannot update resource "statefulsets/scale"' in out.stderr and out.stdout == ""
    kube.api.rules["alice"] = RIGHTS

    def forbid(_):
        kube.api.faults += [0, Failure(500, "etcdserver: no leader")]
    kube.api.on_write = forbid
    out = kube.ctl("scale", "prefill=2", "decode=3")
    assert out.returncode == 1 and "no leader" in out.stderr and "prefill was scaled to 2" in out.stderr
    assert out.stdout == ""


@pytest.mark.parametrize("fault,code,word", [
    (Failure(401, "Unauthorized"), 6, "Unauthorized"), (Failure(403, "forbidden: no"), 6, "forbidden"),
    (Failure(404, "not found"), 5, "not found"), (Failure(409, "modified"), 1, "modified"),
    (Failure(422, "spec.replicas: Invalid value"), 1, "Invalid value"), (Failure(500, "boom\x1b[2J"), 1, "boom?[2J"),
    (b"<html>", 1, "answer"), (b"[]", 1, "answer"), (b'{"a":' * 200, 1, "answer"), ("huge", 3, "")],
    ids=range(10))
def test_what_goes_wrong_is_told_by_code(kube, fault, code, word):
    kube.api.faults = [b"x" * (9 << 20) if fault == "huge" else fault]
    out = kube.ctl("scale", "decode=3")
    assert out.returncode == code and word in out.stderr and out.stdout == "", out
    assert TOKEN not in out.stderr
    assert kube.api.replicas("baton-decode") == 2


def test_a_busy_server_is_asked_again(kube):
    kube.api.faults = [Failure(429, "slow down", headers=[("Retry-After", "1")]), Failure(503, "starting")]
    out = kube.ctl("scale", "decode=3")
    assert out.returncode == 0 and kube.api.replicas("baton-decode") == 3
    kube.api.faults = [Failure(503, "down for long")] * 100
    out = kube.ctl("scale", "decode=4", "--timeout", "900ms")
    assert out.returncode == 4 and out.stdout == "" and ("down for long" in out.stderr or "timed out" in out.stderr)
    kube.api.faults = [5]
    out = kube.ctl("scale", "decode=4", "--timeout", "400ms")
    assert out.returncode == 4 and out.stdout == "", out


def test_who_may_what(kube, tmp_path):
    def config(user):
        return yaml_config(kube.api, kube.ca.ca, user, tmp_path / "other")
    out = kube.ctl("scale", "decode=3", config=config(["token: stolen"]))
    assert out.returncode == 6 and "401" in out.stderr and "stolen" not in out.stderr
    out = kube.ctl("scale", "decode=3", config=config(["token: weak"]))
    assert out.returncode == 6 and 'User "bob" cannot get resource "statefulsets/scale"' in out.stderr
    out = kube.ctl("scale", "decode=3", config=config(["{}"]))
    assert out.returncode == 6 and "system:anonymous" in out.stderr
    out = kube.ctl("scale", "decode=3", "--context", "there")
    assert out.returncode == 6 and '"elsewhere"' in out.stderr
    out = kube.ctl("scale", "decode=3", "--namespace", "default")
    assert out.returncode == 6 and '"default"' in out.stderr
    assert kube.ctl("scale", "nothing=3").returncode == 5
    for bad in ("a/../../secrets=1", "A=1"):
        assert kube.ctl("scale", bad).returncode == 1
    assert kube.ctl("scale", "decode=3", "--namespace", "../x").returncode == 1
    assert kube.ctl("scale", "decode=3", "--kind", "pod").returncode == 2
    # Files beside the kubeconfig, by relative paths.
    (tmp_path / "t").write_text(TOKEN + "\n")
    assert kube.ctl("scale", "decode=3", config=config(["tokenFile: t", "token: stolen"])).returncode == 0
    cert, key = kube.people.issue("operator-cn")
    assert kube.ctl("scale", "decode=4", config=config([f"client-certificate: {cert.name}", f"client-key: {key.name}"])
                    ).returncode == 0
    data = [f"client-certificate-data: {base64.b64encode(cert.read_bytes()).decode()}",
            f"client-key-data: {base64.b64encode(key.read_bytes()).decode()}"]
    assert kube.ctl("scale", "decode=5", config=config(data)).returncode == 0
    assert kube.api.replicas("baton-decode") == 5
    out = kube.ctl("scale", "decode=6", config=config(data[:1]))
    assert out.returncode == 1 and "without the other" in out.stderr


def test_tls_is_verified(kube, tmp_path):
    def config(ca, **cluster):
        return yaml_config(kube.api, ca, [f"token: {TOKEN}"], tmp_path / "tls", **cluster)
    for ca in (kube.people.ca, None):  # another CA; the system's
        out = kube.ctl("scale", "decode=3", config=config(ca))
        assert out.returncode == 6 and "not to be trusted" in out.stderr and not kube.api.requests, out
    other = Authority(tmp_path, "other-ca")
    cert, _ = other.issue("wrong-name", san="DNS:kubernetes.example")
    api = ApiServer(kube.ca, users={TOKEN: "alice"})
    try:
        # Right CA, a name that the certificate does not have.
        out = kube.ctl("scale", "decode=3", config=config(kube.ca.ca, server=f"https://127.0.0.2:{kube.api.port}"))
        assert out.returncode in (3, 6) and out.stdout == ""
    finally:
        api.close()
    for field, value in (("insecure-skip-tls-verify", "true"), ("proxy-url", "http://p"), ("tls-server-name", "x")):
        out = kube.ctl("scale", "decode=3", config=config(kube.ca.ca, **{field: value}))
        assert out.returncode == 1 and field in out.stderr, out
    out = kube.ctl("scale", "decode=3", config=config(kube.ca.ca, server=f"http://127.0.0.1:{kube.api.port}"))
    assert out.returncode == 1 and "https" in out.stderr
    out = kube.ctl("scale", "decode=3", config=config(kube.ca.ca, server="https://127.0.0.1:1"))
    assert out.returncode == 3
    assert not kube.api.requests and kube.api.replicas("baton-decode") == 2


def test_a_certificate_for_another_name_is_refused(kube, tmp_path):
    kube.api.close()
    folder = tmp_path / "name"
    folder.mkdir()
    ca = Authority(folder)
    issue = ca.issue
    ca.issue = lambda name, san=None: issue(name, san="DNS:kubernetes.example")
    kube.api = ApiServer(ca, users={TOKEN: "alice"}, rules={"alice": RIGHTS})
    config = yaml_config(kube.api, ca.ca, [f"token: {TOKEN}"], folder / "config")
    out = kube.ctl("scale", "decode=3", config=config)
    assert out.returncode == 6 and "not to be trusted" in out.stderr and not kube.api.requests, out


@pytest.mark.parametrize("user,words", [
    (["exec:", "  apiVersion: client.authentication.k8s.io/v1", "  command: cloud-get-token", "  args: [a]"],
     ["program", "cloud-get-token"]),
    (["auth-provider:", "  name: oidc"], ["provider", "oidc"]),
    (["username: root", "password: hunter2"], ["username"]),
    (["as: system:admin", f"token: {TOKEN}"], [" as,"]),
    (["token: \"two\\nlines\""], ["token"]), (["tokenFile: /nowhere"], ["/nowhere"]),
    (["client-certificate-data: '???'"], ["base64"])], ids=range(7))
def test_what_a_user_entry_asks_for_is_named(kube, tmp_path, user, words):
    out = kube.ctl("scale", "decode=3", config=yaml_config(kube.api, kube.ca.ca, user, tmp_path / "u"))
    assert out.returncode == 1 and all(w in out.stderr for w in words) and out.stdout == "", out
    assert "hunter2" not in out.stderr and not kube.api.requests


@pytest.mark.parametrize("text,word", [
    ("", "current-context"), ("{", "line"), ("- a\n- b\n", "current-context"), ("current-context: x\n", "no context"),
    ("a: &a [*a]\ncurrent-context: x\ncontexts: *a\n", ""), ("x" * (2 << 20), "1 MiB"), ("[" * 50000, "deep")],
    ids=range(7))
def test_hostile_kubeconfigs(kube, tmp_path, text, word):
    path = tmp_path / "bad"
    path.write_text(text)
    out = kube.ctl("scale", "decode=3", config=path)
    assert out.returncode == 1 and word in out.stderr and out.stdout == "", out
    assert kube.ctl("scale", "decode=3", config=tmp_path / "missing").returncode == 1


def test_inside_of_a_pod(kube, tmp_path):
    sa = tmp_path / "sa"
    sa.mkdir()
    (sa / "token").write_text(TOKEN)
    (sa / "namespace").write_text("llm\n")
    (sa / "ca.crt").write_bytes(kube.ca.ca.read_bytes())
    pod = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(kube.api.port)}
    out = kube.ctl("scale", "decode=3", "--service-account", str(sa), config=False, env=pod)
    assert out.returncode == 0 and kube.api.replicas("baton-decode") == 3, out.stderr
    (sa / "token").write_text("renewed")  # kubelets renew tokens in place
    out = kube.ctl("scale", "decode=4", "--service-account", str(sa), config=False, env=pod)
    assert out.returncode == 6
    kube.api.users["renewed"] = "alice"
    assert kube.ctl("scale", "decode=4", "--service-account", str(sa), config=False, env=pod).returncode == 0
    out = kube.ctl("scale", "decode=5", "--service-account", str(sa), config=False)
    assert out.returncode == 1 and "KUBERNETES_SERVICE_HOST" in out.stderr
    out = kube.ctl("scale", "decode=5", "--namespace", "llm", config=False, env={"KUBECONFIG": str(kube.config)})
    assert out.returncode == 0
    out = kube.ctl("scale", "decode=6", "--context", "here", config=False,
                   env={"KUBECONFIG": f"{kube.config}:{kube.config}"})
    assert out.returncode == 1 and "list" in out.stderr


def test_pods_are_drained_before_they_go(cluster, kube):
    """Real nodes; the double's controller stops the pod with the highest number."""
    c = cluster(model="slow", prefill=1, decode=0, wait=False)
    for i in range(2):
        c.add_node("decode", f"baton-decode-{i}").wait_ready()
    eventually(lambda: len(c.ready_nodes()) == 3, 20)
    router = c.procs["router"].address

    def busy():
        return {n.name: n.requests_running for n in c.client.server().nodes if n.requests_running}
    got = []
    threads = [threading.Thread(target=lambda i=i: got.append(
        c.client.generate(f"stream {i}", max_tokens=300, ignore_eos=True))) for i in range(4)]
    for t in threads:
        t.start()
    eventually(lambda: "baton-decode-1" in busy())

    def kubelet(o):
        assert c.client.nodes()["baton-decode-1"].cordoned and "baton-decode-1" not in busy()
        threading.Thread(target=c.procs["baton-decode-1"].stop).start()
    kube.api.on_write = kubelet
    out = kube.ctl("scale", "decode=1", router=router)
    assert out.returncode == 0 and "drained and stopped baton-decode-1" in out.stdout, out
    assert kube.api.on_write is None and kube.api.replicas("baton-decode") == 1
    for t in threads:
        t.join()
    assert len(got) == 4 and all(len(a.tokens) == 300 and a.timing.retries == 0 for a in got)
    # Flip: only the pod that Kubernetes would take.
    out = kube.ctl("flip", "baton-decode-7", "prefill", router=router)
    assert out.returncode == 1 and "baton-decode-0" in out.stderr and out.stdout == ""
    assert (kube.api.replicas("baton-prefill"), kube.api.replicas("baton-decode")) == (1, 1)
    kube.api.on_write = lambda o: threading.Thread(target=c.procs["baton-decode-0"].stop).start()
    out = kube.ctl("flip", "baton-decode-0", "prefill", router=router)
    assert out.returncode == 0, out.stderr
    assert (kube.api.replicas("baton-prefill"), kube.api.replicas("baton-decode")) == (2, 0)
    eventually(lambda: c.live_nodes() == ["prefill-0"], 40, "the pods' ends")
    c.allow("event=node .*to=lost")


class Kubelet:
    """Runs the pods of a statefulset as real nodes: restarts those whose template has changed."""

    def __init__(self, c, kube, name):
        self.c, self.kube, self.set, self.todo = c, kube, name, queue.Queue()
        self.pods = {}
        kube.api.on_patched = self.todo.put
        # One thread for all of it: nodes end with the thread that has started them.
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            self.reconcile(self.todo.get())
            self.todo.task_done()

    def pod_of(self, o):
        node = o["spec"]["template"]["spec"]["containers"][0]
        return node["image"], next((e["value"] for e in node.get("env", ()) if e["name"] == "BATON_RELEASE"), "1.0")

    def start(self, o):
        for i in range(o["spec"]["replicas"]):
            name = f"{self.set}-{i}"
            self.pods[name] = self.pod_of(o)
            self.c.add_node("decode", name, ["--release=1.0"]).wait_ready()

    def reconcile(self, o):
        first, want = o["spec"]["updateStrategy"]["rollingUpdate"]["partition"], self.pod_of(o)
        for i in reversed(range(first, o["spec"]["replicas"])):
            name = f"{self.set}-{i}"
            if self.pods[name] != want:
                self.pods[name] = want
                p = self.c.procs[name]
                p.argv = [*[a for a in p.argv if not a.startswith("--release=")], f"--release={want[1]}"]
                p.stop()
                self.c.restart(name)
        o["status"] = {"observedGeneration": o["metadata"]["generation"], "replicas": o["spec"]["replicas"],
                       "readyReplicas": o["spec"]["replicas"],
                       "updatedReplicas": sum(p == want for p in self.pods.values())}


def test_canary_promote_and_rollback_of_an_image(cluster, kube):
    c = cluster(prefill=1, decode=0, wait=False)
    kube.api.rules["alice"] = [*RIGHTS, ("patch", "statefulsets", "llm")]
    kubelet = Kubelet(c, kube, "baton-decode")
    sts = kube.api.objects["llm", "statefulsets", "baton-decode"]
    kubelet.start(sts)
    eventually(lambda: len(c.ready_nodes()) == 3, 20)
    router = c.procs["router"].address
    c.allow("event=node .*to=lost")

    def image(i):
        return kubelet.pods[f"baton-decode-{i}"][0]
    out = kube.ctl("canary", "decode", "--image", "baton:2", "--version", "2.0", "--percent", "30", "--dry-run",
                   router=router)
    assert out.returncode == 0 and "PATCH" not in {v for v, _ in kube.api.requests}
    out = kube.ctl("canary", "decode", "--image", "baton:2", "--version", "2.0", "--percent", "30", router=router)
    assert out.returncode == 0 and out.stdout == "decode: 2.0 gets 30 % of the requests\n", out
    assert (image(0), image(1)) == ("baton:1", "baton:2")
    who = [c.client.generate(f"p {i}", max_tokens=2).timing.decode_node for i in range(20)]
    assert who.count("baton-decode-1") == 6, who
    out = kube.ctl("canary", "decode", "--image", "baton:3", router=router)
    assert out.returncode == 1 and "already" in out.stderr
    out = kube.ctl("rollback", "decode", router=router)
    assert out.returncode == 0, out.stderr
    assert (image(0), image(1)) == ("baton:1", "baton:1") and not c.client.server().canaries
    assert sts["metadata"]["annotations"] == {} and sts["spec"]["template"]["spec"]["containers"][0]["env"] == []
    assert kube.ctl("rollback", "decode", router=router).returncode == 5
    eventually(lambda: len(c.ready_nodes()) == 3, 20)
    assert not any(n.cordoned for n in c.client.server().nodes)
    # A canary that announces what the others do is taken back.
    out = kube.ctl("canary", "decode", "--image", "baton:2", "--version", "1.0", router=router)
    assert out.returncode == 1 and "another --version" in out.stderr and out.stdout == ""
    eventually(lambda: (image(0), image(1)) == ("baton:1", "baton:1"), 30)
    kubelet.todo.join()
    assert kube.ctl("canary", "decode", "--image", "baton:2", "--version", "2.0", router=router).returncode == 0
    out = kube.ctl("promote", "decode", router=router)
    assert out.returncode == 0, out.stderr
    assert (image(0), image(1)) == ("baton:2", "baton:2") and sts["metadata"]["annotations"] == {}
    eventually(lambda: {n.version for n in c.client.server().nodes if n.role == "decode" and n.state == "ready"} ==
               {"2.0"})
    assert kube.ctl("canary", "decode", "--binary", "/x", router=router).returncode == 2


def test_canary_of_a_statefulset_that_does_not_start_is_taken_back(kube):
    """No controller here: the pods of the new image never get ready."""
    kube.api.rules["alice"] = [*RIGHTS, ("patch", "statefulsets", "llm")]
    sts = kube.api.objects["llm", "statefulsets", "baton-decode"]
    out = kube.ctl("canary", "decode", "--image", "baton:bad", "--version", "2.0", "--timeout", "2s")
    assert out.returncode == 4 and "taken back" in out.stderr and out.stdout == "", out
    assert sts["spec"]["template"]["spec"]["containers"][0]["image"] == "baton:1"
    assert sts["metadata"]["annotations"] == {} and sts["spec"]["updateStrategy"]["rollingUpdate"]["partition"] == 0
    assert [v for v, _ in kube.api.requests].count("PATCH") == 2


class Controller:
    """Runs the pods of deployments as real nodes: a pod of the new template, then one of the old ends."""

    def __init__(self, c, kube):
        self.c, self.kube, self.todo, self.n = c, kube, queue.Queue(), 0
        self.pods, self.broken = {}, set()  # name: (deployment, image, release); images that never start
        kube.api.on_patched = lambda o: self.todo.put((o, True))
        kube.api.on_deleted = lambda o: self.todo.put((o, False))
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            o, there = self.todo.get()
            self.reconcile(o, o["spec"]["replicas"] if there else 0)
            self.todo.task_done()

    def of(self, name):
        return [p for p in self.pods if self.pods[p][0] == name]

    def reconcile(self, o, n):
        owner, node = o["metadata"]["name"], o["spec"]["template"]["spec"]["containers"][0]
        release = next((e["value"] for e in node.get("env", ()) if e["name"] == "BATON_RELEASE"), "1.0")
        want = (owner, node["image"], release)
        old = [p for p in self.of(owner) if self.pods[p] != want or n == 0]
        while n and node["image"] not in self.broken and [self.pods[p] for p in self.of(owner)].count(want) < n:
            self.start(o, want)
            if old:
                self.stop(old.pop())
        while old:
            self.stop(old.pop())
        ready = len(self.of(owner))
        o["status"] = {"observedGeneration": o["metadata"]["generation"], "replicas": n, "updatedReplicas": ready,
                       "readyReplicas": ready}

    def start(self, o, want):
        self.n += 1
        name = f"{want[0]}-5d9f7-{self.n:05}"
        self.c.add_node("decode", name, [f"--release={want[2]}"]).wait_ready()
        self.pods[name] = want
        self.kube.api.pods["llm", name] = o["spec"]["template"]["metadata"]["labels"]

    def stop(self, name):
        self.c.procs[name].stop()
        del self.pods[name], self.kube.api.pods["llm", name]


CANARY_RIGHTS = [*RIGHTS, *((v, "deployments", "llm") for v in ("create", "patch", "delete")), ("list", "pods", "llm")]


def test_canary_of_a_deployment(cluster, kube):
    """A deployment beside the role's: rolled back it is as if it had never been, promoted the role runs it."""
    c = cluster(prefill=1, decode=0, wait=False)
    kube.api.rules["alice"] = CANARY_RIGHTS
    kube.api.add("deployments", "baton-decode", 2)
    controller = Controller(c, kube)
    role = kube.api.objects["llm", "deployments", "baton-decode"]
    controller.todo.put((role, True))
    controller.todo.join()
    eventually(lambda: len(c.ready_nodes()) == 3, 20)
    before, old = json.dumps(role["spec"]), controller.of("baton-decode")
    router = c.procs["router"].address
    c.allow("event=node .*to=lost")

    def ctl(*args):
        return kube.ctl(*args, "--kind", "deployment", router=router)
    start = ["canary", "decode", "--image", "baton:2", "--version", "2.0", "--percent", "30"]
    out = ctl(*start, "--dry-run")
    assert out.returncode == 0 and {v for v, _ in kube.api.requests} == {"GET"} and out.stderr == "", out
    out = ctl(*start)
    assert out.returncode == 0 and out.stdout == "decode: 2.0 gets 30 % of the requests\n", out
    canary = kube.api.objects["llm", "deployments", "baton-decode-canary"]
    assert canary["spec"]["replicas"] == 1 and canary["spec"]["template"]["metadata"]["labels"] == {
        "app": "baton-decode", "baton/canary": "baton-decode-canary"}
    assert json.dumps(role["spec"]) == before and controller.of("baton-decode") == old
    who = [c.client.generate(f"p {i}", max_tokens=2).timing.decode_node for i in range(20)]
    assert sum(w.startswith("baton-decode-canary-") for w in who) == 6, who
    out = ctl(*start)
    assert out.returncode == 1 and "already" in out.stderr
    out = ctl("rollback", "decode")
    assert out.returncode == 0, out.stderr
    assert not controller.of("baton-decode-canary") and not c.client.server().canaries
    assert json.dumps(role["spec"]) == before and controller.of("baton-decode") == old
    assert ctl("rollback", "decode").returncode == 5
    assert ctl(*start).returncode == 0
    out = ctl("promote", "decode")
    assert out.returncode == 0, out.stderr
    controller.todo.join()
    assert {controller.pods[p] for p in controller.pods} == {("baton-decode", "baton:2", "2.0")}
    assert ("llm", "deployments", "baton-decode-canary") not in kube.api.objects and len(controller.pods) == 2
    eventually(lambda: {n.version for n in c.client.server().nodes if n.role == "decode" and n.state == "ready"} ==
               {"2.0"})
    assert not any(n.cordoned for n in c.client.server().nodes if n.state == "ready")
    assert len(c.client.generate("after", max_tokens=3).tokens) == 3


def test_canary_of_a_deployment_that_does_not_start_is_taken_back(cluster, kube):
    c = cluster(prefill=1, decode=0, wait=False)
    kube.api.add("deployments", "baton-decode", 1)
    controller = Controller(c, kube)
    controller.broken.add("baton:bad")
    role = kube.api.objects["llm", "deployments", "baton-decode"]
    controller.todo.put((role, True))
    controller.todo.join()
    router, before = c.procs["router"].address, json.dumps(role["spec"])
    start = ["canary", "decode", "--image", "baton:bad", "--kind", "deployment", "--timeout", "3s"]
    for missing in ("create", "list"):
        kube.api.rules["alice"] = [r for r in CANARY_RIGHTS if r[0] != missing]
        out = kube.ctl("canary", "decode", "--image", "baton:1", "--version", "2.0", *start[4:6], router=router)
        assert out.returncode == 6 and f"cannot {missing}" in out.stderr and out.stdout == "", out
        assert ("llm", "deployments", "baton-decode-canary") not in kube.api.objects
        controller.todo.join()
    kube.api.rules["alice"] = CANARY_RIGHTS
    out = kube.ctl(*start, router=router)
    assert out.returncode == 4 and "taken back" in out.stderr and out.stdout == "", out
    # Stored, but the answer is lost: nobody would know of its pods.
    kube.api.lose = "POST"
    out = kube.ctl("canary", "decode", "--image", "baton:1", *start[4:6], router=router)
    assert out.returncode == 3 and "taken back" in out.stderr and kube.api.lose is None, out
    assert ("llm", "deployments", "baton-decode-canary") not in kube.api.objects
    controller.todo.join()
    # A deployment of that name which is none of ours stays.
    kube.api.add("deployments", "baton-decode-canary", 1)
    for args in (start, ["rollback", "decode", *start[4:]], ["promote", "decode", *start[4:]]):
        out = kube.ctl(*args, router=router)
        assert out.returncode == 1 and "not as a canary" in out.stderr, out
    assert ("llm", "deployments", "baton-decode-canary") in kube.api.objects
    assert json.dumps(role["spec"]) == before and len(controller.of("baton-decode")) == 1
    assert not c.client.server().canaries
    controller.todo.join()
    c.allow("event=node .*to=lost")


def test_tokens_are_not_shown(kube, tmp_path):
    """Not in the list of processes either: nothing secret is an argument."""
    kube.api.faults = [1.5]
    p = subprocess.Popen([BUILD / "batonctl", "scale", "decode=3", "--kubeconfig", str(kube.config)],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(0.3)
    shown = open(f"/proc/{p.pid}/cmdline", "rb").read() + open(f"/proc/{p.pid}/environ", "rb").read()
    out, err = p.communicate(timeout=30)
    assert TOKEN.encode() not in shown + out + err
