"""Between a router and a real node: a gRPC server that hands on what both say, and may lose some."""
import queue
import threading
from concurrent import futures

import grpc

from ports import free_ports
from wire import NodeMessage


def same(b):
    return b


class Relay:
    """A node started with `args` listens at a port of its own and is reached through here.
    `lose(message)` says which of its messages to lose; `seen` counts them by kind."""

    def __init__(self, lose=lambda m: False):
        self.lose, self.seen, self.lost = lose, {}, 0
        self.lock = threading.Lock()
        self.server = grpc.server(futures.ThreadPoolExecutor(16))
        self.server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()
        self.target = f"127.0.0.1:{free_ports(1)[0]}"
        self.args = [f"--listen={self.target}", f"--advertise={self.address}"]

    def service(self, details):  # grpc.GenericRpcHandler
        def hand_on(requests, context):
            kept = [(k, v) for k, v in context.invocation_metadata()
                    if k != "user-agent" and not k.startswith((":", "grpc-"))]
            with grpc.insecure_channel(self.target) as channel:
                call = channel.stream_stream(details.method, same, same)(
                    pump(requests), metadata=kept)
                context.add_callback(call.cancel)
                try:
                    for m in call:
                        if not details.method.endswith("/Session") or self.passes(m):
                            yield m
                except grpc.RpcError as e:
                    context.abort(e.code(), e.details())
        return grpc.stream_stream_rpc_method_handler(hand_on, same, same)

    def passes(self, raw):
        m = NodeMessage.FromString(raw)
        with self.lock:
            kind = m.WhichOneof("kind")
            self.seen[kind] = self.seen.get(kind, 0) + 1
            lost = self.lose(m)
            self.lost += lost
        return not lost

    def close(self):
        self.server.stop(None).wait()


def pump(requests):
    """The requests of a call that may end at any moment, read by a thread of their own."""
    q = queue.Queue()

    def read():
        try:
            for m in requests:
                q.put(m)
        except Exception:  # the caller is gone
            pass
        q.put(None)

    threading.Thread(target=read, daemon=True).start()
    return iter(q.get, None)
