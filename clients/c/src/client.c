/* Handles: opening a client, submitting and freeing jobs. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#include "internal.h"

#define DEFAULT_CREDIT 4096
#define DEFAULT_GIVE_UP_MS 30000
#define DEFAULT_HEARTBEAT_MS 2000

static bool open_wake_pipe(int *fds) {
    if (pipe(fds) != 0) {
        fds[0] = fds[1] = -1;
        return false;
    }
    for (int i = 0; i < 2; i++)
        if (fcntl(fds[i], F_SETFL, O_NONBLOCK) != 0 || fcntl(fds[i], F_SETFD, FD_CLOEXEC) != 0) return false;
    return true;
}

static bool copy_options(tb_client *client, const char *endpoint, const tb_options *options) {
    const char *keys[3] = {options->curve_server_key, options->curve_public_key, options->curve_secret_key};
    client->endpoint = tbi_strdup(endpoint);
    if (options->tenant != NULL) client->tenant = tbi_strdup(options->tenant);
    bool is_good = client->endpoint != NULL && (client->tenant != NULL || options->tenant == NULL);
    for (int i = 0; i < 3 && is_good; i++) {
        if (keys[i] == NULL) continue;
        client->curve[i] = tbi_strdup(keys[i]);
        is_good = client->curve[i] != NULL;
    }
    client->credit = options->credit > 0 ? options->credit : DEFAULT_CREDIT;
    client->give_up_ms = options->give_up_ms > 0 ? options->give_up_ms : DEFAULT_GIVE_UP_MS;
    return is_good;
}

static bool check_options(const tb_options *options, tb_error *error) {
    const char *keys[3] = {options->curve_server_key, options->curve_public_key, options->curve_secret_key};
    int num_keys = 0;
    for (int i = 0; i < 3; i++) {
        if (keys[i] == NULL) continue;
        num_keys++;
        if (strlen(keys[i]) == 40) continue;
        tbi_error_set(error, TB_INVALID, "curve", "a CURVE key has 40 characters (Z85)");
        return false;
    }
    if (num_keys != 0 && num_keys != 3) {
        tbi_error_set(error, TB_INVALID, "curve", "CURVE needs all three keys, or none");
        return false;
    }
    if (options->tenant != NULL && !tbi_is_name(options->tenant, strlen(options->tenant), 64)) {
        tbi_error_set(error, TB_INVALID, "tenant", "a tenant is 1-64 of A-Z a-z 0-9 . _ : -");
        return false;
    }
    return true;
}

static bool start(tb_client *client, const char *endpoint, const tb_options *options, tb_error *error) {
    memcpy(client->name, "c-", 2);
    client->context = zmq_ctx_new();
    bool is_good = client->context != NULL && copy_options(client, endpoint, options) &&
                   open_wake_pipe(client->wake_fds) && tbi_random_hex(client->name + 2, 32);
    if (!is_good) {
        tbi_error_set(error, TB_NO_MEMORY, NULL, "no memory or file descriptors for a client");
        return false;
    }
    client->heartbeat_ms = DEFAULT_HEARTBEAT_MS;
    client->limits = (tbi_limits){1 << 20, 16 << 20, 4};
    client->lost_since_ms = tbi_now_ms();
    client->lost_why = "no connection yet";
    if (tbi_session_open(client)) return true;
    tbi_error_set(error, TB_INVALID, "endpoint", zmq_strerror(zmq_errno()));
    return false;
}

tb_client *tb_open(const char *endpoint, const tb_options *options, tb_error *error) {
    static const tb_options DEFAULTS = {0};
    if (options == NULL) options = &DEFAULTS;
    tbi_error_set(error, TB_OK, NULL, NULL);
    if (!check_options(options, error)) return NULL;
    tb_client *client = calloc(1, sizeof *client);
    if (client == NULL) {
        tbi_error_set(error, TB_NO_MEMORY, NULL, "no memory for a client");
        return NULL;
    }
    client->wake_fds[0] = client->wake_fds[1] = -1;
    if (start(client, endpoint, options, error)) return client;
    tb_close(client);
    return NULL;
}

void tb_close(tb_client *client) {
    if (client == NULL) return;
    while (client->all != NULL) {
        tb_job *job = client->all;
        if (client->state == TBI_LIVE) tb_job_free(job);
        else tbi_client_free_job(job);
    }
    tbi_session_close(client);
    if (client->context != NULL) zmq_ctx_term(client->context);
    for (int i = 0; i < 2; i++)
        if (client->wake_fds[i] >= 0) close(client->wake_fds[i]);
    for (int i = 0; i < 3; i++) free(client->curve[i]);
    tbi_node_free(client->held);
    free(client->table.buckets);
    free(client->endpoint);
    free(client->tenant);
    free(client);
}

void tbi_client_fail_all(tb_client *client, const tb_error *error) {
    for (tb_job *job = client->all; job != NULL; job = job->all_next)
        tbi_job_fail(job, error);
}

/* -------------------------------------------------------------------- jobs */

/* NULL if the id is taken, or without memory. Takes the request over in every case. */
static tb_job *add_job(tb_client *client, const char *id, tb_request *request, tb_error *error) {
    bool is_taken = tbi_table_find(&client->table, id, strlen(id)) != NULL;
    tb_job *job = is_taken ? NULL : calloc(1, sizeof *job);
    tbi_node *end = job != NULL ? tbi_node_new() : NULL;
    if (end != NULL) {
        memcpy(job->id, id, strlen(id) + 1);
        if (tbi_table_put(&client->table, job)) {
            job->client = client;
            job->request = request;
            job->end = end;
            job->seed = -1;
            job->opened_ms = tbi_now_ms();
            job->all_next = client->all;
            if (client->all != NULL) client->all->all_prev = job;
            client->all = job;
            return job;
        }
    }
    tbi_node_free(end);
    free(job);
    tb_request_free(request);
    if (is_taken) tbi_error_set(error, TB_CONFLICT, "job", "this client already runs a job with this id");
    else tbi_error_set(error, TB_NO_MEMORY, NULL, "no memory for a job");
    return NULL;
}

