/* Running jobs by id: a hash table with chains. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static size_t hash(const char *id, size_t size) {
    uint64_t value = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < size; i++) value = (value ^ (uint8_t)id[i]) * 1099511628211u;
    return (size_t)(value ^ (value >> 32));
}

static tb_job **bucket_of(const tbi_table *table, const char *id, size_t size) {
    return &table->buckets[hash(id, size) & (table->num_buckets - 1)];
}

static void link_in(tbi_table *table, tb_job *job) {
    tb_job **bucket = bucket_of(table, job->id, strlen(job->id));
    job->bucket_next = *bucket;
    *bucket = job;
}

static bool grow(tbi_table *table) {
    tbi_table grown = {NULL, table->num_buckets ? table->num_buckets * 2 : 16, table->num_jobs};
    grown.buckets = calloc(grown.num_buckets, sizeof(tb_job *));
    if (grown.buckets == NULL) return false;
    for (size_t i = 0; i < table->num_buckets; i++) {
        for (tb_job *job = table->buckets[i], *next; job != NULL; job = next) {
            next = job->bucket_next;
            link_in(&grown, job);
        }
    }
    free(table->buckets);
    *table = grown;
    return true;
}

/* The id must not be in the table. False without memory. */
bool tbi_table_put(tbi_table *table, tb_job *job) {
    if (table->num_jobs >= table->num_buckets && !grow(table)) return false;
    link_in(table, job);
    table->num_jobs++;
    return true;
}

tb_job *tbi_table_find(const tbi_table *table, const char *id, size_t size) {
    if (table->num_buckets == 0 || size > TBI_MAX_JOB_ID_BYTES) return NULL;
    for (tb_job *job = *bucket_of(table, id, size); job != NULL; job = job->bucket_next)
        if (memcmp(job->id, id, size) == 0 && job->id[size] == '\0') return job;
    return NULL;
}

/* No effect on a job that is not in it. */
void tbi_table_remove(tbi_table *table, tb_job *job) {
    if (table->num_buckets == 0) return;
    for (tb_job **at = bucket_of(table, job->id, strlen(job->id)); *at != NULL; at = &(*at)->bucket_next) {
        if (*at != job) continue;
        *at = job->bucket_next;
        job->bucket_next = NULL;
        table->num_jobs--;
        return;
    }
}
