/* Digest of a model: SHA-256 over all file bytes, then over what this build made of them.
 *
 *   files  = SHA-256( for every file: role NUL, u64 size, bytes )
 *   digest = SHA-256( "baton model digest 1" NUL, files, configuration as text, frequency table )
 *
 * Only `files` costs time, so it alone is cached, under a name made from device, inode, size and
 * mtime of every file. The cache is a convenience: unreadable, missing or torn entries are ignored
 * and a folder that cannot be written is no error. Entries are written beside and renamed. A file
 * changed in the last second is not looked up or entered: the clock of mtime is coarse, and a
 * second change within one of its ticks would go unseen. */
#include "common/file/file_int.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define HEX_LEN 64

static bool sha_init(EVP_MD_CTX **ret)
{
    *ret = EVP_MD_CTX_new();
    return *ret && EVP_DigestInit_ex(*ret, EVP_sha256(), NULL) == 1;
}

static bool sha_final(EVP_MD_CTX *ctx, uint8_t ret[32])
{
    unsigned n = 32;

    return EVP_DigestFinal_ex(ctx, ret, &n) == 1 && n == 32;
}

static int hash_files(const struct bt_model_file *mf, uint8_t ret[32], struct bt_err *err)
{
    EVP_MD_CTX *ctx;
    bool ok = sha_init(&ctx);

    for (size_t i = 0; ok && i < mf->n_files; i++) {
        const struct bt_file_map *f = &mf->files[i];
        uint64_t n = f->n;

        ok = EVP_DigestUpdate(ctx, f->role, strlen(f->role) + 1) == 1 &&
             EVP_DigestUpdate(ctx, &n, sizeof(n)) == 1 && EVP_DigestUpdate(ctx, f->p, f->n) == 1;
        if (ok && !bt_file_map_unchanged(f)) {
            EVP_MD_CTX_free(ctx);
            return BT_FAIL(err, BT_E_IO, "%s: changed while it was read", f->path);
        }
    }
    ok = ok && sha_final(ctx, ret);
    EVP_MD_CTX_free(ctx);
    return ok ? BT_OK : BT_FAIL(err, BT_E_INTERNAL, "SHA-256 failed");
}

static void to_hex(const uint8_t d[32], char ret[HEX_LEN + 1])
{
    for (int i = 0; i < 32; i++) {
        snprintf(ret + 2 * i, 3, "%02x", d[i]);
    }
}

static bool from_hex(const char *s, uint8_t ret[32])
{
    for (int i = 0; i < HEX_LEN; i++) {
        int c = (unsigned char)s[i];
        int v = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;

        if (v < 0) {
            return false;
        }
        ret[i / 2] = (uint8_t)(i % 2 ? ret[i / 2] | v : v << 4);
    }
    return true;
}

/* ${XDG_CACHE_HOME:-$HOME/.cache}/baton/digest, made if needed; false if there is none. */
static bool cache_dir(char *ret, size_t cap)
{
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n;

    if (xdg && xdg[0] == '/') {
        n = snprintf(ret, cap, "%s/baton/digest", xdg);
    } else if (home && home[0] == '/') {
        n = snprintf(ret, cap, "%s/.cache/baton/digest", home);
    } else {
        return false;
    }
    if (n < 0 || (size_t)n >= cap) {
        return false;
    }
    for (char *p = ret + 1; *p; p++) {
        if (*p == '/') {
            *p = 0;
            mkdir(ret, 0700);
            *p = '/';
        }
    }
    mkdir(ret, 0700);
    return true;
}

/* Path of the cache entry; false if nothing can be cached. */
static bool cache_path(const struct bt_model_file *mf, char *ret, size_t cap)
{
    char dir[3500], line[160], hex[HEX_LEN + 1];
    uint8_t key[32];
    EVP_MD_CTX *ctx;
    bool ok;
    int n;

    if (mf->n_files == 0 || !cache_dir(dir, sizeof(dir))) {
        return false;
    }
    ok = sha_init(&ctx);
    for (size_t i = 0; ok && i < mf->n_files; i++) {
        const struct bt_file_map *f = &mf->files[i];

        n = snprintf(line, sizeof(line), "1 %llu %llu %zu %lld ", (unsigned long long)f->dev,
                     (unsigned long long)f->ino, f->n, (long long)f->mtime_ns);
        ok = EVP_DigestUpdate(ctx, line, (size_t)n) == 1 &&
             EVP_DigestUpdate(ctx, f->role, strlen(f->role) + 1) == 1;
    }
    ok = ok && sha_final(ctx, key);
    EVP_MD_CTX_free(ctx);
    if (!ok) {
        return false;
    }
    to_hex(key, hex);
    n = snprintf(ret, cap, "%s/%s", dir, hex);
    return n > 0 && (size_t)n < cap;
}

