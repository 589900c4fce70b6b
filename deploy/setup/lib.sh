# shellcheck shell=bash
# Common parts of the set-up scripts. Sourced, not run.
#
# CUBE_CACHE      what can be made again: tools, Debian packages, the demo image
#                 (/var/cache/cube; for other users than root a directory of their own)
# CUBE_ARTEFACTS  QEMU and the guest image, by digest                              (/var/lib/cube/artefacts)
# CUBE_UPDATE     1 = take the newest Debian packages, even if older ones are here

set -euo pipefail
umask 022
export LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive
if [ "$(id -u)" = 0 ]; then
	export CUBE_CACHE=${CUBE_CACHE:-/var/cache/cube}
else
	export CUBE_CACHE=${CUBE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cube}
fi
export CUBE_ARTEFACTS=${CUBE_ARTEFACTS:-/var/lib/cube/artefacts}
# One set of flags for all builds, so that Go's build cache serves them all.
export CGO_ENABLED=0 GOFLAGS='-trimpath -buildvcs=false'
# shellcheck disable=SC2034 # for those who source this
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

say() { printf '%s\n' "$*" >&2; }

fail() {
	say "error: $*"
	exit 1
}

# step WHAT COMMAND…: runs the command with its output in a log file. Prints how long it took, unless that is no time at
# all, and a line every now and then while it takes longer than 5 s. When it fails, exits with a line that says why; where
# the cause isn't known, the end of the log (STEP_TAIL lines) stands before it.
step() {
	local what=$1 log start=$SECONDS rc why
	shift
	mkdir -p "$CUBE_CACHE/log"
	log=$CUBE_CACHE/log/${what//[^a-zA-Z0-9.]/-}.log
	start_ticker "$what"
	set +e
	(
		set -e
		"$@"
	) >"$log" 2>&1
	rc=$?
	set -e
	stop_ticker
	if [ "$rc" -ne 0 ]; then
		why=$(cause "$log")
		[ -n "$why" ] || tail -n "${STEP_TAIL:-15}" "$log" | sed 's/^/    /' >&2
		fail "$what failed (exit $rc): ${why:-see above}. The whole log: $log"
	fi
	[ "$SECONDS" -eq "$start" ] || say "  $what: $((SECONDS - start)) s"
}

# start_ticker WHAT: says that WHAT goes on, after 5 s and then every 15 s (or TICK), until stop_ticker or the script's end.
ticker=
start_ticker() {
	tick "$1" $$ &
	ticker=$!
}

stop_ticker() {
	[ -n "$ticker" ] || return 0
	kill "$ticker" 2>/dev/null || true
	wait "$ticker" 2>/dev/null || true
	ticker=
}
trap stop_ticker EXIT

# tick WHAT PID: sleeps in read, not in a child process, which would outlive it.
tick() {
	local waited=0 interval=5 gate
	trap - EXIT
	exec {gate}<> <(:)
	while true; do
		read -rt "$interval" -u "$gate" || true
		kill -0 "$2" 2>/dev/null || return 0
		waited=$((waited + interval))
		interval=${TICK:-15}
		say "  $1 … $waited s"
	done
}

# cause LOG: what went wrong, and the way out, if that can be told.
cause() {
	local dir
	# A log on a full disk may say nothing.
	for dir in "$CUBE_CACHE" "$CUBE_ARTEFACTS"; do
		if [ -d "$dir" ] && [ "$(free_mib "$dir")" -lt 16 ]; then
			echo "the disk with $dir is full; free some space and run the same command again"
			return
		fi
	done
	if grep -qi 'no space left on device' "$1"; then
		echo "a disk is full; free some space and run the same command again"
	elif grep -qiE 'temporary failure (in name )?resolv|could not resolve|no such host|network is unreachable|connection (refused|timed out)|failed to fetch|i/o timeout' "$1"; then
		echo "a package server can't be reached; check the network (and proxy settings) and run the same command again"
	elif grep -qiE 'could not get lock|unable to (lock|acquire)' "$1"; then
		echo "another package manager is running; run the same command again when it has finished"
	elif grep -qiE 'unable to locate package|has no installation candidate' "$1"; then
		echo "a Debian package isn't to be had; check that /etc/apt has Debian's main section and run the same command again"
	fi
}

free_mib() { df --output=avail -BM "$1" | tail -n 1 | tr -dc 0-9; }

# key FILE-OR-WORD…: one word for their content.
key() {
	local a
	for a in "$@"; do
		if [ -f "$a" ]; then sha256sum <"$a"; else printf '%s\n' "$a"; fi
	done | sha256sum | cut -c1-32
}

# fresh NAME KEY and stamp NAME KEY: was NAME's step done with that key, and: it has been.
fresh() { [ "$(cat "$CUBE_CACHE/stamps/$1" 2>/dev/null)" = "$2" ]; }

stamp() {
	mkdir -p "$CUBE_CACHE/stamps"
	printf '%s\n' "$2" >"$CUBE_CACHE/stamps/.$1"
	mv "$CUBE_CACHE/stamps/.$1" "$CUBE_CACHE/stamps/$1"
}

# lock: one set-up at a time; waits for its turn. Scripts that are called by others that hold the lock go on.
lock() {
	[ -z "${CUBE_SETUP_LOCKED:-}" ] || return 0
	mkdir -p "$CUBE_CACHE" 2>/dev/null || fail "can't make $CUBE_CACHE; set CUBE_CACHE to another directory"
	exec {lock_fd}>"$CUBE_CACHE/.lock"
	if ! flock -n "$lock_fd"; then
		say "  waiting for another set-up to finish"
		flock "$lock_fd"
	fi
	export CUBE_SETUP_LOCKED=1
	rm -rf --one-file-system "$CUBE_CACHE/tmp"
	mkdir -p "$CUBE_CACHE/tmp"
}

need_root() {
	[ "$(id -u)" = 0 ] || fail "$* needs root: run the same command with sudo"
}

apt_get() {
	apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 -o Acquire::http::Timeout=60 -o APT::Sandbox::User=root -qq "$@"
}

# with_update COMMAND…: runs a command that needs apt's lists; if it fails, once more with new lists.
with_update() {
	if [ -n "$(find /var/lib/apt/lists -maxdepth 1 -name '*Packages*' -print -quit 2>/dev/null)" ]; then
		"$@" && return
	fi
	apt_get update >&2
	"$@"
}

# resolve PACKAGE…: the packages and all they depend on, as if nothing were installed: "name version architecture" lines.
resolve() {
	local out
	out=$(apt-get -s -o Dir::State::status=/dev/null -o APT::Install-Recommends=0 install "$@") || return
	sed -nE 's/^Inst ([^ ]+) \(([^ ]+) .*\[([a-z0-9]+)\].*/\1 \2 \3/p' <<<"$out" | sort
}

# fetch LIST: downloads the .deb files of a list made by resolve, as far as they aren't here.
fetch() {
	local name version arch missing=() dir
	mkdir -p "$CUBE_CACHE/debs"
	while read -r name version arch; do
		[ -f "$(deb "$name" "$version" "$arch")" ] || missing+=("$name:$arch=$version")
	done <"$1"
	[ ${#missing[@]} -gt 0 ] || return 0
	dir=$(mktemp -d -p "$CUBE_CACHE/tmp")
	(cd "$dir" && apt_get download "${missing[@]}") || return
	mv "$dir"/*.deb "$CUBE_CACHE/debs/"
}

deb() { printf '%s/debs/%s_%s_%s.deb' "$CUBE_CACHE" "$1" "${2//:/%3a}" "$3"; }

# unpack LIST DIR: unpacks the .deb files of a list into a new directory.
unpack() {
	local name version arch
	rm -rf "$2"
	mkdir -p "$2"
	while read -r name version arch; do
		dpkg-deb -x "$(deb "$name" "$version" "$arch")" "$2"
	done <"$1"
}
