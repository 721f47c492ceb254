/* A Kubernetes API server: who it is, how to prove who we are, one request at a time.
 *
 * Where from, in this order: --kubeconfig; --service-account; $KUBECONFIG (one file); the service
 * account of the pod that this runs in; ~/.kube/config. What a kubeconfig asks for and this program
 * does not do (exec plug-ins, auth providers, passwords, impersonation, proxies, TLS without
 * verification) is an error that names it. Servers are https alone, always verified; redirects are
 * not followed, since the token would go with them. Blocks; failures are told on stderr. */
#ifndef CTL_KUBE_H
#define CTL_KUBE_H

#include "deploy/ctl/ctl.h"

#include <jansson.h>

struct kube {     /* texts are owned; NULL = not given */
    char *server; /* https://host:port, without a slash at the end */
    char *ns;
    char *ca, *cert, *key; /* PEM; ca NULL = the system's */
    char *token;           /* checked: no control characters */
};

/* An exit code; on failure nothing is left in *ret. */
int kube_load(const struct ctl_args *a, struct kube *ret);
void kube_free(struct kube *k);
/* The file of a kubeconfig; for kube_load. */
int kube_config_read(const char *path, const char *context, struct kube *ret);
/* Whole content of a file of at most 1 MiB, with a NUL behind it; NULL: told on stderr. */
char *kube_read_file(const char *path);

struct kube_request {
    const char *method, *path; /* path begins with a slash */
    const json_t *body;        /* NULL = none */
    const char *content_type;  /* of the body; NULL = application/json */
    uint64_t deadline_ns;
    bool quiet_conflict; /* 409 is not told: the caller tries again */
    bool quiet_missing;  /* nor is 404: the caller asks whether it is there */
};

/* Whether that status says that nothing was done; without one of these the order may have been
 * carried out, though its answer was lost or makes no sense. */
static inline bool kube_refused(long status)
{
    return status >= 400 && status <= 499;
}

/* CTL_OK with the answer's object, which the caller frees. *ret_status: of HTTP, 0 = there was no
 * answer; may be NULL. 429 and 503 are tried again until the deadline, as the server asks. */
int kube_call(const struct kube *k,
              const struct kube_request *r,
              json_t **ret_answer,
              long *ret_status);

#endif
