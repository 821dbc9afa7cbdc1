/* The calls that wait: everything a client does happens in here. */
#include <errno.h>
#include <unistd.h>
#include <zmq.h>

#include "internal.h"

#define READING_PAUSE_MS 50 /* with events waiting to be read, the network is looked at this often */

static void tick(tb_client *client) {
    int64_t now_ms = tbi_now_ms();
    tbi_session_tick(client, now_ms);
    if (now_ms - client->jobs_ticked_ms < TBI_JOBS_TICK_MS) return;
    client->jobs_ticked_ms = now_ms;
    for (tb_job *job = client->all; job != NULL; job = job->all_next)
        if (!job->is_over) tbi_job_tick(job, now_ms);
}

/* How long nothing will be due, at most limit_ms (-1: no limit). */
static int wait_ms_of(const tb_client *client, int limit_ms) {
    int64_t due_ms = tbi_session_due_ms(client);
    if (client->table.num_jobs > 0 && client->jobs_ticked_ms + TBI_JOBS_TICK_MS < due_ms)
        due_ms = client->jobs_ticked_ms + TBI_JOBS_TICK_MS;
    if (due_ms == INT64_MAX) return limit_ms;
    int64_t wait_ms = due_ms - tbi_now_ms();
    if (wait_ms < 0) wait_ms = 0;
    if (limit_ms >= 0 && wait_ms > limit_ms) wait_ms = limit_ms;
    return wait_ms < 60000 ? (int)wait_ms : 60000;
}

static short events_of(const tb_client *client) {
    bool wants_to_greet = client->state == TBI_GREETING && !client->is_hello_sent;
    return (short)(ZMQ_POLLIN | (wants_to_greet ? ZMQ_POLLOUT : 0));
}

static void drain_wake_pipe(tb_client *client) {
    char bytes[64];
    while (read(client->wake_fds[0], bytes, sizeof bytes) > 0) client->is_woken = true;
}

static void wait_for_network(tb_client *client, int timeout_ms) {
    zmq_pollitem_t items[2] = {
        {.fd = client->wake_fds[0], .events = ZMQ_POLLIN},
        {.socket = client->socket, .events = events_of(client)},
    };
    int num_items = client->socket != NULL ? 2 : 1;
    if (zmq_poll(items, num_items, timeout_ms) < 0 && errno == EINTR) client->is_woken = true;
    drain_wake_pipe(client);
}

static void pump(tb_client *client, int timeout_ms) {
    tick(client);
    wait_for_network(client, client->calls.head != NULL ? 0 : wait_ms_of(client, timeout_ms));
    tbi_session_read(client);
    tick(client);
    client->pumped_ms = tbi_now_ms();
}

static bool is_idle(const tb_client *client) {
    return client->table.num_jobs == 0 && client->calls.head == NULL;
}

size_t tb_poll(tb_client *client, int timeout_ms) {
    if (client->is_calling) return 0;
    client->is_woken = false;
    pump(client, client->ready.head != NULL ? 0 : timeout_ms);
    return tbi_queue_call(client);
}

void tb_run(tb_client *client) {
    client->is_woken = false;
    while (!client->is_calling && !client->is_woken && !is_idle(client)) {
        pump(client, TB_FOREVER);
        tbi_queue_call(client);
    }
}

static tb_next_result hand_out(tb_client *client, tbi_node *node, tb_event *event) {
    tbi_node_free(client->held);
    client->held = node;
    *event = node->event;
    return TB_NEXT_EVENT;
}

/* job: whose events; NULL for all. */
static tb_next_result next(tb_client *client, tb_job *job, int timeout_ms, tb_event *event) {
    int64_t until_ms = timeout_ms < 0 ? INT64_MAX : tbi_now_ms() + timeout_ms;
    client->is_woken = false;
    for (bool is_first = true;; is_first = false) {
        tb_job *source = job != NULL ? job : client->ready.head;
        bool has_event = source != NULL && source->first != NULL;
        int64_t now_ms = tbi_now_ms();
        if (has_event && now_ms - client->pumped_ms < READING_PAUSE_MS)
            return hand_out(client, tbi_queue_pop(source), event);
        bool is_end = job != NULL ? job->is_over : is_idle(client);
        if (!has_event && is_end) return TB_NEXT_END;
        if (!has_event && !is_first && (client->is_woken || now_ms >= until_ms)) return TB_NEXT_TIMEOUT;
        int64_t left_ms = until_ms == INT64_MAX ? -1 : until_ms - now_ms;
        if (has_event) left_ms = 0;
        pump(client, left_ms > 60000 ? 60000 : (int)left_ms);
        tbi_queue_call(client);
    }
}

tb_next_result tb_next(tb_client *client, int timeout_ms, tb_event *event) {
    return client->is_calling ? TB_NEXT_TIMEOUT : next(client, NULL, timeout_ms, event);
}

tb_next_result tb_job_next(tb_job *job, int timeout_ms, tb_event *event) {
    tb_client *client = job->client;
    return client->is_calling || job->callback != NULL ? TB_NEXT_TIMEOUT : next(client, job, timeout_ms, event);
}

int tb_fd(tb_client *client) {
    int fd = -1;
    size_t size = sizeof fd;
    if (client->socket == NULL || zmq_getsockopt(client->socket, ZMQ_FD, &fd, &size) != 0) return -1;
    return fd;
}

int tb_wait_ms(tb_client *client) {
    int ready = 0;
    size_t size = sizeof ready;
    if (client->ready.head != NULL || client->calls.head != NULL) return 0;
    /* Asking for the events also arms the fd again. */
    if (client->socket != NULL && zmq_getsockopt(client->socket, ZMQ_EVENTS, &ready, &size) == 0 &&
        (ready & events_of(client)) != 0)
        return 0;
    return wait_ms_of(client, 60000);
}

void tb_wake(tb_client *client) {
    int saved = errno;
    ssize_t written = write(client->wake_fds[1], "w", 1); /* a full pipe wakes as well */
    (void)written;
    errno = saved;
}

bool tb_is_connected(const tb_client *client) { return client->state == TBI_LIVE; }
size_t tb_num_running(const tb_client *client) { return client->table.num_jobs; }
