// C++17 on top of tokenbus.h, header only: owning handles, exceptions, range-for over tokens.
//
//     tokenbus::Client client("tcp://127.0.0.1:5555");
//     auto stream = client.generate(tokenbus::Request().prompt("The sea is").max_tokens(16));
//     for (const tokenbus::Token& token : stream) std::cout << token.text << std::flush;
//
// The thread rules of tokenbus.h hold. A Client and its Streams may be destroyed in any order.
#ifndef TOKENBUS_HPP
#define TOKENBUS_HPP

#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tokenbus.h"

namespace tokenbus {

/// Everything that goes wrong: `code()`, and where it applies `field()` and `retry()`.
class Error : public std::runtime_error {
public:
    explicit Error(const tb_error& error) : std::runtime_error(words(error)), error_(error) {}

    tb_code code() const noexcept { return error_.code; }
    const char* code_name() const noexcept { return tb_code_name(error_.code); }
    const char* field() const noexcept { return error_.field; }
    bool retry() const noexcept { return error_.retry; }
    std::int64_t retry_ms() const noexcept { return error_.retry_ms; }

private:
    static std::string words(const tb_error& error) {
        std::string text = tb_code_name(error.code);
        if (error.field[0] != '\0') text += std::string(" ") + error.field;
        return text + ": " + error.message;
    }

    tb_error error_;
};

/// The fields of a job; each setter returns the request, so that they chain. Defaults are the worker's.
class Request {
public:
    Request() : handle_(tb_request_new()) {
        if (!handle_) throw std::bad_alloc();
    }

    Request& prompt(std::string_view text) { return with(tb_request_set_prompt_n, text.data(), text.size()); }
    Request& message(const std::string& role, const std::string& content) {
        return with(tb_request_add_message, role.c_str(), content.c_str());
    }
    Request& input_ids(const std::vector<std::int32_t>& ids) {
        return with(tb_request_set_input_ids, ids.data(), ids.size());
    }
    Request& max_tokens(std::int64_t n) { return with(tb_request_set_max_tokens, n); }
    Request& min_tokens(std::int64_t n) { return with(tb_request_set_min_tokens, n); }
    Request& temperature(double value) { return with(tb_request_set_temperature, value); }
    Request& top_p(double value) { return with(tb_request_set_top_p, value); }
    Request& top_k(std::int64_t value) { return with(tb_request_set_top_k, value); }
    Request& min_p(double value) { return with(tb_request_set_min_p, value); }
    Request& repetition_penalty(double value) { return with(tb_request_set_repetition_penalty, value); }
    Request& presence_penalty(double value) { return with(tb_request_set_presence_penalty, value); }
    Request& frequency_penalty(double value) { return with(tb_request_set_frequency_penalty, value); }
    Request& seed(std::int64_t value) { return with(tb_request_set_seed, value); }
    Request& stop(const std::string& text) { return with(tb_request_add_stop, text.c_str()); }
    Request& stop_token_ids(const std::vector<std::int32_t>& ids) {
        return with(tb_request_set_stop_token_ids, ids.data(), ids.size());
    }
    Request& ignore_eos(bool value = true) { return with(tb_request_set_ignore_eos, value); }
    Request& job(const std::string& id) { return with(tb_request_set_job, id.c_str()); }
    Request& priority(const std::string& word) { return with(tb_request_set_priority, word.c_str()); }
    Request& deadline_ms(std::int64_t ms) { return with(tb_request_set_deadline_ms, ms); }
    Request& tenant(const std::string& name) { return with(tb_request_set_tenant, name.c_str()); }
    Request& idempotency_key(const std::string& key) { return with(tb_request_set_idempotency_key, key.c_str()); }
    Request& model(const std::string& name) { return with(tb_request_set_model, name.c_str()); }
    Request& durable(bool value = true) { return with(tb_request_set_durable, value); }
    Request& have(const std::vector<std::int32_t>& ids) { return with(tb_request_set_have, ids.data(), ids.size()); }

    const tb_request* get() const noexcept { return handle_.get(); }

private:
    struct Free {
        void operator()(tb_request* request) const noexcept { tb_request_free(request); }
    };

    template <typename... Parameters, typename... Arguments>
    Request& with(void (*set)(tb_request*, Parameters...), Arguments... arguments) {
        set(handle_.get(), arguments...);
        return *this;
    }

    std::unique_ptr<tb_request, Free> handle_;
};

/// One TOKENS event: usually one token, more when they are read slowly.
struct Token {
    std::int64_t attempt = 0;
    std::int64_t seq = 0;  ///< of the first id
    std::vector<std::int32_t> ids;
    std::string text;
};

/// How a job ended.
struct Done {
    tb_reason reason = TB_REASON_NONE;
    std::int64_t seq = 0;  ///< of the last token
    std::uint32_t crc = 0;
    tb_usage usage = {};
};

namespace detail {
struct Close {
    void operator()(tb_client* client) const noexcept { tb_close(client); }
};

struct Shared;

/// A job that is told by callback.
struct Call {
    Shared* shared;
    std::function<void(const tb_event&)> callback;
};

/// What a Client shares with its streams; its last owner closes the connection.
struct Shared {
    std::unordered_map<const Call*, std::unique_ptr<Call>> calls;  // of jobs that run
    std::exception_ptr thrown;                                     // by a callback; thrown again by poll and run
    std::unique_ptr<tb_client, Close> client;
};
}  // namespace detail

/// The tokens of one job, to be read once. Destroying it early cancels the job.
class Stream {
public:
    Stream(std::shared_ptr<detail::Shared> shared, tb_job* job) : shared_(std::move(shared)), job_(job) {}
    Stream(Stream&& other) noexcept { *this = std::move(other); }
    Stream& operator=(Stream&& other) noexcept {
        if (this == &other) return *this;
        tb_job_free(job_);
        shared_ = std::move(other.shared_);
        job_ = std::exchange(other.job_, nullptr);
        done_ = other.done_;
        return *this;
    }
    ~Stream() { tb_job_free(job_); }

