/* The ChatML family without a template engine.
 *
 * A turn is  <|im_start|>ROLE\nCONTENT<|im_end|>\n . Two forms of template are recognised, and only
 * as a whole: a template with anything more would write another text than we would.
 *   plain  one loop that writes every message so (SmolLM2, Qwen2)
 *   tools  Qwen2.5: a run of tool messages is one user turn of <tool_response> blocks
 * The default system text is read from the template, not known by heart. */
#include "common/text/chat.h"

#include "common/text/utf8.h"

#include <stdlib.h>

#define IM_START   "<|im_start|>"
#define IM_END     "<|im_end|>"
#define MAX_SYSTEM 4096

enum chat_form { CHAT_PLAIN, CHAT_TOOLS };

struct bt_chat_template {
    const struct bt_tokenizer *tok;
    enum chat_form form;
    int32_t im_start, im_end;
    struct bt_buf system; /* default system text */
};

/* The conversation while it is written: text of our making and of others, up to the next marker. */
struct writer {
    const struct bt_chat_template *tmpl;
    struct bt_buf text;
    struct bt_ids *ids;
    struct bt_err *err;
    int rc; /* first failure; everything after it does nothing */
};

/* The template with blanks outside string literals and the marks of white-space control removed,
 * and with one kind of quote, so that its spelling does not matter. White space between tags that
 * the template would write into the prompt becomes an unknown character, so that nothing matches.
 * (Templates are rendered with trim_blocks and lstrip_blocks.) */
struct squeezer {
    struct bt_str in;
    size_t at;
    bool after_block; /* the last tag was {% %}, or none was yet */
    bool after_dash;  /* it ended in "-" */
    struct bt_buf *out;
};

#define UNWANTED "\x01"

static bool is_blank(char c)
{
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

static bool at_text(const struct squeezer *s, const char *what)
{
    size_t n = strlen(what);

    return s->in.n - s->at >= n && memcmp(s->in.p + s->at, what, n) == 0;
}

static int put(struct squeezer *s, const char *p, size_t n)
{
    return bt_buf_add(s->out, p, n);
}

/* Blanks between two tags. */
static int squeeze_gap(struct squeezer *s)
{
    size_t from = s->at;
    bool block, vanishes;

    while (s->at < s->in.n && is_blank(s->in.p[s->at])) {
        s->at++;
    }
    if (s->at == from) {
        return BT_OK;
    }
    if (s->after_dash || at_text(s, "{%-") || at_text(s, "{{-")) {
        return BT_OK;
    }
    block = s->at == s->in.n || at_text(s, "{%");
    vanishes = s->in.p[from] == '\n' && (s->after_block || s->at == s->in.n);
    for (size_t i = from + 1; i < s->at; i++) {
        vanishes = vanishes && block && (s->in.p[i] == ' ' || s->in.p[i] == '\t');
    }
    return vanishes ? BT_OK : put(s, UNWANTED, 1);
}

/* A string literal inside a tag; what comes out stands between single quotes, a newline as its
 * escape. */
static int squeeze_literal(struct squeezer *s)
{
    char quote = s->in.p[s->at++];
    int rc = put(s, "'", 1);

    while (rc == BT_OK && s->at < s->in.n && s->in.p[s->at] != quote) {
        size_t n = s->in.p[s->at] == '\\' && s->at + 1 < s->in.n ? 2 : 1;

        if (s->in.p[s->at] == '\'') {
            rc = put(s, "\\", 1);
        }
        if (rc == BT_OK && s->in.p[s->at] == '\n') {
            rc = put(s, "\\n", 2);
        } else if (rc == BT_OK) {
            rc = put(s, s->in.p + s->at, n);
        }
        s->at += n;
    }
    s->at += s->at < s->in.n;
    return rc == BT_OK ? put(s, "'", 1) : rc;
}

static int squeeze_tag(struct squeezer *s, const char *end)
{
    int rc = put(s, s->in.p + s->at, 2);

    s->at += 2;
    s->at += s->at < s->in.n && s->in.p[s->at] == '-';
    s->after_dash = false;
    while (rc == BT_OK && s->at < s->in.n && !at_text(s, end)) {
        char c = s->in.p[s->at];

        if (c == '\'' || c == '"') {
            rc = squeeze_literal(s);
            s->after_dash = false;
            continue;
        }
        s->after_dash = c == '-';
        if (!is_blank(c) && !(c == '-' && s->at + 1 < s->in.n && s->in.p[s->at + 1] == end[0])) {
            rc = put(s, &c, 1);
        }
        s->at++;
    }
    if (rc == BT_OK && s->at < s->in.n) {
        s->at += 2;
        rc = put(s, end, 2);
    }
    s->after_block = end[0] == '%';
    return rc;
}

static int squeeze(struct bt_str text, struct bt_buf *out)
{
    struct squeezer s = {.in = text, .out = out, .after_block = true};
    int rc = BT_OK;

    while (rc == BT_OK && s.at < text.n) {
        if (is_blank(text.p[s.at])) {
            rc = squeeze_gap(&s);
        } else if (at_text(&s, "{%")) {
            rc = squeeze_tag(&s, "%}");
        } else if (at_text(&s, "{{")) {
            rc = squeeze_tag(&s, "}}");
        } else {
            rc = put(&s, text.p + s.at++, 1);
        }
    }
    return rc;
}

/* Reading the squeezed template from the front. */
static bool eat(struct bt_str *s, const char *what)
{
    size_t n = strlen(what);

    if (s->n < n || memcmp(s->p, what, n) != 0) {
        return false;
    }
    *s = (struct bt_str){s->p + n, s->n - n};
    return true;
}

/* Text of a literal up to the end-of-turn marker. */
static bool eat_system(struct bt_str *s, struct bt_str *ret)
{
    const char *end = s->n ? memmem(s->p, s->n, IM_END, sizeof(IM_END) - 1) : NULL;
    size_t n = end ? (size_t)(end - s->p) : 0;

    if (!n || n > MAX_SYSTEM) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        if (s->p[i] == '\'') {
            return false;
        }
        if (s->p[i] == '\\' && (++i == n || !strchr("nt\\'\"", s->p[i]))) {
            return false; /* an escape that add_literal does not know */
        }
    }
    *ret = (struct bt_str){s->p, n};
    *s = (struct bt_str){end, s->n - n};
    return true;
}

