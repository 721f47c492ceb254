/* What an API server may answer to batonctl: any JSON, at every step of scaling, flipping and
 * canaries on StatefulSets and Deployments. Everything ends, with an exit code. First byte: what is
 * done; then parts, the answers in their order (a first byte of '{' or '[', or a status). */
#include "deploy/ctl/cluster.h"
#include "deploy/ctl/pools_kube.h"

#include "common/thr/time.h"
#include "tests/fuzz/feeder.inc.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static struct feeder answers;
static unsigned n_asked;

static void must(bool ok)
{
    if (!ok) {
        abort();
    }
}

/* --- what stands between a command and the server -----------------------------------------------
 */

int kube_load(const struct ctl_args *a, struct kube *ret)
{
    *ret = (struct kube){.ns = strdup("default")};
    return CTL_OK;
}

void kube_free(struct kube *k)
{
    free(k->ns);
}

int kube_call(const struct kube *k,
              const struct kube_request *r,
              json_t **ret_answer,
              long *ret_status)
{
    struct bt_str part = {0};
    json_t *answer = NULL;
    long status = 0;

    must(r->path[0] == '/' && !strstr(r->path, "..") && !strchr(r->path, '\n'));
    must(++n_asked < 100);
    if (feeder_part(&answers, &part) && part.n > 0) {
        answer = json_loadb(part.p, part.n, 0, NULL);
        status = answer ? 200 : part.p[0] % 2 ? 404 : 409;
    }
    if (ret_status) {
        *ret_status = status;
    }
    if (answer && !json_is_object(answer)) { /* which kube_http.c does not let pass either */
        json_decref(answer);
        answer = NULL;
        status = 500;
    }
    if (!answer) {
        return status == 404 ? CTL_NOT_FOUND : status ? CTL_FAILED : CTL_UNREACHABLE;
    }
    *ret_answer = answer;
    return CTL_OK;
}

/* --- the router, which knows no node ------------------------------------------------------------
 */

int ctl_look(const char *router, uint64_t deadline_ns, struct ctl_view *v)
{
    return CTL_UNREACHABLE;
}

void ctl_view_free(struct ctl_view *v)
{
}

const struct ctl_seen *ctl_view_find(const struct ctl_view *v, const char *name)
{
    return NULL;
}

int ctl_pools_drain(struct ctl_pools *p,
                    const json_t *names,
                    uint64_t deadline_ns,
                    json_t *cordoned)
{
    return CTL_OK;
}

void ctl_pools_uncordon(struct ctl_pools *p, const json_t *names, uint64_t deadline_ns)
{
}

void ctl_sleep(uint64_t ns)
{
}

/* --- commands -----------------------------------------------------------------------------------
 */

static int scale(struct ctl_pools *p, json_t *names)
{
    struct ctl_size s[2] = {{.role = "prefill", .to = 1}, {.role = "decode", .to = 3}};
    uint64_t now = bt_now_ns();
    int code = p->ops->plan(p, s, 2, names, now);

    code = code != CTL_OK ? code : p->ops->scale(p, s, 2, now);
    code = code != CTL_OK ? code : p->ops->gone(p, names, now);
    code = code != CTL_OK ? code : p->ops->settle(p, s, 2, now);
    return code != CTL_OK ? code : p->ops->members(p, s, 2, names, now);
}

static int flip(struct ctl_pools *p, json_t *names, bool dry)
{
    uint64_t now = bt_now_ns();
    int code = p->ops->flip(p, "baton-decode-1", "prefill", dry, now);

    code = code != CTL_OK ? code : p->ops->settle(p, NULL, 0, now);
    return code != CTL_OK ? code : p->ops->members(p, NULL, 0, names, now);
}

static int canary(struct ctl_pools *p, struct ctl_canary *c, bool begin)
{
    uint64_t now = bt_now_ns();
    int code = begin ? p->ops->canary(p, c, now) : p->ops->end(p, c, now);

    return code != CTL_OK || begin ? code : p->ops->over(p, c, now);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static FILE *nowhere;
    struct ctl_args a = {.workload = "baton", .image = "i:2", .version = "2"};
    struct ctl_pools p = {.a = &a};
    struct ctl_canary c = {.role = "decode", .n = 1};
    uint8_t what;
    int code;

    if (!nowhere) { /* commands tell failures on stderr, and there are many */
        nowhere = stderr = fopen("/dev/null", "w");
        must(nowhere);
    }
    answers = (struct feeder){data, n};
    n_asked = 0;
    what = feeder_byte(&answers);
    a.kind = what % 2 ? "statefulset" : "deployment";
    c.dry = what / 2 % 2;
    c.promote = what / 4 % 2;
    c.names = json_array();
    must(ctl_pools_open_kube(&p, 0) == CTL_OK);
    switch (what / 8 % 4) {
    case 0:
        code = scale(&p, c.names);
        break;
    case 1:
        code = flip(&p, c.names, c.dry);
        break;
    default:
        code = canary(&p, &c, what / 8 % 4 == 2);
        break;
    }
    must(code >= 0 && code < CTL_EXIT_COUNT);
    must(json_array_size(c.names) <= 100000);
    json_decref(c.names);
    p.ops->close(&p);
    return 0;
}
