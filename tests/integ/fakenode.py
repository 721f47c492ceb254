"""Nodes played by a script, for what real nodes do not do on request: lies, late and early messages."""
import hashlib
import queue
import threading
from concurrent import futures

import grpc

from wire import NodeMessage, RouterMessage


class Session:
    """One router's session with a fake node."""

    def __init__(self, node, context):
        self.node, self.context, self.out, self.welcomed = node, context, queue.Queue(), False
        self.refused = threading.Event()
        self.cancelled = []

    def send(self, **kw):
        self.out.put(NodeMessage(**kw))

    def output(self, stream_id, offset=0, tokens=(), finish=0, error=None, handed_over=False):
        m = NodeMessage()
        o = m.step.outputs.add(stream_id=stream_id, offset=offset, tokens=tokens, finish=finish,
                               handed_over=handed_over)
        if error:
            o.error.rc, o.error.message, o.error.retryable = error
        self.out.put(m)

    def load(self, **kw):
        self.send(load=kw)

    def close(self):
        self.out.put(None)


class FakeNode:
    def __init__(self, name, role, digest=None, incarnation=1, on_start=None, cache=None, refuse=None, creds=None,
                 **welcome):
        # With follow(session, message) and load(); a list: one a rank. None: none, as an old node.
        self.cache = cache
        self.caches = cache if isinstance(cache, list) else [cache]
        self.name, self.role, self.incarnation = name, role, incarnation
        self.on_start = on_start or (lambda session, start: None)
        self.welcome = dict(wire_version=1, name=name, incarnation=incarnation, role=role, model_name="m",
                            model_digest=digest or b"", kv_format=hashlib.sha256(b"kv").digest(),
                            numerics="fake/1", weight_epoch=1, net_address="127.0.0.1:9",
                            context_tokens=8192, page_tokens=16, pages_total=1000, heartbeat_ms=100)
        self.welcome.update(welcome)
        self.refuse = refuse  # text of the FAILED_PRECONDITION that answers a hello
        self.has_digest = threading.Event()
        if digest:
            self.has_digest.set()
        self.hellos, self.starts, self.cancels, self.sessions, self.shown = [], [], [], [], []
        self.changed = threading.Condition()
        self.beat = True
        self.server = grpc.server(futures.ThreadPoolExecutor(16))
        handler = grpc.method_handlers_generic_handler("baton.v1.Node", {
            "Session": grpc.stream_stream_rpc_method_handler(
                self.session, request_deserializer=RouterMessage.FromString,
                response_serializer=lambda m: m.SerializeToString())})
        self.server.add_generic_rpc_handlers((handler,))
        self.port = self.server.add_secure_port("127.0.0.1:0", creds) if creds else \
            self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def set_digest(self, digest):
        self.welcome["model_digest"] = digest
        self.has_digest.set()

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def session(self, requests, context):
        s = Session(self, context)
        self.sessions.append(s)
        self.shown.append(dict(context.invocation_metadata()).get("authorization"))

        def read():
            try:
                for m in requests:
                    kind = m.WhichOneof("kind")
                    if kind == "hello":
                        self.hellos.append(m.hello)
                        if self.refuse:
                            s.refused.set()
                            break
                        assert self.has_digest.wait(20)
                        s.send(welcome=self.welcome)
                        s.welcomed = True
                    elif kind == "start":
                        with self.changed:
                            self.starts.append(m.start)
                            self.changed.notify_all()
                        self.on_start(s, m.start)
                    elif kind == "follow" and self.cache:
                        self.caches[m.follow.rank].follow(s, m.follow)
                    elif kind == "cancel":
                        with self.changed:
                            self.cancels.append(m.cancel.stream_id)
                            self.changed.notify_all()
                        s.output(m.cancel.stream_id, error=(-4, "cancelled", False))
            except grpc.RpcError:
                pass
            except Exception:  # the test looks at what came
                pass
            s.close()

        threading.Thread(target=read, daemon=True).start()
        while True:
            try:
                m = s.out.get(timeout=0.1)
            except queue.Empty:
                if self.beat and s.welcomed:
                    for rank, cache in enumerate(self.caches):
                        load = cache.load() if cache else {"pages_free": 100}
                        yield NodeMessage(load={**load, "rank": rank})
                if not context.is_active():
                    return
                continue
            if m is None:
                if s.refused.is_set():
                    context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuse)
                return
            yield m

    def wait(self, predicate, timeout=10):
        with self.changed:
            assert self.changed.wait_for(predicate, timeout), f"{self.name}: {self.starts} {self.cancels}"

    def stop(self):
        for s in self.sessions:
            s.close()
        self.server.stop(0.2).wait()
