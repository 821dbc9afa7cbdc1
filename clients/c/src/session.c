/* The connection: one DEALER at a time, HELLO, heartbeats, credit, reconnecting. Knows nothing of jobs.
 *
 *   waiting --backoff is over--> greeting --WELCOME--> live --silence, a broken connection--> waiting
 *                                    ^                  | ERROR no_session: HELLO again
 *                                    +------------------+
 */
#include <errno.h>
#include <string.h>
#include <zmq.h>

#include "internal.h"

#define LINGER_MS 500
#define FIRST_BACKOFF_MS 100
#define MAX_BACKOFF_MS 10000
#define MAX_MESSAGES_A_READ 1000
/* What a worker sends is bounded by our credit, not by its own limits. */
static const tbi_limits INCOMING = {64 << 20, 64 << 20, 4};

static bool set_int(void *socket, int option, int value) {
    return zmq_setsockopt(socket, option, &value, sizeof value) == 0;
}

static bool set_up(tb_client *client) {
    static const int KEYS[3] = {ZMQ_CURVE_SERVERKEY, ZMQ_CURVE_PUBLICKEY, ZMQ_CURVE_SECRETKEY};
    void *socket = client->socket;
    int64_t max_bytes = INCOMING.max_body_bytes;
    bool is_good = set_int(socket, ZMQ_LINGER, LINGER_MS) && set_int(socket, ZMQ_IMMEDIATE, 1) &&
                   set_int(socket, ZMQ_RCVHWM, 0) && set_int(socket, ZMQ_SNDHWM, 0) &&
                   set_int(socket, ZMQ_IPV6, strchr(client->endpoint, '[') != NULL) &&
                   zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &max_bytes, sizeof max_bytes) == 0;
    for (int i = 0; i < 3 && is_good; i++)
        if (client->curve[i] != NULL)
            is_good = zmq_setsockopt(socket, KEYS[i], client->curve[i], 41) == 0;
    return is_good && zmq_connect(socket, client->endpoint) == 0;
}

/* False on a bad endpoint or key; a worker that is not there shows later, as silence. */
bool tbi_session_open(tb_client *client) {
    client->socket = zmq_socket(client->context, ZMQ_DEALER);
    if (client->socket == NULL) return false;
    if (!set_up(client)) {
        tbi_session_close(client);
        return false;
    }
    client->state = TBI_GREETING;
    client->is_hello_sent = false;
    client->greet_by_ms = tbi_now_ms() + TBI_GREETING_MS;
    return true;
}

void tbi_session_close(tb_client *client) {
    if (client->socket != NULL) zmq_close(client->socket);
    client->socket = NULL;
    client->state = TBI_WAITING;
}

/* Gives the connection up; the next one is tried after a growing, slightly random time. `why` is kept. */
void tbi_session_lost(tb_client *client, const char *why) {
    int64_t now_ms = tbi_now_ms();
    if (client->state == TBI_DEAD) return;
    if (client->state == TBI_LIVE) client->lost_since_ms = now_ms;
    tbi_session_close(client);
    client->lost_why = why;
    int64_t wait_ms = client->backoff_ms > 0 ? client->backoff_ms * 2 : FIRST_BACKOFF_MS;
    client->backoff_ms = wait_ms < MAX_BACKOFF_MS ? wait_ms : MAX_BACKOFF_MS;
    client->retry_at_ms = now_ms + (int64_t)((double)client->backoff_ms * (0.75 + 0.25 * tbi_random_unit()));
}

/* For good: the worker speaks another version, or nothing but nonsense. */
void tbi_session_die(tb_client *client, const tb_error *error) {
    tbi_session_close(client);
    client->state = TBI_DEAD;
    client->last_error = *error;
    tbi_client_fail_all(client, error);
}

static bool send_frame(tb_client *client, const void *data, size_t size, bool has_more) {
    int flags = ZMQ_DONTWAIT | (has_more ? ZMQ_SNDMORE : 0);
    int result;
    do result = zmq_send(client->socket, data, size, flags);
    while (result < 0 && errno == EINTR);
    return result >= 0;
}

/* False without a connection. One that takes nothing is broken: there is no limit on what waits. */
bool tbi_session_send(tb_client *client, tbi_type type, tbi_outgoing *out) {
    const uint8_t head[4] = {'T', 'B', 1, (uint8_t)type};
    if (client->socket == NULL) return false;
    bool is_sent = send_frame(client, head, sizeof head, true) &&
                   send_frame(client, out->body.data, out->body.size, out->num_blobs > 0);
    for (size_t i = 0; i < out->num_blobs && is_sent; i++)
        is_sent = send_frame(client, out->blobs[i], out->blob_bytes[i], i + 1 < out->num_blobs);
    if (is_sent) client->sent_ms = tbi_now_ms();
    else if (client->is_hello_sent) tbi_session_lost(client, "the connection broke");
    return is_sent;
}

