/* ./example tcp://127.0.0.1:5555 "The sea is" [max_tokens]: streams the answer of a worker. Ctrl-C cancels. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include <tokenbus.h>

static volatile sig_atomic_t is_interrupted;

static void on_interrupt(int number) {
    (void)number;
    is_interrupted = 1;
}

static int stream(tb_job *job) {
    tb_event event;
    for (;;) {
        tb_next_result result = tb_job_next(job, TB_FOREVER, &event);
        if (result == TB_NEXT_END) return 1;
        if (is_interrupted) tb_cancel(job);
        if (result != TB_NEXT_EVENT) continue;
        if (event.kind == TB_TOKENS || event.kind == TB_DONE) {
            fwrite(event.text, 1, event.text_bytes, stdout);
            fflush(stdout);
        }
        if (event.kind == TB_DONE) {
            fprintf(stderr, "\n%s after %lld tokens, first one after %.0f ms\n", tb_reason_name(event.reason),
                    (long long)event.usage.completion_tokens, event.usage.ttft_ms);
            return 0;
        }
        if (event.kind == TB_FAILED) {
            fprintf(stderr, "\n%s %s: %s\n", tb_code_name(event.error.code), event.error.field,
                    event.error.message);
            return 1;
        }
    }
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: %s ENDPOINT PROMPT [MAX_TOKENS]\n", argv[0]);
        return 2;
    }
    signal(SIGINT, on_interrupt);
    tb_error error = {0};
    tb_client *client = tb_open(argv[1], NULL, &error);
    tb_request *request = tb_request_new();
    tb_job *job = NULL;
    if (client != NULL && request != NULL) {
        tb_request_set_prompt(request, argv[2]);
        if (argc > 3) tb_request_set_max_tokens(request, atoll(argv[3]));
        job = tb_submit(client, request, NULL, NULL, &error);
    }
    int status = 1;
    if (job != NULL) status = stream(job);
    else fprintf(stderr, "%s %s: %s\n", tb_code_name(error.code), error.field, error.message);
    tb_request_free(request);
    tb_close(client);
    return status;
}
