/* Health and reflection, asked by our own client. */
#include "common/rpc/client.h"
#include "common/rpc/health.h"
#include "common/rpc/health.pb-c.h"
#include "common/rpc/reflection.h"
#include "common/rpc/reflection.pb-c.h"

#include "tests/unit/cmocka.h"

#include <stdio.h>

struct fixture {
    struct bt_loop *loop;
    struct bt_rpc_server *srv;
    struct bt_health *health;
    struct bt_reflection *reflection;
    struct bt_rpc_channel *ch;
};

struct seen {
    struct bt_rpc_client_call *call;
    int n, closed, status;
    int last_health;
    int n_services, n_files, error;
    size_t file_bytes;
    char first[100];
};

#define EVENTUALLY(f, cond)                                                                        \
    do {                                                                                           \
        uint64_t until_ = bt_now_ns() + 20 * BT_NS_PER_S;                                          \
        while (!(cond) && bt_now_ns() < until_) {                                                  \
            bt_loop_poll((f)->loop, bt_now_ns() + 50 * BT_NS_PER_MS);                              \
        }                                                                                          \
        assert_true(cond);                                                                         \
    } while (0)

static void on_health(struct bt_rpc_client_call *call, const ProtobufCMessage *msg)
{
    struct seen *s = bt_rpc_client_user(call);

    s->n++;
    s->last_health = (int)((const Grpc__Health__V1__HealthCheckResponse *)msg)->status;
}

static void on_reflection(struct bt_rpc_client_call *call, const ProtobufCMessage *msg)
{
    const Grpc__Reflection__V1__ServerReflectionResponse *r =
        (const Grpc__Reflection__V1__ServerReflectionResponse *)msg;
    struct seen *s = bt_rpc_client_user(call);

    s->n++;
    s->n_services = s->n_files = s->error = 0;
    switch ((int)r->message_response_case) {
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_LIST_SERVICES_RESPONSE:
        s->n_services = (int)r->list_services_response->n_service;
        snprintf(s->first, sizeof(s->first), "%s", r->list_services_response->service[0]->name);
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_FILE_DESCRIPTOR_RESPONSE:
        s->n_files = (int)r->file_descriptor_response->n_file_descriptor_proto;
        s->file_bytes = r->file_descriptor_response->file_descriptor_proto[0].len;
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ERROR_RESPONSE:
        s->error = r->error_response->error_code;
        break;
    default:
        break;
    }
}

static void on_closed(struct bt_rpc_client_call *call, int status, const char *text)
{
    struct seen *s = bt_rpc_client_user(call);

    s->closed++;
    s->status = status;
}

static const struct bt_rpc_client_events health_events = {.message = on_health,
                                                          .closed = on_closed};
static const struct bt_rpc_client_events reflection_events = {.message = on_reflection,
                                                              .closed = on_closed};

static void setup(struct fixture *f)
{
    char target[40];
    int port;

    assert_int_equal(bt_loop_create(&f->loop, NULL), BT_OK);
    assert_int_equal(bt_rpc_server_create(f->loop, NULL, &f->srv, NULL), BT_OK);
    assert_int_equal(bt_rpc_server_listen(f->srv, "127.0.0.1:0", &port, NULL), BT_OK);
    assert_int_equal(bt_health_create(f->srv, &f->health, NULL), BT_OK);
    assert_int_equal(bt_reflection_create(f->srv, NULL, 0, &f->reflection, NULL), BT_OK);
    assert_int_equal(bt_rpc_server_start(f->srv, NULL), BT_OK);
    snprintf(target, sizeof(target), "127.0.0.1:%d", port);
    assert_int_equal(bt_rpc_channel_create(f->loop, target, NULL, &f->ch, NULL), BT_OK);
}

static void teardown(struct fixture *f)
{
    bt_rpc_channel_destroy(f->ch);
    bt_rpc_server_destroy(f->srv);
    bt_reflection_destroy(f->reflection);
    bt_health_destroy(f->health);
    bt_loop_destroy(f->loop);
}

