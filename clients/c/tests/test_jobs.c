/* Jobs against a scripted worker: docs/PROTOCOL.md section 6, case by case. One thread does both. */
#include <math.h>

#include "kit.h"

static void tokens_come_in_order_and_done_has_the_rest(void) {
    start();
    tb_job *job = submit("j");
    const heard *said = router_expect(worker, client, M_SUBMIT);
    CHECK(strcmp(said->prompt, "p") == 0 && said->max_tokens == 6 && said->seed == -1);
    router_accept(worker, "j", 9);
    tb_event event = read_to(TB_STARTED);
    CHECK(event.seed == 9 && event.prompt_tokens == 3 && strcmp(event.worker, "scripted") == 0);
    router_tokens(worker, "j", 1, "a", 1, IDS);
    router_tokens(worker, "j", 2, "b", 2, IDS + 1);
    router_done(worker, "j", "!", "stop", 3, IDS, 0);
    event = read_to(TB_DONE);
    CHECK(strcmp(text, "ab!") == 0 && event.reason == TB_REASON_STOP && event.seq == 3);
    CHECK(event.usage.completion_tokens == 3 && event.usage.ttft_ms == 12.5);
    CHECK(tb_next(client, 0, &event) == TB_NEXT_END && tb_job_is_over(job));
    router_tokens(worker, "j", 4, "late", 1, IDS);
    CHECK(tb_poll(client, 50) == 0 && tb_next(client, 0, &event) == TB_NEXT_END);
    stop();
}

static void a_hole_is_filled_and_repeats_are_dropped(void) {
    start();
    start_job();
    router_tokens(worker, "j", 1, "a", 1, IDS);        /* a repeat */
    router_tokens(worker, "j", 3, "c", 1, IDS + 2);    /* a hole */
    CHECK(router_expect(worker, client, M_RESUME)->after == 1);
    router_tokens(worker, "j", 2, "b", 1, IDS + 1);
    router_tokens(worker, "j", 1, "abc", 3, IDS);      /* an overlap: asks again */
    CHECK(router_expect(worker, client, M_RESUME)->after == 2);
    router_tokens(worker, "j", 3, "cd", 2, IDS + 2);
    router_done(worker, "j", "", "length", 4, IDS, 0);
    CHECK(read_to(TB_DONE).reason == TB_REASON_LENGTH && strcmp(text, "abcd") == 0);
    stop();
}

static void a_done_that_is_ahead_of_the_tokens_resumes_and_at_last_gives_up(void) {
    start();
    start_job();
    for (int i = 0; i < TBI_MAX_RESUMES; i++) {
        router_done(worker, "j", "", "stop", 2, IDS, 0);
        CHECK(router_expect(worker, client, M_RESUME)->after == 1);
    }
    CHECK(read_failure() == TB_PROTOCOL);
    stop();
}

static void a_resume_that_a_busy_worker_refuses_is_asked_again(void) {
    start();
    start_job();
    router_tokens(worker, "j", 3, "c", 1, IDS + 2); /* a hole */
    CHECK(router_expect(worker, client, M_RESUME)->after == 1);
    for (int i = 0; i < TBI_MAX_RESUMES + 1; i++) {
        int64_t refused_ms = tbi_now_ms();
        router_error(worker, M_ERROR, "j", "busy", true, 300);
        CHECK(router_expect(worker, client, M_RESUME)->after == 1);
        CHECK(tbi_now_ms() - refused_ms >= 300);
    }
    router_tokens(worker, "j", 2, "bc", 2, IDS + 1);
    router_done(worker, "j", "", "stop", 3, IDS, 0);
    CHECK(read_to(TB_DONE).seq == 3 && strcmp(text, "abc") == 0);
    stop();
}

static void a_wrong_checksum_is_a_protocol_error(void) {
    start();
    start_job();
    router_done(worker, "j", "", "stop", 1, IDS, 1);
    CHECK(read_failure() == TB_PROTOCOL);
    stop();
}

