#!/usr/bin/env bash
# Tries compose.yaml on a real Docker Engine: builds, starts, sends jobs over both doors, scales to two workers, kills
# one in mid-stream, stops, removes everything again. About five minutes, and a build before that.
#
#   COMPOSE_CHECK_FILES="a.yaml b.yaml"   more compose files, such as one with a proxy or a mirror for the build
#   COMPOSE_CHECK_KEEP=1                  leave the images, so that the next run need not build
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
bash ops/setup.sh # the ZeroMQ client of the host
export PATH="$root/.venv/bin:$PATH"

project=tokenbuscheck$$
files=(-f compose.yaml)
for file in ${COMPOSE_CHECK_FILES:-}; do files+=(-f "$file"); done
if docker compose version >/dev/null 2>&1; then compose=(docker compose); else compose=(docker-compose); fi
version=$("${compose[@]}" version --short)
compose+=(-p "$project" "${files[@]}")
started=$SECONDS

say() { printf '%4d s  %s\n' $((SECONDS - started)) "$*"; }
fail() {
    say "FAILED: $*"
    "${compose[@]}" logs --tail 30 worker >&2 || true
    exit 1
}

clean_up() {
    local images=(--rmi local)
    [ -z "${COMPOSE_CHECK_KEEP:-}" ] || images=()
    "${compose[@]}" down -v --remove-orphans "${images[@]}" >/dev/null 2>&1 || true
    say "removed: containers, network, volumes"
}

free_ports() { # free_ports N: the first of N consecutive TCP ports that nobody listens on
    python - "$1" <<'PYTHON'
import contextlib, random, socket, sys
count = int(sys.argv[1])
while True:
    first = random.randrange(20_000, 32_000)
    with contextlib.ExitStack() as stack:
        try:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            continue
        print(first)
        break
PYTHON
}

wait_for() { # wait_for SECONDS "what" command...: until the command succeeds
    local deadline=$((SECONDS + $1)) what=$2
    shift 2
    until "$@"; do
        ((SECONDS < deadline)) || fail "$what: not within the time"
        sleep 0.5
    done
}