#define OPENING "{%endfor%}{%ifadd_generation_prompt%}{{'<|im_start|>assistant\\n'}}{%endif%}"

static bool is_plain(struct bt_str s, struct bt_str *ret_system)
{
    static const char *const turns[] = {
        "{{'<|im_start|>'+message['role']+'\\n'+message['content']+'<|im_end|>'+'\\n'}}",
        "{{'<|im_start|>'+message['role']+'\\n'+message['content']+'<|im_end|>\\n'}}",
        "{{'<|im_start|>'+message.role+'\\n'+message.content+'<|im_end|>'+'\\n'}}",
        "{{'<|im_start|>'+message.role+'\\n'+message.content+'<|im_end|>\\n'}}",
    };
    bool turn = false;

    (void)eat(&s,
              "{%ifnotadd_generation_promptisdefined%}{%setadd_generation_prompt=false%}{%endif%}");
    if (!eat(&s, "{%formessageinmessages%}")) {
        return false;
    }
    if (eat(&s, "{%ifloop.firstandmessages[0]['role']!='system'%}{{'<|im_start|>system\\n") &&
        (!eat_system(&s, ret_system) || !eat(&s, "<|im_end|>\\n'}}{%endif%}"))) {
        return false;
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(turns) && !turn; i++) {
        turn = eat(&s, turns[i]);
    }
    return turn && eat(&s, OPENING) && s.n == 0;
}

