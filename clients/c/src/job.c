/* One job: docs/PROTOCOL.md section 6, and section 5.6 for what follows a WELCOME.
 *
 *   new --SUBMIT--> submitted --ACCEPTED--> running --DONE, ERROR--> over
 *                       ^                     | a hole, a new connection: RESUME
 *                       +---- new worker -----+
 *
 * RESUME after a new connection may stay without an answer for as long as the job waits in the queue.
 * Only one that follows a hole must bring something: it is repeated, and at last the job fails. One that
 * a worker was too busy to answer is repeated as long as there is a worker.
 */
#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

static void send_job_message(tb_job *job, tbi_type type, int64_t after) {
    tbi_outgoing out;
    tbi_outgoing_init(&out);
    tbi_job_message_encode(job->id, after, &out);
    tbi_session_send(job->client, type, &out);
    tbi_outgoing_free(&out);
}

/* The end: the event comes from the node that was kept for it. */
static tb_event *finish(tb_job *job, tb_event_kind kind) {
    tbi_node *node = job->end;
    job->end = NULL;
    job->is_over = true;
    tbi_table_remove(&job->client->table, job);
    node->event.kind = kind;
    node->event.attempt = job->attempt;
    node->event.seq = job->last;
    tbi_queue_push(job, node);
    return &node->event;
}

void tbi_job_fail(tb_job *job, const tb_error *error) {
    if (!job->is_over) finish(job, TB_FAILED)->error = *error;
}

void tbi_job_fail_code(tb_job *job, tb_code code, const char *message) {
    tb_error error;
    tbi_error_set(&error, code, NULL, message);
    tbi_job_fail(job, &error);
}

/* Without a connection nothing is sent: the next WELCOME picks the job up. */
void tbi_job_submit(tb_job *job) {
    tb_client *client = job->client;
    if (client->state != TBI_LIVE) return;
    tbi_outgoing out;
    tb_error error;
    tbi_outgoing_init(&out);
    bool is_good = tbi_submit_encode(job->request, &client->limits, &out, &error);
    if (is_good) {
        job->is_answered = false;
        job->asked_ms = tbi_now_ms();
        tbi_session_send(client, TBI_SUBMIT, &out);
    }
    tbi_outgoing_free(&out);
    if (!is_good) tbi_job_fail(job, &error);
}

void tbi_job_resume(tb_job *job) {
    int64_t now_ms = tbi_now_ms();
    if (job->client->state != TBI_LIVE) return;
    if (now_ms < job->again_ms || (job->is_resuming && now_ms - job->asked_ms < TBI_RESUME_AGAIN_MS)) return;
    if (job->has_hole && job->num_resumes++ >= TBI_MAX_RESUMES) {
        tbi_job_fail_code(job, TB_PROTOCOL, "the worker does not send what follows the last token again");
        return;
    }
    job->is_resuming = true;
    job->again_ms = 0;
    job->asked_ms = now_ms;
    send_job_message(job, TBI_RESUME, job->last);
}

/* Makes the request one that goes on after the tokens which are here. */
static bool continue_request(tb_job *job) {
    if (job->deadline_ms > 0) {
        int64_t left_ms = job->deadline_ms - (tbi_now_ms() - job->opened_ms);
        tb_request_set_deadline_ms(job->request, left_ms > 1 ? left_ms : 1);
    }
    if (job->seed >= 0) {
        tb_request_set_seed(job->request, job->seed);
        tb_request_set_have(job->request, job->ids.data, job->ids.num);
    }
    return !job->request->no_memory;
}

static void submit_continued(tb_job *job) {
    job->is_answered = job->is_resuming = job->has_hole = false;
    job->again_ms = 0;
    if (continue_request(job)) tbi_job_submit(job);
    else tbi_job_fail_code(job, TB_NO_MEMORY, "no memory to submit the job again");
}

bool tbi_job_is_durable(const tb_job *job) {
    const tbi_field *field = job->request != NULL ? tbi_request_find(job->request, "durable") : NULL;
    return field != NULL && field->integer != 0;
}

