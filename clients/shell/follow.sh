#!/usr/bin/env bash
# Prints a job's text as it is made; its last line, on stderr, says how the job ended. Needs bash and redis-cli.
#
#   follow.sh JOB [CURSOR]          CURSOR: id of the last entry you have seen; without it, from the beginning
#   REDIS_CLI='redis-cli -h bus'    how to reach Redis      QUEUE=default    the queue
#
# Exit code: 0 done (stop, length, cancelled, deadline), 1 the job ended in an error, 2 Redis gave none or a wrong answer.
set -euo pipefail
job=${1:?usage: follow.sh JOB [CURSOR]}
cursor=${2:-0}
stream="tokenbus:{${QUEUE:-default}}:out:$job"
read -ra redis <<<"${REDIS_CLI:-redis-cli}"

next_entry() { # One entry after the cursor, a string a line, quoted: key, id, field, value, field, value ...
    # --no-raw writes a newline inside a text as \n, so that a line is always one string.
    "${redis[@]}" --no-raw XREAD COUNT 1 BLOCK 5000 STREAMS "$stream" "$cursor"
}

unquoted() { # what redis-cli's quotes stand for
    printf '%b' "${1//\\\"/\"}"
}

while true; do
    reply=$(next_entry) || exit 2
    case $reply in
    '(nil)'*) continue ;; # nothing new yet: the job waits, or is being computed
    '(error)'* | '') printf '%s\n' "${reply:-no answer}" >&2 && exit 2 ;;
    esac
    mapfile -t strings < <(sed -E 's/^[^"]*"(.*)"$/\1/' <<<"$reply")
    cursor=${strings[1]}
    declare -A entry=()
    for ((i = 2; i + 1 < ${#strings[@]}; i += 2)); do entry[${strings[i]}]=${strings[i + 1]}; done
    unquoted "${entry[text]:-}"
    case ${entry[event]:-} in
    done)
        printf '\n%s: %s\n' "$job" "${entry[reason]}" >&2
        exit 0
        ;;
    error)
        printf '\n%s: %s: %s\n' "$job" "${entry[code]}" "$(unquoted "${entry[message]:-}")" >&2
        exit 1
        ;;
    esac
done
