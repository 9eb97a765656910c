#!/usr/bin/env bash
# A local cluster, a ledger under a UUID, and that ledger through every layer. Leaves nothing behind.
set -euo pipefail

bkctl=${BKCTL:-bkctl}
work=$(mktemp -d)
# Contexts and variables of the user name a cluster that the demo must not write to, not even in the audit log.
unset "${!BKCTL_@}"
export XDG_CONFIG_HOME="$work/config" XDG_DATA_HOME="$work/data" XDG_STATE_HOME="$work/state"
cleanup() {
    "$bkctl" --quiet local down --dir "$work/cluster" >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

say() { printf '\n\033[1m# %s\033[0m\n' "$*"; }
run() {
    printf '\033[32m$ %s\033[0m\n' "$*"
    "$bkctl" "${@:2}"
}

# Run bkctl on what a command of the shell prints, and keep the last line of its answer in $answer.
feed() {
    printf '\033[32m$ %s | %s\033[0m\n' "$1" "${*:2}"
    bash -c "$1" | "$bkctl" "${@:3}" 2>"$work/notes" | tee "$work/answer"
    answer=$(tail -n 1 "$work/answer")
}

say "Three bookies of our own over an embedded metadata store"
run bkctl local up --dir "$work/cluster" --bookies 3

say "A ledger under a UUID: 128 bits, no central counter"
feed 'printf "one\ntwo\nthree\n"' bkctl ledger write --uuid --output id
ledger=$answer

say "The same ledger id in two scopes: two ledgers"
feed 'echo "scope zero"' bkctl ledger write --ledger-id 1 --output id
feed 'echo "scope seven"' bkctl ledger write --ledger-scope-id 7 --ledger-id 1 --output id
run bkctl ledger read 1 --body --format utf8
run bkctl ledger read 7:1 --body --format utf8

say "Metadata"
run bkctl ledger list --all-scopes
run bkctl ledger show "$ledger"

say "Entries, from the bookies"
run bkctl ledger read "$ledger" --body --format utf8
run bkctl ledger verify "$ledger"

for first in "$work"/cluster/bookie-*; do
    if "$bkctl" journal read --conf "$first/bk_server.conf" --ledger "$ledger" --output ndjson 2>/dev/null |
        grep -q entryId; then
        break
    fi
done
conf="$first/bk_server.conf"

say "Journal of $(basename "$first")"
run bkctl journal list --conf "$conf"
run bkctl journal read --conf "$conf" --ledger "$ledger"

say "A clean stop checkpoints everything, so the entry log and the index are complete"
run bkctl local down

say "Entry log: scoped entries stand in a log of their own, formatVersion 2"
run bkctl entrylog list --conf "$conf"
run bkctl entrylog read --conf "$conf" --ledger "$ledger"
run bkctl entrylog read --conf "$conf" --ledger "$ledger" --body --limit 1 --output ndjson

say "Index: four levels of directories below the ledger directory"
run bkctl bookie files --conf "$conf" --kind index
run bkctl bookie index show --conf "$conf" "$ledger"
