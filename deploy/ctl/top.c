/* batonctl top: load, speed and nodes of a cluster, again and again. Plain text: where standard
 * output is a terminal it is redrawn in place, as much as fits; else one picture after the other.
 */
#include "deploy/ctl/show.h"

#include "common/thr/time.h"
#include "proto/inspect.pb-c.h"

#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

struct picture {
    uint64_t at_ns;
    Baton__V1__Figures *f;
    Baton__V1__ServerInfo *s;
};

static volatile sig_atomic_t stopped;

static void on_stop(int sig)
{
    (void)sig;
    stopped = 1;
}

static void drop(struct picture *p)
{
    if (p->f) {
        baton__v1__figures__free_unpacked(p->f, NULL);
    }
    if (p->s) {
        baton__v1__server_info__free_unpacked(p->s, NULL);
    }
    *p = (struct picture){0};
}

static int look(const struct ctl_args *a, struct picture *p)
{
    Baton__V1__GetFiguresRequest fm = BATON__V1__GET_FIGURES_REQUEST__INIT;
    Baton__V1__GetServerRequest sm = BATON__V1__GET_SERVER_REQUEST__INIT;
    struct ctl_ask ask = {.path = "/baton.v1.Inspect/GetFigures",
                          .request = &fm.base,
                          .response = &baton__v1__figures__descriptor,
                          .deadline_ns = bt_deadline_ns(a->timeout_ns)};
    ProtobufCMessage *got;
    int code = ctl_ask(a->router, &ask, &got);

    *p = (struct picture){.at_ns = bt_now_ns()};
    if (code != CTL_OK) {
        return code;
    }
    p->f = (Baton__V1__Figures *)got;
    ask.path = "/baton.v1.Baton/GetServer";
    ask.request = &sm.base;
    ask.response = &baton__v1__server_info__descriptor;
    code = ctl_ask(a->router, &ask, &got);
    if (code != CTL_OK) {
        drop(p);
        return code;
    }
    p->s = (Baton__V1__ServerInfo *)got;
    return CTL_OK;
}

/* --- text ------------------------------------------------------------------------------------ */

struct screen {
    unsigned rows, cols; /* 0 = no bound */
    unsigned row;
};

static void BT_PRINTF_ATTR(2, 3) line(struct screen *sc, const char *fmt, ...)
{
    char text[400];
    va_list ap;

    if (sc->rows && sc->row + 1 >= sc->rows) {
        return;
    }
    sc->row++;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    if (sc->cols && sc->cols < sizeof(text)) {
        text[sc->cols] = '\0';
    }
    printf("%s\n", text);
}

static double rate(uint64_t now, uint64_t before, double s)
{
    return s > 0 && now >= before ? (double)(now - before) / s : 0;
}

static uint64_t total(Baton__V1__Count *const *c, size_t n)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < n; i++) {
        sum += c[i]->value;
    }
    return sum;
}

/* `was` is of an earlier look, or all zero: then rates are means since the start. */
static void draw_router(struct screen *sc, const struct picture *p, const struct picture *was)
{
    const Baton__V1__Figures *f = p->f;
    double s = was->f ? (double)(p->at_ns - was->at_ns) / 1e9 : f->uptime_s;
    uint64_t all = total(f->outcomes, f->n_outcomes);
    uint64_t ok = f->n_outcomes ? f->outcomes[0]->value : 0;

    line(sc, "router %s, up %.0f s, membership %s; %u running, %u waiting (%u in the router)",
         p->s->version, f->uptime_s, p->s->membership, f->running, f->waiting, f->queued);
    line(sc, "requests %.1f/s, %llu ended, %.1f %% ok, %.1f %% good; tokens %.0f/s, prompt %.0f/s",
         rate(all, was->f ? total(was->f->outcomes, was->f->n_outcomes) : 0, s),
         (unsigned long long)all, all ? 100.0 * (double)ok / (double)all : 0,
         all ? 100.0 * (double)f->good / (double)all : 0,
         rate(f->tokens, was->f ? was->f->tokens : 0, s),
         rate(f->prompt_tokens, was->f ? was->f->prompt_tokens : 0, s));
    line(sc, "first token p50 %.1f ms, p99 %.1f ms; each token p50 %.2f ms, p99 %.2f ms (last %u)",
         f->first_token_p50_s * 1e3, f->first_token_p99_s * 1e3, f->token_p50_s * 1e3,
         f->token_p99_s * 1e3, f->recent);
    line(sc, "cache %.1f %% of prompt tokens, retries %llu",
         f->prompt_tokens ? 100.0 * (double)f->cached_tokens / (double)f->prompt_tokens : 0,
         (unsigned long long)f->retries);
}

static void draw_nodes(struct screen *sc, const struct picture *p)
{
    line(sc, "%s", "");
    line(sc, "%-20s %-8s %-10s %6s %7s %7s %5s %8s %9s %8s", "NODE", "ROLE", "STATE", "KV %",
         "WAITING", "RUNNING", "BUSY", "QUEUE ms", "PREFILL/s", "STEP ms");
    for (size_t i = 0; i < p->s->n_nodes; i++) {
        const Baton__V1__NodeInfo *n = p->s->nodes[i];
        double used =
            n->pages_total
                ? 100.0 * (n->pages_total - BT_MIN(n->pages_free, n->pages_total)) / n->pages_total
                : 0;

        line(sc, "%-20s %-8s %-10s %6.1f %7u %7u %5.2f %8.1f %9.0f %8.2f", ctl_dash(n->name),
             n->role, ctl_node_state(n), used, n->requests_waiting, n->requests_running, n->busy,
             n->queue_s * 1e3, n->prefill_tokens_per_s, n->decode_step_s * 1e3);
    }
}

static int draw(const struct ctl_args *a, const struct picture *p, const struct picture *was)
{
    struct screen sc = {0};
    struct winsize size;

    if (a->output == CTL_JSON) {
        struct bt_buf b = {0};
        struct bt_jsonw w = {.b = &b};

        bt_jw_open(&w, NULL, '{');
        ctl_put_message(&w, "figures", &p->f->base);
        ctl_put_message(&w, "server", &p->s->base);
        bt_jw_close(&w, '}');
        return ctl_print_buf(&w);
    }
    if (!a->once && isatty(STDOUT_FILENO)) {
        if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) {
            sc.rows = size.ws_row;
            sc.cols = size.ws_col;
        }
        printf("\033[H\033[2J");
    }
    draw_router(&sc, p, was);
    draw_nodes(&sc, p);
    return CTL_OK;
}

int ctl_top(const struct ctl_args *a)
{
    struct picture now = {0}, was = {0};
    struct sigaction sa = {.sa_handler = on_stop}; /* no SA_RESTART: it ends the pause */
    int code = look(a, &now);

    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
    while (code == CTL_OK) {
        struct timespec ts = {.tv_sec = (time_t)(a->interval_ns / BT_NS_PER_S),
                              .tv_nsec = (long)(a->interval_ns % BT_NS_PER_S)};

        code = draw(a, &now, &was);
        if (code != CTL_OK || a->once || fflush(stdout) != 0 || stopped) {
            break;
        }
        drop(&was);
        was = now;
        now = (struct picture){0};
        if (nanosleep(&ts, NULL) != 0 && stopped) {
            break;
        }
        code = look(a, &now);
    }
    drop(&now);
    drop(&was);
    return code;
}