/* A copy of the request with a job id, if it can be sent. */
static tb_request *prepare(tb_client *client, const tb_request *request, tb_error *error) {
    char id[33];
    if (!request->no_memory && !tbi_request_check(request, error)) return NULL;
    tb_request *copy = tbi_request_clone(request);
    if (copy != NULL && tbi_request_find(copy, "job") == NULL && tbi_random_hex(id, 32))
        tb_request_set_job(copy, id);
    if (copy == NULL || copy->no_memory || tbi_request_find(copy, "job") == NULL) {
        tb_request_free(copy);
        tbi_error_set(error, TB_NO_MEMORY, NULL, "no memory for the request");
        return NULL;
    }
    tbi_outgoing out;
    tbi_outgoing_init(&out);
    bool is_good = tbi_submit_encode(copy, &client->limits, &out, error);
    tbi_outgoing_free(&out);
    if (is_good) return copy;
    tb_request_free(copy);
    return NULL;
}

tb_job *tb_submit(tb_client *client, const tb_request *request, tb_callback callback, void *user,
                  tb_error *error) {
    tbi_error_set(error, TB_OK, NULL, NULL);
    if (client->state == TBI_DEAD) {
        if (error != NULL) *error = client->last_error;
        return NULL;
    }
    tb_request *copy = prepare(client, request, error);
    if (copy == NULL) return NULL;
    tb_job *job = add_job(client, tbi_request_find(copy, "job")->texts[0].data, copy, error);
    if (job == NULL) return NULL;
    const tbi_field *seed = tbi_request_find(copy, "seed"), *have = tbi_request_find(copy, "have");
    const tbi_field *deadline = tbi_request_find(copy, "deadline_ms");
    job->callback = callback;
    job->user = user;
    job->has_all_ids = true;
    if (seed != NULL) job->seed = seed->integer;
    if (deadline != NULL) job->deadline_ms = deadline->integer;
    if (have != NULL && tbi_ids_append(&job->ids, have->ids.data, have->ids.num)) {
        job->last = (int64_t)have->ids.num;
        job->crc = tbi_crc(0, have->ids.data, have->ids.num);
    }
    tbi_job_submit(job);
    return job;
}

tb_job *tb_follow(tb_client *client, const char *job_id, int64_t after, tb_callback callback, void *user,
                  tb_error *error) {
    tbi_error_set(error, TB_OK, NULL, NULL);
    if (client->state == TBI_DEAD) {
        if (error != NULL) *error = client->last_error;
        return NULL;
    }
    if (!tbi_is_name(job_id, strlen(job_id), TBI_MAX_JOB_ID_BYTES) || after < 0 || after > TBI_MAX_INT) {
        tbi_error_set(error, TB_INVALID, after < 0 ? "after" : "job", "not a job id, or not a position");
        return NULL;
    }
    tb_job *job = add_job(client, job_id, NULL, error);
    if (job == NULL) return NULL;
    job->callback = callback;
    job->user = user;
    job->last = after;
    job->has_all_ids = after == 0;
    tbi_job_resume(job);
    return job;
}

void tb_cancel(tb_job *job) {
    tbi_outgoing out;
    if (job->is_over) return;
    job->wants_cancel = true;
    if (job->client->state != TBI_LIVE) return; /* said when the job is picked up */
    tbi_outgoing_init(&out);
    tbi_job_message_encode(job->id, -1, &out);
    tbi_session_send(job->client, TBI_CANCEL, &out);
    tbi_outgoing_free(&out);
}

void tbi_client_free_job(tb_job *job) {
    tb_client *client = job->client;
    tbi_queue_clear(job);
    if (!job->is_over) tbi_table_remove(&client->table, job);
    if (job->all_prev != NULL) job->all_prev->all_next = job->all_next;
    else client->all = job->all_next;
    if (job->all_next != NULL) job->all_next->all_prev = job->all_prev;
    tbi_node_free(job->end);
    tb_request_free(job->request);
    free(job->ids.data);
    free(job);
}

static void reap(const tb_event *event, void *user) {
    (void)user;
    if (event->kind == TB_DONE || event->kind == TB_FAILED) tbi_client_free_job(event->job);
}

/* A job that the worker knows while there is no connection stays until CANCEL was answered. */
void tb_job_free(tb_job *job) {
    if (job == NULL) return;
    bool is_ours = !job->is_over && job->request != NULL && job->asked_ms > 0;
    if (is_ours && !tbi_job_is_durable(job)) {
        tb_cancel(job);
        if (job->client->state != TBI_LIVE && job->client->state != TBI_DEAD && !job->is_orphan) {
            tbi_queue_clear(job);
            job->callback = reap;
            job->user = NULL;
            job->is_orphan = true;
            return;
        }
    }
    tbi_client_free_job(job);
}

const char *tb_job_id(const tb_job *job) { return job->id; }
bool tb_job_is_over(const tb_job *job) { return job->is_over; }
int64_t tb_job_seed(const tb_job *job) { return job->seed; }
int64_t tb_job_last_seq(const tb_job *job) { return job->last; }

const int32_t *tb_job_ids(const tb_job *job, size_t *num_ids) {
    *num_ids = job->ids.num;
    return job->ids.data;
}
