"""Messages and calls of our services, built at run time from compiled descriptors."""
import os
import pathlib

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("BATON_TEST_BUILD", ROOT / "build"))

_pool = descriptor_pool.DescriptorPool()
_set = descriptor_pb2.FileDescriptorSet.FromString((BUILD / "proto/baton.protoset").read_bytes())
for _file in _set.file:
    _pool.Add(_file)


# Made once: threads share them.
_classes = {name: message_factory.GetMessageClass(m) for f in _set.file
            for name, m in _pool.FindFileByName(f.name).message_types_by_name.items()}


def cls(name):
    return _classes[name]


GenerateRequest = cls("GenerateRequest")
GenerateResponse = cls("GenerateResponse")
RouterMessage = cls("RouterMessage")
NodeMessage = cls("NodeMessage")
NodeStatusRequest = cls("NodeStatusRequest")
NodeStatus = cls("NodeStatus")

STOP, LENGTH = 1, 2
AUTO, DIRECT, LOCAL, STORE = 0, 1, 2, 3
LEG_LOCAL, LEG_PREFILL, LEG_DECODE = 0, 1, 2


def enum_value(enum, name):
    return _pool.FindEnumTypeByName("baton.v1." + enum).values_by_name[name].number


class Answer:
    """A whole answer, checked for gaps while it comes in."""

    def __init__(self):
        self.tokens, self.text, self.logprobs, self.messages = [], b"", [], []
        self.finish, self.usage, self.timing, self.stream_id, self.request_id = 0, None, None, "", ""

    def add(self, m):
        assert self.finish == 0, "a message after the last one"
        assert m.offset == len(self.tokens), "gap or repeat"
        self.tokens += m.tokens
        self.text += m.text
        m.text.decode()  # whole characters only
        self.logprobs += m.logprobs
        self.messages.append(m)
        if len(self.messages) == 1:
            self.stream_id, self.request_id = m.stream_id, m.request_id
        self.finish = m.finish
        if m.finish:
            self.usage, self.timing = m.usage, m.timing
        return self


def request(text=None, ids=None, chat=None, max_tokens=None, stop=(), stop_ids=(), seed=None,
            path=AUTO, request_id="", skip_special=False, ignore_eos=False, min_tokens=0, cache_salt="",
            tenant="", priority=0,
            **sampling):
    m = GenerateRequest(path=path, request_id=request_id, skip_special_tokens=skip_special,
                        cache_salt=cache_salt, tenant=tenant, priority=priority)
    if text is not None:
        m.text = text
    if ids is not None:
        m.tokens.ids.extend(ids)
        m.tokens.SetInParent()
    if chat is not None:
        m.chat.SetInParent()
        for role, content in chat:
            m.chat.messages.add(role=role, content=content)
    if max_tokens is not None:
        m.stopping.max_tokens = max_tokens
    m.stopping.strings.extend(stop)
    m.stopping.token_ids.extend(stop_ids)
    m.stopping.ignore_eos = ignore_eos
    m.stopping.min_tokens = min_tokens
    bias = sampling.pop("bias", {})
    for token, value in bias.items():
        m.sampling.logit_bias.add(token=token, bias=value)
    if seed is not None:
        m.sampling.seed = seed
    for key, value in sampling.items():
        setattr(m.sampling, key, value)
    return m


OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1),
           ("grpc.use_local_subchannel_pool", 1)]


class Client:
    """A client of the router, or of a node's GetStatus. `access`: what it shows, see security.py."""

    def __init__(self, address, options=(), access=None):
        self.access = access
        options = [*OPTIONS, *options, *(access.options if access else [])]
        if access and access.creds:
            self.channel = grpc.secure_channel(address, access.creds, options=options)
        else:
            self.channel = grpc.insecure_channel(address, options=options)

    def metadata(self, method):
        token = self.access and self.access.token_for(method)
        return [("authorization", f"Bearer {token}")] if token else []

    def close(self):
        self.channel.close()

    def unary(self, method, message, response, timeout=30, service="Baton"):
        call = self.channel.unary_unary(f"/baton.v1.{service}/{method}",
                                        request_serializer=lambda m: m.SerializeToString(),
                                        response_deserializer=cls(response).FromString)
        return call(message, timeout=timeout, metadata=self.metadata(method))

    def stream(self, message, timeout=60):
        call = self.channel.unary_stream("/baton.v1.Baton/Generate",
                                         request_serializer=lambda m: m.SerializeToString(),
                                         response_deserializer=GenerateResponse.FromString)
        return call(message, timeout=timeout, metadata=self.metadata("Generate"))

    def generate(self, *args, timeout=60, **kw):
        answer = Answer()
        for m in self.stream(request(*args, **kw), timeout=timeout):
            answer.add(m)
        assert answer.finish, "the stream ended without a finish"
        return answer

    def error(self, *args, timeout=60, **kw):
        """The error that a request gets; fails if it gets none."""
        try:
            self.generate(*args, timeout=timeout, **kw)
        except grpc.RpcError as e:
            return e
        raise AssertionError("no error")

    def tokenize(self, text):
        return list(self.unary("Tokenize", cls("TokenizeRequest")(text=text), "TokenizeResponse").tokens)

    def detokenize(self, ids):
        return self.unary("Detokenize", cls("DetokenizeRequest")(tokens=ids), "DetokenizeResponse").text

    def model(self):
        return self.unary("GetModel", cls("GetModelRequest")(), "ModelInfo")

    def server(self):
        return self.unary("GetServer", cls("GetServerRequest")(), "ServerInfo", timeout=5)

    def nodes(self):
        return {n.name: n for n in self.server().nodes}

    def status(self):
        return self.unary("GetStatus", NodeStatusRequest(), "NodeStatus", service="Node", timeout=5)