static void ask_health(struct fixture *f, struct seen *s, const char *method, const char *service)
{
    Grpc__Health__V1__HealthCheckRequest req = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    struct bt_rpc_client_args args = {.response =
                                          &grpc__health__v1__health_check_response__descriptor,
                                      .events = &health_events,
                                      .user = s,
                                      .wait_for_ready = true,
                                      .request = &req.base,
                                      .half_close = true};
    char path[64];

    *s = (struct seen){.last_health = -1};
    snprintf(path, sizeof(path), "/grpc.health.v1.Health/%s", method);
    args.path = path;
    req.service = (char *)(uintptr_t)service;
    assert_int_equal(bt_rpc_client_start(f->ch, &args, &s->call, NULL), BT_OK);
}

static void test_check(void **state)
{
    struct fixture f;
    struct seen s;

    setup(&f);
    ask_health(&f, &s, "Check", "");
    EVENTUALLY(&f, s.closed);
    assert_int_equal(s.last_health, BT_HEALTH_NOT_SERVING);
    ask_health(&f, &s, "Check", "pkg.Svc");
    EVENTUALLY(&f, s.closed);
    assert_int_equal(s.status, BT_RPC_NOT_FOUND);
    bt_health_set(f.health, "pkg.Svc", BT_HEALTH_SERVING);
    ask_health(&f, &s, "Check", "pkg.Svc");
    EVENTUALLY(&f, s.closed);
    assert_int_equal(s.status, BT_RPC_OK);
    assert_int_equal(s.last_health, BT_HEALTH_SERVING);
    bt_rpc_server_drain(f.srv); /* still answered, and tells it */
    bt_health_set_all(f.health, BT_HEALTH_NOT_SERVING);
    ask_health(&f, &s, "Check", "pkg.Svc");
    EVENTUALLY(&f, s.closed);
    assert_int_equal(s.last_health, BT_HEALTH_NOT_SERVING);
    teardown(&f);
}

static void set_true(void *arg)
{
    *(bool *)arg = true;
}

static void test_watch(void **state)
{
    struct seen all, svc, slow;
    bool done = false;
    struct fixture f;

    setup(&f);
    ask_health(&f, &all, "Watch", "");
    ask_health(&f, &svc, "Watch", "pkg.Svc");
    EVENTUALLY(&f, all.n == 1 && svc.n == 1);
    assert_int_equal(svc.last_health, 3); /* SERVICE_UNKNOWN, and the watch goes on */
    bt_health_set(f.health, "pkg.Svc", BT_HEALTH_SERVING);
    bt_health_set(f.health, "pkg.Svc", BT_HEALTH_SERVING); /* no change: nothing is sent */
    EVENTUALLY(&f, svc.n == 2);
    assert_int_equal(svc.last_health, BT_HEALTH_SERVING);
    for (int i = 0; i < 1001; i++) { /* faster than anything can be sent: the last one counts */
        bt_health_set(f.health, "", i % 2 ? BT_HEALTH_NOT_SERVING : BT_HEALTH_SERVING);
    }
    EVENTUALLY(&f, all.last_health == BT_HEALTH_SERVING);
    assert_true(all.n < 10);
    assert_int_equal(svc.n, 2);
    bt_rpc_client_cancel(svc.call);
    EVENTUALLY(&f, svc.closed);

    ask_health(&f, &slow, "Watch", ""); /* watchers are no reason to wait at shutdown */
    EVENTUALLY(&f, slow.n == 1);
    bt_rpc_server_shutdown(f.srv, bt_now_ns() + 3600 * BT_NS_PER_S, set_true, &done);
    EVENTUALLY(&f, done && all.closed && slow.closed);
    assert_int_equal(all.status, BT_RPC_UNAVAILABLE);
    teardown(&f);
}

static void ask(struct fixture *f, struct seen *s, Grpc__Reflection__V1__ServerReflectionRequest q)
{
    int n = s->n;

    assert_int_equal(bt_rpc_client_send(s->call, &q.base), BT_OK);
    EVENTUALLY(f, s->n == n + 1);
}

