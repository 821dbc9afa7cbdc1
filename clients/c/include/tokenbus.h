/* libtokenbus: send LLM jobs to a tokenbus worker over ZeroMQ, read their tokens as they are made.
 *
 * A client is one connection and any number of jobs. All its work happens inside tb_poll, tb_next,
 * tb_job_next and tb_run: there is no hidden thread. Within these calls it reconnects, fills holes,
 * drops repeats, renews credit, and checks every answer against the worker's checksum.
 *
 * Threads: a client, its jobs and its requests belong to one thread at a time. Different clients may
 * be used in different threads at once. Only tb_wake may be called from any thread, and from a signal
 * handler. After fork() the child must not touch a client that was opened before.
 *
 * Memory: every function that takes text or ids copies them. Text is UTF-8. A job lives until tb_job_free
 * or tb_close, also when it has ended.
 */
#ifndef TOKENBUS_H
#define TOKENBUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TB_VERSION "0.1.0"
#define TB_API __attribute__((visibility("default")))
#define TB_FOREVER (-1) /* as a timeout_ms */

typedef struct tb_client tb_client;
typedef struct tb_request tb_request;
typedef struct tb_job tb_job;

/* ------------------------------------------------------------------ errors */

/* docs/PROTOCOL.md section 3 says what each means. The last three are made here, never sent. */
typedef enum tb_code {
    TB_OK = 0,
    TB_INVALID,          /* a field has the wrong type or range: see tb_error.field */
    TB_UNSUPPORTED,      /* a feature that this worker does not honour */
    TB_TOO_LARGE,        /* a message or field is over its size limit */
    TB_TOO_LONG,         /* the prompt does not fit the model's length */
    TB_UNKNOWN_MODEL,    /* the model is not served here */
    TB_UNKNOWN_QUEUE,    /* the queue is not served here */
    TB_NOT_FOUND,        /* nobody knows the job (any more) */
    TB_CONFLICT,         /* the job id belongs to a different request */
    TB_GONE,             /* the position is no longer in the worker's log */
    TB_BUSY,             /* the queue is full: wait retry_ms */
    TB_DRAINING,         /* the worker takes no new jobs */
    TB_ENGINE_LOST,      /* the engine died and could not be brought back */
    TB_POISONED,         /* the job killed the engine too often */
    TB_NON_FINITE,       /* the model produced NaN or infinite logits */
    TB_BAD_FRAME,        /* a message is not in the protocol */
    TB_NO_SESSION,       /* a message before HELLO */
    TB_VERSION_MISMATCH, /* the worker speaks another major version */
    TB_INTERNAL,         /* a fault of the worker; also every code that is not known here */
    TB_UNAVAILABLE,      /* no worker could be reached in time */
    TB_PROTOCOL,         /* a hole that could not be filled, or a wrong checksum */
    TB_NO_MEMORY         /* an allocation or a file descriptor was refused */
} tb_code;

typedef struct tb_error {
    tb_code code;
    bool retry;         /* the same job may succeed later */
    int64_t retry_ms;   /* how long to wait before that; 0 if not told */
    char field[64];     /* the request field at fault, such as "messages[2].role"; "" if none */
    char message[513];  /* for people */
} tb_error;

/* The wire word of a code ("busy"). */
TB_API const char *tb_code_name(tb_code code);

/* ---------------------------------------------------------------- requests */

TB_API tb_request *tb_request_new(void); /* NULL without memory */
TB_API void tb_request_free(tb_request *request);

/* Exactly one of prompt, messages, input_ids. Setting a field again replaces it; NULL text unsets it.
 * Nothing is reported here: tb_submit checks what would break the message, the worker the rest. */
TB_API void tb_request_set_prompt(tb_request *request, const char *text);
TB_API void tb_request_set_prompt_n(tb_request *request, const char *text, size_t num_bytes);
TB_API void tb_request_add_message(tb_request *request, const char *role, const char *content);
TB_API void tb_request_set_input_ids(tb_request *request, const int32_t *ids, size_t num_ids);

