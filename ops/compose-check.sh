#!/usr/bin/env bash
# Tries compose.yaml on a real Docker Engine: builds, starts, sends jobs over both doors, scales to three workers, has
# Prometheus scrape them, kills one in mid-stream, stops, removes everything again. About five minutes, and a build
# before that. Of the profile `monitoring` it starts the services whose images are here or can be pulled.
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
    "${compose[@]}" --profile monitoring down -v --remove-orphans "${images[@]}" >/dev/null 2>&1 || true
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

start_monitoring() { # start_monitoring SERVICE: with the workers that are there; fails if its image cannot be had
    local image
    image=$("${compose[@]}" --profile monitoring config | sed -n "s|^ *image: \(.*/$1:.*\)|\1|p")
    if ! docker image inspect "$image" >/dev/null 2>&1 && ! docker pull --quiet "$image" >/dev/null 2>&1; then
        say "left out: $1, its image $image cannot be had"
        return 1
    fi
    "${compose[@]}" --profile monitoring up -d --no-recreate --no-deps "$1" 2>/dev/null || fail "$1 does not start"
}

prometheus() { # prometheus PATH: an answer of its API
    curl -sf "http://127.0.0.1:$TOKENBUS_PROMETHEUS_PORT/api/v1/$1"
}
scrapes() { # scrapes N: N workers are found and answer
    prometheus 'query?query=count(up%7Bjob%3D%22tokenbus%22%7D%20%3D%3D%201)' | grep -q "\"$1\"\]"
}
check_prometheus() { # check_prometheus N
    local rules wanted
    wait_for 90 "Prometheus with $1 workers" scrapes "$1"
    rules=$(prometheus rules | grep -o '"type":"alerting"' | wc -l)
    wanted=$(grep -c 'alert:' ops/monitoring/alerts.yml)
    [ "$rules" = "$wanted" ] || fail "Prometheus has $rules alerts, and not $wanted"
    ! prometheus rules | grep -q '"health":"err"' || fail "an alert cannot be evaluated"
    prometheus 'query?query=sum(tokenbus_ready)' | grep -q "\"$1\"\]" || fail "Prometheus has no metrics of $1 workers"
    say "Prometheus scrapes $1 workers and has $rules alerts"
}

check_grafana() {
    local grafana=http://127.0.0.1:$TOKENBUS_GRAFANA_PORT
    wait_for 90 "Grafana" curl -sf -o /dev/null "$grafana/api/health"
    curl -sf "$grafana/api/search?type=dash-db" | grep -q tokenbus || fail "Grafana has no dashboard"
    say "Grafana has the dashboard"
}

# ---------------------------------------------------------------- the check

for more in "" compose.gpu.yaml; do
    "${compose[@]}" ${more:+-f "$more"} config -q
done
say "compose $version: compose.yaml is valid, alone and with compose.gpu.yaml"

TOKENBUS_REDIS_PORT=$(free_ports 1)
zmq_port=$(free_ports 10)
TOKENBUS_ZMQ_PORTS=$zmq_port-$((zmq_port + 9))
TOKENBUS_PROMETHEUS_PORT=$(free_ports 1)
TOKENBUS_GRAFANA_PORT=$(free_ports 1)
export TOKENBUS_REDIS_PORT TOKENBUS_ZMQ_PORTS TOKENBUS_PROMETHEUS_PORT TOKENBUS_GRAFANA_PORT
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

"${compose[@]}" up -d --no-recreate --scale worker=3 2>/dev/null
wait_for 180 "three healthy workers" are_healthy 3
mapfile -t ports < <(workers | xargs -n 1 docker port | sed -n 's/5555.*-> 127.0.0.1://p' | sort -u)
((${#ports[@]} == 3)) || fail "three workers have the ZeroMQ ports ${ports[*]}"
for port in "${ports[@]}"; do
    text=$(tokenbus ask --zmq "tcp://127.0.0.1:$port" --raw --max-tokens 12 --temperature 0 'Once upon a time')
    [ "$text" = "$over_zmq" ] || fail "the worker at port $port gave another text: $text"
done
say "scaled to three workers, which give the same text at the ports ${ports[*]}"

if start_monitoring prometheus; then check_prometheus 3; fi
if start_monitoring grafana; then check_grafana; fi

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
