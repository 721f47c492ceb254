/* The decode node's movers: pieces into pages.
 *
 * A piece is a run of P's pages in one layer. Where both sides have the same page size it is read
 * straight into our pages, one read per run of neighbours on our side; where sizes differ it is
 * read into a bounce buffer and its tokens are copied head by head. The checksum is taken over what
 * has landed, or, where we copy ourselves, over what we copied: each byte is read once for both. A
 * piece that does not match is asked for once more (P checks the generation of its pages and sums
 * again); then the handoff fails. */
#include "kvstore/handoff/handoff_int.h"

#include "common/obs/log.h"

#include <stdlib.h>

void kv_recv_piece_free(struct kv_piece *piece)
{
    bt_list_remove(&piece->link);
    free(piece->bounce);
    free(piece);
}

/* Page sizes are equal and none of the piece is here already: it can land where it belongs. */
static bool lands_in_place(const struct kv_piece *piece)
{
    const struct kv_recv *r = piece->r;

    return r->peer->layout.page_tokens == r->end.fmt->layout->page_tokens &&
           piece->first_page >= r->first_page;
}

/* Our pages from prompt page `first` on that are neighbours, at most `max`. */
static uint32_t run_of(const struct kv_recv *r, uint32_t first, uint32_t max)
{
    uint32_t n = 1;

    while (n < max && r->pages[first + n] == r->pages[first] + n) {
        n++;
    }
    return n;
}

static char *page_at(const struct kv_recv *r, uint32_t layer, uint32_t prompt_page)
{
    return kv_pool_page(r->end.fmt->pool, (int)layer, r->pages[prompt_page]);
}

/* Our pages are TRANSFER until done, so a new generation is somebody's bug, not a race. */
static bool pages_are_ours(const struct kv_piece *piece)
{
    const struct kv_recv *r = piece->r;
    uint32_t theirs = (uint32_t)r->peer->layout.page_tokens;
    uint32_t ours = (uint32_t)r->end.fmt->layout->page_tokens;
    uint32_t first = BT_MAX(piece->first_page * theirs / ours, r->first_page);
    uint32_t end = BT_DIV_UP((piece->first_page + piece->at.n_pages) * theirs, ours);

    for (uint32_t i = first; i < BT_MIN(end, r->n_pages); i++) {
        if (kv_pool_generation(r->end.fmt->pool, r->pages[i]) != r->generations[i]) {
            return false;
        }
    }
    return true;
}

/* ---- copies between page sizes ---- */

/* Tokens [from, from + n) of the prompt, which lie at `src` in P's layout beginning with token
 * `src_first`, into our pages: for each head one copy of n * head_dim elements, for K and for V,
 * within one page of either side. */
static void copy_tokens(struct kv_recv *r,
                        uint32_t layer,
                        const char *src,
                        uint32_t src_first,
                        uint32_t from,
                        uint32_t n)
{
    const struct kv_layout *ours = r->end.fmt->layout, *theirs = &r->peer->layout;
    uint32_t tp = (uint32_t)theirs->page_tokens, td = (uint32_t)ours->page_tokens;
    size_t token = (size_t)ours->head_dim * r->end.fmt->elem;
    const char *s = src + (size_t)((from - src_first) / tp) * theirs->page_stride;
    char *d = page_at(r, layer, from / td);

    for (int kv_head = 0; kv_head < 2 * ours->n_kv_heads; kv_head++) {
        memcpy(d + ((size_t)kv_head * td + from % td) * token,
               s + ((size_t)kv_head * tp + from % tp) * token, n * token);
    }
}

static void scatter(struct kv_piece *piece, const char *src)
{
    struct kv_recv *r = piece->r;
    uint32_t tp = (uint32_t)r->peer->layout.page_tokens;
    uint32_t td = (uint32_t)r->end.fmt->layout->page_tokens;
    uint32_t first = piece->first_page * tp;
    uint32_t end = BT_MIN(first + piece->at.n_pages * tp, r->n_tokens);

    for (uint32_t t = BT_MAX(first, r->n_have); t < end;) {
        uint32_t n = BT_MIN(tp - t % tp, td - t % td);

        n = BT_MIN(n, end - t);
        copy_tokens(r, piece->layer, src, first, t, n);
        t += n;
    }
}

