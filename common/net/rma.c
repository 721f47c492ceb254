/* One-sided access: registered memory, keys, get, put, flush. */
#include "common/net/net_int.h"

#include <stdlib.h>

int bt_net_mem_register(struct bt_net *net,
                        void *base,
                        size_t bytes,
                        struct bt_net_mem **ret_mem,
                        struct bt_str *ret_key,
                        struct bt_err *err)
{
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = base,
        .length = bytes,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    struct bt_net_mem *mem = bt_calloc(1, sizeof(*mem));
    ucs_status_t status;

    if (!mem) {
        return BT_FAIL(err, BT_E_NOMEM, "memory registration: out of memory");
    }
    mem->net = net;
    status = ucp_mem_map(net->context, &params, &mem->memh);
    if (status != UCS_OK) {
        free(mem);
        return BT_FAIL(err, BT_E_NOMEM, "cannot register %zu bytes with UCX: %s", bytes,
                       ucs_status_string(status));
    }
    status = ucp_rkey_pack(net->context, mem->memh, &mem->key, &mem->key_bytes);
    if (status != UCS_OK) {
        ucp_mem_unmap(net->context, mem->memh);
        free(mem);
        return BT_FAIL(err, BT_E_INTERNAL, "UCX memory key: %s", ucs_status_string(status));
    }
    bt_list_push_back(&net->mems, &mem->link);
    *ret_mem = mem;
    *ret_key = (struct bt_str){mem->key, mem->key_bytes};
    return BT_OK;
}

/* UCX keeps what was registered with an RDMA device, and with it the keys that peers have got,
 * until its cache is too full, which it looks at when something is registered. It is told that one
 * region is too many (env.c), so registering a page that nobody knows ends the keys of all that is
 * free. */
static void end_cached_keys(struct bt_net *net)
{
    static char page[4096] BT_ALIGNED(4096);
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
        .address = page,
        .length = sizeof(page),
    };
    ucp_mem_h memh;

    if (ucp_mem_map(net->context, &params, &memh) == UCS_OK) {
        ucp_mem_unmap(net->context, memh);
    }
}

void bt_net_mem_unregister(struct bt_net_mem *mem)
{
    if (!mem) {
        return;
    }
    bt_list_remove(&mem->link);
    ucp_rkey_buffer_release(mem->key);
    ucp_mem_unmap(mem->net->context, mem->memh);
    end_cached_keys(mem->net);
    free(mem);
}

int bt_net_rkey_unpack(struct bt_net_peer *peer,
                       struct bt_str key,
                       struct bt_net_rkey **ret_rkey,
                       struct bt_err *err)
{
    struct bt_net_rkey *rkey;
    char *copy;
    ucs_status_t status;

    if (peer->state != BT_NET_PEER_UP || peer->dying) {
        return BT_FAIL(err, BT_E_PEER_LOST, "the connection is not up");
    }
    if (key.n < 8 || key.n > BT_NET_MAX_KEY) {
        return BT_FAIL(err, BT_E_PEER_PROTOCOL, "memory key of %zu bytes", key.n);
    }
    rkey = bt_calloc(1, sizeof(*rkey));
    copy = bt_calloc(1, BT_NET_KEY_ROOM);
    if (!rkey || !copy) {
        free(rkey);
        free(copy);
        return BT_FAIL(err, BT_E_NOMEM, "memory key: out of memory");
    }
    /* UCX takes no length and believes what the key says: give it room with zeros behind, so that a
     * short or forged key reads zeros, never foreign memory. */
    memcpy(copy, key.p, key.n);
    status = ucp_ep_rkey_unpack(peer->ep, copy, &rkey->rkey);
    free(copy);
    if (status != UCS_OK) {
        free(rkey);
        return BT_FAIL(err, BT_E_PEER_PROTOCOL, "memory key: %s", ucs_status_string(status));
    }
    rkey->peer = peer;
    *ret_rkey = rkey;
    return BT_OK;
}

void bt_net_rkey_destroy(struct bt_net_rkey *rkey)
{
    if (rkey) {
        ucp_rkey_destroy(rkey->rkey);
        free(rkey);
    }
}

int bt_net_get(struct bt_net_peer *peer,
               void *local,
               uint64_t remote,
               size_t bytes,
               struct bt_net_rkey *rkey,
               bt_net_done_fn done,
               void *arg)
{
    ucp_request_param_t param;
    struct bt_net_op *op;

    if (peer->state != BT_NET_PEER_UP || peer->dying || peer->flushing) {
        return BT_E_PEER_LOST;
    }
    if (peer->mapped_pid) {
        int rc = bt_net_mapped_read(peer, local, remote, bytes);

        if (rc == BT_OK && done) {
            done(arg, BT_OK);
        }
        return rc;
    }
    if (!rkey) {
        return BT_E_PEER_PROTOCOL;
    }
    op = bt_net_op_new(peer, 0, done, arg);
    if (!op) {
        return BT_E_NOMEM;
    }
    param = bt_net_op_param(op);
    return bt_net_op_started(op, ucp_get_nbx(peer->ep, local, bytes, remote, rkey->rkey, &param));
}

int bt_net_put(struct bt_net_peer *peer,
               const void *local,
               uint64_t remote,
               size_t bytes,
               struct bt_net_rkey *rkey,
               bt_net_done_fn done,
               void *arg)
{
    ucp_request_param_t param;
    struct bt_net_op *op;

    if (peer->state != BT_NET_PEER_UP || peer->dying || peer->flushing) {
        return BT_E_PEER_LOST;
    }
    if (!rkey) {
        return BT_E_PEER_PROTOCOL;
    }
    op = bt_net_op_new(peer, 0, done, arg);
    if (!op) {
        return BT_E_NOMEM;
    }
    param = bt_net_op_param(op);
    return bt_net_op_started(op, ucp_put_nbx(peer->ep, local, bytes, remote, rkey->rkey, &param));
}

int bt_net_flush(struct bt_net_peer *peer, bt_net_done_fn done, void *arg)
{
    ucp_request_param_t param;
    struct bt_net_op *op;

    if (peer->state != BT_NET_PEER_UP || peer->dying) {
        return BT_E_PEER_LOST;
    }
    op = bt_net_op_new(peer, 0, done, arg);
    if (!op) {
        return BT_E_NOMEM;
    }
    param = bt_net_op_param(op);
    return bt_net_op_started(op, ucp_ep_flush_nbx(peer->ep, &param));
}
