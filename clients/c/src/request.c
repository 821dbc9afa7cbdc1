/* A job's fields, as they were set. Setters keep a failed allocation in mind for tb_submit to tell. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static void clear_field(tbi_field *field) {
    for (size_t i = 0; i < field->num_texts; i++) free(field->texts[i].data);
    free(field->texts);
    free(field->ids.data);
    memset(field, 0, sizeof *field);
}

static tbi_field *find(const tb_request *request, const char *name) {
    for (size_t i = 0; i < request->num_fields; i++)
        if (strcmp(request->fields[i].name, name) == 0) return &request->fields[i];
    return NULL;
}

const tbi_field *tbi_request_find(const tb_request *request, const char *name) { return find(request, name); }

static void unset(tb_request *request, const char *name) {
    tbi_field *field = find(request, name);
    if (field == NULL) return;
    clear_field(field);
    size_t after = request->num_fields - (size_t)(field - request->fields) - 1;
    memmove(field, field + 1, after * sizeof *field);
    request->num_fields--;
}

/* The field, new if it was not set; NULL without memory. */
static tbi_field *add(tb_request *request, const char *name, tbi_kind kind) {
    tbi_field *field = find(request, name);
    if (field != NULL) return field;
    if (request->num_fields == request->capacity) {
        size_t capacity = request->capacity + 8;
        tbi_field *grown = realloc(request->fields, capacity * sizeof *grown);
        if (grown == NULL) {
            request->no_memory = true;
            return NULL;
        }
        request->fields = grown;
        request->capacity = capacity;
    }
    field = &request->fields[request->num_fields++];
    memset(field, 0, sizeof *field);
    field->name = name;
    field->kind = kind;
    return field;
}

static void set_number(tb_request *request, const char *name, double value) {
    tbi_field *field = add(request, name, TBI_DOUBLE);
    if (field != NULL) field->number = value;
}

void tbi_request_set_int(tb_request *request, const char *name, int64_t value) {
    tbi_field *field = add(request, name, TBI_INT);
    if (field != NULL) field->integer = value;
}

static void set_bool(tb_request *request, const char *name, bool value) {
    tbi_field *field = add(request, name, TBI_BOOL);
    if (field != NULL) field->integer = value;
}

static void add_text(tb_request *request, const char *name, tbi_kind kind, const char *text, size_t size) {
    tbi_field *field = add(request, name, kind);
    if (field == NULL) return;
    tbi_text *grown = realloc(field->texts, (field->num_texts + 1) * sizeof *grown);
    if (grown != NULL) {
        field->texts = grown;
        memset(&grown[field->num_texts], 0, sizeof *grown);
        if (tbi_text_append(&grown[field->num_texts], text, size)) {
            field->num_texts++;
            return;
        }
    }
    request->no_memory = true;
}

static void set_text(tb_request *request, const char *name, const char *text) {
    unset(request, name);
    if (text != NULL) add_text(request, name, TBI_TEXT, text, strlen(text));
}

static void set_ids(tb_request *request, const char *name, const int32_t *ids, size_t num_ids) {
    unset(request, name);
    tbi_field *field = add(request, name, TBI_IDS);
    if (field != NULL && !tbi_ids_append(&field->ids, ids, num_ids)) request->no_memory = true;
}

static bool copy_field(tbi_field *to, const tbi_field *from, tb_request *request) {
    to->integer = from->integer;
    to->number = from->number;
    for (size_t i = 0; i < from->num_texts; i++)
        add_text(request, from->name, from->kind, from->texts[i].data, from->texts[i].size);
    return from->ids.num == 0 || tbi_ids_append(&to->ids, from->ids.data, from->ids.num);
}

/* NULL without memory, now or when a field was set. */
tb_request *tbi_request_clone(const tb_request *request) {
    tb_request *copy = tb_request_new();
    if (copy == NULL) return NULL;
    copy->no_memory = request->no_memory;
    for (size_t i = 0; i < request->num_fields && !copy->no_memory; i++) {
        tbi_field *field = add(copy, request->fields[i].name, request->fields[i].kind);
        if (field == NULL || !copy_field(field, &request->fields[i], copy)) copy->no_memory = true;
    }
    if (!copy->no_memory) return copy;
    tb_request_free(copy);
    return NULL;
}

tb_request *tb_request_new(void) { return calloc(1, sizeof(tb_request)); }

void tb_request_free(tb_request *request) {
    if (request == NULL) return;
    for (size_t i = 0; i < request->num_fields; i++) clear_field(&request->fields[i]);
    free(request->fields);
    free(request);
}

void tb_request_set_prompt_n(tb_request *r, const char *text, size_t num_bytes) {
    unset(r, "prompt");
    if (text != NULL) add_text(r, "prompt", TBI_TEXT, text, num_bytes);
}

void tb_request_add_message(tb_request *r, const char *role, const char *content) {
    add_text(r, "messages", TBI_CHAT, role, strlen(role));
    add_text(r, "messages", TBI_CHAT, content, strlen(content));
}

void tb_request_add_stop(tb_request *r, const char *text) { add_text(r, "stop", TBI_TEXTS, text, strlen(text)); }

void tb_request_set_input_ids(tb_request *r, const int32_t *ids, size_t num) { set_ids(r, "input_ids", ids, num); }
void tb_request_set_stop_token_ids(tb_request *r, const int32_t *ids, size_t num) {
    set_ids(r, "stop_token_ids", ids, num);
}
void tb_request_set_have(tb_request *r, const int32_t *ids, size_t num) { set_ids(r, "have", ids, num); }

void tb_request_set_prompt(tb_request *r, const char *text) { set_text(r, "prompt", text); }
void tb_request_set_job(tb_request *r, const char *id) { set_text(r, "job", id); }
void tb_request_set_priority(tb_request *r, const char *priority) { set_text(r, "priority", priority); }
void tb_request_set_tenant(tb_request *r, const char *tenant) { set_text(r, "tenant", tenant); }
void tb_request_set_idempotency_key(tb_request *r, const char *key) { set_text(r, "idempotency_key", key); }
void tb_request_set_model(tb_request *r, const char *model) { set_text(r, "model", model); }

void tb_request_set_max_tokens(tb_request *r, int64_t num) { tbi_request_set_int(r, "max_tokens", num); }
void tb_request_set_min_tokens(tb_request *r, int64_t num) { tbi_request_set_int(r, "min_tokens", num); }
void tb_request_set_top_k(tb_request *r, int64_t top_k) { tbi_request_set_int(r, "top_k", top_k); }
void tb_request_set_seed(tb_request *r, int64_t seed) { tbi_request_set_int(r, "seed", seed); }
void tb_request_set_deadline_ms(tb_request *r, int64_t ms) { tbi_request_set_int(r, "deadline_ms", ms); }

void tb_request_set_temperature(tb_request *r, double value) { set_number(r, "temperature", value); }
void tb_request_set_top_p(tb_request *r, double value) { set_number(r, "top_p", value); }
void tb_request_set_min_p(tb_request *r, double value) { set_number(r, "min_p", value); }
void tb_request_set_repetition_penalty(tb_request *r, double value) { set_number(r, "repetition_penalty", value); }
void tb_request_set_presence_penalty(tb_request *r, double value) { set_number(r, "presence_penalty", value); }
void tb_request_set_frequency_penalty(tb_request *r, double value) { set_number(r, "frequency_penalty", value); }

void tb_request_set_ignore_eos(tb_request *r, bool value) { set_bool(r, "ignore_eos", value); }
void tb_request_set_durable(tb_request *r, bool value) { set_bool(r, "durable", value); }
