/* What the worker sent, to the session or the job it is about. */
#include <string.h>

#include "internal.h"

static tb_job *job_of(tb_client *client, const msgpack_object_map *body) {
    tbi_bytes id = tbi_get_text(body, "job");
    return tbi_table_find(&client->table, id.data, id.size);
}

static void read_limits(tb_client *client, const msgpack_object_map *body) {
    const msgpack_object *limits = tbi_get(body, "limits");
    if (limits == NULL || limits->type != MSGPACK_OBJECT_MAP) return;
    const msgpack_object_map *map = &limits->via.map;
    client->limits.max_body_bytes = tbi_get_int(map, "max_body_bytes", client->limits.max_body_bytes);
    client->limits.max_frame_bytes = tbi_get_int(map, "max_frame_bytes", client->limits.max_frame_bytes);
    client->limits.max_blobs = tbi_get_int(map, "max_blobs", client->limits.max_blobs);
}

static void on_welcome(tb_client *client, const msgpack_object_map *body) {
    char boot[sizeof client->boot];
    tbi_copy_text(boot, sizeof boot, tbi_get_text(body, "boot"));
    bool is_same_worker = strcmp(boot, client->boot) == 0;
    memcpy(client->boot, boot, sizeof boot);
    tbi_copy_text(client->worker, sizeof client->worker, tbi_get_text(body, "worker"));
    int64_t heartbeat_ms = tbi_get_int(body, "heartbeat_ms", 0);
    if (heartbeat_ms > 0) client->heartbeat_ms = heartbeat_ms;
    read_limits(client, body);
    client->state = TBI_LIVE;
    client->backoff_ms = 0;
    for (tb_job *job = client->all, *next; job != NULL; job = next) {
        next = job->all_next;
        if (!job->is_over) tbi_job_pick_up(job, is_same_worker);
    }
}

static void on_tokens(tb_client *client, const msgpack_object_map *body) {
    const msgpack_object *events = tbi_get(body, "events");
    if (events == NULL || events->type != MSGPACK_OBJECT_ARRAY) return;
    for (uint32_t i = 0; i < events->via.array.size; i++) {
        const msgpack_object *event = &events->via.array.ptr[i];
        if (event->type != MSGPACK_OBJECT_ARRAY || event->via.array.size < 5) continue;
        const msgpack_object *id = &event->via.array.ptr[0];
        if (id->type != MSGPACK_OBJECT_STR) continue;
        tb_job *job = tbi_table_find(&client->table, id->via.str.ptr, id->via.str.size);
        if (job != NULL) tbi_job_on_tokens(job, event);
    }
    tbi_session_use_credit(client, (int64_t)events->via.array.size);
}

static void on_error(tb_client *client, const msgpack_object_map *body) {
    tb_error error;
    tbi_error_from_body(&error, body);
    if (tbi_get(body, "job") != NULL) {
        tb_job *job = job_of(client, body);
        if (job != NULL) tbi_job_on_error(job, &error);
    } else if (error.code == TB_NO_SESSION) {
        if (client->state == TBI_LIVE) tbi_session_say_hello(client);
    } else if (error.code == TB_VERSION_MISMATCH) {
        tbi_session_die(client, &error);
    } else {
        client->last_error_ms = tbi_now_ms();
        client->last_error = error; /* tells later why a SUBMIT stayed without an answer */
    }
}

static void on_rejected(tb_client *client, const msgpack_object_map *body) {
    tb_error error;
    tb_job *job = job_of(client, body);
    tbi_error_from_body(&error, body);
    if (job != NULL) tbi_job_fail(job, &error);
}

static void on_ping(tb_client *client, const msgpack_object_map *body) {
    tbi_outgoing out;
    tbi_outgoing_init(&out);
    tbi_int_message_encode("t", tbi_get_int(body, "t", 0), &out);
    tbi_session_send(client, TBI_PONG, &out);
    tbi_outgoing_free(&out);
}

/* PONG has done its work by arriving; STATS is not asked for, and DRAIN shows when a job is rejected. */
void tbi_route(tb_client *client, const tbi_message *message) {
    const msgpack_object_map *body = message->body;
    tb_job *job;
    switch (message->type) {
    case TBI_WELCOME: on_welcome(client, body); break;
    case TBI_TOKENS: on_tokens(client, body); break;
    case TBI_ERROR: on_error(client, body); break;
    case TBI_REJECTED: on_rejected(client, body); break;
    case TBI_PING: on_ping(client, body); break;
    case TBI_ACCEPTED:
        if ((job = job_of(client, body)) != NULL) tbi_job_on_accepted(job, body);
        break;
    case TBI_DONE:
        if ((job = job_of(client, body)) != NULL) tbi_job_on_done(job, body);
        break;
    default: break;
    }
}