/* The first branch writes the tools; without tools the template is what follows it. */
static bool is_tools(struct bt_str s, struct bt_str *ret_system)
{
    static const char no_tools[] =
        "{%else%}{%ifmessages[0]['role']=='system'%}"
        "{{'<|im_start|>system\\n'+messages[0]['content']+'<|im_end|>\\n'}}"
        "{%else%}{{'<|im_start|>system\\n";
    const char *p;

    if (!eat(&s, "{%iftools%}")) {
        return false;
    }
    p = memmem(s.p, s.n, no_tools, sizeof(no_tools) - 1);
    if (!p) {
        return false;
    }
    s = (struct bt_str){p, s.n - (size_t)(p - s.p)};
    return eat(&s, no_tools) && eat_system(&s, ret_system) &&
           eat(&s, "<|im_end|>\\n'}}{%endif%}{%endif%}") &&
           eat(&s, "{%formessageinmessages%}{%if(message.role=='user')or(message.role=='system'and"
                   "notloop.first)or(message.role=='assistant'andnotmessage.tool_calls)%}"
                   "{{'<|im_start|>'+message.role+'\\n'+message.content+'<|im_end|>'+'\\n'}}") &&
           eat(&s, "{%elifmessage.role=='assistant'%}{{'<|im_start|>'+message.role}}"
                   "{%ifmessage.content%}{{'\\n'+message.content}}{%endif%}"
                   "{%fortool_callinmessage.tool_calls%}{%iftool_call.functionisdefined%}"
                   "{%settool_call=tool_call.function%}{%endif%}"
                   "{{'\\n<tool_call>\\n{\"name\": \"'}}{{tool_call.name}}{{'\", \"arguments\": '}}"
                   "{{tool_call.arguments|tojson}}{{'}\\n</tool_call>'}}{%endfor%}"
                   "{{'<|im_end|>\\n'}}") &&
           eat(&s, "{%elifmessage.role=='tool'%}"
                   "{%if(loop.index0==0)or(messages[loop.index0-1].role!='tool')%}"
                   "{{'<|im_start|>user'}}{%endif%}"
                   "{{'\\n<tool_response>\\n'}}{{message.content}}{{'\\n</tool_response>'}}"
                   "{%ifloop.lastor(messages[loop.index0+1].role!='tool')%}"
                   "{{'<|im_end|>\\n'}}{%endif%}{%endif%}") &&
           eat(&s, OPENING) && s.n == 0;
}

/* Undoes the escapes of a string literal. */
static int add_literal(struct bt_str s, struct bt_buf *out)
{
    int rc = BT_OK;

    for (size_t i = 0; i < s.n && rc == BT_OK; i++) {
        char c = s.p[i];

        if (c == '\\' && i + 1 < s.n) {
            i++;
            c = s.p[i] == 'n' ? '\n' : s.p[i] == 't' ? '\t' : s.p[i];
        }
        rc = bt_buf_add(out, &c, 1);
    }
    return rc;
}

int bt_chat_create(const struct bt_tokenizer *tok,
                   struct bt_str text,
                   struct bt_chat_template **ret_tmpl,
                   struct bt_err *err)
{
    BT_AUTO(bt_buf_fini) struct bt_buf squeezed = {0};
    struct bt_str system = {0};
    struct bt_chat_template *t;
    enum chat_form form = CHAT_PLAIN;
    int rc;

    if (!text.n) {
        return BT_FAIL(err, BT_E_NOT_FOUND, "the model has no chat template");
    }
    rc = squeeze(text, &squeezed);
    if (rc < 0) {
        return BT_FAIL(err, rc, "no room for the chat template");
    }
    if (!is_plain(bt_buf_str(&squeezed), &system)) {
        form = CHAT_TOOLS;
    }
    if (form == CHAT_TOOLS && !is_tools(bt_buf_str(&squeezed), &system)) {
        return BT_FAIL(err, BT_E_UNSUPPORTED,
                       "the model's chat template is not of a known form (ChatML as in SmolLM2 and "
                       "Qwen2 is); send text or token ids");
    }
    t = bt_calloc(1, sizeof(*t));
    if (!t) {
        return BT_FAIL(err, BT_E_NOMEM, "no room for the chat template");
    }
    t->tok = tok;
    t->form = form;
    t->im_start = bt_tokenizer_find_special(tok, BT_STR(IM_START));
    t->im_end = bt_tokenizer_find_special(tok, BT_STR(IM_END));
    rc = add_literal(system, &t->system);
    if (rc < 0) {
        BT_FAIL(err, rc, "no room for the chat template");
    } else if (t->im_start < 0 || t->im_end < 0) {
        rc = BT_FAIL(err, BT_E_UNSUPPORTED,
                     "the chat template's markers " IM_START " and " IM_END
                     " are not tokens of the model");
    }
    if (rc < 0) {
        bt_chat_destroy(t);
        return rc;
    }
    *ret_tmpl = t;
    return BT_OK;
}

void bt_chat_destroy(struct bt_chat_template *tmpl)
{
    if (tmpl) {
        bt_buf_fini(&tmpl->system);
        free(tmpl);
    }
}

static void add_text(struct writer *w, struct bt_str s)
{
    if (w->rc == BT_OK) {
        w->rc = bt_buf_add(&w->text, s.p, s.n);
        if (w->rc < 0) {
            BT_FAIL(w->err, w->rc, "no room for the conversation");
        }
    }
}

