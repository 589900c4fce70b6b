#!/usr/bin/env bash
# Installs the Debian packages that building, running and testing Cube take.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
lock

packages=(
	ca-certificates
	# the store, the demo image, the guest's modules
	e2fsprogs xfsprogs mmdebstrap kmod mount util-linux
	# runc
	gcc libc6-dev libseccomp-dev pkg-config
	# tests
	iproute2 procps lsof busybox-static erofs-utils openssh-client
	# make lint, make generate
	shellcheck protobuf-compiler libprotobuf-dev
)

missing=()
installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' | sed -n 's/^installed //p')
for p in "${packages[@]}"; do
	grep -qxF "$p" <<<"$installed" || missing+=("$p")
done
[ ${#missing[@]} -gt 0 ] || exit 0

# An installation that was killed has to be finished before another one.
install() {
	with_update apt_get install -y --no-install-recommends "$@" && return
	dpkg --configure -a
	apt_get install -y --no-install-recommends "$@"
}

need_root "the installation of ${missing[*]}"
step "Debian packages" install "${missing[@]}"
