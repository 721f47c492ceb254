/* Memory that outlives an engine on the card, held by a keeper: processes are killed (SIGKILL) or
 * lose the device (a kernel that writes where nothing is) in the middle of load, and their
 * successors find what they sealed.
 *
 * Six lives of an engine, one process each. A life takes over what the one before left, asks the
 * next turn of twelve chats, and then works on load until it ends. Every turn but the first must be
 * a hit: all whole blocks of the last turn whose K and V were computed. In the end one process
 * without keeper and without reuse computes every turn again, one at a time: its tokens must be the
 * same ones (numerics=invariant).
 *
 *   gpu_survive_check KEEPER       the program baton-keeper
 *
 * BATON_TEST_MODULE and BATON_TEST_DATA as for the other checks; without a module the engines run
 * on the CPU, where nothing but SIGKILL can be tried. Needs no gRPC. Threads: main; in a life also
 * the engine's, which emits. */
#include "common/base/buf.h"
#include "common/file/model.h"
#include "common/thr/time.h"
#include "kernels/core/device.h"
#include "kernels/engine/engine.h"
#include "kvstore/keeper/client.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    CHATS = 12,
    ANSWER = 24,
    BLOCK = 64,
    PAGE = 32,
    PAGES = 2048,
    LOAD = 8,        /* requests at once */
    LOAD_KINDS = 16, /* prompts that they have */
    MAX_IDS = 4096,
    TAGS = 1 << 16,
    LOAD_TAG = 100
};

int rig_fault(void);

enum { LIVES = 6 };
static const char *const endings[LIVES] = {"kill", "kill", "fault", "kill", "fault", "end"};

struct chat {
    int n, known; /* ids so far; of them computed by the life before */
    int32_t ids[MAX_IDS];
};

static void die(const char *what, const struct bt_err *err)
{
    fprintf(stderr, "survive_check: %s: %s\n", what, err ? err->msg : "");
    exit(1);
}

/* ---- a life ---- */

struct result {
    int32_t ids[ANSWER * 4];
    uint32_t n, cached;
    bool last;
    int rc;
};

struct life {
    struct kn_engine *engine;
    struct kv_keeper *keeper; /* NULL = cold */
    struct bt_model_file *file;
    struct result *results; /* [TAGS] guarded by lock */
    pthread_mutex_t lock;
    pthread_cond_t cond;
};

static void on_step(void *arg, struct kn_step *take_step)
{
    struct life *l = arg;

    pthread_mutex_lock(&l->lock);
    for (size_t i = 0; i < take_step->n_outputs; i++) {
        const struct kn_output *o = &take_step->outputs[i];
        struct result *r = &l->results[o->tag];

        r->cached = o->cached_tokens;
        for (uint32_t t = 0; t < o->n_tokens && r->n < BT_ARRAY_LEN(r->ids); t++) {
            r->ids[r->n++] = o->tokens[t].id;
        }
        if (o->finish != KN_FINISH_NONE || o->rc < 0) {
            r->last = true;
            r->rc = o->rc;
        }
    }
    pthread_cond_broadcast(&l->cond);
    pthread_mutex_unlock(&l->lock);
    kn_step_free(take_step);
}

/* Waits until the request is over (or has a token); false when that takes too long. */
static bool wait_for(struct life *l, uint64_t tag, bool first)
{
    uint64_t deadline = bt_deadline_ns(30 * BT_NS_PER_S);
    bool there;

    pthread_mutex_lock(&l->lock);
    while (!(there = l->results[tag].last || (first && l->results[tag].n > 0)) &&
           bt_now_ns() < deadline) {
        struct timespec ts;

        clock_gettime(CLOCK_REALTIME, &ts);
        ts.tv_sec++;
        pthread_cond_timedwait(&l->cond, &l->lock, &ts);
    }
    pthread_mutex_unlock(&l->lock);
    return there;
}

static void submit(struct life *l, uint64_t tag, const int32_t *ids, int n, int n_answer)
{
    struct wire_sampling sampling;
    struct kn_submit_args a = {.tag = tag,
                               .leg = KN_LEG_LOCAL,
                               .prompt = ids,
                               .n_prompt = (size_t)n,
                               .sampling = &sampling,
                               .claim = tag,
                               .deadline_ns = BT_NEVER_NS};
    struct bt_err err = {0};

    wire_sampling_defaults(&sampling);
    sampling.temperature = 0;
    sampling.max_tokens = (uint32_t)n_answer;
    sampling.ignore_eos = true;
    if (kn_engine_submit(l->engine, &a, &err) < 0) {
        die("submit", &err);
    }
}

