/* Error codes and end reasons, in words and back. */
#include <string.h>

#include "internal.h"

static const struct {
    const char *name;
    bool retries; /* where the worker does not say */
} CODES[] = {
    [TB_OK] = {"ok", false},
    [TB_INVALID] = {"invalid", false},
    [TB_UNSUPPORTED] = {"unsupported", false},
    [TB_TOO_LARGE] = {"too_large", false},
    [TB_TOO_LONG] = {"too_long", false},
    [TB_UNKNOWN_MODEL] = {"unknown_model", false},
    [TB_UNKNOWN_QUEUE] = {"unknown_queue", false},
    [TB_NOT_FOUND] = {"not_found", false},
    [TB_CONFLICT] = {"conflict", false},
    [TB_GONE] = {"gone", false},
    [TB_BUSY] = {"busy", true},
    [TB_DRAINING] = {"draining", true},
    [TB_ENGINE_LOST] = {"engine_lost", true},
    [TB_POISONED] = {"poisoned", false},
    [TB_NON_FINITE] = {"non_finite", false},
    [TB_BAD_FRAME] = {"bad_frame", false},
    [TB_NO_SESSION] = {"no_session", true},
    [TB_VERSION_MISMATCH] = {"version", false},
    [TB_INTERNAL] = {"internal", false},
    [TB_UNAVAILABLE] = {"unavailable", true},
    [TB_PROTOCOL] = {"protocol", false},
    [TB_NO_MEMORY] = {"no_memory", false},
};
#define NUM_CODES (sizeof CODES / sizeof CODES[0])

static const char *const REASONS[] = {
    [TB_REASON_NONE] = "",           [TB_REASON_STOP] = "stop",
    [TB_REASON_LENGTH] = "length",   [TB_REASON_CANCELLED] = "cancelled",
    [TB_REASON_DEADLINE] = "deadline", [TB_REASON_OTHER] = "other",
};

static bool is_word(tbi_bytes text, const char *word) {
    return text.size == strlen(word) && memcmp(text.data, word, text.size) == 0;
}

const char *tb_code_name(tb_code code) {
    return (size_t)code < NUM_CODES ? CODES[code].name : "internal";
}

bool tbi_code_retries(tb_code code) { return (size_t)code < NUM_CODES && CODES[code].retries; }

/* Only codes that travel; all others are internal. */
tb_code tbi_code_from(tbi_bytes name) {
    for (int code = TB_INVALID; code < TB_UNAVAILABLE; code++)
        if (is_word(name, CODES[code].name)) return (tb_code)code;
    return TB_INTERNAL;
}

const char *tb_reason_name(tb_reason reason) {
    return (size_t)reason <= TB_REASON_OTHER ? REASONS[reason] : "other";
}

tb_reason tbi_reason_from(tbi_bytes name) {
    for (int reason = TB_REASON_STOP; reason < TB_REASON_OTHER; reason++)
        if (is_word(name, REASONS[reason])) return (tb_reason)reason;
    return TB_REASON_OTHER;
}

/* error may be NULL, field and message too. */
void tbi_error_set(tb_error *error, tb_code code, const char *field, const char *message) {
    if (error == NULL) return;
    memset(error, 0, sizeof *error);
    error->code = code;
    error->retry = tbi_code_retries(code);
    if (field != NULL) tbi_copy_text(error->field, sizeof error->field, (tbi_bytes){field, strlen(field)});
    if (message != NULL)
        tbi_copy_text(error->message, sizeof error->message, (tbi_bytes){message, strlen(message)});
}

/* From the body of ERROR or REJECTED. A code that is not known stays readable in the message. */
void tbi_error_from_body(tb_error *error, const msgpack_object_map *body) {
    tbi_bytes name = tbi_get_text(body, "code");
    tbi_bytes message = tbi_get_text(body, "message");
    tbi_error_set(error, tbi_code_from(name), NULL, NULL);
    tbi_copy_text(error->message, sizeof error->message, message);
    if (error->code == TB_INTERNAL && !is_word(name, "internal")) {
        char word[64];
        tbi_copy_text(word, sizeof word, name);
        size_t used = strlen(word);
        memcpy(error->message, word, used);
        memcpy(error->message + used, ": ", 2);
        tbi_copy_text(error->message + used + 2, sizeof error->message - used - 2, message);
    }
    tbi_copy_text(error->field, sizeof error->field, tbi_get_text(body, "field"));
    if (tbi_get(body, "retry") != NULL) error->retry = tbi_get_bool(body, "retry");
    error->retry_ms = tbi_get_int(body, "retry_ms", 0);
}
