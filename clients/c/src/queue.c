/* Events that came and were not read yet: a list per job, and a list of the jobs that have some. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

tbi_node *tbi_node_new(void) {
    tbi_node *node = calloc(1, sizeof *node);
    if (node != NULL) node->event.text = "";
    return node;
}

void tbi_node_free(tbi_node *node) {
    if (node == NULL) return;
    free(node->ids.data);
    free(node->text.data);
    free(node);
}

static tbi_ready *list_of(tb_job *job) {
    return job->callback != NULL ? &job->client->calls : &job->client->ready;
}

static void ready_add(tb_job *job) {
    tbi_ready *list = list_of(job);
    if (job->is_ready) return;
    job->is_ready = true;
    job->ready_prev = list->tail;
    job->ready_next = NULL;
    if (list->tail != NULL) list->tail->ready_next = job;
    else list->head = job;
    list->tail = job;
}

static void ready_remove(tb_job *job) {
    tbi_ready *list = list_of(job);
    if (!job->is_ready) return;
    job->is_ready = false;
    if (job->ready_prev != NULL) job->ready_prev->ready_next = job->ready_next;
    else list->head = job->ready_next;
    if (job->ready_next != NULL) job->ready_next->ready_prev = job->ready_prev;
    else list->tail = job->ready_prev;
}

/* Completes the event's pointers and puts it last. */
void tbi_queue_push(tb_job *job, tbi_node *node) {
    node->next = NULL;
    node->event.job = job;
    node->event.user = job->user;
    if (job->last_node != NULL) job->last_node->next = node;
    else job->first = node;
    job->last_node = node;
    ready_add(job);
}

/* Joins the tokens to the last event while nobody has read that: what waits here stays small however
 * slowly it is read. False without memory. */
bool tbi_queue_add_tokens(tb_job *job, int64_t attempt, int64_t seq, const tbi_ids *ids, tbi_bytes text) {
    tbi_node *node = job->last_node;
    bool is_new = node == NULL || node->event.kind != TB_TOKENS || node->event.attempt != attempt;
    if (is_new) node = tbi_node_new();
    if (node == NULL) return false;
    if (!tbi_ids_append(&node->ids, ids->data, ids->num) || !tbi_text_append(&node->text, text.data, text.size)) {
        if (is_new) tbi_node_free(node);
        return false;
    }
    node->event.ids = node->ids.data;
    node->event.num_ids = node->ids.num;
    node->event.text = node->text.data;
    node->event.text_bytes = node->text.size;
    if (!is_new) return true;
    node->event.kind = TB_TOKENS;
    node->event.attempt = attempt;
    node->event.seq = seq;
    tbi_queue_push(job, node);
    return true;
}

/* The job's oldest event, or NULL; a job with more goes to the end of the line. */
tbi_node *tbi_queue_pop(tb_job *job) {
    tbi_node *node = job->first;
    if (node == NULL) return NULL;
    job->first = node->next;
    if (job->first == NULL) job->last_node = NULL;
    ready_remove(job);
    if (job->first != NULL) ready_add(job);
    return node;
}

void tbi_queue_clear(tb_job *job) {
    for (tbi_node *node = job->first, *next; node != NULL; node = next) {
        next = node->next;
        tbi_node_free(node);
    }
    job->first = job->last_node = NULL;
    ready_remove(job);
}

/* Hands every waiting event to its callback, which may free the job. */
size_t tbi_queue_call(tb_client *client) {
    size_t num_calls = 0;
    client->is_calling = true;
    for (tb_job *job = client->calls.head; job != NULL; job = client->calls.head) {
        tbi_node *node = tbi_queue_pop(job);
        job->callback(&node->event, job->user);
        tbi_node_free(node);
        num_calls++;
    }
    client->is_calling = false;
    return num_calls;
}
