#!/usr/bin/env bash
# The container's first process below tini.
#
#   all         web UI and daemon; when one of them ends, the other is stopped and its status is passed on (default)
#   webserver   the web UI alone
#   daemon      schedules, sensors and the run queue; runs, and with them vLLM, start from here
#   anything    else is run as a command, e.g. `eagle3 status --recipe kimi-k2.5-8gpu`
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

: "${DAGSTER_HOME:?has to name a folder on a mounted volume}"
: "${EAGLE3_STORAGE:?has to name a folder on a mounted volume}"

# Said here, in words, rather than in the middle of a run.
for folder in "$DAGSTER_HOME" "$EAGLE3_STORAGE" "${TMPDIR:-/tmp}"; do
    if ! mkdir -p "$folder" 2>/dev/null || [[ ! -w $folder ]]; then
        echo "entrypoint: $folder cannot be written by uid $(id -u); on the host: chown -R $(id -u) that folder" >&2
        exit 1
    fi
done
# A dagster.yaml of one's own on the volume is left as it is.
[[ -e $DAGSTER_HOME/dagster.yaml ]] || ln -sfn "$PWD/dagster.yaml" "$DAGSTER_HOME/dagster.yaml"

# 0.0.0.0 inside the container; that only the host itself reaches it is the business of `-p 127.0.0.1:3000:3000`.
webserver=(dagster-webserver -w workspace.yaml -h 0.0.0.0 -p 3000)
daemon=(dagster-daemon run -w workspace.yaml)

case ${1:-all} in
webserver) exec "${webserver[@]}" ;;
daemon) exec "${daemon[@]}" ;;
all) ;;
*) exec "$@" ;;
esac

"${webserver[@]}" &
pids=($!)
"${daemon[@]}" &
pids+=($!)

stopped=
stop() {
    stopped=yes
    kill -TERM "${pids[@]}" 2>/dev/null || true
}
trap stop TERM INT

# Either of the two ending is the end of the container: half a pipeline that looks healthy is worse.
status=0
wait -n || status=$?
if [[ -n $stopped ]]; then
    status=0
else
    echo "entrypoint: web UI or daemon ended with status $status; stopping the other" >&2
    stop
fi
wait
exit "$status"
