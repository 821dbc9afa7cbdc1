/* What the files of libtokenbus share. Public names begin with tb_, these with tbi_.
 *
 *   client.c  open, submit, free            poll.c    the calls that wait
 *   session.c socket, HELLO, PING, credit   route.c   messages that came, to jobs
 *   job.c     a job's state: holes, repeats, checksum, picking up
 *   queue.c   events waiting to be read     table.c   job id -> job
 *   request.c fields of a job               submit.c  request -> SUBMIT
 *   wire.c    frames <-> messages           subset.c  which msgpack is allowed
 *   codes.c   errors in words               util.c    clock, randomness, UTF-8
 */
#ifndef TOKENBUS_INTERNAL_H
#define TOKENBUS_INTERNAL_H

#include <msgpack.h>

#include "tokenbus.h"

#define TBI_MAX_INT ((int64_t)9007199254740991) /* 2^53-1 */
#define TBI_MAX_FRAMES 6                        /* head, body, four blobs */
#define TBI_MAX_DEPTH 6
#define TBI_MAX_KEY_BYTES 32
#define TBI_MAX_JOB_ID_BYTES 128
#define TBI_LIVENESS 3         /* heartbeats without a sign of life */
#define TBI_GREETING_MS 5000   /* HELLO must be answered within */
#define TBI_RESUME_AGAIN_MS 1000
#define TBI_MAX_RESUMES 3      /* for one hole, without a new token in between */
#define TBI_SUBMIT_AGAIN_MS 10000
#define TBI_MAX_SUBMITS 3
#define TBI_JOBS_TICK_MS 250   /* how often the jobs' own timers are looked at */
#define TBI_MAX_BAD_MESSAGES 3 /* from the worker, without progress in between */

typedef enum tbi_type {
    TBI_HELLO = 1,
    TBI_WELCOME,
    TBI_SUBMIT,
    TBI_ACCEPTED,
    TBI_REJECTED,
    TBI_TOKENS,
    TBI_DONE,
    TBI_ERROR,
    TBI_CANCEL,
    TBI_RESUME,
    TBI_CREDIT,
    TBI_PING,
    TBI_PONG,
    TBI_STATS,
    TBI_DRAIN
} tbi_type;

typedef struct tbi_bytes {
    const void *data;
    size_t size;
} tbi_bytes;

typedef struct tbi_limits {
    int64_t max_body_bytes, max_frame_bytes, max_blobs;
} tbi_limits;

/* A decoded message; the objects point into `unpacked` and the frames. */
typedef struct tbi_message {
    int type;
    msgpack_unpacked unpacked;
    const msgpack_object_map *body;
} tbi_message;

/* A growing array of ids. */
typedef struct tbi_ids {
    int32_t *data;
    size_t num, capacity;
} tbi_ids;

typedef struct tbi_text {
    char *data; /* NUL-terminated */
    size_t size, capacity;
} tbi_text;

/* ---- request.c, submit.c */

typedef enum tbi_kind { TBI_INT, TBI_DOUBLE, TBI_BOOL, TBI_TEXT, TBI_TEXTS, TBI_CHAT, TBI_IDS } tbi_kind;

/* One field that was set. CHAT: role and content by turns. */
typedef struct tbi_field {
    const char *name;
    tbi_kind kind;
    int64_t integer;
    double number;
    tbi_text *texts;
    size_t num_texts;
    tbi_ids ids;
} tbi_field;

struct tb_request {
    tbi_field *fields;
    size_t num_fields, capacity;
    bool no_memory;
};

tb_request *tbi_request_clone(const tb_request *request);
const tbi_field *tbi_request_find(const tb_request *request, const char *name);
void tbi_request_set_int(tb_request *request, const char *name, int64_t value);
bool tbi_request_check(const tb_request *request, tb_error *error);