/* ---- check ---- */

static void maybe_corrupt(char *p)
{
    int n = __atomic_load_n(&kv_handoff_corrupt_next, __ATOMIC_RELAXED);

    if (n > 0) {
        __atomic_store_n(&kv_handoff_corrupt_next, n - 1, __ATOMIC_RELAXED);
        *p = (char)(*p ^ 1);
    }
}

/* XXH3-64 of a piece that lies in our pages. */
static uint64_t sum_in_place(const struct kv_piece *piece)
{
    const struct kv_recv *r = piece->r;
    size_t stride = r->end.fmt->layout->page_stride;
    uint32_t n = run_of(r, piece->first_page, piece->at.n_pages);
    XXH3_state_t *st = r->end.h->xxh;

    maybe_corrupt(page_at(r, piece->layer, piece->first_page));
    if (n == piece->at.n_pages) {
        return kv_sum(page_at(r, piece->layer, piece->first_page), n * stride);
    }
    XXH3_64bits_reset(st);
    for (uint32_t i = 0; i < piece->at.n_pages; i += n) {
        n = run_of(r, piece->first_page + i, piece->at.n_pages - i);
        XXH3_64bits_update(st, page_at(r, piece->layer, piece->first_page + i), n * stride);
    }
    return XXH3_64bits_digest(st);
}

static void ask_again(struct kv_piece *piece)
{
    struct kv_recv *r = piece->r;
    struct wire_handoff m = {
        .type = WIRE_HANDOFF_RESEND,
        .id_hi = r->end.id.hi,
        .id_lo = r->end.id.lo,
        .ticket = r->ticket,
        .layer = piece->layer,
        .first_page = piece->first_page,
        .n_pages = piece->at.n_pages,
        .generation = piece->at.generation,
    };

    piece->again = true;
    free(piece->bounce);
    piece->bounce = NULL;
    bt_list_push_back(&r->again, &piece->link);
    kv_peer_send(r->peer, &m, (struct bt_str){0});
}

/* The piece that goes on where the layer has got to, if it is in already. */
static struct kv_piece *next_late(struct kv_recv *r, uint32_t layer)
{
    bt_list_for_each (it, &r->late) {
        struct kv_piece *piece = BT_LIST_ENTRY(it, struct kv_piece, link);

        if (piece->layer == layer && piece->first_page == r->placed[layer]) {
            return piece;
        }
    }
    return NULL;
}

void kv_recv_piece_placed(struct kv_piece *piece)
{
    struct kv_recv *r = piece->r;
    uint32_t layer = piece->layer, page_tokens = (uint32_t)r->peer->layout.page_tokens;

    r->n_placed += piece->at.n_pages;
    if (piece->first_page != r->placed[layer]) {
        free(piece->bounce);
        piece->bounce = NULL;
        bt_list_push_back(&r->late, &piece->link);
        return;
    }
    for (; piece; piece = next_late(r, layer)) {
        r->placed[layer] += piece->at.n_pages;
        kv_recv_piece_free(piece);
    }
    if (r->events.progress) {
        r->events.progress(r->events.arg, (int)layer,
                           BT_MIN(r->placed[layer] * page_tokens, r->n_tokens));
    }
}

/* P keeps its sums a little ahead of us. */
static void tell_reached(struct kv_recv *r)
{
    struct wire_handoff m = {
        .type = WIRE_HANDOFF_REACHED,
        .id_hi = r->end.id.hi,
        .id_lo = r->end.id.lo,
        .ticket = r->ticket,
        .reached = r->bytes,
    };

    if (r->method == BT_NET_METHOD_PULL && r->peer->version >= 3 &&
        r->bytes - r->reached >= WIRE_HANDOFF_REACHED_BYTES) {
        r->reached = r->bytes;
        kv_peer_send(r->peer, &m, (struct bt_str){0});
    }
}

