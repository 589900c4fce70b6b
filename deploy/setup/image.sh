#!/usr/bin/env bash
# Makes the demo image cube.local/debian:bookworm from Debian's packages, as an OCI archive in the cache. Debian's own
# default mirror is used, or CUBE_DEBIAN_MIRROR.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
need_root "set-up"
lock

archive=$CUBE_CACHE/images/debian-bookworm.tar
key=$(key "$tree"/deploy/setup/image.sh "$tree"/internal/ociarchive/ociarchive.go)
if [ -z "${CUBE_UPDATE:-}" ] && fresh image "$key" && [ -e "$archive" ]; then exit 0; fi

# Its mounts are in a mount namespace of their own, so that nothing stays mounted however it ends.
bootstrap() {
	TMPDIR=$CUBE_CACHE/tmp SOURCE_DATE_EPOCH=1 unshare --mount mmdebstrap --mode=root --variant=minbase --include=python3 \
		--skip=output/dev --aptopt='Acquire::Languages "none"' --aptopt='Acquire::Retries "3"' \
		--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
		--dpkgopt='path-exclude=/usr/share/info/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
		bookworm "$CUBE_CACHE/tmp/rootfs.tar" ${CUBE_DEBIAN_MIRROR:+"$CUBE_DEBIAN_MIRROR"}
}

pack() {
	mkdir -p "${archive%/*}"
	"$tree/bin/cube-artefact" image --name cube.local/debian:bookworm --rootfs "$CUBE_CACHE/tmp/rootfs.tar" --out "$archive"
	rm "$CUBE_CACHE/tmp/rootfs.tar"
}

step "Debian root file system for the demo image" bootstrap
"$tree/deploy/setup/build.sh" ./cmd/cube-artefact
step "demo image" pack
stamp image "$key"
