/* Thread team: fork and join inside one CPU op.
 *
 * Owner: the model. The caller is member 0 and works too. Between ops a worker spins for a bounded
 * moment (SPIN_NS in team.c), then sleeps on a futex, so that an idle engine costs nothing. Which
 * member runs an item is left open (items are taken from a counter); ops are written so that
 * results do not depend on it. */
#ifndef KN_CPU_TEAM_H
#define KN_CPU_TEAM_H

#include "common/base/rc.h"

struct kn_team;

/* Starts n_threads - 1 workers. n_threads 1..256. */
int kn_team_create(int n_threads, struct kn_team **ret_team, struct bt_err *err) BT_MUST_USE;
/* NULL is fine. Joins the workers. */
void kn_team_destroy(struct kn_team *team);
/* Members including the caller; 1 for NULL. */
int kn_team_size(const struct kn_team *team);

/* Calls fn(arg, item, member) once for every item in [0, n_items) and returns when all are done;
 * what fn wrote is visible to the caller. fn must not call kn_team_run. Only the thread that made
 * the team. NULL team: on the caller, in order. */
typedef void (*kn_team_fn)(void *arg, int item, int member);
void kn_team_run(struct kn_team *team, int n_items, kn_team_fn fn, void *arg);

#endif
