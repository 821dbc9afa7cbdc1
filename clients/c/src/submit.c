/* A request as SUBMIT. What would make the worker refuse the whole message, without naming the job, is
 * refused here by the field's name; ranges and the like are the worker's to judge. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define MAX_INLINE_IDS 64 /* more travel as a blob */

static bool refuse(tb_error *error, tb_code code, const char *field, const char *message) {
    tbi_error_set(error, code, field, message);
    return false;
}

static bool check_texts(const tbi_field *field, tb_error *error) {
    for (size_t i = 0; i < field->num_texts; i++) {
        if (tbi_is_utf8(field->texts[i].data, field->texts[i].size)) continue;
        char path[64];
        if (field->kind == TBI_CHAT)
            snprintf(path, sizeof path, "messages[%zu].%s", i / 2, i % 2 ? "content" : "role");
        else if (field->kind == TBI_TEXTS)
            snprintf(path, sizeof path, "%s[%zu]", field->name, i);
        else
            snprintf(path, sizeof path, "%s", field->name);
        return refuse(error, TB_INVALID, path, "text is not valid UTF-8");
    }
    return true;
}

static bool check_field(const tbi_field *field, tb_error *error) {
    if (field->kind == TBI_DOUBLE && !isfinite(field->number))
        return refuse(error, TB_INVALID, field->name, "a number must be finite");
    if (field->kind == TBI_INT && (field->integer > TBI_MAX_INT || field->integer < -TBI_MAX_INT))
        return refuse(error, TB_INVALID, field->name, "an integer must be within 2^53-1");
    return check_texts(field, error);
}

/* Everything that can be known without the worker's limits. */
bool tbi_request_check(const tb_request *request, tb_error *error) {
    for (size_t i = 0; i < request->num_fields; i++)
        if (!check_field(&request->fields[i], error)) return false;
    const tbi_field *job = tbi_request_find(request, "job");
    if (job != NULL && !tbi_is_name(job->texts[0].data, job->texts[0].size, TBI_MAX_JOB_ID_BYTES))
        return refuse(error, TB_INVALID, "job", "a job id is 1-128 of A-Z a-z 0-9 . _ : -");
    const tbi_field *have = tbi_request_find(request, "have");
    if (have != NULL && have->ids.num > 0 && tbi_request_find(request, "seed") == NULL)
        return refuse(error, TB_INVALID, "seed", "have needs the seed of the lost run");
    return true;
}

static void pack_chat(msgpack_packer *packer, const tbi_field *field) {
    msgpack_pack_array(packer, field->num_texts / 2);
    for (size_t i = 0; i + 1 < field->num_texts; i += 2) {
        msgpack_pack_map(packer, 2);
        tbi_pack_key(packer, "role");
        tbi_pack_text(packer, field->texts[i].data, field->texts[i].size);
        tbi_pack_key(packer, "content");
        tbi_pack_text(packer, field->texts[i + 1].data, field->texts[i + 1].size);
    }
}

static void *blob_of(const tbi_ids *ids) {
    uint8_t *blob = malloc(ids->num * 4);
    for (size_t i = 0; blob != NULL && i < ids->num; i++) {
        uint32_t word = (uint32_t)ids->data[i];
        for (size_t byte = 0; byte < 4; byte++) blob[i * 4 + byte] = (uint8_t)(word >> (8 * byte));
    }
    return blob;
}

/* False without memory. stop_token_ids have no blob form. */
static bool pack_ids(msgpack_packer *packer, const tbi_field *field, tbi_outgoing *out) {
    bool can_be_blob = strcmp(field->name, "stop_token_ids") != 0;
    if (can_be_blob && field->ids.num > MAX_INLINE_IDS) {
        char name[32];
        snprintf(name, sizeof name, "%s_blob", field->name);
        tbi_pack_key(packer, name);
        msgpack_pack_uint64(packer, out->num_blobs);
        out->blobs[out->num_blobs] = blob_of(&field->ids);
        out->blob_bytes[out->num_blobs] = field->ids.num * 4;
        return out->blobs[out->num_blobs++] != NULL;
    }
    tbi_pack_key(packer, field->name);
    msgpack_pack_array(packer, field->ids.num);
    for (size_t i = 0; i < field->ids.num; i++) msgpack_pack_int32(packer, field->ids.data[i]);
    return true;
}

static bool pack_field(msgpack_packer *packer, const tbi_field *field, tbi_outgoing *out) {
    if (field->kind == TBI_IDS) return pack_ids(packer, field, out);
    tbi_pack_key(packer, field->name);
    if (field->kind == TBI_INT) {
        msgpack_pack_int64(packer, field->integer);
    } else if (field->kind == TBI_DOUBLE) {
        msgpack_pack_double(packer, field->number);
    } else if (field->kind == TBI_BOOL) {
        if (field->integer) msgpack_pack_true(packer);
        else msgpack_pack_false(packer);
    } else if (field->kind == TBI_TEXT) {
        tbi_pack_text(packer, field->texts[0].data, field->texts[0].size);
    } else if (field->kind == TBI_CHAT) {
        pack_chat(packer, field);
    } else {
        msgpack_pack_array(packer, field->num_texts);
        for (size_t i = 0; i < field->num_texts; i++)
            tbi_pack_text(packer, field->texts[i].data, field->texts[i].size);
    }
    return true;
}

static bool check_sizes(const tbi_outgoing *out, const tbi_limits *limits, tb_error *error) {
    if (out->body.size > (size_t)limits->max_body_bytes)
        return refuse(error, TB_TOO_LARGE, "", "the request is over the worker's limit for a body");
    if (out->num_blobs > (size_t)limits->max_blobs)
        return refuse(error, TB_TOO_LARGE, "", "the worker takes fewer blobs");
    for (size_t i = 0; i < out->num_blobs; i++)
        if (out->blob_bytes[i] > (size_t)limits->max_frame_bytes)
            return refuse(error, TB_TOO_LARGE, "input_ids", "the ids are over the worker's limit for a frame");
    return true;
}

/* Free `out` in either case. */
bool tbi_submit_encode(const tb_request *request, const tbi_limits *limits, tbi_outgoing *out, tb_error *error) {
    msgpack_packer packer;
    msgpack_packer_init(&packer, &out->body, msgpack_sbuffer_write);
    msgpack_pack_map(&packer, request->num_fields);
    for (size_t i = 0; i < request->num_fields; i++)
        if (!pack_field(&packer, &request->fields[i], out))
            return refuse(error, TB_NO_MEMORY, request->fields[i].name, "no memory for the ids");
    return check_sizes(out, limits, error);
}