/* Ends the text before a marker and writes the marker. */
static void add_marker(struct writer *w, int32_t id)
{
    if (w->rc == BT_OK && w->text.n) {
        w->rc = bt_tokenizer_encode(w->tmpl->tok, bt_buf_str(&w->text), 0, w->ids, w->err);
        w->text.n = 0;
    }
    if (w->rc == BT_OK && id >= 0) {
        w->rc = bt_ids_push(w->ids, id);
        if (w->rc < 0) {
            BT_FAIL(w->err, w->rc, "the conversation is longer than %zu tokens", w->ids->max);
        }
    }
}

static void open_turn(struct writer *w, struct bt_str role)
{
    add_marker(w, w->tmpl->im_start);
    add_text(w, role);
}

static void close_turn(struct writer *w)
{
    add_marker(w, w->tmpl->im_end);
    add_text(w, BT_STR("\n"));
}

static void add_content(struct writer *w, const struct bt_chat_message *m)
{
    for (size_t i = 0; i < m->n_parts; i++) {
        add_text(w, m->parts[i]);
    }
}

static bool is_role(const struct bt_chat_message *m, struct bt_str role)
{
    return bt_str_eq(m->role, role);
}

static void add_message(struct writer *w, const struct bt_chat_message *all, size_t n, size_t i)
{
    const struct bt_chat_message *m = &all[i];

    if (w->tmpl->form == CHAT_TOOLS && is_role(m, BT_STR("tool"))) {
        if (i == 0 || !is_role(&all[i - 1], BT_STR("tool"))) {
            open_turn(w, BT_STR("user"));
        }
        add_text(w, BT_STR("\n<tool_response>\n"));
        add_content(w, m);
        add_text(w, BT_STR("\n</tool_response>"));
        if (i + 1 == n || !is_role(&all[i + 1], BT_STR("tool"))) {
            close_turn(w);
        }
        return;
    }
    open_turn(w, m->role);
    add_text(w, BT_STR("\n"));
    add_content(w, m);
    close_turn(w);
}

static int check_messages(const struct bt_chat_message *messages, size_t n, struct bt_err *err)
{
    static const char *const roles[] = {"system", "user", "assistant", "tool"};

    if (n == 0) {
        return BT_FAIL(err, BT_E_INVALID, "the conversation has no messages");
    }
    if (n > BT_CHAT_MAX_MESSAGES) {
        return BT_FAIL(err, BT_E_TOO_LARGE, "%zu messages; at most %d are possible", n,
                       BT_CHAT_MAX_MESSAGES);
    }
    for (size_t i = 0; i < n; i++) {
        bool known = false;

        for (size_t k = 0; k < BT_ARRAY_LEN(roles); k++) {
            known = known || bt_str_eq(messages[i].role, bt_str_of(roles[k]));
        }
        if (!known) {
            return BT_FAIL(err, BT_E_INVALID,
                           "message %zu: role \"%.*s\" is not system, user, assistant or tool", i,
                           (int)BT_MIN(messages[i].role.n, (size_t)32),
                           messages[i].role.p ? messages[i].role.p : "");
        }
        for (size_t k = 0; k < messages[i].n_parts; k++) {
            struct bt_str s = messages[i].parts[k];
            size_t valid = bt_utf8_valid_prefix(s.p, s.n);

            if (valid != s.n) {
                return BT_FAIL(err, BT_E_INVALID,
                               "message %zu: content is not UTF-8 at byte %zu of part %zu", i,
                               valid, k);
            }
        }
    }
    return BT_OK;
}

int bt_chat_render(const struct bt_chat_template *tmpl,
                   const struct bt_chat_message *messages,
                   size_t n_messages,
                   bool open_answer,
                   struct bt_ids *ids,
                   struct bt_err *err)
{
    struct writer w = {.tmpl = tmpl, .ids = ids, .err = err};
    size_t n_before = ids->n;
    int rc = check_messages(messages, n_messages, err);

    if (rc < 0) {
        return rc;
    }
    if (tmpl->system.n && !is_role(&messages[0], BT_STR("system"))) {
        open_turn(&w, BT_STR("system\n"));
        add_text(&w, bt_buf_str(&tmpl->system));
        close_turn(&w);
    }
    for (size_t i = 0; i < n_messages; i++) {
        add_message(&w, messages, n_messages, i);
    }
    if (open_answer) {
        open_turn(&w, BT_STR("assistant\n"));
    }
    add_marker(&w, -1);
    bt_buf_fini(&w.text);
    if (w.rc < 0) {
        ids->n = n_before;
    }
    return w.rc;
}

struct bt_str bt_chat_default_system(const struct bt_chat_template *tmpl)
{
    return bt_buf_str(&tmpl->system);
}