/* After a WELCOME. Another worker process knows nothing of the job, unless it is durable. */
void tbi_job_pick_up(tb_job *job, bool is_same_worker) {
    job->is_resuming = job->has_hole = job->was_forgotten = false;
    job->num_resumes = job->num_submits = 0;
    job->again_ms = 0;
    if (job->is_orphan && !is_same_worker) {
        tbi_client_free_job(job);
        return;
    }
    if (job->request == NULL || (job->is_answered && (is_same_worker || tbi_job_is_durable(job))))
        tbi_job_resume(job);
    else if (is_same_worker)
        tbi_job_submit(job);
    else
        submit_continued(job);
    if (job->wants_cancel) send_job_message(job, TBI_CANCEL, -1);
}

/* Asks again where an answer is overdue. */
void tbi_job_tick(tb_job *job, int64_t now_ms) {
    tb_client *client = job->client;
    if (client->state != TBI_LIVE) {
        int64_t since_ms = job->opened_ms > client->lost_since_ms ? job->opened_ms : client->lost_since_ms;
        if (now_ms - since_ms < client->give_up_ms) return;
        char message[512];
        snprintf(message, sizeof message, "no worker at %.300s: %.100s", client->endpoint, client->lost_why);
        tbi_job_fail_code(job, TB_UNAVAILABLE, message);
    } else if (job->again_ms > 0) {
        if (now_ms < job->again_ms) return;
        bool is_resume_due = job->is_resuming;
        job->is_resuming = false; /* it was answered: nothing is on its way */
        job->again_ms = 0;
        if (is_resume_due) tbi_job_resume(job);
        if (job->wants_cancel) send_job_message(job, TBI_CANCEL, -1);
    } else if (job->has_hole && now_ms - job->asked_ms >= TBI_RESUME_AGAIN_MS) {
        tbi_job_resume(job);
    } else if (job->request != NULL && !job->is_answered && now_ms - job->asked_ms >= TBI_SUBMIT_AGAIN_MS) {
        if (++job->num_submits < TBI_MAX_SUBMITS) tbi_job_submit(job);
        else if (client->last_error_ms > job->opened_ms) tbi_job_fail(job, &client->last_error);
        else tbi_job_fail_code(job, TB_PROTOCOL, "the worker does not answer SUBMIT");
    }
}

void tbi_job_on_accepted(tb_job *job, const msgpack_object_map *body) {
    int64_t attempt = tbi_get_int(body, "attempt", 1);
    bool is_repeat = job->is_answered && attempt == job->attempt;
    job->is_answered = true;
    job->attempt = attempt;
    job->seed = tbi_get_int(body, "seed", job->seed);
    if (is_repeat) return;
    tbi_node *node = tbi_node_new();
    if (node == NULL) return; /* the tokens can do without */
    node->event.kind = TB_STARTED;
    node->event.attempt = attempt;
    node->event.seq = job->last;
    node->event.seed = job->seed;
    node->event.prompt_tokens = tbi_get_int(body, "prompt_tokens", 0);
    node->event.worker = job->client->worker;
    tbi_queue_push(job, node);
}

static void on_hole(tb_job *job) {
    job->has_hole = true;
    tbi_job_resume(job);
}

static void take_tokens(tb_job *job, int64_t attempt, int64_t seq, const tbi_ids *ids, tbi_bytes text) {
    if (!tbi_ids_append(&job->ids, ids->data, ids->num) || !tbi_queue_add_tokens(job, attempt, seq, ids, text)) {
        tbi_job_fail_code(job, TB_NO_MEMORY, "no memory for the answer");
        return;
    }
    job->crc = tbi_crc(job->crc, ids->data, ids->num);
    job->attempt = attempt;
    job->last = seq + (int64_t)ids->num - 1;
    job->is_resuming = job->has_hole = false;
    job->num_resumes = 0;
    if (!job->wants_cancel) job->again_ms = 0;
    job->client->num_bad_messages = 0;
}

