/* One client and one scripted worker, for the tests that include this once. */
#ifndef TOKENBUS_TEST_KIT_H
#define TOKENBUS_TEST_KIT_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "router.h"

#define CHECK(condition) \
    do { \
        if (condition) break; \
        fprintf(stderr, "FAILED %s:%d: %s\n", __FILE__, __LINE__, #condition); \
        exit(1); \
    } while (0)

static const int32_t IDS[] = {5, 6, 7, 8, 9, 10};
static router *worker;
static tb_client *client;
static char text[256]; /* of the events read so far */

static void append(const tb_event *event) {
    if (event->kind == TB_TOKENS || event->kind == TB_DONE) strncat(text, event->text, event->text_bytes);
}

/* Reads until an event of this kind. */
static tb_event read_to(tb_event_kind kind) {
    tb_event event;
    do {
        CHECK(tb_next(client, 5000, &event) == TB_NEXT_EVENT);
        append(&event);
        CHECK(event.kind == kind || (event.kind != TB_DONE && event.kind != TB_FAILED));
    } while (event.kind != kind);
    return event;
}

static tb_code read_failure(void) { return read_to(TB_FAILED).error.code; }

static void start_with(int64_t heartbeat_ms, const tb_options *options) {
    tb_error error;
    text[0] = '\0';
    worker = router_new("boot-1", heartbeat_ms, NULL);
    client = tb_open(router_endpoint(worker), options, &error);
    CHECK(client != NULL && error.code == TB_OK);
}

static inline void start(void) { start_with(2000, NULL); }

static void stop(void) {
    tb_close(client);
    router_free(worker);
}

static tb_job *submit_as(const char *id, bool durable) {
    tb_request *request = tb_request_new();
    if (durable) tb_request_set_durable(request, true);
    tb_request_set_prompt(request, "p");
    tb_request_set_max_tokens(request, 6);
    tb_request_set_job(request, id);
    tb_job *job = tb_submit(client, request, NULL, NULL, NULL);
    tb_request_free(request);
    CHECK(job != NULL);
    return job;
}

static inline tb_job *submit(const char *id) { return submit_as(id, false); }

/* A job that runs and has one token. */
static tb_job *start_job_as(bool durable) {
    tb_job *job = submit_as("j", durable);
    router_expect(worker, client, M_SUBMIT);
    router_accept(worker, "j", 123);
    router_tokens(worker, "j", 1, "a", 1, IDS);
    CHECK(read_to(TB_STARTED).seed == 123);
    read_to(TB_TOKENS);
    return job;
}

static inline tb_job *start_job(void) { return start_job_as(false); }

#endif