static void life_begin(struct life *l, const char *socket)
{
    static const uint8_t digest[32] = {7};
    const char *data = getenv("BATON_TEST_DATA"), *module = getenv("BATON_TEST_MODULE");
    struct kv_keeper_cfg kc = {.socket = socket,
                               .node = "survivor",
                               .incarnation = (uint64_t)getpid() << 32 | 1,
                               .wait_ns = 5 * BT_NS_PER_S};
    struct kn_engine_cfg cfg = {.mem = &bt_mem_host,
                                .n_threads = 1,
                                .invariant = true,
                                .page_tokens = PAGE,
                                .max_ctx = MAX_IDS,
                                .block_tokens = socket ? BLOCK : 0,
                                .key = {.model_digest = digest},
                                .max_batch_tokens = 512,
                                .max_running = 32,
                                .max_waiting = 64,
                                .emit = on_step,
                                .emit_arg = l};
    const struct bt_model_config *c;
    struct bt_err err = {0};
    char path[4096];

    snprintf(path, sizeof(path), "%s/tiny.gguf", data ? data : "tests/data");
    if (bt_model_open(path, &l->file, &err) < 0 ||
        (module && kn_device_load(module, &cfg.device, &err) < 0) ||
        (socket && kv_keeper_open(&kc, &l->keeper, &err) < 0)) {
        die("start", &err);
    }
    c = bt_model_config(l->file);
    cfg.file = l->file;
    cfg.keeper = l->keeper;
    cfg.pool_bytes =
        (size_t)c->n_layers * 2 * (size_t)c->n_kv_heads * (size_t)c->head_dim * PAGE * PAGES * 2;
    if (kn_engine_create(&cfg, &l->engine, &err) < 0 ||
        kn_engine_start(l->engine, NULL, &err) < 0 ||
        (l->keeper && kv_keeper_start(l->keeper, &err) < 0)) {
        die("engine", &err);
    }
}

static void say_turn(struct life *l, uint64_t tag)
{
    const struct result *r = &l->results[tag];

    printf("turn %d %u", (int)tag, r->cached);
    for (uint32_t i = 0; i < r->n; i++) {
        printf(" %d", r->ids[i]);
    }
    printf("\n");
}

/* The next turn of all chats: together, or (cold) one by one. */
static void turns(struct life *l, const struct chat *chats)
{
    for (uint64_t i = 0; i < CHATS; i++) {
        submit(l, i, chats[i].ids, chats[i].n, ANSWER);
        if (!l->keeper && !wait_for(l, i, false)) {
            die("a turn takes too long", NULL);
        }
    }
    for (uint64_t i = 0; i < CHATS; i++) {
        if (!wait_for(l, i, false) || l->results[i].rc < 0 || l->results[i].n != ANSWER) {
            die("a turn failed", NULL);
        }
        say_turn(l, i);
    }
}

static void submit_load(struct life *l, uint64_t tag)
{
    static int32_t ids[1024];
    int kind = (int)(tag % LOAD_KINDS), n = 100 + kind * 53;

    for (int i = 0; i < n; i++) {
        ids[i] = (int32_t)((uint32_t)(kind * 4099 + i + 11) * 2654435761u >> 8) % 256;
    }
    submit(l, tag, ids, n, 64);
}

/* Keeps LOAD requests going for ever, or until `until` where the device goes. */
static void load(struct life *l, bool fault)
{
    uint64_t next = LOAD_TAG + LOAD, until = 0;
    int failed = 0;

    for (uint64_t t = LOAD_TAG; t < next; t++) {
        submit_load(l, t);
    }
    wait_for(l, LOAD_TAG, true);
    printf("loaded\n");
    fflush(stdout);
    until = bt_deadline_ns(300 * BT_NS_PER_MS);
    for (uint64_t t = LOAD_TAG; t < TAGS - LOAD; t++) {
        if (!wait_for(l, t, false)) {
            die("load stands still", NULL);
        }
        failed += l->results[t].rc == BT_E_DEVICE_LOST;
        if (failed > 0 && t + 1 == next) {
            break;
        }
        if (fault && bt_now_ns() > until && until > 0) {
            printf("fault %d\n", rig_fault());
            until = 0;
        }
        if (failed == 0) {
            submit_load(l, next++);
        }
    }
    printf("lost %d\n", failed);
    fflush(stdout);
}