/* event: [job, attempt, seq, ids, text, ...]. One that is malformed is left out: it makes a hole. */
void tbi_job_on_tokens(tb_job *job, const msgpack_object *event) {
    const msgpack_object *items = event->via.array.ptr;
    tbi_ids ids = {NULL, 0, 0};
    bool is_good = items[1].type == MSGPACK_OBJECT_POSITIVE_INTEGER &&
                   items[2].type == MSGPACK_OBJECT_POSITIVE_INTEGER && items[4].type == MSGPACK_OBJECT_STR;
    if (is_good && tbi_read_ids(&items[3], &ids)) {
        int64_t seq = (int64_t)items[2].via.u64;
        tbi_bytes text = {items[4].via.str.ptr, items[4].via.str.size};
        if (seq == job->last + 1 && ids.num > 0)
            take_tokens(job, (int64_t)items[1].via.u64, seq, &ids, text);
        else if (seq + (int64_t)ids.num - 1 > job->last)
            on_hole(job);
    }
    free(ids.data);
}

static void read_usage(tb_usage *usage, const msgpack_object_map *body) {
    const msgpack_object *object = tbi_get(body, "usage");
    if (object == NULL || object->type != MSGPACK_OBJECT_MAP) return;
    const msgpack_object_map *map = &object->via.map;
    usage->prompt_tokens = tbi_get_int(map, "prompt_tokens", 0);
    usage->completion_tokens = tbi_get_int(map, "completion_tokens", 0);
    usage->cached_tokens = tbi_get_int(map, "cached_tokens", 0);
    usage->queue_ms = tbi_get_number(map, "queue_ms");
    usage->ttft_ms = tbi_get_number(map, "ttft_ms");
    usage->total_ms = tbi_get_number(map, "total_ms");
}

void tbi_job_on_done(tb_job *job, const msgpack_object_map *body) {
    int64_t seq = tbi_get_int(body, "seq", -1);
    if (seq > job->last) {
        on_hole(job);
        return;
    }
    int64_t crc = tbi_get_int(body, "crc", -1);
    if (seq < job->last || (job->has_all_ids && crc != (int64_t)job->crc)) {
        tbi_job_fail_code(job, TB_PROTOCOL,
                          seq < job->last ? "the job ended before its last token" : "the checksum is wrong");
        return;
    }
    tbi_bytes text = tbi_get_text(body, "text");
    if (!tbi_text_append(&job->end->text, text.data, text.size)) {
        tbi_job_fail_code(job, TB_NO_MEMORY, "no memory for the answer");
        return;
    }
    tb_event *event = finish(job, TB_DONE);
    event->attempt = tbi_get_int(body, "attempt", job->attempt);
    event->text_bytes = text.size;
    event->reason = tbi_reason_from(tbi_get_text(body, "reason"));
    event->crc = (uint32_t)crc;
    read_usage(&event->usage, body);
    event->text = job->last_node->text.data;
    job->client->num_bad_messages = 0;
}

/* RESUME or CANCEL came at a bad time, such as before the worker had found its Redis. */
static void on_busy(tb_job *job, int64_t retry_ms) {
    job->num_resumes = 0;
    job->again_ms = tbi_now_ms() + (retry_ms > 0 ? retry_ms : TBI_RESUME_AGAIN_MS);
}

/* ERROR: the end, or the answer to CANCEL or RESUME. */
void tbi_job_on_error(tb_job *job, const tb_error *error) {
    bool is_resuming = job->is_resuming;
    if (error->code == TB_GONE && !is_resuming) return; /* of a RESUME that was overtaken */
    bool is_forgotten = error->code == TB_NOT_FOUND && job->request != NULL && !job->wants_cancel;
    if (is_forgotten && !job->is_answered) return; /* of a CANCEL before this SUBMIT */
    if (is_forgotten && is_resuming && !job->was_forgotten && !tbi_job_is_durable(job)) {
        job->was_forgotten = true; /* a worker that forgets it again and again must not run it for ever */
        submit_continued(job);
    } else if (error->code == TB_BUSY && (is_resuming || job->wants_cancel))
        on_busy(job, error->retry_ms);
    else
        tbi_job_fail(job, error);
}