/* The bytes are there and `sum` is theirs: right, once more, or the end. */
static void judge(struct kv_piece *piece, uint64_t sum)
{
    struct kv_recv *r = piece->r;
    struct kv_handoff *h = r->end.h;

    if (!pages_are_ours(piece)) {
        kv_add(&h->stale, 1);
        kv_recv_piece_free(piece);
        kv_recv_fail(r, BT_E_PEER_STALE, "a page changed hands during its transfer");
        return;
    }
    if (sum != piece->at.sum) {
        kv_add(&h->checksum_errors, 1);
        BT_WARN("handoff_checksum", "peer=%s layer=%u page=%u again=%d", r->peer->name,
                piece->layer, piece->first_page, piece->again);
        if (!piece->again && r->method != BT_NET_METHOD_PUT) {
            ask_again(piece);
            return;
        }
        kv_recv_piece_free(piece);
        kv_recv_fail(r, BT_E_CORRUPT, "the bytes of a page do not match their checksum");
        return;
    }
    if (piece->bounce) {
        scatter(piece, piece->bounce);
    }
    kv_add(&h->bytes, piece->bytes);
    r->bytes += piece->bytes;
    tell_reached(r);
    kv_recv_piece_placed(piece);
    kv_recv_check_end(r);
}

/* ---- message, put ---- */

void kv_recv_placed(struct kv_piece *piece)
{
    judge(piece, sum_in_place(piece));
}

/* Bytes [at, at + n) of a piece, which come next in `c`, into our pages, which have P's size. */
static void
place_bytes(const struct kv_piece *piece, struct kv_copy *c, size_t at, const char *p, size_t n)
{
    struct kv_recv *r = piece->r;
    size_t stride = r->end.fmt->layout->page_stride;

    while (n > 0) {
        size_t k = BT_MIN(stride - at % stride, n);

        kv_copy_add(
            c, page_at(r, piece->layer, piece->first_page + (uint32_t)(at / stride)) + at % stride,
            p, k);
        at += k;
        p += k;
        n -= k;
    }
    kv_copy_flush(c);
}

/* The sum of a piece that was summed on its way into our pages. */
static uint64_t sum_of_copy(const struct kv_piece *piece, struct kv_copy *c)
{
    char *at = page_at(piece->r, piece->layer, piece->first_page), old = *at;

    maybe_corrupt(at);
    return kv_copy_end(c) ^ (uint64_t)(*at != old);
}

void kv_recv_place_part(struct kv_piece *piece, struct bt_str data)
{
    struct kv_recv *r = piece->r;

    if (!lands_in_place(piece) && !piece->bounce) {
        piece->bounce = malloc(piece->bytes);
        if (!piece->bounce) {
            r->part = NULL;
            kv_recv_piece_free(piece);
            kv_recv_fail(r, BT_E_NOMEM, "handoff: out of memory");
            return;
        }
    }
    if (piece->bounce) {
        memcpy(piece->bounce + piece->landed, data.p, data.n);
    } else {
        if (piece->landed == 0) {
            kv_copy_begin(&r->copy);
        }
        place_bytes(piece, &r->copy, piece->landed, data.p, data.n);
    }
    piece->landed += data.n;
    if (piece->landed < piece->bytes) {
        return;
    }
    r->part = NULL;
    if (piece->bounce) {
        maybe_corrupt(piece->bounce);
    }
    judge(piece,
          piece->bounce ? kv_sum(piece->bounce, piece->bytes) : sum_of_copy(piece, &r->copy));
}

/* ---- pull ---- */

static void piece_landed(struct kv_piece *piece)
{
    struct kv_recv *r = piece->r;

    if (r->state != KV_RECV_FILLING) {
        kv_recv_piece_free(piece);
        kv_recv_check_end(r);
    } else if (piece->rc == BT_E_NOMEM) {
        kv_recv_piece_free(piece);
        kv_recv_fail(r, BT_E_NOMEM, "handoff: out of memory");
    } else if (piece->rc != BT_OK) {
        struct kv_peer *p = r->peer;

        /* Its memory cannot be read: nothing on this connection can be trusted to come. */
        kv_recv_piece_free(piece);
        kv_peer_close(p, BT_E_PEER_LOST, "the prefill node's memory cannot be read");
        kv_recv_check_end(r);
    } else {
        if (piece->bounce) {
            maybe_corrupt(piece->bounce);
        }
        judge(piece, piece->bounce ? kv_sum(piece->bounce, piece->bytes) : sum_in_place(piece));
    }
}

