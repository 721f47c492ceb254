/* batonctl generate: streams an answer to standard output. */
#include "common/thr/time.h"
#include "deploy/ctl/ctl.h"

#include <stdio.h>
#include <unistd.h>

static void on_message(void *user, const ProtobufCMessage *msg)
{
    const Baton__V1__GenerateResponse *m = (const void *)msg;

    fwrite(m->text.data, 1, m->text.len, stdout);
    if (m->finish != BATON__V1__FINISH_REASON__FINISH_NONE) {
        fputc('\n', stdout);
    }
    if (fflush(stdout) != 0) { /* nobody reads: with the process the request ends, too */
        fputs("batonctl: cannot write to standard output\n", stderr);
        _exit(CTL_FAILED);
    }
}

int ctl_generate(const struct ctl_args *a)
{
    Baton__V1__GenerateRequest m = BATON__V1__GENERATE_REQUEST__INIT;
    Baton__V1__Stopping stopping = BATON__V1__STOPPING__INIT;
    Baton__V1__Chat chat = BATON__V1__CHAT__INIT;
    Baton__V1__ChatMessage message = BATON__V1__CHAT_MESSAGE__INIT, *messages[] = {&message};
    struct ctl_call c = {.path = "/baton.v1.Baton/Generate",
                         .request = &m.base,
                         .response = &baton__v1__generate_response__descriptor,
                         .deadline_ns = bt_deadline_ns(a->timeout_ns),
                         .message = on_message};

    if (a->chat) {
        message.role = (char *)(uintptr_t) "user";
        message.content = (char *)(uintptr_t)a->prompt;
        chat.n_messages = 1;
        chat.messages = messages;
        m.input_case = BATON__V1__GENERATE_REQUEST__INPUT_CHAT;
        m.chat = &chat;
    } else {
        m.input_case = BATON__V1__GENERATE_REQUEST__INPUT_TEXT;
        m.text = (char *)(uintptr_t)a->prompt;
    }
    if (a->max_tokens > 0) {
        stopping.max_tokens__case = BATON__V1__STOPPING__MAX_TOKENS__MAX_TOKENS;
        stopping.max_tokens = (uint32_t)a->max_tokens;
        m.stopping = &stopping;
    }
    m.skip_special_tokens = true;
    return ctl_run(a->router, &c);
}