static void rejections_are_typed_and_unknown_codes_internal(void) {
    start();
    submit("j");
    router_expect(worker, client, M_SUBMIT);
    router_error(worker, M_REJECTED, "j", "busy", true, 250);
    tb_event event = read_to(TB_FAILED);
    CHECK(event.error.code == TB_BUSY && event.error.retry && event.error.retry_ms == 250);
    submit("j");
    router_expect(worker, client, M_SUBMIT);
    router_error(worker, M_REJECTED, "j", "later", true, 0);
    event = read_to(TB_FAILED);
    CHECK(event.error.code == TB_INTERNAL && event.error.retry);
    CHECK(strcmp(event.error.message, "later: in words") == 0);
    stop();
}

static void a_cancelled_job_ends_as_the_worker_says(void) {
    start();
    tb_job *job = start_job();
    tb_cancel(job);
    CHECK(strcmp(router_expect(worker, client, M_CANCEL)->job, "j") == 0);
    router_done(worker, "j", "", "cancelled", 1, IDS, 0);
    CHECK(read_to(TB_DONE).reason == TB_REASON_CANCELLED);
    tb_job_free(job);
    tb_job_free(start_job());
    router_expect(worker, client, M_CANCEL);
    stop();
}

static void a_job_that_is_told_not_to_be_durable_is_cancelled_with_its_handle(void) {
    start();
    tb_request *request = tb_request_new();
    tb_request_set_prompt(request, "p");
    tb_request_set_durable(request, false);
    tb_job *job = tb_submit(client, request, NULL, NULL, NULL);
    tb_request_free(request);
    router_expect(worker, client, M_SUBMIT);
    tb_job_free(job);
    router_expect(worker, client, M_CANCEL);
    stop();
}

static void a_cancel_that_a_busy_worker_refuses_is_said_again(void) {
    start();
    tb_cancel(start_job_as(true));
    router_expect(worker, client, M_CANCEL);
    for (int i = 0; i < 2; i++) {
        int64_t refused_ms = tbi_now_ms();
        router_error(worker, M_ERROR, "j", "busy", true, 100);
        router_tokens(worker, "j", 2 + i, "b", 1, IDS + 1 + i);
        router_expect(worker, client, M_CANCEL);
        CHECK(tbi_now_ms() - refused_ms >= 100);
    }
    router_done(worker, "j", "", "cancelled", 3, IDS, 0);
    CHECK(read_to(TB_DONE).reason == TB_REASON_CANCELLED && strcmp(text, "abb") == 0);
    stop();
}

static void credit_of_one_event_is_renewed_after_every_event(void) {
    start_with(2000, &(tb_options){.credit = 1});
    start_job();
    CHECK(router_expect(worker, client, M_CREDIT)->total == 2);
    router_tokens(worker, "j", 2, "b", 1, IDS + 1);
    CHECK(router_expect(worker, client, M_CREDIT)->total == 3);
    stop();
}

static void credit_is_renewed_when_half_is_used(void) {
    start_with(2000, &(tb_options){.credit = 4});
    submit("j");
    CHECK(router_expect(worker, client, M_HELLO)->credit == 4);
    router_expect(worker, client, M_SUBMIT);
    router_accept(worker, "j", 1);
    router_tokens(worker, "j", 1, "a", 1, IDS);
    router_tokens(worker, "j", 2, "b", 1, IDS + 1);
    CHECK(router_expect(worker, client, M_CREDIT)->total == 6);
    router_tokens(worker, "j", 3, "c", 1, IDS + 2);
    router_tokens(worker, "j", 4, "d", 1, IDS + 3);
    CHECK(router_expect(worker, client, M_CREDIT)->total == 8);
    tb_event event = read_to(TB_TOKENS); /* read slowly: the steps came together */
    CHECK(event.seq == 1 && event.num_ids == 4 && strcmp(event.text, "abcd") == 0);
    stop();
}

static void a_job_of_another_client_is_followed(void) {
    start();
    tb_job *job = tb_follow(client, "other", 2, NULL, NULL, NULL);
    const heard *said = router_expect(worker, client, M_RESUME);
    CHECK(said->after == 2 && strcmp(said->job, "other") == 0);
    router_tokens(worker, "other", 3, "c", 1, IDS + 2);
    router_done(worker, "other", "", "stop", 3, IDS, 0);
    CHECK(read_to(TB_DONE).seq == 3 && strcmp(text, "c") == 0);
    tb_job_free(job);
    stop();
}