/* A message ready to send. */
typedef struct tbi_outgoing {
    msgpack_sbuffer body;
    void *blobs[4];
    size_t blob_bytes[4];
    size_t num_blobs;
} tbi_outgoing;

void tbi_outgoing_free(tbi_outgoing *out);
bool tbi_submit_encode(const tb_request *request, const tbi_limits *limits, tbi_outgoing *out, tb_error *error);

/* ---- queue.c */

/* An event that nobody read yet, and what it points to. */
typedef struct tbi_node {
    struct tbi_node *next;
    tb_event event;
    tbi_ids ids;
    tbi_text text;
} tbi_node;

/* Jobs with unread events, in the order in which they came. */
typedef struct tbi_ready {
    tb_job *head, *tail;
} tbi_ready;

/* ---- job.c */

struct tb_job {
    tb_client *client;
    char id[TBI_MAX_JOB_ID_BYTES + 1];
    tb_request *request; /* NULL: only followed */
    tb_callback callback;
    void *user;

    int64_t seed, attempt, last;
    int64_t opened_ms, deadline_ms; /* 0: no deadline */
    uint32_t crc;
    bool has_all_ids; /* false when followed from the middle: no checksum then */
    tbi_ids ids;

    bool is_answered; /* ACCEPTED came for the newest SUBMIT */
    bool is_resuming, has_hole, wants_cancel, is_over;
    bool was_forgotten; /* by this worker, since its WELCOME; it is not asked for a second time */
    bool is_orphan; /* freed by its owner, to be cancelled when there is a connection again */
    int num_resumes, num_submits;
    int64_t asked_ms; /* when SUBMIT or RESUME was last sent */
    int64_t again_ms; /* when RESUME or CANCEL is to be sent again after the answer busy; 0: it is not */

    tbi_node *first, *last_node; /* unread events */
    tbi_node *end;               /* kept for the terminal event, so that it can always be told */
    bool is_ready;
    tb_job *ready_next, *ready_prev;
    tb_job *bucket_next;         /* in the table */
    tb_job *all_next, *all_prev; /* of the client */
};

void tbi_job_submit(tb_job *job);
void tbi_job_resume(tb_job *job);
void tbi_job_pick_up(tb_job *job, bool is_same_worker);
bool tbi_job_is_durable(const tb_job *job);
void tbi_job_tick(tb_job *job, int64_t now_ms);
void tbi_job_fail(tb_job *job, const tb_error *error);
void tbi_job_fail_code(tb_job *job, tb_code code, const char *message);
void tbi_job_on_accepted(tb_job *job, const msgpack_object_map *body);
void tbi_job_on_tokens(tb_job *job, const msgpack_object *event);
void tbi_job_on_done(tb_job *job, const msgpack_object_map *body);
void tbi_job_on_error(tb_job *job, const tb_error *error);

/* ---- table.c */

typedef struct tbi_table {
    tb_job **buckets;
    size_t num_buckets, num_jobs;
} tbi_table;

bool tbi_table_put(tbi_table *table, tb_job *job);
tb_job *tbi_table_find(const tbi_table *table, const char *id, size_t size);
void tbi_table_remove(tbi_table *table, tb_job *job);

/* ---- session.c, client.c */

typedef enum tbi_state { TBI_WAITING, TBI_GREETING, TBI_LIVE, TBI_DEAD } tbi_state;

struct tb_client {
    char *endpoint, *tenant;
    char *curve[3]; /* server, public, secret */
    char name[40];
    int64_t credit, give_up_ms;

    void *context, *socket;
    int wake_fds[2];
    tbi_state state;
    bool is_hello_sent;
    char boot[129], worker[129];
    int64_t heartbeat_ms;
    tbi_limits limits;
    int64_t granted, received;
    int64_t sent_ms, heard_ms, jobs_ticked_ms, pumped_ms;
    int64_t greet_by_ms, retry_at_ms, lost_since_ms, backoff_ms;
    int num_bad_messages;
    const char *lost_why;
    tb_error last_error; /* the newest ERROR that named no job; the one that ended a DEAD client */
    int64_t last_error_ms;

