/* Long texts are turned into ids on a thread of their own, so that one client's megabytes do not
 * hold up everybody's tokens. A job goes to the thread by its mailbox and comes back by the loop's;
 * it is owned by whoever has it. */
#include "router/router_int.h"

#include "common/thr/worker.h"

#include <stdlib.h>

struct rt_tok_worker {
    struct rt_router *router;
    struct bt_worker *thread;
    size_t n_jobs; /* loop thread */
};

static void free_job(struct rt_tok_job *job)
{
    free(job->text);
    if (job->chat) {
        baton__v1__chat__free_unpacked(job->chat, NULL);
    }
    bt_ids_fini(&job->ids);
    free(job);
}

/* [loop] */
static void on_done(struct bt_msg *msg, void *loop)
{
    struct rt_tok_job *job = BT_CONTAINER_OF(msg, struct rt_tok_job, msg);

    job->worker->n_jobs--;
    if (job->user) {
        job->done(job->user, job);
    }
    free_job(job);
}

/* [tokenizer] */
static void on_job(struct bt_msg *msg, void *worker)
{
    struct rt_tok_job *job = BT_CONTAINER_OF(msg, struct rt_tok_job, msg);
    const struct rt_tok_worker *w = worker;
    const struct rt_model *model = w->router->model;

    job->rc = job->text ? rt_model_text(model, job->text, &job->ids, &job->err)
                        : rt_model_chat(model, job->chat, &job->ids, &job->err);
    job->msg.handle = on_done;
    bt_loop_post(w->router->loop, &job->msg); /* the loop outlives this thread */
}

int rt_tok_worker_start(struct rt_router *r, struct bt_err *err)
{
    struct rt_tok_worker *w = bt_calloc(1, sizeof(*w));
    int rc;

    if (!w) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory for the tokenizer's thread");
    }
    w->router = r;
    rc = bt_worker_start("tokenizer", w, &w->thread, err);
    if (rc < 0) {
        free(w);
        return rc;
    }
    r->tok_worker = w;
    return BT_OK;
}

void rt_tok_worker_stop(struct rt_tok_worker *w)
{
    if (!w) {
        return;
    }
    bt_worker_stop(w->thread);
    while (w->n_jobs > 0) { /* what came back last */
        bt_loop_poll(w->router->loop, BT_NEVER_NS);
    }
    free(w);
}

static Baton__V1__Chat *copy_chat(const Baton__V1__Chat *chat)
{
    size_t n = baton__v1__chat__get_packed_size(chat);
    uint8_t *bytes = malloc(n + 1);
    Baton__V1__Chat *copy = NULL;

    if (bytes) {
        baton__v1__chat__pack(chat, bytes);
        copy = baton__v1__chat__unpack(NULL, n, bytes);
        free(bytes);
    }
    return copy;
}

size_t rt_chat_bytes(const Baton__V1__Chat *chat)
{
    size_t n = 0;

    for (size_t i = 0; i < chat->n_messages; i++) {
        n += strlen(chat->messages[i]->role) + strlen(chat->messages[i]->content) +
             strlen(chat->messages[i]->name);
    }
    return n;
}

int rt_tok_start(struct rt_router *r,
                 const struct rt_tok_input *in,
                 struct rt_tok_job **ret_job,
                 struct bt_err *err)
{
    struct rt_tok_worker *w = r->tok_worker;
    struct rt_tok_job *job;

    if (w->n_jobs >= RT_TOK_MAX_JOBS) {
        return BT_FAIL(err, BT_E_EXHAUSTED, "%zu long texts are waiting to be tokenized",
                       w->n_jobs);
    }
    job = bt_calloc(1, sizeof(*job));
    if (job) {
        job->text = in->text ? strdup(in->text) : NULL;
        job->chat = in->text ? NULL : copy_chat(in->chat);
    }
    if (!job || (!job->text && !job->chat)) {
        free(job);
        return BT_FAIL(err, BT_E_NOMEM, "no memory for a long text");
    }
    job->msg.handle = on_job;
    job->worker = w;
    job->done = in->done;
    job->user = in->user;
    w->n_jobs++;
    *ret_job = job;
    bt_worker_post(w->thread, &job->msg);
    return BT_OK;
}
