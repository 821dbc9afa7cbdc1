/* stress ENDPOINT [fd]: runs the jobs on standard input, all at once over one connection, by callbacks (or
 * with "fd" by a poll loop of its own on tb_fd).
 *
 * A line of input: MAX_TOKENS TEMPERATURE SEED CHAT PROMPT, separated by tabs; SEED -1 for none, CHAT 1 for
 * a chat of one user message. CHAT "cancel" cancels the job after its third token.
 * A line of output for each job in order: INDEX REASON-OR-CODE SEQ CRC TEXT-IN-HEX IDS.
 * Standard error: "tokens N" each time the job with the fewest tokens has got five more. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tokenbus.h>

#define MAX_JOBS 256
#define MAX_LINE 65536

typedef struct run {
    tb_job *job;
    bool cancels;
    int64_t seq; /* as the events told it */
    char *text;
    size_t text_bytes;
    char end[64];
    uint32_t crc;
} run;

static run runs[MAX_JOBS];
static size_t num_runs;
static int64_t told;

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static void append(run *to, const char *text, size_t size) {
    to->text = realloc(to->text, to->text_bytes + size + 1);
    if (to->text == NULL) fail("no memory");
    memcpy(to->text + to->text_bytes, text, size);
    to->text_bytes += size;
}

static void tell_progress(void) {
    int64_t least = INT64_MAX;
    for (size_t i = 0; i < num_runs; i++)
        if (!tb_job_is_over(runs[i].job) && runs[i].seq < least) least = runs[i].seq;
    if (least == INT64_MAX || least < told + 5) return;
    told = least;
    fprintf(stderr, "tokens %lld\n", (long long)least);
}

static void on_event(const tb_event *event, void *user) {
    run *at = user;
    if (at->end[0] != '\0') fail("an event after the end");
    if (event->kind == TB_TOKENS) {
        if (event->seq != at->seq + 1) fail("a hole or a repeat");
        at->seq += (int64_t)event->num_ids;
        append(at, event->text, event->text_bytes);
        if (at->cancels && at->seq >= 3) tb_cancel(event->job);
        tell_progress();
    } else if (event->kind == TB_DONE) {
        append(at, event->text, event->text_bytes);
        snprintf(at->end, sizeof at->end, "%s", tb_reason_name(event->reason));
        at->crc = event->crc;
    } else if (event->kind == TB_FAILED) {
        snprintf(at->end, sizeof at->end, "%s", tb_code_name(event->error.code));
        fprintf(stderr, "job %td: %s %s\n", at - runs, event->error.field, event->error.message);
    }
}

static void submit_line(tb_client *client, char *line) {
    char *fields[5];
    for (int i = 0; i < 5; i++) fields[i] = i == 0 ? strtok(line, "\t") : strtok(NULL, "\t\n");
    if (fields[4] == NULL || num_runs == MAX_JOBS) fail("bad input");
    tb_request *request = tb_request_new();
    if (strcmp(fields[3], "1") == 0) tb_request_add_message(request, "user", fields[4]);
    else tb_request_set_prompt(request, fields[4]);
    tb_request_set_max_tokens(request, atoll(fields[0]));
    tb_request_set_temperature(request, atof(fields[1]));
    if (atoll(fields[2]) >= 0) tb_request_set_seed(request, atoll(fields[2]));
    run *at = &runs[num_runs++];
    tb_error error;
    at->cancels = strcmp(fields[3], "cancel") == 0;
    at->job = tb_submit(client, request, on_event, at, &error);
    tb_request_free(request);
    if (at->job == NULL) fail(error.message);
}

/* The way of a program that has its own event loop. */
static void run_by_fd(tb_client *client) {
    while (tb_num_running(client) > 0 || tb_wait_ms(client) == 0) {
        struct pollfd item = {.fd = tb_fd(client), .events = POLLIN};
        poll(&item, item.fd >= 0 ? 1 : 0, tb_wait_ms(client));
        tb_poll(client, 0);
    }
}

static void print(const run *at, size_t index) {
    size_t num_ids;
    const int32_t *ids = tb_job_ids(at->job, &num_ids);
    printf("%zu\t%s\t%lld\t%u\t", index, at->end, (long long)at->seq, at->crc);
    for (size_t i = 0; i < at->text_bytes; i++) printf("%02x", (unsigned)(unsigned char)at->text[i]);
    for (size_t i = 0; i < num_ids; i++) printf("%c%d", i == 0 ? '\t' : ',', ids[i]);
    printf("\n");
}

int main(int argc, char **argv) {
    static char line[MAX_LINE];
    tb_error error;
    tb_client *client = argc > 1 ? tb_open(argv[1], NULL, &error) : NULL;
    if (client == NULL) fail(argc > 1 ? error.message : "usage: stress ENDPOINT [fd]");
    while (fgets(line, sizeof line, stdin) != NULL) submit_line(client, line);
    if (argc > 2) run_by_fd(client);
    else tb_run(client);
    for (size_t i = 0; i < num_runs; i++) {
        print(&runs[i], i);
        free(runs[i].text);
    }
    tb_close(client);
    return 0;
}
