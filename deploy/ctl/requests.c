/* batonctl requests, explain: what runs, and why a request went where it went. */
#include "deploy/ctl/show.h"

#include "common/thr/time.h"
#include "proto/inspect.pb-c.h"

static void print_rows(const Baton__V1__ListRequestsResponse *m)
{
    printf("%-16s %-10s %8s %-7s %-16s %-16s %8s %7s %7s  %s\n", "REQUEST", "STATE", "AGE", "PATH",
           "PREFILL", "DECODE", "PROMPT", "TOKENS", "RETRIES", "TENANT");
    for (size_t i = 0; i < m->n_requests; i++) {
        const Baton__V1__RequestRow *r = m->requests[i];

        printf("%-16s %-10s %7.1fs %-7s %-16s %-16s %8u %7u %7u  %s\n", r->id, r->state, r->age_s,
               ctl_path_name((int)r->path), ctl_dash(r->prefill_node), ctl_dash(r->decode_node),
               r->prompt_tokens, r->completion_tokens, r->retries, ctl_dash(r->tenant));
    }
    printf("%zu of %u running requests\n", m->n_requests, m->total);
}

int ctl_requests(const struct ctl_args *a)
{
    Baton__V1__ListRequestsRequest m = BATON__V1__LIST_REQUESTS_REQUEST__INIT;
    struct ctl_ask ask = {.path = "/baton.v1.Inspect/ListRequests",
                          .request = &m.base,
                          .response = &baton__v1__list_requests_response__descriptor,
                          .deadline_ns = bt_deadline_ns(a->timeout_ns)};
    ProtobufCMessage *got;
    int code;

    m.limit = (uint32_t)a->limit;
    code = ctl_ask(a->router, &ask, &got);
    if (code != CTL_OK) {
        return code;
    }
    if (a->output == CTL_JSON) {
        code = ctl_print_json(got);
    } else {
        ctl_make_plain(got);
        print_rows((const void *)got);
    }
    protobuf_c_message_free_unpacked(got, NULL);
    return code;
}

/* --- explain --------------------------------------------------------------------------------- */

static void print_head(const Baton__V1__Explanation *m)
{
    const Baton__V1__RequestRow *r = m->request;

    printf("request    %s%s%s, %s, tenant %s\n", r->id, r->client_id[0] ? ", client's id " : "",
           r->client_id, r->via, ctl_dash(r->tenant));
    if (m->status[0]) {
        printf("ended      %s, finish %s, after %.3f s%s\n", m->status, m->finish, m->total_s,
               m->good ? ", within the goodput limits" : "");
    } else {
        printf("runs       %s, for %.3f s\n", r->state, m->total_s);
    }
    printf("tokens     prompt %u, of them cached %u; answer %u\n", r->prompt_tokens,
           r->cached_tokens, r->completion_tokens);
    printf("path       %s (asked: %s), prefill %s, decode %s", ctl_path_name((int)r->path),
           m->asked_path, ctl_dash(r->prefill_node), ctl_dash(r->decode_node));
    if (r->store[0]) {
        printf(", store %s", r->store);
    }
    if (m->transport[0]) {
        char bytes[24];

        printf(", handed over by %s, %s", m->transport, ctl_bytes((double)m->handoff_bytes, bytes));
    }
    printf("\n");
    for (size_t i = 0; i < m->n_failed; i++) {
        printf("failed     %s\n", m->failed[i]->reason);
    }
}

static void print_tiers(const char *name, const Baton__V1__TierTokens *t, bool store)
{
    if (!t) {
        return;
    }
    printf("%-10s pool %u, host %u, disk %u", name, t->pool, t->host, t->disk);
    if (store) {
        printf(", store %u", t->store);
    }
    printf(" tokens\n");
}

static void print_candidates(const Baton__V1__Explanation *m)
{
    if (m->n_candidates == 0) {
        return;
    }
    printf("\n  %-20s %-8s %9s %9s %9s %9s %9s %9s %7s\n", "CANDIDATE", "LEG", "COST ms", "QUEUE",
           "BRING", "COMPUTE", "EVICT", "SHARE", "BLOCKS");
    for (size_t i = 0; i < m->n_candidates; i++) {
        const Baton__V1__Candidate *c = m->candidates[i];

        printf("%c %-20s %-8s %9.2f", c->chosen ? '*' : ' ', c->node, c->leg, c->cost_s * 1e3);
        if (strcmp(c->leg, "decode") != 0) {
            printf(" %9.2f %9.2f %9.2f %9.2f %9.2f %7u", c->queue_s * 1e3, c->bring_s * 1e3,
                   c->compute_s * 1e3, c->evict_s * 1e3, c->share_s * 1e3, c->cached_blocks);
        }
        printf("%s\n", c->excluded ? "  had failed" : "");
    }
    if (m->candidates_total > m->n_candidates) {
        printf("  the cheapest of %u\n", m->candidates_total);
    }
}

static void print_stages(const char *title, Baton__V1__Stage *const *stages, size_t n, double sum)
{
    if (n == 0) {
        return;
    }
    printf("\n%-16s %10.3f ms\n", title, sum * 1e3);
    for (size_t i = 0; i < n; i++) {
        if (stages[i]->s > 0) {
            printf("  %-14s %10.3f\n", stages[i]->name, stages[i]->s * 1e3);
        }
    }
}

static void print_explanation(const Baton__V1__Explanation *m)
{
    print_head(m);
    print_tiers("expected", m->expected, false);
    print_tiers("found", m->found, true);
    print_candidates(m);
    print_stages(m->first_token_s > 0 ? "first token" : "no token yet", m->first, m->n_first,
                 m->first_token_s > 0 ? m->first_token_s : m->total_s);
    print_stages("to the second", m->second, m->n_second, m->second_gap_s);
    if (m->token_s > 0) {
        printf("\n%-16s %10.3f ms\n", "each token", m->token_s * 1e3);
    }
}

int ctl_explain(const struct ctl_args *a)
{
    Baton__V1__ExplainRequest m = BATON__V1__EXPLAIN_REQUEST__INIT;
    struct ctl_ask ask = {.path = "/baton.v1.Inspect/Explain",
                          .request = &m.base,
                          .response = &baton__v1__explanation__descriptor,
                          .deadline_ns = bt_deadline_ns(a->timeout_ns)};
    ProtobufCMessage *got;
    int code;

    m.id = (char *)(uintptr_t)a->words[0];
    code = ctl_ask(a->router, &ask, &got);
    if (code != CTL_OK) {
        return code;
    }
    if (a->output == CTL_JSON) {
        code = ctl_print_json(got);
    } else if (!((Baton__V1__Explanation *)got)->request) {
        fprintf(stderr, "batonctl: %s: an empty answer\n", a->router);
        code = CTL_FAILED;
    } else {
        ctl_make_plain(got);
        print_explanation((const void *)got);
    }
    protobuf_c_message_free_unpacked(got, NULL);
    return code;
}
