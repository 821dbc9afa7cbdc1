// ./example-cpp tcp://127.0.0.1:5555 "Why is the sky blue?": a chat, its tokens as they come.
#include <iostream>

#include <tokenbus.hpp>

int main(int argc, char** argv) {
    if (argc != 3) {
        std::cerr << "usage: " << argv[0] << " ENDPOINT MESSAGE\n";
        return 2;
    }
    try {
        tokenbus::Client client(argv[1]);
        auto stream = client.generate(tokenbus::Request().message("user", argv[2]).max_tokens(64));
        for (const tokenbus::Token& token : stream) std::cout << token.text << std::flush;
        std::cerr << '\n' << tb_reason_name(stream.done()->reason) << ", seed " << stream.seed() << '\n';
        return 0;
    } catch (const tokenbus::Error& error) {
        std::cerr << error.what() << '\n';
        return 1;
    }
}