static void on_got(void *arg, int rc)
{
    struct kv_piece *piece = arg;
    struct kv_recv *r = piece->r;

    r->n_ops--;
    if (rc != BT_OK) {
        piece->rc = rc;
    }
    if (--piece->n_ops == 0) {
        r->peer->in_bytes -= piece->bytes;
        if (!bt_list_empty(&r->pieces)) {
            kv_work_ready(r->end.h, &r->work);
        }
        piece_landed(piece);
    }
}

/* One read; the piece holds it until it is back. */
static bool read_run(struct kv_piece *piece, void *to, uint64_t offset, size_t bytes)
{
    struct kv_recv *r = piece->r;
    struct kv_peer *p = r->peer;
    uint64_t from =
        p->base + kv_layout_offset(&p->layout, (int)piece->layer, piece->at.page) + offset;
    int rc;

    piece->n_ops++;
    r->n_ops++;
    rc = p->closing ? BT_E_PEER_LOST : bt_net_get(p->net, to, from, bytes, p->rkey, on_got, piece);
    if (rc != BT_OK) {
        piece->rc = rc;
        piece->n_ops--;
        r->n_ops--;
    }
    return rc == BT_OK;
}

/* P's bytes can be seen in place: copied and summed in one pass. */
static bool take_view(struct kv_piece *piece)
{
    struct kv_peer *p = piece->r->peer;
    const void *view =
        p->closing || !lands_in_place(piece)
            ? NULL
            : bt_net_view(p->net,
                          p->base + kv_layout_offset(&p->layout, (int)piece->layer, piece->at.page),
                          piece->bytes);
    struct kv_copy c;

    if (!view) {
        return false;
    }
    kv_copy_begin(&c);
    place_bytes(piece, &c, 0, view, piece->bytes);
    judge(piece, sum_of_copy(piece, &c));
    return true;
}

static void start_piece(struct kv_piece *piece)
{
    struct kv_recv *r = piece->r;
    size_t stride = r->end.fmt->layout->page_stride;

    if (take_view(piece)) {
        return;
    }
    r->peer->in_bytes += piece->bytes;
    piece->n_ops++; /* ours, until all reads are posted */
    r->n_ops++;
    if (lands_in_place(piece)) {
        for (uint32_t i = 0, n; i < piece->at.n_pages; i += n) {
            n = run_of(r, piece->first_page + i, piece->at.n_pages - i);
            if (!read_run(piece, page_at(r, piece->layer, piece->first_page + i),
                          (uint64_t)i * stride, n * stride)) {
                break;
            }
        }
    } else {
        piece->bounce = malloc(piece->bytes);
        if (!piece->bounce) {
            piece->rc = BT_E_NOMEM;
        } else {
            read_run(piece, piece->bounce, 0, piece->bytes);
        }
    }
    on_got(piece, piece->rc);
}

bool kv_recv_move(struct kv_work *w, size_t *budget)
{
    struct kv_recv *r = BT_CONTAINER_OF(w, struct kv_recv, work);

    while (r->state == KV_RECV_FILLING && !r->peer->closing && !bt_list_empty(&r->pieces)) {
        struct kv_piece *piece = BT_LIST_ENTRY(r->pieces.next, struct kv_piece, link);

        if (*budget == 0) {
            return true;
        }
        if (r->peer->in_bytes > 0 &&
            r->peer->in_bytes + piece->bytes > r->end.h->cfg.max_inflight_bytes) {
            return false; /* a read that comes back wakes us */
        }
        bt_list_remove(&piece->link);
        *budget -= BT_MIN(*budget, piece->bytes);
        start_piece(piece); /* may end the recv, which is then DONE but still there */
    }
    return false;
}