/* A field that is not set has its default: the model's own, else greedy; see PROTOCOL.md section 1. */
TB_API void tb_request_set_max_tokens(tb_request *request, int64_t num_tokens);
TB_API void tb_request_set_min_tokens(tb_request *request, int64_t num_tokens);
TB_API void tb_request_set_temperature(tb_request *request, double temperature);
TB_API void tb_request_set_top_p(tb_request *request, double top_p);
TB_API void tb_request_set_top_k(tb_request *request, int64_t top_k);
TB_API void tb_request_set_min_p(tb_request *request, double min_p);
TB_API void tb_request_set_repetition_penalty(tb_request *request, double penalty);
TB_API void tb_request_set_presence_penalty(tb_request *request, double penalty);
TB_API void tb_request_set_frequency_penalty(tb_request *request, double penalty);
TB_API void tb_request_set_seed(tb_request *request, int64_t seed);
TB_API void tb_request_add_stop(tb_request *request, const char *text);
TB_API void tb_request_set_stop_token_ids(tb_request *request, const int32_t *ids, size_t num_ids);
TB_API void tb_request_set_ignore_eos(tb_request *request, bool ignore_eos);

TB_API void tb_request_set_job(tb_request *request, const char *id); /* default: a random one */
TB_API void tb_request_set_priority(tb_request *request, const char *priority);
TB_API void tb_request_set_deadline_ms(tb_request *request, int64_t deadline_ms);
TB_API void tb_request_set_tenant(tb_request *request, const char *tenant);
TB_API void tb_request_set_idempotency_key(tb_request *request, const char *key);
TB_API void tb_request_set_model(tb_request *request, const char *model);
TB_API void tb_request_set_durable(tb_request *request, bool durable);
/* Output ids already held from a lost worker; needs the seed. The answer goes on after them. */
TB_API void tb_request_set_have(tb_request *request, const int32_t *ids, size_t num_ids);

/* ------------------------------------------------------------------ events */

typedef enum tb_event_kind {
    TB_STARTED, /* a worker took the job; comes again when another worker goes on with it */
    TB_TOKENS,  /* ids and the text they add */
    TB_DONE,    /* the end; text that was held back until now */
    TB_FAILED   /* the end */
} tb_event_kind;

typedef enum tb_reason {
    TB_REASON_NONE = 0,
    TB_REASON_STOP,
    TB_REASON_LENGTH,
    TB_REASON_CANCELLED,
    TB_REASON_DEADLINE,
    TB_REASON_OTHER /* a word that is not known here */
} tb_reason;

TB_API const char *tb_reason_name(tb_reason reason);

typedef struct tb_usage {
    int64_t prompt_tokens, completion_tokens, cached_tokens;
    double queue_ms, ttft_ms, total_ms;
} tb_usage;

/* One event of one job. The pointers in it are valid until the next tb_next, tb_job_next, tb_poll or
 * tb_run of the client (in a callback: until it returns), and at most as long as the job. */
typedef struct tb_event {
    tb_event_kind kind;
    tb_job *job;
    void *user;           /* as given to tb_submit */
    int64_t attempt;
    int64_t seq;          /* TOKENS: of the first token; DONE, FAILED: of the last; STARTED: tokens so far */
    const int32_t *ids;   /* TOKENS */
    size_t num_ids;
    const char *text;     /* TOKENS, DONE: UTF-8, never NULL, with a NUL after text[text_bytes - 1] */
    size_t text_bytes;
    int64_t seed;         /* STARTED */
    int64_t prompt_tokens;
    const char *worker;   /* STARTED */
    tb_reason reason;     /* DONE */
    tb_usage usage;
    uint32_t crc;
    tb_error error;       /* FAILED */
} tb_event;

/* May call everything but tb_poll, tb_next, tb_job_next, tb_run and tb_close. */
typedef void (*tb_callback)(const tb_event *event, void *user);

/* ------------------------------------------------------------------ client */