    /// The next token; none after the end. Text that was held back comes as a last Token without ids.
    /// Throws Error when the job failed.
    std::optional<Token> next() {
        tb_event event;
        while (!done_) {
            tb_next_result result = tb_job_next(job_, TB_FOREVER, &event);
            if (result == TB_NEXT_END) return std::nullopt;
            if (result == TB_NEXT_TIMEOUT) continue;  // a signal, or wake
            if (event.kind == TB_FAILED) throw Error(event.error);
            if (event.kind == TB_DONE) done_ = Done{event.reason, event.seq, event.crc, event.usage};
            if (event.kind == TB_TOKENS || event.text_bytes > 0)
                return Token{event.attempt, event.seq, std::vector<std::int32_t>(event.ids, event.ids + event.num_ids),
                             std::string(event.text, event.text_bytes)};
        }
        return std::nullopt;
    }

    /// All the text from here to the end.
    std::string text() {
        std::string all;
        while (std::optional<Token> token = next()) all += token->text;
        return all;
    }

    void cancel() { tb_cancel(job_); }
    std::string job() const { return tb_job_id(job_); }
    std::int64_t seed() const noexcept { return tb_job_seed(job_); }
    const std::optional<Done>& done() const noexcept { return done_; }  ///< set after the last token

    class iterator {
    public:
        using iterator_category = std::input_iterator_tag;
        using value_type = Token;
        using difference_type = std::ptrdiff_t;
        using pointer = const Token*;
        using reference = const Token&;

        iterator() = default;
        explicit iterator(Stream& stream) : stream_(&stream) { ++*this; }
        reference operator*() const noexcept { return *token_; }
        pointer operator->() const noexcept { return &*token_; }
        iterator& operator++() {
            token_ = stream_->next();
            return *this;
        }
        void operator++(int) { ++*this; }
        bool operator==(const iterator& other) const noexcept { return token_.has_value() == other.token_.has_value(); }
        bool operator!=(const iterator& other) const noexcept { return !(*this == other); }

    private:
        Stream* stream_ = nullptr;
        std::optional<Token> token_;
    };

    iterator begin() { return iterator(*this); }
    iterator end() noexcept { return iterator(); }

private:
    std::shared_ptr<detail::Shared> shared_;
    tb_job* job_ = nullptr;
    std::optional<Done> done_;
};

/// One connection to a worker, for any number of jobs.
class Client {
public:
    using Callback = std::function<void(const tb_event&)>;

    /// Throws Error on a bad endpoint or option. Connecting goes on while tokens are waited for.
    explicit Client(const std::string& endpoint, const tb_options& options = {}) {
        tb_error error;
        shared_ = std::make_shared<detail::Shared>();
        shared_->client.reset(tb_open(endpoint.c_str(), &options, &error));
        if (!shared_->client) throw Error(error);
    }

    /// Submits a job and streams it. Throws Error if it cannot be sent as it is.
    Stream generate(const Request& request) { return Stream(shared_, submit(request, nullptr, nullptr)); }

    /// Streams a job that was submitted elsewhere, from after a seq.
    Stream follow(const std::string& job, std::int64_t after = 0) {
        tb_error error;
        tb_job* handle = tb_follow(get(), job.c_str(), after, nullptr, nullptr, &error);
        if (handle == nullptr) throw Error(error);
        return Stream(shared_, handle);
    }

    /// Submits a job whose events go to `callback`, inside poll and run, until DONE or FAILED.
    /// Returns its id. What the callback throws ends poll or run; other events of that turn come first.
    std::string submit(const Request& request, Callback callback) {
        auto call = std::make_unique<detail::Call>(detail::Call{shared_.get(), std::move(callback)});
        detail::Call* key = call.get();
        shared_->calls.emplace(key, std::move(call));
        try {
            return tb_job_id(submit(request, &Client::on_event, key));
        } catch (...) {
            shared_->calls.erase(key);
            throw;
        }
    }

    /// See tb_poll and tb_run.
    std::size_t poll(int timeout_ms) {
        std::size_t num_calls = tb_poll(get(), timeout_ms);
        rethrow();
        return num_calls;
    }
    void run() {
        tb_run(get());
        rethrow();
    }
    void wake() noexcept { tb_wake(get()); }
    tb_client* get() const noexcept { return shared_->client.get(); }

private:
    tb_job* submit(const Request& request, tb_callback callback, void* user) {
        tb_error error;
        tb_job* job = tb_submit(get(), request.get(), callback, user, &error);
        if (job == nullptr) throw Error(error);
        return job;
    }

    // No exception may pass through the C library: the first one is kept, and ends poll or run.
    static void on_event(const tb_event* event, void* user) {
        auto* call = static_cast<detail::Call*>(user);
        detail::Shared* shared = call->shared;
        try {
            call->callback(*event);
        } catch (...) {
            if (!shared->thrown) shared->thrown = std::current_exception();
            tb_wake(shared->client.get());
        }
        if (event->kind != TB_DONE && event->kind != TB_FAILED) return;
        tb_job_free(event->job);
        shared->calls.erase(call);
    }

    void rethrow() {
        if (shared_->thrown) std::rethrow_exception(std::exchange(shared_->thrown, nullptr));
    }

    std::shared_ptr<detail::Shared> shared_;
};

}  // namespace tokenbus

#endif
