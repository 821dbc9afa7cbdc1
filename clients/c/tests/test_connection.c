/* Connections that break, workers that restart or fall silent: docs/PROTOCOL.md section 5.6. */
#include <pthread.h>
#include <zmq.h>

#include "kit.h"

static void a_restarted_worker_goes_on_from_the_ids_here(void) {
    char endpoint[128], name[65];
    start_with(200, NULL);
    start_job();
    snprintf(endpoint, sizeof endpoint, "%s", router_endpoint(worker));
    router_free(worker);
    worker = router_new("boot-2", 200, endpoint);
    snprintf(name, sizeof name, "%s", client->name);
    CHECK(strcmp(router_expect(worker, client, M_HELLO)->client, name) == 0);
    const heard *said = router_expect(worker, client, M_SUBMIT);
    CHECK(said->seed == 123 && said->num_have == 1 && said->have[0] == 5 && said->max_tokens == 6);
    router_accept(worker, "j", 123);
    router_tokens(worker, "j", 2, "b", 1, IDS + 1);
    router_done(worker, "j", "", "stop", 2, IDS, 0);
    read_to(TB_DONE);
    CHECK(strcmp(text, "ab") == 0);
    stop();
}

static void no_session_is_answered_by_hello_and_resume(void) {
    start();
    start_job();
    router_error(worker, M_ERROR, NULL, "no_session", true, 0);
    router_expect(worker, client, M_HELLO);
    CHECK(router_expect(worker, client, M_RESUME)->after == 1);
    router_error(worker, M_ERROR, "j", "not_found", false, 0); /* forgotten: submitted anew */
    const heard *said = router_expect(worker, client, M_SUBMIT);
    CHECK(said->seed == 123 && said->num_have == 1);
    router_error(worker, M_REJECTED, "j", "draining", true, 0);
    CHECK(read_failure() == TB_DRAINING);
    stop();
}

static void a_worker_that_forgets_a_job_twice_is_asked_once_for_each_welcome(void) {
    start();
    start_job();
    for (int i = 0; i < 2; i++) { /* each no_session leads to a WELCOME */
        router_error(worker, M_ERROR, NULL, "no_session", true, 0);
        router_expect(worker, client, M_RESUME);
        router_error(worker, M_ERROR, "j", "not_found", false, 0);
        router_expect(worker, client, M_SUBMIT);
        router_accept(worker, "j", 123);
    }
    router_tokens(worker, "j", 9, "z", 1, IDS); /* a hole */
    CHECK(router_expect(worker, client, M_RESUME)->after == 1);
    router_error(worker, M_ERROR, "j", "not_found", false, 0);
    CHECK(read_failure() == TB_NOT_FOUND);
    stop();
}

static void a_submit_that_a_restarted_worker_never_read_is_sent_again(void) {
    char endpoint[128];
    start_with(200, NULL);
    start_job();
    snprintf(endpoint, sizeof endpoint, "%s", router_endpoint(worker));
    router_free(worker);
    worker = router_new("boot-2", 200, endpoint);
    for (int i = 0; i < 2; i++) {
        const heard *said = router_expect(worker, client, M_SUBMIT);
        CHECK(said->seed == 123 && said->num_have == 1 && said->have[0] == 5);
        if (i == 0) router_error(worker, M_ERROR, NULL, "no_session", true, 0);
    }
    router_accept(worker, "j", 123);
    router_done(worker, "j", "", "stop", 1, IDS, 0);
    read_to(TB_DONE);
    stop();
}

static void a_durable_job_that_redis_lost_is_not_submitted_again(void) {
    start();
    start_job_as(true);
    router_error(worker, M_ERROR, NULL, "no_session", true, 0);
    router_expect(worker, client, M_RESUME);
    router_error(worker, M_ERROR, "j", "not_found", false, 0);
    CHECK(read_failure() == TB_NOT_FOUND);
    stop();
}

static void the_answer_about_a_freed_job_does_not_end_the_next_of_its_name(void) {
    start();
    tb_job_free(start_job());
    router_expect(worker, client, M_CANCEL);
    submit("j");
    router_expect(worker, client, M_SUBMIT);
    router_error(worker, M_ERROR, "j", "not_found", false, 0); /* of the CANCEL */
    router_accept(worker, "j", 123);
    router_done(worker, "j", "", "stop", 0, IDS, 0);
    read_to(TB_DONE);
    stop();
}

static void a_silent_worker_is_left_and_found_again(void) {
    start_with(100, NULL);
    start_job();
    router_expect_only(worker, client, M_HELLO); /* its pings stayed without an answer */
    CHECK(!tb_is_connected(client));
    router_welcome(worker);
    CHECK(router_expect(worker, client, M_RESUME)->after == 1);
    CHECK(tb_is_connected(client));
    router_done(worker, "j", "", "stop", 1, IDS, 0);
    read_to(TB_DONE);
    stop();
}