workers() { "${compose[@]}" ps -q worker; }
health_of() { docker inspect --format '{{.State.Health.Status}}' "$1"; }
are_healthy() { # are_healthy N: N workers, all healthy
    local ids
    mapfile -t ids < <(workers)
    ((${#ids[@]} == $1)) || return 1
    for id in "${ids[@]}"; do [ "$(health_of "$id")" = healthy ] || return 1; done
}

redis() { $REDIS_CLI "$@"; }
submit() { # submit TOKENS: a greedy job of so many tokens; prints its id
    redis XADD 'tokenbus:{default}:jobs' '*' prompt 'Once upon a time' max_tokens "$1" temperature 0 ignore_eos true
}
about() { redis HGET "tokenbus:{default}:job:$1" "$2"; }
has_tokens() { [ "$(redis XLEN "tokenbus:{default}:out:$1")" -ge 4 ]; }

# ---------------------------------------------------------------- the check

for more in "" compose.gpu.yaml; do
    "${compose[@]}" ${more:+-f "$more"} config -q
done
say "compose $version: compose.yaml is valid, alone and with compose.gpu.yaml"

TOKENBUS_REDIS_PORT=$(free_ports 1)
zmq_port=$(free_ports 10)
TOKENBUS_ZMQ_PORTS=$zmq_port-$((zmq_port + 9))
export TOKENBUS_REDIS_PORT TOKENBUS_ZMQ_PORTS
trap clean_up EXIT
"${compose[@]}" build --quiet worker >/dev/null 2>&1 || "${compose[@]}" build worker # once more, to show why
"${compose[@]}" up -d 2>/dev/null
say "built and started"
wait_for 300 "a healthy worker" are_healthy 1
first=$(workers)
image=$(docker inspect --format '{{.Image}}' "$first")
say "healthy: $(docker image inspect --format '{{.Size}}' "$image" | awk '{printf "%.2f GB", $1 / 1e9}') image," \
    "user $(docker exec "$first" id -u)"
[ "$(docker exec "$first" id -u)" != 0 ] || fail "the worker runs as root"
! docker exec "$first" pip list 2>/dev/null | grep -Eiq 'nvidia|cuda|triton' || fail "there is CUDA in the CPU image"

if command -v redis-cli >/dev/null; then
    export REDIS_CLI="redis-cli -h 127.0.0.1 -p $TOKENBUS_REDIS_PORT"
else
    export REDIS_CLI="docker exec -i $("${compose[@]}" ps -q redis) redis-cli"
fi
[ "$(redis CONFIG GET maxmemory-policy | tail -1)" = noeviction ] || fail "Redis may evict jobs"
[ "$(redis CONFIG GET appendonly | tail -1)" = yes ] || fail "Redis keeps no append-only file"
undisturbed=$(clients/shell/follow.sh "$(submit 150)" 2>/dev/null)
say "redis-cli: 150 tokens, ${undisturbed:0:50} ..."

port=$("${compose[@]}" port worker 5555 | sed 's/.*://')
over_zmq=$(tokenbus ask --zmq "tcp://127.0.0.1:$port" --raw --max-tokens 12 --temperature 0 'Once upon a time')
[ -n "$over_zmq" ] && [[ $undisturbed == "$over_zmq"* ]] || fail "ZeroMQ gave another text: $over_zmq"
say "ZeroMQ from the host, port $port: the same text"

"${compose[@]}" up -d --no-recreate --scale worker=2 2>/dev/null
wait_for 120 "two healthy workers" are_healthy 2
scraped=$(docker exec "$first" python3 -c 'if True:
    import socket, urllib.request
    found = {info[4][0] for info in socket.getaddrinfo("worker", 9464, socket.AF_INET)}
    pages = [urllib.request.urlopen(f"http://{address}:9464/metrics").read() for address in found]
    print(sum(b"tokenbus_ready 1" in page for page in pages))')
[ "$scraped" = 2 ] || fail "Prometheus would find $scraped workers under the name worker"
say "scaled to two workers, both with metrics: $(workers | xargs -n 1 docker port | sed -n 's/5555.*-> //p' | xargs)"

job=$(submit 150)
wait_for 60 "tokens" has_tokens "$job"
owner=$(about "$job" worker)
docker kill "${owner%%-*}" >/dev/null # a worker's name begins with its host's: the container's id
say "killed ${owner%%-*} in mid-stream, after $(redis XLEN "tokenbus:{default}:out:$job") entries"
text=$(clients/shell/follow.sh "$job" 2>/dev/null)
[ "$(about "$job" attempt)" = 2 ] || fail "the job was not taken over: attempt $(about "$job" attempt)"
[ "$text" = "$undisturbed" ] || fail "another text after the take-over: $text"
say "the other worker finished it: attempt 2, the same text, byte for byte"

job=$(submit 150)
wait_for 60 "tokens" has_tokens "$job"
before=$SECONDS
"${compose[@]}" stop worker 2>/dev/null
last=$(docker ps -a -q --no-trunc --filter "label=com.docker.compose.project=$project" \
    --filter 'label=com.docker.compose.service=worker' --filter exited=0)
[ -n "$last" ] || fail "no worker ended with exit code 0"
[ "$(about "$job" state)" = done ] || fail "stop did not wait for the running job: $(about "$job" state)"
say "stop: drained in $((SECONDS - before)) s, exit code 0, the running job is done"

offline=$(docker run -d --network none -v "${project}_models:/cache" "$image" serve --zmq ipc:///tmp/zmq.sock)
is_ready() { docker logs "$offline" 2>&1 | grep -q 'worker.ready'; }
wait_for 120 "a worker without a network" is_ready
docker stop -t 40 "$offline" >/dev/null
docker rm -v "$offline" >/dev/null
say "a second start needs no network: the model is in its volume"
say "passed"
