#include "router.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#include "internal.h"

struct router {
    void *context, *socket;
    char endpoint[128], boot[32];
    int64_t heartbeat_ms;
    uint8_t peer[64], greeted[64]; /* heard last; that got WELCOME last */
    size_t peer_size, greeted_size;
    heard heard;
};

static void die(const char *what) {
    fprintf(stderr, "FAILED router: %s\n", what);
    exit(1);
}

static const char *curve_secret_key;

void router_use_curve(const char *secret_key) { curve_secret_key = secret_key; }

router *router_new(const char *boot, int64_t heartbeat_ms, const char *endpoint) {
    static int number;
    router *self = calloc(1, sizeof *self);
    if (self == NULL) die("no memory");
    self->context = zmq_ctx_new();
    self->socket = zmq_socket(self->context, ZMQ_ROUTER);
    self->heartbeat_ms = heartbeat_ms;
    snprintf(self->boot, sizeof self->boot, "%s", boot);
    if (endpoint != NULL) snprintf(self->endpoint, sizeof self->endpoint, "%s", endpoint);
    else snprintf(self->endpoint, sizeof self->endpoint, "ipc:///tmp/tokenbus-%d-%d.sock", (int)getpid(), number++);
    int linger = 0, is_server = 1;
    zmq_setsockopt(self->socket, ZMQ_LINGER, &linger, sizeof linger);
    if (curve_secret_key != NULL) {
        zmq_setsockopt(self->socket, ZMQ_CURVE_SERVER, &is_server, sizeof is_server);
        zmq_setsockopt(self->socket, ZMQ_CURVE_SECRETKEY, curve_secret_key, 41);
    }
    if (zmq_bind(self->socket, self->endpoint) != 0) die("cannot bind");
    return self;
}

void router_free(router *self) {
    zmq_close(self->socket);
    zmq_ctx_term(self->context);
    unlink(self->endpoint + strlen("ipc://"));
    free(self);
}

const char *router_endpoint(const router *self) { return self->endpoint; }

/* --------------------------------------------------------------- frames */

static void send_body(router *self, int type, msgpack_sbuffer *body) {
    const uint8_t head[4] = {'T', 'B', 1, (uint8_t)type};
    zmq_send(self->socket, self->peer, self->peer_size, ZMQ_SNDMORE);
    zmq_send(self->socket, head, sizeof head, ZMQ_SNDMORE);
    zmq_send(self->socket, body->data, body->size, 0);
    msgpack_sbuffer_destroy(body);
}

static void begin(msgpack_sbuffer *body, msgpack_packer *packer, size_t num_keys) {
    msgpack_sbuffer_init(body);
    msgpack_packer_init(packer, body, msgpack_sbuffer_write);
    msgpack_pack_map(packer, num_keys);
}

static void text_pair(msgpack_packer *packer, const char *key, const char *value) {
    tbi_pack_key(packer, key);
    tbi_pack_text(packer, value, strlen(value));
}

static void int_pair(msgpack_packer *packer, const char *key, int64_t value) {
    tbi_pack_key(packer, key);
    msgpack_pack_int64(packer, value);
}

static void send_int(router *self, int type, int64_t t) {
    msgpack_sbuffer body;
    msgpack_packer packer;
    begin(&body, &packer, 1);
    int_pair(&packer, "t", t);
    send_body(self, type, &body);
}

/* -------------------------------------------------------------- listening */

static void read_body(heard *to, int type, const msgpack_object_map *body) {
    memset(to, 0, sizeof *to);
    to->type = type;
    tbi_copy_text(to->job, sizeof to->job, tbi_get_text(body, "job"));
    tbi_copy_text(to->client, sizeof to->client, tbi_get_text(body, "client"));
    tbi_copy_text(to->prompt, sizeof to->prompt, tbi_get_text(body, "prompt"));
    to->after = tbi_get_int(body, "after", -1);
    to->total = tbi_get_int(body, "total", -1);
    to->credit = tbi_get_int(body, "credit", -1);
    to->seed = tbi_get_int(body, "seed", -1);
    to->t = tbi_get_int(body, "t", -1);
    to->max_tokens = tbi_get_int(body, "max_tokens", -1);
    to->deadline_ms = tbi_get_int(body, "deadline_ms", -1);
    tbi_ids have = {NULL, 0, 0};
    const msgpack_object *object = tbi_get(body, "have");
    to->num_have = object != NULL && tbi_read_ids(object, &have) ? (int64_t)have.num : -1;
    if (have.num > 0) memcpy(to->have, have.data, (have.num < 16 ? have.num : 16) * sizeof *have.data);
    free(have.data);
}

/* False if nothing is there. */
static bool receive(router *self) {
    static const tbi_limits LIMITS = {1 << 20, 16 << 20, 4};
    zmq_msg_t parts[8];
    tbi_bytes frames[8];
    size_t num = 0;
    for (int has_more = 1; has_more && num < 8; num++) {
        zmq_msg_init(&parts[num]);
        if (zmq_msg_recv(&parts[num], self->socket, ZMQ_DONTWAIT) < 0) return false;
        frames[num] = (tbi_bytes){zmq_msg_data(&parts[num]), zmq_msg_size(&parts[num])};
        has_more = zmq_msg_more(&parts[num]);
    }
    self->peer_size = frames[0].size;
    memcpy(self->peer, frames[0].data, self->peer_size);
    tbi_message message;
    if (tbi_decode(frames + 1, num - 1, &LIMITS, &message) != TB_OK) die("the client sent a bad message");
    read_body(&self->heard, message.type, message.body);
    tbi_message_free(&message);
    for (size_t i = 0; i < num; i++) zmq_msg_close(&parts[i]);
    return true;
}