static void a_resume_of_a_job_that_waits_is_patient(void) {
    tb_event event;
    start();
    submit("j");
    router_expect(worker, client, M_SUBMIT);
    router_accept(worker, "j", 1);
    router_error(worker, M_ERROR, NULL, "no_session", true, 0);
    router_expect(worker, client, M_RESUME);
    read_to(TB_STARTED);
    client->jobs_ticked_ms = 0;
    int64_t asked_ms = client->all->asked_ms -= 60000;
    CHECK(tb_next(client, 300, &event) == TB_NEXT_TIMEOUT && tb_num_running(client) == 1);
    CHECK(client->all->asked_ms == asked_ms); /* nor was the worker asked again */
    stop();
}

static void a_job_freed_without_a_connection_is_cancelled_later(void) {
    start_with(100, NULL);
    tb_job *job = start_job();
    router_expect_only(worker, client, M_HELLO);
    tb_job_free(job);
    router_welcome(worker);
    router_expect(worker, client, M_CANCEL);
    CHECK(tb_num_running(client) == 1);
    router_done(worker, "j", "", "cancelled", 1, IDS, 0);
    while (tb_num_running(client) > 0) tb_poll(client, 100);
    tb_poll(client, 0);
    CHECK(client->all == NULL);
    stop();
}

static void without_a_worker_jobs_are_unavailable(void) {
    start_with(2000, &(tb_options){.give_up_ms = 100});
    submit("j"); /* the router is there but never says WELCOME */
    tb_event event = read_to(TB_FAILED);
    CHECK(event.error.code == TB_UNAVAILABLE && event.error.retry);
    stop();
}

static void another_major_version_ends_the_client(void) {
    tb_error error;
    start();
    submit("j");
    router_expect_only(worker, client, M_HELLO);
    router_error(worker, M_ERROR, NULL, "version", false, 0);
    CHECK(read_failure() == TB_VERSION_MISMATCH);
    tb_request *request = tb_request_new();
    CHECK(tb_submit(client, request, NULL, NULL, &error) == NULL && error.code == TB_VERSION_MISMATCH);
    tb_request_free(request);
    stop();
}

static void junk_from_the_worker_is_survived_and_at_last_refused(void) {
    start();
    start_job();
    router_junk(worker);
    CHECK(router_expect(worker, client, M_RESUME)->after == 1);
    router_junk(worker);
    router_expect(worker, client, M_RESUME);
    router_junk(worker);
    CHECK(read_failure() == TB_PROTOCOL);
    stop();
}

static void a_ping_is_answered(void) {
    start();
    start_job();
    router_ping(worker, 77);
    CHECK(router_expect(worker, client, M_PONG)->t == 77);
    stop();
}

static void curve_keys_open_a_worker_that_asks_for_them(void) {
    char server[2][41], own[2][41], other[2][41];
    if (!zmq_has("curve")) return; /* libzmq was built without it */
    CHECK(zmq_curve_keypair(server[0], server[1]) == 0 && zmq_curve_keypair(own[0], own[1]) == 0);
    CHECK(zmq_curve_keypair(other[0], other[1]) == 0);
    router_use_curve(server[1]);
    tb_options options = {.curve_server_key = server[0], .curve_public_key = own[0], .curve_secret_key = own[1]};
    start_with(2000, &options);
    start_job();
    router_done(worker, "j", "", "stop", 1, IDS, 0);
    read_to(TB_DONE);
    stop();
    options.curve_server_key = other[0]; /* not the one of this worker */
    options.give_up_ms = 300;
    start_with(2000, &options);
    submit("j");
    CHECK(read_failure() == TB_UNAVAILABLE);
    stop();
    router_use_curve(NULL);
}

static void *wake(void *ignored) {
    (void)ignored;
    tb_wake(client);
    return NULL;
}

static void another_thread_ends_a_wait(void) {
    pthread_t thread;
    tb_event event;
    start();
    start_job();
    CHECK(pthread_create(&thread, NULL, wake, NULL) == 0);
    CHECK(tb_next(client, TB_FOREVER, &event) == TB_NEXT_TIMEOUT);
    pthread_join(thread, NULL);
    tb_wake(client);
    tb_run(client); /* returns although a job runs */
    stop();
}

int main(void) {
    a_restarted_worker_goes_on_from_the_ids_here();
    no_session_is_answered_by_hello_and_resume();
    a_worker_that_forgets_a_job_twice_is_asked_once_for_each_welcome();
    a_submit_that_a_restarted_worker_never_read_is_sent_again();
    a_durable_job_that_redis_lost_is_not_submitted_again();
    the_answer_about_a_freed_job_does_not_end_the_next_of_its_name();
    a_silent_worker_is_left_and_found_again();
    a_resume_of_a_job_that_waits_is_patient();
    a_job_freed_without_a_connection_is_cancelled_later();
    without_a_worker_jobs_are_unavailable();
    another_major_version_ends_the_client();
    junk_from_the_worker_is_survived_and_at_last_refused();
    a_ping_is_answered();
    another_thread_ends_a_wait();
    curve_keys_open_a_worker_that_asks_for_them();
    printf("connection: 15 cases, no failures\n");
    return 0;
}