static void reflection_over(const char *package)
{
#define REQ     GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__INIT
#define CASE(x) GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_##x
    static const char *const symbols[] = {"grpc.health.v1.Health",
                                          "grpc.health.v1.Health.Watch",
                                          "grpc.health.v1.HealthCheckResponse",
                                          "grpc.health.v1.HealthCheckResponse.ServingStatus",
                                          "grpc.health.v1.HealthCheckResponse.SERVING",
                                          "grpc.health.v1.HealthCheckRequest.service"};
    static const char *const strangers[] = {"", "grpc", "grpc.health.v1", "grpc.health.v1.Health.",
                                            "grpc.health.v1.Nothing"};
    Grpc__Reflection__V1__ServerReflectionRequest q = REQ;
    struct seen s = {0};
    char path[100];
    struct bt_rpc_client_args args = {
        .path = path,
        .response = &grpc__reflection__v1__server_reflection_response__descriptor,
        .events = &reflection_events,
        .user = &s,
        .wait_for_ready = true};
    struct fixture f;

    setup(&f);
    snprintf(path, sizeof(path), "/%s.ServerReflection/ServerReflectionInfo", package);
    assert_int_equal(bt_rpc_client_start(f.ch, &args, &s.call, NULL), BT_OK);
    q.message_request_case = CASE(LIST_SERVICES);
    q.list_services = (char *)(uintptr_t) "*";
    ask(&f, &s, q);
    assert_int_equal(s.n_services, 3);
    assert_string_equal(s.first, "grpc.health.v1.Health");
    for (size_t i = 0; i < BT_ARRAY_LEN(symbols); i++) {
        q.message_request_case = CASE(FILE_CONTAINING_SYMBOL);
        q.file_containing_symbol = (char *)(uintptr_t)symbols[i];
        ask(&f, &s, q);
        assert_int_equal(s.n_files, 1);
        assert_true(s.file_bytes > 100);
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(strangers); i++) {
        q.file_containing_symbol = (char *)(uintptr_t)strangers[i];
        ask(&f, &s, q);
        assert_int_equal(s.error, BT_RPC_NOT_FOUND);
    }
    q.message_request_case = CASE(FILE_BY_FILENAME);
    q.file_by_filename = (char *)(uintptr_t) "grpc/reflection/v1alpha/reflection.proto";
    ask(&f, &s, q);
    assert_int_equal(s.n_files, 1);
    q.file_by_filename = (char *)(uintptr_t) "../../etc/passwd";
    ask(&f, &s, q);
    assert_int_equal(s.error, BT_RPC_NOT_FOUND);
    q = (Grpc__Reflection__V1__ServerReflectionRequest)REQ; /* asks nothing */
    ask(&f, &s, q);
    assert_int_equal(s.error, BT_RPC_INVALID_ARGUMENT);
    bt_rpc_client_half_close(s.call);
    EVENTUALLY(&f, s.closed);
    assert_int_equal(s.status, BT_RPC_OK);
    teardown(&f);
}

static void test_reflection(void **state)
{
    reflection_over("grpc.reflection.v1");
    reflection_over("grpc.reflection.v1alpha");
}

static void test_reflection_refuses_a_broken_set(void **state)
{
    struct bt_str sets[] = {BT_STR("\x0a\x05\x0a\x7f"), BT_STR("\x0a"), BT_STR("\xff\xff\xff"),
                            BT_STR("\x0b\x0c")};
    struct bt_rpc_server *srv;
    struct bt_reflection *r;
    struct bt_loop *loop;

    assert_int_equal(bt_loop_create(&loop, NULL), BT_OK);
    assert_int_equal(bt_rpc_server_create(loop, NULL, &srv, NULL), BT_OK);
    for (size_t i = 0; i < BT_ARRAY_LEN(sets); i++) {
        assert_int_equal(bt_reflection_create(srv, &sets[i], 1, &r, NULL), BT_E_FORMAT);
    }
    bt_rpc_server_destroy(srv);
    bt_loop_destroy(loop);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_check),
        cmocka_unit_test(test_watch),
        cmocka_unit_test(test_reflection),
        cmocka_unit_test(test_reflection_refuses_a_broken_set),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