static int live(const char *socket, const char *file, const char *how)
{
    static struct chat chats[CHATS];
    struct life l = {.lock = PTHREAD_MUTEX_INITIALIZER, .cond = PTHREAD_COND_INITIALIZER};
    struct kn_engine_stats st;
    uint64_t start = bt_now_ns();
    bool clean;
    FILE *f = fopen(file, "r");

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (!f || fread(chats, sizeof(chats), 1, f) != 1) {
        die("cannot read the chats", NULL);
    }
    fclose(f);
    l.results = bt_calloc(TAGS, sizeof(*l.results));
    life_begin(&l, strcmp(how, "cold") == 0 ? NULL : socket);
    st = kn_engine_stats(l.engine);
    printf("adopted %llu %llu %.0f\n", (unsigned long long)st.blocks_adopted,
           (unsigned long long)st.blocks_bad, (double)(bt_now_ns() - start) / 1e6);
    turns(&l, chats);
    fflush(stdout);
    if (strcmp(how, "kill") == 0 || strcmp(how, "fault") == 0) {
        load(&l, how[0] == 'f');
    }
    clean = kn_engine_stop(l.engine);
    kn_engine_destroy(l.engine);
    kv_keeper_close(l.keeper);
    printf("stopped %d\n", clean);
    return 0;
}

/* ---- the one who watches ---- */

static int bad;

static void expect(bool ok, const char *what, int life, int got, int want)
{
    if (!ok) {
        printf("BAD life %d: %s: %d, not %d\n", life, what, got, want);
        bad++;
    }
}

static pid_t spawn(const char *const argv[], FILE **ret_out)
{
    int fds[2];
    pid_t pid;

    if (pipe2(fds, O_CLOEXEC) < 0) {
        die("pipe", NULL);
    }
    pid = fork();
    if (pid < 0) {
        die("fork", NULL);
    }
    if (pid == 0) {
        if (ret_out) {
            dup2(fds[1], 1);
        }
        execv(argv[0], (char *const *)(uintptr_t)argv);
        _exit(127);
    }
    close(fds[1]);
    *(ret_out ? ret_out : &(FILE *){NULL}) = fdopen(fds[0], "r");
    return pid;
}

static void user_speaks(struct chat *c, int chat, int turn)
{
    int n = turn == 0 ? 150 + 97 * chat : 5 + chat * 3;

    for (int i = 0; i < n && c->n < MAX_IDS; i++) {
        c->ids[c->n++] =
            (int32_t)(((uint32_t)(chat * 7001 + turn * 131 + i) * 2654435761u) >> 9) % 256;
    }
}

static void write_chats(const char *file, const struct chat *chats)
{
    FILE *f = fopen(file, "w");

    if (!f || fwrite(chats, sizeof(*chats) * CHATS, 1, f) != 1 || fclose(f) != 0) {
        die("cannot write the chats", NULL);
    }
}

struct heard {
    int adopted, bad_blocks, ms, fault, lost, stopped;
    bool loaded;
    int n_turns, cached[CHATS];
    int32_t ids[CHATS][ANSWER];
};

static void hear_turn(struct heard *h, char *line)
{
    char *save = NULL, *w = strtok_r(line, " ", &save);
    int chat = (int)strtol(strtok_r(NULL, " ", &save), NULL, 10), n = 0;

    if (chat < 0 || chat >= CHATS) {
        return;
    }
    h->cached[chat] = (int)strtol(strtok_r(NULL, " ", &save), NULL, 10);
    while ((w = strtok_r(NULL, " \n", &save)) && n < ANSWER) {
        h->ids[chat][n++] = (int32_t)strtol(w, NULL, 10);
    }
    h->n_turns += n == ANSWER;
}

/* What a life says; one that is to be killed is, a while after it works on load. */
static void hear(FILE *out, pid_t pid, bool kill_it, int life, struct heard *h)
{
    char line[4096];

    *h = (struct heard){.fault = -1, .lost = -1, .stopped = -1};
    while (fgets(line, sizeof(line), out)) {
        if (strncmp(line, "turn ", 5) == 0) {
            hear_turn(h, line);
        } else if (strncmp(line, "loaded", 6) == 0) {
            h->loaded = true;
            if (kill_it) {
                usleep(100000 + 70000 * (useconds_t)life);
                kill(pid, SIGKILL);
            }
        } else if (sscanf(line, "adopted %d %d %d", &h->adopted, &h->bad_blocks, &h->ms) != 3 &&
                   sscanf(line, "fault %d", &h->fault) != 1 &&
                   sscanf(line, "lost %d", &h->lost) != 1 &&
                   sscanf(line, "stopped %d", &h->stopped) != 1) {
            printf("life %d says: %s", life, line);
        }
    }
    fclose(out);
}