/* All zero is a good start. */
typedef struct tb_options {
    const char *tenant;        /* default for jobs */
    int64_t credit;            /* TOKENS events the worker may send ahead of our reading; 0: 4096 */
    int64_t give_up_ms;        /* without a worker for so long, all jobs fail with TB_UNAVAILABLE; 0: 30 s */
    const char *curve_server_key, *curve_public_key, *curve_secret_key; /* Z85, 40 characters each */
} tb_options;

/* Opens a client; connecting goes on inside tb_poll. NULL on a bad endpoint or option, see *error.
 * options and error may be NULL. */
TB_API tb_client *tb_open(const char *endpoint, const tb_options *options, tb_error *error);

/* Cancels what still runs (not durable jobs), frees the connection and every job. */
TB_API void tb_close(tb_client *client);

/* Submits a copy of the request. Without a connection it waits for one. With a callback the job's
 * events are handed to it inside tb_poll; without, tb_next and tb_job_next return them.
 * NULL if the request cannot be sent as it is, see *error (which may be NULL). */
TB_API tb_job *tb_submit(tb_client *client, const tb_request *request, tb_callback callback, void *user,
                         tb_error *error);

/* Follows a job that was submitted elsewhere, from after a seq (0: everything that is in the log). */
TB_API tb_job *tb_follow(tb_client *client, const char *job_id, int64_t after, tb_callback callback,
                         void *user, tb_error *error);

/* Does what is due, waits up to timeout_ms for the network if nothing was, and runs callbacks.
 * Returns the number of events handed to callbacks. A signal or tb_wake ends the wait. */
TB_API size_t tb_poll(tb_client *client, int timeout_ms);

/* Polls until every job has ended and, where it has a callback, was told so; or until tb_wake. */
TB_API void tb_run(tb_client *client);

typedef enum tb_next_result {
    TB_NEXT_END = -1,    /* nothing will come any more: every end was read */
    TB_NEXT_TIMEOUT = 0, /* the time is up, or a signal or tb_wake came */
    TB_NEXT_EVENT = 1    /* *event is filled */
} tb_next_result;

/* The next event of any job without callback; of one job. Others keep theirs. */
TB_API tb_next_result tb_next(tb_client *client, int timeout_ms, tb_event *event);
TB_API tb_next_result tb_job_next(tb_job *job, int timeout_ms, tb_event *event);

/* For a loop of your own: wait until tb_fd is readable, at most tb_wait_ms, then call tb_poll(client, 0),
 * and take what tb_next(client, 0, ...) has. Ask for both before every wait: the fd changes when the
 * client reconnects (-1: there is none just now, wait without), and readability is signalled once. */
TB_API int tb_fd(tb_client *client);
TB_API int tb_wait_ms(tb_client *client);

/* Ends a wait of the client in another thread, or the next one. Safe in a signal handler. */
TB_API void tb_wake(tb_client *client);

TB_API bool tb_is_connected(const tb_client *client);
TB_API size_t tb_num_running(const tb_client *client);

/* -------------------------------------------------------------------- jobs */

/* Asks the worker to end the job: its end comes as TB_DONE with TB_REASON_CANCELLED, or as what it
 * already ended with. No effect after the end. */
TB_API void tb_cancel(tb_job *job);

/* Frees the handle, also in the job's own callback. A job that still runs is cancelled, unless it is durable
 * or followed. NULL is allowed. */
TB_API void tb_job_free(tb_job *job);

TB_API const char *tb_job_id(const tb_job *job);
TB_API bool tb_job_is_over(const tb_job *job);      /* its end arrived (perhaps unread) */
TB_API int64_t tb_job_seed(const tb_job *job);      /* -1 until a worker told it */
TB_API int64_t tb_job_last_seq(const tb_job *job);
/* Every output id so far, those of `have` first; valid until the client is polled again. */
TB_API const int32_t *tb_job_ids(const tb_job *job, size_t *num_ids);

#ifdef __cplusplus
}
#endif

#endif
