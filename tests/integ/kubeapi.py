"""A double of a Kubernetes API server: HTTPS with a CA of its own, bearer tokens and client certificates,
an RBAC table, and the objects behind statefulsets and deployments with their scale subresource. Answers
have the shapes that the real server gives: Status objects, resourceVersions, generations."""
import http.server
import json
import re
import ssl
import threading
import time
import urllib.parse

REASONS = {400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed",
           409: "Conflict", 415: "UnsupportedMediaType", 422: "Invalid", 429: "TooManyRequests", 500: "InternalError",
           503: "ServiceUnavailable"}
PATH = re.compile(r"^/apis/apps/v1/namespaces/(?P<ns>[a-z0-9-]+)/(?P<resource>statefulsets|deployments)/"
                  r"(?P<name>[a-z0-9-]+)(?P<sub>/scale)?$")
MANY = re.compile(r"^/apis/apps/v1/namespaces/(?P<ns>[a-z0-9-]+)/(?P<resource>deployments)(?P<name>)(?P<sub>)$|"
                  r"^/api/v1/namespaces/(?P<pod_ns>[a-z0-9-]+)/(?P<pods>pods)(\?labelSelector=(?P<selector>[^&]+))?$")
VERBS = {"GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class Failure(Exception):
    def __init__(self, code, message, headers=(), **details):
        self.code, self.message, self.headers, self.details = code, message, headers, details


class ApiServer:
    """users: {token or certificate CN: name}; rules: {name: [(verb, resource, namespace)]}."""

    def __init__(self, authority, client_authority=None, users=None, rules=None):
        self.users, self.rules = users or {}, rules or {}
        self.objects, self.requests, self.faults, self.on_write, self.on_patched = {}, [], [], None, None
        self.pods = {}  # (namespace, name): labels
        self.on_deleted = None
        self.lock = threading.Lock()
        self.version = 1000
        cert, key = authority.issue("kube-apiserver", san="DNS:localhost,IP:127.0.0.1")
        ctx = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ctx.load_cert_chain(cert, key)
        if client_authority:
            ctx.load_verify_locations(client_authority.ca)
            ctx.verify_mode = ssl.CERT_OPTIONAL
        outer = self

        self.lose = None  # method whose next answer is lost, after it was carried out

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do(self):
                outer.handle(self)
            do_GET = do_PUT = do_PATCH = do_POST = do_DELETE = do

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def finish_request(self, request, client_address):
                try:
                    request = ctx.wrap_socket(request, server_side=True)
                    super().finish_request(request, client_address)
                    request.unwrap()
                except (ssl.SSLError, OSError):
                    pass

            def handle_error(self, *args):
                pass

        self.httpd = Server(("127.0.0.1", 0), Handler)
        self.port = self.httpd.server_address[1]
        self.thread = threading.Thread(target=self.httpd.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    @property
    def url(self):
        return f"https://127.0.0.1:{self.port}"

    def close(self):
        self.httpd.shutdown()
        self.thread.join()
        self.httpd.server_close()

    # --- objects

    def add(self, resource, name, replicas, ns="llm", image="baton:1"):
        self.version += 1
        self.objects[ns, resource, name] = {
            "apiVersion": "apps/v1", "kind": {"statefulsets": "StatefulSet", "deployments": "Deployment"}[resource],
            "metadata": {"name": name, "namespace": ns, "uid": f"uid-{self.version}", "generation": 1,
                         "resourceVersion": str(self.version), "annotations": {}},
            "spec": {"replicas": replicas,
                     "selector": {"matchLabels": {"app": name}},
                     **({"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}}}
                        if resource == "statefulsets" else {}),
                     "template": {"metadata": {"labels": {"app": name}, "creationTimestamp": None},
                                  "spec": {"containers": [{"name": "node", "image": image}]}}},
            "status": {"observedGeneration": 1, "replicas": replicas, "readyReplicas": replicas}}

    def replicas(self, name, resource="statefulsets", ns="llm"):
        return self.objects[ns, resource, name]["spec"]["replicas"]

    def touch(self, o):
        self.version += 1
        o["metadata"]["resourceVersion"] = str(self.version)

    def settle(self, name, resource="statefulsets", ns="llm"):
        """What the controller and the kubelets do."""
        with self.lock:
            o = self.objects[ns, resource, name]
            n = o["spec"]["replicas"]
            o["status"] = {"observedGeneration": o["metadata"]["generation"], "replicas": n, "updatedReplicas": n}
            if n:
                o["status"]["readyReplicas"] = n  # zero is left out, as the real one does
            self.touch(o)

    def scale_of(self, o):
        return {"kind": "Scale", "apiVersion": "autoscaling/v1",
                "metadata": {k: o["metadata"][k] for k in ("name", "namespace", "uid", "resourceVersion")},
                "spec": {"replicas": o["spec"]["replicas"]},
                "status": {"replicas": o["status"]["replicas"], "selector": "app=x"}}

    # --- requests

    def user_of(self, h):
        auth = h.headers.get("Authorization", "")
        if auth.startswith("Bearer "):
            if auth[7:] not in self.users:
                raise Failure(401, "Unauthorized")
            return self.users[auth[7:]]
        cert = h.connection.getpeercert()
        cn = dict(x[0] for x in cert["subject"]).get("commonName") if cert else None
        if cn in self.users:
            return self.users[cn]
        return "system:anonymous"

    def authorize(self, user, verb, m):
        resource = m["resource"] + (m["sub"] or "")
        if (verb, resource, m["ns"]) not in self.rules.get(user, ()):
            raise Failure(403, f'{m["resource"]}.apps "{m["name"]}" is forbidden: User "{user}" cannot {verb} resource '
                               f'"{resource}" in API group "apps" in the namespace "{m["ns"]}"', name=m["name"])

    def handle(self, h):
        body = h.rfile.read(int(h.headers.get("Content-Length") or 0))
        try:
            with self.lock:
                self.requests.append((h.command, h.path))
                out = self.answer(h, body)
                lost = self.lose == h.command
                self.lose = None if lost else self.lose
            if lost:
                h.close_connection = True
                return
            self.send(h, 200, out)
        except Failure as e:
            self.send(h, e.code, {
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": e.message,
                "reason": REASONS[e.code], "details": e.details, "code": e.code}, e.headers)

    def send(self, h, code, doc, headers=()):
        data = doc if isinstance(doc, bytes) else json.dumps(doc).encode()
        h.send_response(code)
        h.send_header("Content-Type", "application/json")
        h.send_header("Content-Length", str(len(data)))
        for k, v in headers:
            h.send_header(k, v)
        h.end_headers()
        h.wfile.write(data)

    def answer(self, h, body):
        user = self.user_of(h)
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, Failure):
                raise fault
            if isinstance(fault, bytes):
                return fault
            time.sleep(fault)
        m = MANY.match(h.path)
        if m and m["pods"] and h.command == "GET":
            self.authorize(user, "list", {"resource": "pods", "sub": "", "ns": m["pod_ns"], "name": ""})
            return self.list_pods(m["pod_ns"], m["selector"])
        if m and not m["pods"] and h.command == "POST":
            self.authorize(user, "create", m)
            return self.create(h, m["ns"], m["resource"], json.loads(body))
        m = PATH.match(h.path)
        if not m:
            raise Failure(403 if user == "system:anonymous" else 404, "the server could not find the requested resource")
        verb = VERBS.get(h.command)
        if not verb:
            raise Failure(405, "the server does not allow this method on the requested resource")
        self.authorize(user, verb, m)
        o = self.objects.get((m["ns"], m["resource"], m["name"]))
        if o is None:
            raise Failure(404, f'{m["resource"]}.apps "{m["name"]}" not found', name=m["name"], group="apps",
                          kind=m["resource"])
        if verb == "get":
            return self.scale_of(o) if m["sub"] else o
        if self.on_write:
            hook, self.on_write = self.on_write, None
            hook(o)
        if verb == "patch":
            return self.patch(h, o, body)
        if verb == "delete":
            return self.delete(o, m)
        return self.put_scale(h, o, m, body)

    def list_pods(self, ns, selector):
        want = dict(pair.split("=", 1) for pair in urllib.parse.unquote(selector or "").split(",") if pair)
        return {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": str(self.version)},
                "items": [{"metadata": {"name": name, "namespace": ns, "labels": labels}}
                          for (where, name), labels in sorted(self.pods.items())
                          if where == ns and want.items() <= labels.items()]}

    def create(self, h, ns, resource, o):
        meta, spec = o["metadata"], o["spec"]
        if (o.get("apiVersion"), o.get("kind")) != ("apps/v1", "Deployment"):
            raise Failure(400, "the object provided is unrecognized")
        if meta.get("namespace", ns) != ns:
            raise Failure(400, "the namespace of the provided object does not match the namespace sent on the request")
        if "resourceVersion" in meta:
            raise Failure(500, "resourceVersion should not be set on objects to be created")
        if not spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items():
            raise Failure(422, f'Deployment.apps "{meta["name"]}" is invalid: spec.template.metadata.labels: Invalid '
                               "value: `selector` does not match template `labels`")
        if any(len(v) > 63 for v in spec["template"]["metadata"]["labels"].values()):
            raise Failure(422, "must be no more than 63 characters")
        if (ns, resource, meta["name"]) in self.objects:
            raise Failure(409, f'{resource}.apps "{meta["name"]}" already exists')
        o["metadata"] = {**meta, "namespace": ns, "uid": f"uid-{self.version}", "generation": 1}
        o["status"] = {}
        self.touch(o)
        self.objects[ns, resource, meta["name"]] = o
        if self.on_patched:
            self.on_patched(o)
        return o

    def delete(self, o, m):
        del self.objects[m["ns"], m["resource"], m["name"]]
        if self.on_deleted:
            self.on_deleted(o)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "details": {"name": m["name"]}}

    def put_scale(self, h, o, m, body):
        if not m["sub"]:
            raise Failure(405, "whole objects are not written here")
        if h.headers.get("Content-Type") != "application/json":
            raise Failure(415, "the body of the request was in an unknown format")
        doc = json.loads(body)
        if doc.get("kind") != "Scale" or doc.get("apiVersion") != "autoscaling/v1":
            raise Failure(400, "the API version in the data does not match the expected API version")
        meta = doc["metadata"]
        if meta["name"] != m["name"] or meta["namespace"] != m["ns"]:
            raise Failure(400, "the name of the object does not match the name on the URL")
        if meta.get("resourceVersion") not in (None, o["metadata"]["resourceVersion"]):
            raise Failure(409, f'Operation cannot be fulfilled on {m["resource"]}.apps "{m["name"]}": the object has been '
                               "modified; please apply your changes to the latest version and try again")
        n = doc["spec"].get("replicas", 0)
        if n < 0:
            raise Failure(422, f'Scale.autoscaling "{m["name"]}" is invalid: spec.replicas: Invalid value: {n}: must be '
                               "greater than or equal to 0")
        if n != o["spec"]["replicas"]:
            o["spec"]["replicas"] = n
            o["metadata"]["generation"] += 1
        self.touch(o)
        return self.scale_of(o)

    def merge(self, old, new, merged_lists=("containers", "env")):
        """A strategic merge: null removes, lists of named things are merged by name."""
        for k, v in new.items():
            if v is None:
                old.pop(k, None)
            elif isinstance(v, dict):
                self.merge(old.setdefault(k, {}), v)
            elif isinstance(v, list) and k in merged_lists:
                items = old.setdefault(k, [])
                for item in v:
                    found = next((i for i in items if i["name"] == item["name"]), None)
                    if item.get("$patch") == "delete":
                        items[:] = [i for i in items if i is not found]
                    elif found is None:
                        items.append(item)
                    else:
                        self.merge(found, item)
            else:
                old[k] = v

    def patch(self, h, o, body):
        if h.headers.get("Content-Type") != "application/strategic-merge-patch+json":
            raise Failure(415, "the body of the request was in an unknown format")
        doc = json.loads(body)
        version = doc.get("metadata", {}).pop("resourceVersion", None)
        if version not in (None, o["metadata"]["resourceVersion"]):
            raise Failure(409, "the object has been modified; please apply your changes to the latest version")
        self.merge(o, doc)
        o["metadata"]["generation"] += 1
        self.touch(o)
        if self.on_patched:
            self.on_patched(o)
        return o