static bool is_greeted(const router *self) {
    return self->greeted_size == self->peer_size && memcmp(self->greeted, self->peer, self->peer_size) == 0;
}

static const heard *expect(router *self, tb_client *client, int type, bool answers) {
    for (int64_t until_ms = tbi_now_ms() + 10000; tbi_now_ms() < until_ms;) {
        zmq_pollitem_t item = {.socket = self->socket, .events = ZMQ_POLLIN};
        tb_poll(client, 0);
        if (zmq_poll(&item, 1, 2) <= 0 || !receive(self)) continue;
        if (answers && self->heard.type == M_HELLO) router_welcome(self);
        if (answers && !is_greeted(self)) { /* ZeroMQ reconnected to a worker that is new */
            router_error(self, M_ERROR, NULL, "no_session", true, 0);
            continue;
        }
        if (answers && self->heard.type == M_PING) send_int(self, M_PONG, self->heard.t);
        if (self->heard.type == type) return &self->heard;
    }
    fprintf(stderr, "FAILED: no message of type %d\n", type);
    exit(1);
}

const heard *router_expect(router *self, tb_client *client, int type) { return expect(self, client, type, true); }
const heard *router_expect_only(router *self, tb_client *client, int type) {
    return expect(self, client, type, false);
}

/* --------------------------------------------------------------- speaking */

void router_welcome(router *self) {
    msgpack_sbuffer body;
    msgpack_packer packer;
    begin(&body, &packer, 5);
    int_pair(&packer, "version", 1);
    text_pair(&packer, "worker", "scripted");
    text_pair(&packer, "boot", self->boot);
    int_pair(&packer, "heartbeat_ms", self->heartbeat_ms);
    text_pair(&packer, "later", "unknown fields are ignored");
    send_body(self, M_WELCOME, &body);
    memcpy(self->greeted, self->peer, self->peer_size);
    self->greeted_size = self->peer_size;
}

void router_accept(router *self, const char *job, int64_t seed) {
    msgpack_sbuffer body;
    msgpack_packer packer;
    begin(&body, &packer, 5);
    text_pair(&packer, "job", job);
    int_pair(&packer, "attempt", 1);
    int_pair(&packer, "seed", seed);
    int_pair(&packer, "prompt_tokens", 3);
    int_pair(&packer, "seq", 0);
    send_body(self, M_ACCEPTED, &body);
}

void router_tokens(router *self, const char *job, int64_t seq, const char *text, size_t num_ids, const int32_t *ids) {
    msgpack_sbuffer body;
    msgpack_packer packer;
    begin(&body, &packer, 1);
    tbi_pack_key(&packer, "events");
    msgpack_pack_array(&packer, 1);
    msgpack_pack_array(&packer, 6);
    tbi_pack_text(&packer, job, strlen(job));
    msgpack_pack_int64(&packer, 1);
    msgpack_pack_int64(&packer, seq);
    msgpack_pack_array(&packer, num_ids);
    for (size_t i = 0; i < num_ids; i++) msgpack_pack_int32(&packer, ids[i]);
    tbi_pack_text(&packer, text, strlen(text));
    msgpack_pack_nil(&packer); /* an element of a later version */
    send_body(self, M_TOKENS, &body);
}

void router_done(router *self, const char *job, const char *text, const char *reason, size_t num_ids,
                 const int32_t *ids, uint32_t crc_change) {
    msgpack_sbuffer body;
    msgpack_packer packer;
    begin(&body, &packer, 7);
    text_pair(&packer, "job", job);
    int_pair(&packer, "attempt", 1);
    int_pair(&packer, "seq", (int64_t)num_ids);
    text_pair(&packer, "reason", reason);
    text_pair(&packer, "text", text);
    int_pair(&packer, "crc", (int64_t)(tbi_crc(0, ids, num_ids) ^ crc_change));
    tbi_pack_key(&packer, "usage");
    msgpack_pack_map(&packer, 2);
    int_pair(&packer, "completion_tokens", (int64_t)num_ids);
    tbi_pack_key(&packer, "ttft_ms");
    msgpack_pack_double(&packer, 12.5);
    send_body(self, M_DONE, &body);
}

void router_error(router *self, int type, const char *job, const char *code, bool retry, int64_t retry_ms) {
    msgpack_sbuffer body;
    msgpack_packer packer;
    begin(&body, &packer, job != NULL ? 5 : 4);
    if (job != NULL) text_pair(&packer, "job", job);
    text_pair(&packer, "code", code);
    text_pair(&packer, "message", "in words");
    tbi_pack_key(&packer, "retry");
    if (retry) msgpack_pack_true(&packer);
    else msgpack_pack_false(&packer);
    int_pair(&packer, "retry_ms", retry_ms);
    send_body(self, type, &body);
}

void router_ping(router *self, int64_t t) { send_int(self, M_PING, t); }

void router_junk(router *self) {
    msgpack_sbuffer body;
    msgpack_sbuffer_init(&body);
    msgpack_sbuffer_write(&body, "\xc1", 1);
    send_body(self, M_TOKENS, &body);
}