/* A client that is not connected: all of this is found before anything is sent. */
static void expect_refusal(tb_request *request, tb_code code, const char *field) {
    tb_error error;
    CHECK(tb_submit(client, request, NULL, NULL, &error) == NULL);
    CHECK(error.code == code && strcmp(error.field, field) == 0 && error.message[0] != '\0');
    tb_request_free(request);
}

static void requests_that_cannot_be_sent_are_refused_by_field(void) {
    tb_error error;
    start();
    tb_request *request = tb_request_new();
    tb_request_add_message(request, "user", "\xff");
    expect_refusal(request, TB_INVALID, "messages[0].content");
    request = tb_request_new();
    tb_request_set_temperature(request, (double)NAN);
    expect_refusal(request, TB_INVALID, "temperature");
    request = tb_request_new();
    tb_request_set_seed(request, INT64_MAX);
    expect_refusal(request, TB_INVALID, "seed");
    request = tb_request_new();
    tb_request_set_job(request, "no spaces");
    expect_refusal(request, TB_INVALID, "job");
    request = tb_request_new();
    tb_request_set_have(request, IDS, 3);
    expect_refusal(request, TB_INVALID, "seed");
    char *huge = calloc(1, (1 << 20) + 2);
    memset(huge, 'x', (1 << 20) + 1);
    request = tb_request_new();
    tb_request_set_prompt(request, huge);
    expect_refusal(request, TB_TOO_LARGE, "");
    free(huge);
    submit("twice");
    request = tb_request_new();
    tb_request_set_job(request, "twice");
    expect_refusal(request, TB_CONFLICT, "job");
    CHECK(tb_open("nonsense", NULL, &error) == NULL && strcmp(error.field, "endpoint") == 0);
    CHECK(tb_open("tcp://127.0.0.1:1", &(tb_options){.curve_secret_key = "short"}, &error) == NULL);
    CHECK(tb_open("tcp://127.0.0.1:1", &(tb_options){.tenant = "a b"}, &error) == NULL);
    stop();
}

static int num_left;

static void free_at_the_end(const tb_event *event, void *user) {
    CHECK(*(int *)user == 42);
    append(event);
    if (event->kind != TB_DONE) return;
    tb_job_free(event->job); /* allowed */
    num_left--;
}

static void many_jobs_share_a_connection_by_callbacks(void) {
    static int answer = 42;
    char id[16];
    start();
    tb_request *request = tb_request_new();
    tb_request_set_prompt(request, "p");
    for (num_left = 0; num_left < 40; num_left++) {
        snprintf(id, sizeof id, "j%d", num_left);
        tb_request_set_job(request, id);
        CHECK(tb_submit(client, request, free_at_the_end, &answer, NULL) != NULL);
    }
    tb_request_free(request);
    for (int i = 0; i < 40; i++) router_expect(worker, client, M_SUBMIT);
    for (int i = 0; i < 40; i++) {
        snprintf(id, sizeof id, "j%d", i);
        router_accept(worker, id, 1);
        router_tokens(worker, id, 1, ".", 1, IDS);
        router_done(worker, id, "", "stop", 1, IDS, 0);
    }
    tb_run(client);
    CHECK(num_left == 0 && strlen(text) == 40 && tb_num_running(client) == 0 && client->all == NULL);
    stop();
}

int main(void) {
    tokens_come_in_order_and_done_has_the_rest();
    a_hole_is_filled_and_repeats_are_dropped();
    a_done_that_is_ahead_of_the_tokens_resumes_and_at_last_gives_up();
    a_resume_that_a_busy_worker_refuses_is_asked_again();
    a_wrong_checksum_is_a_protocol_error();
    rejections_are_typed_and_unknown_codes_internal();
    a_cancelled_job_ends_as_the_worker_says();
    a_job_that_is_told_not_to_be_durable_is_cancelled_with_its_handle();
    a_cancel_that_a_busy_worker_refuses_is_said_again();
    credit_is_renewed_when_half_is_used();
    credit_of_one_event_is_renewed_after_every_event();
    a_job_of_another_client_is_followed();
    requests_that_cannot_be_sent_are_refused_by_field();
    many_jobs_share_a_connection_by_callbacks();
    printf("jobs: 14 cases, no failures\n");
    return 0;
}
