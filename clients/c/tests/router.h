/* A ROUTER that a test scripts message by message, in the thread of the client under test. */
#ifndef TOKENBUS_TEST_ROUTER_H
#define TOKENBUS_TEST_ROUTER_H

#include <tokenbus.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    M_HELLO = 1, M_WELCOME, M_SUBMIT, M_ACCEPTED, M_REJECTED, M_TOKENS, M_DONE, M_ERROR, M_CANCEL, M_RESUME,
    M_CREDIT, M_PING, M_PONG
};

typedef struct router router;

/* What the last message said; numbers are -1 and text is "" where it said nothing. */
typedef struct heard {
    int type;
    char job[129], client[65], prompt[65];
    int64_t after, total, credit, seed, t, max_tokens, deadline_ms, num_have;
    int32_t have[16];
} heard;

/* endpoint: NULL for a new one. A second router may take the endpoint of one that was freed. */
router *router_new(const char *boot, int64_t heartbeat_ms, const char *endpoint);
void router_free(router *router);
/* Routers made from now on ask for CURVE, with this secret key (Z85); NULL: no longer. */
void router_use_curve(const char *secret_key);
const char *router_endpoint(const router *router);

/* Lets the client work until a message of the type came; HELLO and PING before it are answered, others
 * passed over. Ends the program after ten seconds. */
const heard *router_expect(router *router, tb_client *client, int type);
/* The same, but HELLO and PING stay without an answer. */
const heard *router_expect_only(router *router, tb_client *client, int type);

void router_welcome(router *router);
void router_accept(router *router, const char *job, int64_t seed);
void router_tokens(router *router, const char *job, int64_t seq, const char *text, size_t num_ids, const int32_t *ids);
void router_done(router *router, const char *job, const char *text, const char *reason, size_t num_ids,
                 const int32_t *ids, uint32_t crc_change);
/* ERROR or REJECTED; job NULL: about a message. */
void router_error(router *router, int type, const char *job, const char *code, bool retry, int64_t retry_ms);
void router_ping(router *router, int64_t t);
void router_junk(router *router);

#ifdef __cplusplus
}
#endif
#endif
