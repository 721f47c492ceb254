"""Clients that have no file of ours: grpcurl, and Python through server reflection; health."""
import json
import os
import shutil
import subprocess
import sys

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


@pytest.fixture(scope="module")
def c(models):
    from cluster import Cluster
    cluster = Cluster(models("tiny"))
    yield cluster
    cluster.finish()


@pytest.fixture(scope="module")
def grpcurl(c):
    beside = os.path.join(os.path.dirname(sys.executable), "grpcurl")
    tool = beside if os.path.exists(beside) else shutil.which("grpcurl")
    if not tool:
        pytest.skip("grpcurl is not installed")

    def run(*args, target="router", data=None):
        out = subprocess.run([tool, "-plaintext", *(["-d", json.dumps(data)] if data is not None else []),
                              c.procs[target].address, *args], capture_output=True, text=True, timeout=60)
        assert out.returncode == 0, out.stderr
        return out.stdout

    return run


def test_grpcurl_lists_and_describes(grpcurl):
    assert {"baton.v1.Baton", "grpc.health.v1.Health"} <= set(grpcurl("list").split())
    assert "baton.v1.Node" in grpcurl("list", target="decode-0").split()
    assert "baton.v1.Baton.Generate" in grpcurl("list", "baton.v1.Baton").split()
    assert "stream .baton.v1.GenerateResponse" in grpcurl("describe", "baton.v1.Baton.Generate")
    assert "max_tokens" in grpcurl("describe", "baton.v1.Stopping")


def test_grpcurl_generates(grpcurl, c):
    out = grpcurl("baton.v1.Baton/Generate",
                  data={"text": "The lamp keeper", "stopping": {"max_tokens": 5, "ignore_eos": True}})
    messages, rest = [], out.strip()
    while rest:
        m, end = json.JSONDecoder().raw_decode(rest)
        messages.append(m)
        rest = rest[end:].strip()
    tokens = [t for m in messages for t in m.get("tokens", [])]
    assert tokens == c.client.generate("The lamp keeper", max_tokens=5, ignore_eos=True).tokens
    assert messages[-1]["finish"] == "FINISH_LENGTH"
    assert messages[-1]["usage"]["completionTokens"] == 5


def test_grpcurl_status_and_health(grpcurl):
    server = json.loads(grpcurl("baton.v1.Baton/GetServer"))
    assert {n["state"] for n in server["nodes"]} == {"ready"}
    for target in ("router", "prefill-0", "decode-0"):
        assert json.loads(grpcurl("grpc.health.v1.Health/Check", target=target))["status"] == "SERVING"
        for service in grpcurl("list", target=target).split():
            if service.startswith("baton."):  # all of ours have a state
                answer = grpcurl("grpc.health.v1.Health/Check", target=target, data={"service": service})
                assert json.loads(answer)["status"] == "SERVING", service
    status = json.loads(grpcurl("baton.v1.Node/GetStatus", target="decode-0"))
    assert status["name"] == "decode-0" and status["pagesFree"] == status["pagesTotal"]


def test_python_through_reflection(c):
    with grpc.insecure_channel(c.procs["router"].address) as channel:
        db = ProtoReflectionDescriptorDatabase(channel)
        assert "baton.v1.Baton" in db.get_services()
        pool = descriptor_pool.DescriptorPool(db)
        service = pool.FindServiceByName("baton.v1.Baton")
        method = service.FindMethodByName("Generate")
        assert method.server_streaming and not method.client_streaming
        request = message_factory.GetMessageClass(method.input_type)
        response = message_factory.GetMessageClass(method.output_type)
        call = channel.unary_stream("/baton.v1.Baton/Generate", request_serializer=request.SerializeToString,
                                    response_deserializer=response.FromString)
        m = request(text="The lamp keeper")
        m.stopping.max_tokens = 5
        m.stopping.ignore_eos = True
        tokens = [t for r in call(m, timeout=30) for t in r.tokens]
    assert tokens == c.client.generate("The lamp keeper", max_tokens=5, ignore_eos=True).tokens


def test_health_watch_sees_the_drain(cluster):
    c = cluster(prefill=0, role="both")
    with grpc.insecure_channel(c.procs["router"].address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="baton.v1.Baton"), timeout=30)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        c.procs["router"].stop()
        try:
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        except grpc.RpcError as e:
            assert e.code() == grpc.StatusCode.UNAVAILABLE
    c.procs["router"].killed = True
    with pytest.raises(grpc.RpcError) as e:
        with grpc.insecure_channel(c.procs["decode-0"].address) as channel:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="no"), timeout=5)
    assert e.value.code() == grpc.StatusCode.NOT_FOUND
