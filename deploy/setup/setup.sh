#!/usr/bin/env bash
# All the set-up of a Debian 12 machine for Cube. What is done and up to date is not done again.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

here=$tree/deploy/setup

# check refuses hosts where the set-up can't work, before anything is changed.
check() {
	local id='' version_id='' free
	[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "Cube needs Linux on x86-64; this is $(uname -s) on $(uname -m)"
	if [ -r /etc/os-release ]; then
		# shellcheck source=/dev/null
		id=$(. /etc/os-release && echo "${ID:-}") version_id=$(. /etc/os-release && echo "${VERSION_ID:-}")
	fi
	case $id-${version_id%%.*} in
	debian-1[2-9]) ;;
	*) fail "set-up knows Debian 12 and later; this is ${id:-unknown} ${version_id:-}. Run it on a Debian 12 machine" ;;
	esac
	command -v go >/dev/null || fail "go is not in PATH ($PATH); install Go $(sed -n 's/^go //p' "$tree/go.mod") or later"
	[ -e "$CUBE_ARTEFACTS/guest/current" ] && return
	for dir in "$CUBE_CACHE" "$CUBE_ARTEFACTS" "$(go env GOCACHE)"; do
		mkdir -p "$dir"
		# All of set-up takes 2.5 GiB, most of it in CUBE_CACHE and Go's caches.
		free=$(free_mib "$dir")
		[ "$free" -ge 3072 ] || fail "$dir has $free MiB free; set-up needs 3072. Free some space or set CUBE_CACHE, CUBE_ARTEFACTS or GOCACHE to a larger disk"
	done
}

check
lock
start=$SECONDS
[ -z "${CUBE_UPDATE:-}" ] || step "package lists" apt_get update
"$here/packages.sh"
"$here/tools.sh" run
"$here/build.sh"
"$here/qemu.sh"
"$here/guest.sh"
"$here/image.sh"
"$here/sdk.sh"
say "set-up is complete ($((SECONDS - start)) s)"