static void check_end(int life, const char *how, int status, const struct heard *h)
{
    expect(h->n_turns == CHATS, "turns answered", life, h->n_turns, CHATS);
    if (strcmp(how, "kill") == 0) {
        expect(WIFSIGNALED(status) && h->loaded, "killed under load", life, status, SIGKILL);
        return;
    }
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "exit status", life, status, 0);
    expect(h->stopped == 1, "pages came back", life, h->stopped, 1);
    if (strcmp(how, "fault") == 0) {
        expect(h->fault > 0, "the device faults", life, h->fault, 700);
        expect(h->lost > 0, "requests that end with the device", life, h->lost, LOAD);
    }
}

static int watch(char *self, const char *keeper)
{
    static struct chat chats[CHATS];
    static struct heard h[LIVES], cold;
    static int asked[LIVES][CHATS];
    char dir[] = "/tmp/baton-survive.XXXXXX", socket[64], file[64], option[128];
    pid_t keeper_pid, pid;
    FILE *out;
    int status;

    if (!mkdtemp(dir)) {
        die("mkdtemp", NULL);
    }
    snprintf(socket, sizeof(socket), "%s/keeper.sock", dir);
    snprintf(file, sizeof(file), "%s/chats", dir);
    snprintf(option, sizeof(option), "--socket=%s", socket);
    keeper_pid = spawn((const char *[]){keeper, option, "--die_with_parent=true", NULL}, NULL);
    for (int i = 0; i < 200 && access(socket, F_OK) != 0; i++) {
        usleep(20000);
    }
    for (int life = 0; life < LIVES; life++) {
        bool card = getenv("BATON_TEST_MODULE") != NULL;
        const char *how = card || endings[life][0] != 'f' ? endings[life] : "kill";
        int least = 0;

        for (int i = 0; i < CHATS; i++) {
            chats[i].known = life ? chats[i].n - 1 : 0; /* the last token's K and V are not there */
            user_speaks(&chats[i], i, life);
            asked[life][i] = chats[i].n;
            least += chats[i].known / BLOCK;
        }
        write_chats(file, chats);
        pid = spawn((const char *[]){self, "--life", socket, file, how, NULL}, &out);
        hear(out, pid, how[0] == 'k', life, &h[life]);
        waitpid(pid, &status, 0);
        check_end(life, how, status, &h[life]);
        expect(h[life].adopted >= least, "blocks adopted", life, h[life].adopted, least);
        for (int i = 0; i < CHATS; i++) {
            expect(h[life].cached[i] == chats[i].known / BLOCK * BLOCK, "tokens found", life,
                   h[life].cached[i], chats[i].known / BLOCK * BLOCK);
            memcpy(chats[i].ids + chats[i].n, h[life].ids[i], sizeof(h[life].ids[i]));
            chats[i].n += ANSWER;
        }
        printf("life %d (%s): started in %d ms, %d blocks adopted, %d damaged, %d turns; %d "
               "requests lost with the device\n",
               life, how, h[life].ms, h[life].adopted, h[life].bad_blocks, h[life].n_turns,
               h[life].lost < 0 ? 0 : h[life].lost);
        fflush(stdout);
    }
    kill(keeper_pid, SIGTERM);
    waitpid(keeper_pid, &status, 0);
    for (int life = 0; life < LIVES; life++) {
        static struct chat then[CHATS];
        int same = 0;

        memcpy(then, chats, sizeof(then));
        for (int i = 0; i < CHATS; i++) {
            then[i].n = asked[life][i];
        }
        write_chats(file, then);
        pid = spawn((const char *[]){self, "--life", socket, file, "cold", NULL}, &out);
        hear(out, pid, false, life, &cold);
        waitpid(pid, &status, 0);
        check_end(life, "cold", status, &cold);
        for (int i = 0; i < CHATS; i++) {
            same += memcmp(cold.ids[i], h[life].ids[i], sizeof(cold.ids[i])) == 0;
        }
        expect(same == CHATS, "answers that are those of a cold engine", life, same, CHATS);
    }
    unlink(file);
    unlink(socket);
    rmdir(dir);
    printf("survive_check: %d lives, %d bad\n", LIVES, bad);
    return bad ? 1 : 0;
}

int main(int argc, char **argv)
{
    if (argc == 5 && strcmp(argv[1], "--life") == 0) {
        return live(argv[2], argv[3], argv[4]);
    }
    if (argc != 2) {
        fprintf(stderr, "usage: gpu_survive_check KEEPER\n");
        return 2;
    }
    return watch(argv[0], argv[1]);
}