/* The first HELLO waits until ZeroMQ has a connection to send it on. */
void tbi_session_say_hello(tb_client *client) {
    tbi_outgoing out;
    tbi_outgoing_init(&out);
    tbi_hello_encode(client, client->credit, &out);
    if (client->state == TBI_LIVE) client->lost_since_ms = tbi_now_ms();
    client->state = TBI_GREETING;
    if (tbi_session_send(client, TBI_HELLO, &out)) {
        client->is_hello_sent = true;
        client->granted = client->credit;
        client->received = 0;
        client->greet_by_ms = client->heard_ms = tbi_now_ms();
        client->greet_by_ms += TBI_GREETING_MS;
    }
    tbi_outgoing_free(&out);
}

static void send_int(tb_client *client, tbi_type type, const char *key, int64_t value) {
    tbi_outgoing out;
    tbi_outgoing_init(&out);
    tbi_int_message_encode(key, value, &out);
    tbi_session_send(client, type, &out);
    tbi_outgoing_free(&out);
}

/* Counts events that came; grants more when half is used. */
void tbi_session_use_credit(tb_client *client, int64_t num_events) {
    client->received += num_events;
    if (client->state != TBI_LIVE || client->granted - client->received > client->credit / 2) return;
    client->granted = client->received + client->credit;
    send_int(client, TBI_CREDIT, "total", client->granted);
}

/* Reads one message. False if there is none; frames beyond the allowed number are counted only. */
static bool receive(void *socket, zmq_msg_t *frames, size_t *num_frames) {
    *num_frames = 0;
    for (int has_more = 1; has_more; (*num_frames)++) {
        zmq_msg_t extra;
        bool is_kept = *num_frames < TBI_MAX_FRAMES;
        zmq_msg_t *frame = is_kept ? &frames[*num_frames] : &extra;
        zmq_msg_init(frame);
        int result;
        do result = zmq_msg_recv(frame, socket, ZMQ_DONTWAIT);
        while (result < 0 && errno == EINTR);
        has_more = result >= 0 && zmq_msg_more(frame);
        if (result < 0 || !is_kept) zmq_msg_close(frame);
        if (result < 0) return false;
    }
    return true;
}

static void on_bad_message(tb_client *client, tb_code code) {
    tb_error error;
    if (code == TB_UNSUPPORTED) return; /* of a later version: to be ignored */
    tbi_error_set(&error, code == TB_VERSION_MISMATCH ? code : TB_PROTOCOL, NULL,
                  "the worker sends what is not in version 1 of the protocol");
    if (code == TB_VERSION_MISMATCH || ++client->num_bad_messages >= TBI_MAX_BAD_MESSAGES)
        tbi_session_die(client, &error);
    else
        tbi_session_lost(client, "the worker sent a malformed message");
}

static void handle(tb_client *client, zmq_msg_t *messages, size_t num_frames) {
    tbi_bytes frames[TBI_MAX_FRAMES];
    size_t num_kept = num_frames < TBI_MAX_FRAMES ? num_frames : TBI_MAX_FRAMES;
    for (size_t i = 0; i < num_kept; i++)
        frames[i] = (tbi_bytes){zmq_msg_data(&messages[i]), zmq_msg_size(&messages[i])};
    tbi_message message;
    tb_code code = tbi_decode(frames, num_frames, &INCOMING, &message);
    if (code == TB_OK) tbi_route(client, &message);
    else on_bad_message(client, code);
    tbi_message_free(&message);
    for (size_t i = 0; i < num_kept; i++) zmq_msg_close(&messages[i]);
}

/* Takes what is there, up to a limit so that callbacks get their turn. */
void tbi_session_read(tb_client *client) {
    zmq_msg_t messages[TBI_MAX_FRAMES];
    size_t num_frames;
    for (int i = 0; i < MAX_MESSAGES_A_READ && client->socket != NULL; i++) {
        if (!receive(client->socket, messages, &num_frames)) return;
        client->heard_ms = tbi_now_ms();
        handle(client, messages, num_frames);
    }
}

void tbi_session_tick(tb_client *client, int64_t now_ms) {
    if (client->state == TBI_WAITING && now_ms >= client->retry_at_ms && !tbi_session_open(client))
        tbi_session_lost(client, zmq_strerror(zmq_errno()));
    if (client->state == TBI_GREETING) {
        if (!client->is_hello_sent) tbi_session_say_hello(client);
        if (now_ms >= client->greet_by_ms) tbi_session_lost(client, "no answer to HELLO");
    } else if (client->state == TBI_LIVE) {
        if (now_ms - client->heard_ms >= TBI_LIVENESS * client->heartbeat_ms)
            tbi_session_lost(client, "the worker is silent");
        else if (now_ms - client->sent_ms >= client->heartbeat_ms)
            send_int(client, TBI_PING, "t", now_ms);
    }
}

/* When the next tick has something to do. */
int64_t tbi_session_due_ms(const tb_client *client) {
    if (client->state == TBI_WAITING) return client->retry_at_ms;
    if (client->state == TBI_GREETING) return client->greet_by_ms;
    if (client->state == TBI_DEAD) return INT64_MAX;
    int64_t silent_ms = client->heard_ms + TBI_LIVENESS * client->heartbeat_ms;
    int64_t ping_ms = client->sent_ms + client->heartbeat_ms;
    return silent_ms < ping_ms ? silent_ms : ping_ms;
}