    tbi_table table; /* jobs that run */
    tb_job *all;
    tbi_ready ready, calls;
    tbi_node *held; /* the event the caller is looking at */
    bool is_calling;
    bool is_woken; /* a signal or tb_wake ended the last wait */
};

bool tbi_session_open(tb_client *client);
void tbi_session_close(tb_client *client);
void tbi_session_lost(tb_client *client, const char *why);
bool tbi_session_send(tb_client *client, tbi_type type, tbi_outgoing *out);
void tbi_session_say_hello(tb_client *client);
void tbi_session_use_credit(tb_client *client, int64_t num_events);
void tbi_session_read(tb_client *client);
void tbi_session_tick(tb_client *client, int64_t now_ms);
int64_t tbi_session_due_ms(const tb_client *client);
void tbi_session_die(tb_client *client, const tb_error *error);
void tbi_client_fail_all(tb_client *client, const tb_error *error);
void tbi_client_free_job(tb_job *job);

/* ---- route.c */

void tbi_route(tb_client *client, const tbi_message *message);

/* ---- queue.c */

tbi_node *tbi_node_new(void);
void tbi_node_free(tbi_node *node);
void tbi_queue_push(tb_job *job, tbi_node *node);
bool tbi_queue_add_tokens(tb_job *job, int64_t attempt, int64_t seq, const tbi_ids *ids, tbi_bytes text);
tbi_node *tbi_queue_pop(tb_job *job);
void tbi_queue_clear(tb_job *job);
size_t tbi_queue_call(tb_client *client);

/* ---- wire.c, subset.c */

tb_code tbi_subset_check(const uint8_t *data, size_t size);
tb_code tbi_decode(const tbi_bytes *frames, size_t num_frames, const tbi_limits *limits, tbi_message *message);
void tbi_message_free(tbi_message *message);
const msgpack_object *tbi_get(const msgpack_object_map *map, const char *key);
int64_t tbi_get_int(const msgpack_object_map *map, const char *key, int64_t fallback);
double tbi_get_number(const msgpack_object_map *map, const char *key);
bool tbi_get_bool(const msgpack_object_map *map, const char *key);
tbi_bytes tbi_get_text(const msgpack_object_map *map, const char *key);
bool tbi_read_ids(const msgpack_object *array, tbi_ids *ids);
void tbi_outgoing_init(tbi_outgoing *out);
void tbi_pack_text(msgpack_packer *packer, const char *text, size_t size);
void tbi_pack_key(msgpack_packer *packer, const char *key);
void tbi_hello_encode(const tb_client *client, int64_t credit, tbi_outgoing *out);
void tbi_job_message_encode(const char *job, int64_t after, tbi_outgoing *out);
void tbi_int_message_encode(const char *key, int64_t value, tbi_outgoing *out);

/* ---- codes.c */

tb_code tbi_code_from(tbi_bytes name);
tb_reason tbi_reason_from(tbi_bytes name);
bool tbi_code_retries(tb_code code);
void tbi_error_set(tb_error *error, tb_code code, const char *field, const char *message);
void tbi_error_from_body(tb_error *error, const msgpack_object_map *body);

/* ---- util.c */

int64_t tbi_now_ms(void);
bool tbi_random_hex(char *text, size_t num_chars);
double tbi_random_unit(void);
bool tbi_is_utf8(const void *data, size_t size);
bool tbi_is_name(const char *text, size_t size, size_t max_bytes);
char *tbi_strdup(const char *text);
void tbi_copy_text(char *to, size_t capacity, tbi_bytes text);
bool tbi_text_append(tbi_text *text, const void *data, size_t size);
bool tbi_ids_append(tbi_ids *ids, const int32_t *data, size_t num);
uint32_t tbi_crc(uint32_t crc, const int32_t *ids, size_t num);

#endif
