#!/usr/bin/env bash
# Makes images from Debian's packages, as OCI archives in the cache: `demo` is cube.local/debian:bookworm, `base` is
# cube.local/base:bookworm, of which the template `base` is made. Without an argument both are. `docker` and `browser` are
# base with dockerd or Chromium, for the long tests. Debian's own default mirror is used, or CUBE_DEBIAN_MIRROR.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
need_root "set-up"
lock

# What those who run the SDKs' helpers expect of a sandbox, beside Debian's minimal system with its bash, tar and util-linux.
base_packages=ca-certificates,curl,git,iproute2,ncurses-bin,nodejs,openssh-client,procps,python3,sudo,wget

# Its mounts are in a mount namespace of their own, so that nothing stays mounted however it ends.
bootstrap() {
	TMPDIR=$CUBE_CACHE/tmp SOURCE_DATE_EPOCH=1 unshare --mount mmdebstrap --mode=root --variant=minbase "$@" \
		--skip=output/dev --aptopt='Acquire::Languages "none"' --aptopt='Acquire::Retries "3"' \
		--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
		--dpkgopt='path-exclude=/usr/share/info/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
		bookworm "$CUBE_CACHE/tmp/rootfs.tar" ${CUBE_DEBIAN_MIRROR:+"$CUBE_DEBIAN_MIRROR"}
}

demo_rootfs() { bootstrap --include=python3; }

# base_rootfs [PACKAGES]: has the user that commands run as unless they name another, who may become root.
base_rootfs() {
	# shellcheck disable=SC2016 # mmdebstrap's shell expands it
	bootstrap --include="$base_packages${1:+,$1}" \
		--customize-hook='chroot "$1" useradd --create-home --shell /bin/bash --groups sudo user' \
		--customize-hook='printf "user ALL=(ALL) NOPASSWD: ALL\n" >"$1/etc/sudoers.d/user" && chmod 0440 "$1/etc/sudoers.d/user"'
}

docker_rootfs() { base_rootfs docker.io,busybox-static; }

browser_rootfs() { base_rootfs chromium,fonts-dejavu-core; }

pack() {
	mkdir -p "$CUBE_CACHE/images"
	"$tree/bin/cube-artefact" image --name "$1" --rootfs "$CUBE_CACHE/tmp/rootfs.tar" --out "$2"
	rm "$CUBE_CACHE/tmp/rootfs.tar"
}

# make KIND NAME ARCHIVE
make() {
	local key
	key=$(key "$tree"/deploy/setup/image.sh "$tree"/internal/ociarchive/ociarchive.go)
	if [ -z "${CUBE_UPDATE:-}" ] && fresh "image-$1" "$key" && [ -e "$3" ]; then return; fi
	step "Debian root file system for the $1 image" "$1_rootfs"
	"$tree/deploy/setup/build.sh" ./cmd/cube-artefact
	step "$1 image" pack "$2" "$3"
	stamp "image-$1" "$key"
}

[ $# -gt 0 ] || set -- demo base
for kind; do
	case $kind in
	demo) make demo cube.local/debian:bookworm "$CUBE_CACHE/images/debian-bookworm.tar" ;;
	base) make base cube.local/base:bookworm "$CUBE_CACHE/images/base-bookworm.tar" ;;
	docker | browser) make "$kind" "cube.local/$kind:bookworm" "$CUBE_CACHE/images/$kind-bookworm.tar" ;;
	*) fail "there is no image $kind; there are demo, base, docker and browser" ;;
	esac
done
