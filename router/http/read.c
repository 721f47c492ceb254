/* Bodies become specs. A short one is read at once; a long one, which may take tens of
 * milliseconds, goes to the thread "reader", so that nobody else's answer waits for it.
 *
 * A long body moves to its job, and the exchange is held (n_held) until the job is back: meanwhile
 * the reader alone touches ex->spec. Bytes of the body count as the connection's did. */
#include "router/http/http_int.h"

#include <stdlib.h>

#define READ_HERE 32768 /* bytes that are read in well under a millisecond */

struct rt_http_read {
    struct bt_msg msg;
    struct rt_http *h;
    struct rt_http_ex *ex;
    struct bt_buf body;
    rt_http_read_fn read;
    rt_http_read_done done;
    int rc;
    struct bt_err err;
};

/* [http] */
static void on_read(struct bt_msg *msg, void *http)
{
    struct rt_http_read *job = BT_CONTAINER_OF(msg, struct rt_http_read, msg);
    struct rt_http_ex *ex = job->ex;
    struct rt_http *h = http;

    h->body_bytes -= job->body.cap;
    bt_buf_fini(&job->body);
    ex->n_held--;
    ex->reading = NULL;
    if (ex->over) {
        rt_http_ex_let_go(ex);
    } else if (rt_http_still_may(ex->conn) < 0) {
        rt_http_ex_error(ex, BT_E_UNAUTHENTICATED, NULL, "the token of this request is gone");
    } else {
        job->done(ex, job->rc, &job->err);
    }
    free(job);
}

/* [reader] */
static void on_job(struct bt_msg *msg, void *reader)
{
    struct rt_http_read *job = BT_CONTAINER_OF(msg, struct rt_http_read, msg);

    job->rc = job->read(job->ex, bt_buf_str(&job->body), &job->err);
    job->msg.handle = on_read;
    bt_mailbox_push(&job->h->mailbox, &job->msg); /* never closed while jobs are out */
}

void rt_http_read(struct rt_http_ex *ex, rt_http_read_fn read, rt_http_read_done done)
{
    struct rt_http_conn *c = ex->conn;
    struct rt_http_read *job = c->body.n > READ_HERE ? bt_calloc(1, sizeof(*job)) : NULL;
    struct bt_err err = {0};

    ex->spec.max_values = (size_t)ex->h->conf->max_body_values;
    if (!job) { /* without memory a long one as well */
        int rc = read(ex, bt_buf_str(&c->body), &err);

        done(ex, rc, &err);
        return;
    }
    *job = (struct rt_http_read){
        .msg.handle = on_job, .h = ex->h, .ex = ex, .body = c->body, .read = read, .done = done};
    c->body = (struct bt_buf){0};
    ex->n_held++;
    ex->reading = job;
    bt_worker_post(ex->h->reader, &job->msg);
}