static bool cache_load(const char *path, uint8_t ret[32])
{
    char text[HEX_LEN + 2];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof(text)) : -1;

    bt_close_fd(&fd);
    return n == HEX_LEN + 1 && text[HEX_LEN] == '\n' && from_hex(text, ret);
}

static void cache_save(const char *path, const uint8_t digest[32])
{
    char tmp[4096], text[HEX_LEN + 2];
    int n = snprintf(tmp, sizeof(tmp), "%s.XXXXXX", path), fd;
    bool ok;

    if (n < 0 || (size_t)n >= sizeof(tmp)) {
        return;
    }
    fd = mkostemp(tmp, O_CLOEXEC);
    if (fd < 0) {
        return;
    }
    to_hex(digest, text);
    text[HEX_LEN] = '\n';
    ok = write(fd, text, HEX_LEN + 1) == HEX_LEN + 1;
    close(fd);
    if (!ok || rename(tmp, path) != 0) {
        unlink(tmp);
    }
}

/* Everything that the computation takes from the files, as text with exact floats. */
static int describe(const struct bt_model_file *mf, struct bt_buf *b)
{
    const struct bt_model_config *c = &mf->cfg;
    int rc =
        bt_buf_printf(b,
                      "arch=%s layers=%d e=%d h=%d hkv=%d d=%d f=%d v=%d ctx=%d eps=%a "
                      "tied=%d bias=%d qknorm=%d interleaved=%d eos=",
                      bt_arch_name(c->arch), c->n_layers, c->d_model, c->n_heads, c->n_kv_heads,
                      c->head_dim, c->d_ff, c->n_vocab, c->n_ctx, (double)c->rms_eps, c->tied,
                      c->qkv_bias, c->qk_norm, c->rope_interleaved);

    for (int i = 0; rc == BT_OK && i < c->n_eos; i++) {
        rc = bt_buf_printf(b, "%d,", c->eos[i]);
    }
    for (int i = 0; rc == BT_OK && i < c->head_dim / 2; i++) {
        rc = bt_buf_printf(b, " %a", (double)mf->rope_freqs[i]);
    }
    return rc;
}

/* True if no file is so new that its mtime may yet stand for other bytes. */
static bool settled(const struct bt_model_file *mf)
{
    struct timespec ts;
    int64_t now_ns;

    clock_gettime(CLOCK_REALTIME, &ts);
    now_ns = (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
    for (size_t i = 0; i < mf->n_files; i++) {
        if (mf->files[i].mtime_ns > now_ns - 1000000000) {
            return false;
        }
    }
    return true;
}

static int files_digest(const struct bt_model_file *mf, uint8_t ret[32], struct bt_err *err)
{
    char path[4000];
    bool cached = settled(mf) && cache_path(mf, path, sizeof(path));
    int rc;

    if (cached && cache_load(path, ret)) {
        return BT_OK;
    }
    rc = hash_files(mf, ret, err);
    if (rc == BT_OK && cached) {
        cache_save(path, ret);
    }
    return rc;
}

int bt_model_digest(const struct bt_model_file *mf, uint8_t ret_digest[32], struct bt_err *err)
{
    static const char tag[] = "baton model digest 1";
    struct bt_buf text = {0};
    uint8_t files[32], digest[32];
    EVP_MD_CTX *ctx;
    bool ok;
    int rc = files_digest(mf, files, err);

    if (rc != BT_OK) {
        return rc;
    }
    rc = describe(mf, &text);
    if (rc != BT_OK) {
        bt_buf_fini(&text);
        return BT_FAIL(err, rc, "model digest: out of memory");
    }
    ok = sha_init(&ctx) && EVP_DigestUpdate(ctx, tag, sizeof(tag)) == 1 &&
         EVP_DigestUpdate(ctx, files, sizeof(files)) == 1 &&
         EVP_DigestUpdate(ctx, text.p, text.n) == 1 && sha_final(ctx, digest);
    EVP_MD_CTX_free(ctx);
    bt_buf_fini(&text);
    if (!ok) {
        return BT_FAIL(err, BT_E_INTERNAL, "SHA-256 failed");
    }
    memcpy(ret_digest, digest, sizeof(digest));
    return BT_OK;
}
