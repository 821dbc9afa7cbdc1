// The C++ wrapper against a scripted worker.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <tokenbus.hpp>

#include "router.h"

#define CHECK(condition) \
    do { \
        if (condition) break; \
        std::fprintf(stderr, "FAILED %s:%d: %s\n", __FILE__, __LINE__, #condition); \
        std::exit(1); \
    } while (0)

namespace {

using tokenbus::Request;
const std::int32_t IDS[] = {5, 6, 7};

struct Worker {
    router* handle = router_new("boot-1", 2000, nullptr);
    Worker() = default;
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;
    ~Worker() { router_free(handle); }

    void answer(tokenbus::Client& client, const char* job) {
        router_expect(handle, client.get(), M_SUBMIT);
        router_accept(handle, job, 7);
        router_tokens(handle, job, 1, "a", 1, IDS);
        router_tokens(handle, job, 2, "b", 2, IDS + 1);
        router_done(handle, job, "!", "stop", 3, IDS, 0);
    }
};

void a_stream_is_a_range_and_tells_its_end() {
    Worker worker;
    tokenbus::Client client(router_endpoint(worker.handle));
    auto stream = client.generate(Request().prompt("p").job("j").max_tokens(3).temperature(0.5).seed(7));
    worker.answer(client, "j");
    std::string text;
    std::size_t num_ids = 0;
    for (const tokenbus::Token& token : stream) {
        text += token.text;
        num_ids += token.ids.size();
    }
    CHECK(text == "ab!" && num_ids == 3 && stream.seed() == 7 && stream.job() == "j");
    CHECK(stream.done() && stream.done()->reason == TB_REASON_STOP && stream.done()->seq == 3);
    CHECK(!stream.next());
}

void a_failure_is_an_exception_once() {
    Worker worker;
    tokenbus::Client client(router_endpoint(worker.handle));
    auto stream = client.generate(Request().prompt("p").job("j"));
    router_expect(worker.handle, client.get(), M_SUBMIT);
    router_error(worker.handle, M_REJECTED, "j", "busy", true, 250);
    try {
        stream.text();
        CHECK(false);
    } catch (const tokenbus::Error& error) {
        CHECK(error.code() == TB_BUSY && error.retry() && error.retry_ms() == 250);
        CHECK(std::strcmp(error.what(), "busy: in words") == 0);
    }
    CHECK(!stream.next());
}

void a_request_that_cannot_be_sent_throws_at_once() {
    Worker worker;
    tokenbus::Client client(router_endpoint(worker.handle));
    try {
        client.generate(Request().prompt("\xff"));
        CHECK(false);
    } catch (const tokenbus::Error& error) {
        CHECK(error.code() == TB_INVALID && std::strcmp(error.field(), "prompt") == 0);
    }
    try {
        tokenbus::Client("nonsense");
        CHECK(false);
    } catch (const tokenbus::Error& error) {
        CHECK(std::strcmp(error.field(), "endpoint") == 0);
    }
}

void a_stream_dropped_early_cancels_and_may_outlive_its_client() {
    Worker worker;
    auto client = std::make_unique<tokenbus::Client>(router_endpoint(worker.handle));
    {
        auto stream = client->generate(Request().prompt("p").job("j"));
        auto moved = std::move(stream);
        router_expect(worker.handle, client->get(), M_SUBMIT);
    }
    router_expect(worker.handle, client->get(), M_CANCEL);
    auto last = client->generate(Request().prompt("p").job("k"));
    worker.answer(*client, "k");
    client.reset();
    CHECK(last.text() == "ab!");
}

void callbacks_get_every_event_and_their_exceptions_come_out_of_run() {
    Worker worker;
    tokenbus::Client client(router_endpoint(worker.handle));
    std::string text;
    auto collect = [&text](const tb_event& event) {
        if (event.kind == TB_TOKENS || event.kind == TB_DONE) text.append(event.text, event.text_bytes);
    };
    client.submit(Request().prompt("p").job("j"), collect);
    worker.answer(client, "j");
    client.run();
    CHECK(text == "ab!");
    client.submit(Request().prompt("p").job("k"), [](const tb_event& event) {
        if (event.kind == TB_DONE) throw std::runtime_error("mine");
    });
    worker.answer(client, "k");
    try {
        client.run();
        CHECK(false);
    } catch (const std::runtime_error& error) {
        CHECK(std::strcmp(error.what(), "mine") == 0);
    }
    client.submit(Request().prompt("p").job("left"), collect);  // freed with the client
}

}  // namespace

int main() {
    a_stream_is_a_range_and_tells_its_end();
    a_failure_is_an_exception_once();
    a_request_that_cannot_be_sent_throws_at_once();
    a_stream_dropped_early_cancels_and_may_outlive_its_client();
    callbacks_get_every_event_and_their_exceptions_come_out_of_run();
    std::puts("c++: 5 cases, no failures");
}
