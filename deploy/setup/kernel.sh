#!/usr/bin/env bash
# Builds the small guest kernel from Debian's sources and the fragments in deploy/kernel, into $CUBE_CACHE/kernel as an
# unpacked kernel package: boot/vmlinuz-RELEASE and lib/modules/RELEASE, which names what is built in, besides release and
# packages. guest.sh calls it.
# Nothing is installed on the host but what packages.sh does: flex, bison and the like are unpacked for the time of it.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
need_root "set-up"
lock

out=$CUBE_CACHE/kernel
tmp=$CUBE_CACHE/tmp/kernel
fragments=("$tree"/deploy/kernel/*.config)
# Of the sources, their objects and what they are packed in.
space=5120

# find_source: which package has the sources; stays as it is until it is asked for newer ones.
find_source() {
	local list=$CUBE_CACHE/tmp/kernel-source
	with_update resolve linux-source | grep -E '^linux-source-[0-9]' >"$list"
	mkdir -p "$CUBE_CACHE/kernel-source"
	mv "$list" "$CUBE_CACHE/kernel-source/packages"
}

# unpack_all: the sources, and the tools that the host may not have.
unpack_all() {
	local tools=$tmp/tools lib=usr/lib/x86_64-linux-gnu
	mkdir -p "$tmp"
	with_update resolve flex bison bc xz-utils libelf-dev |
		grep -E '^(flex|bison|m4|bc|xz-utils|lib(elf1|elf-dev|lzma5|readline8|tinfo6)|zlib1g(-dev)?) ' >"$tmp/tools.list"
	cat "$CUBE_CACHE/kernel-source/packages" "$tmp/tools.list" >"$tmp/list"
	with_update fetch "$tmp/list"
	unpack "$tmp/tools.list" "$tools"
	unpack "$CUBE_CACHE/kernel-source/packages" "$tmp/package"
	cat >"$tmp/env" <<-EOF
		export PATH=$tools/usr/bin:\$PATH LD_LIBRARY_PATH=$tools/$lib:$tools/lib/x86_64-linux-gnu
		export BISON_PKGDATADIR=$tools/usr/share/bison M4=$tools/usr/bin/m4
		export PKG_CONFIG_LIBDIR=$tools/$lib/pkgconfig PKG_CONFIG_SYSROOT_DIR=$tools
	EOF
	# shellcheck source=/dev/null
	. "$tmp/env"
	mkdir "$tmp/source"
	tar -C "$tmp/source" --strip-components=1 -xJf "$tmp"/package/usr/src/linux-source-*.tar.xz
	rm -r "$tmp/package"
}

# compile: what the fragments don't name is off, and what they name has to be had. The same sources, fragments and
# compiler give the same bytes.
compile() {
	local release
	# shellcheck source=/dev/null
	. "$tmp/env"
	export KBUILD_BUILD_TIMESTAMP=@0 KBUILD_BUILD_USER=cube KBUILD_BUILD_HOST=cube KBUILD_BUILD_VERSION=1
	cd "$tmp/source"
	cat "${fragments[@]}" >"$tmp/config"
	make KCONFIG_ALLCONFIG="$tmp/config" allnoconfig
	if grep ^CONFIG_ "$tmp/config" | grep -vxFf .config; then
		echo "the kernel doesn't take these settings of deploy/kernel"
		return 1
	fi
	release=$(make -s LOCALVERSION=-cube kernelrelease)
	make -j "$(nproc)" LOCALVERSION=-cube bzImage
	# What depmod and the guest's modprobe read: the names of what is built in.
	mkdir -p "$tmp/out/boot" "$tmp/out/lib/modules/$release"
	cp modules.builtin modules.builtin.modinfo "$tmp/out/lib/modules/$release/"
	depmod -b "$tmp/out" "$release"
	cp arch/x86/boot/bzImage "$tmp/out/boot/vmlinuz-$release"
	cp "$CUBE_CACHE/kernel-source/packages" "$tmp/out/packages"
	echo "$release" >"$tmp/out/release"
	rm -rf "$out"
	mv "$tmp/out" "$out"
	cd /
	rm -rf "$tmp"
}

"$tree/deploy/setup/packages.sh"
if [ -n "${CUBE_UPDATE:-}" ] || [ ! -s "$CUBE_CACHE/kernel-source/packages" ]; then
	step "guest kernel's sources" find_source
fi
key=$(key "$tree/deploy/setup/kernel.sh" "${fragments[@]}" "$CUBE_CACHE/kernel-source/packages" "$(gcc -dumpfullversion)" "$(ld -v)")
if fresh kernel "$key" && [ -e "$out/release" ]; then exit 0; fi
free=$(free_mib "$CUBE_CACHE")
[ "$free" -ge "$space" ] || fail "$CUBE_CACHE has $free MiB free; the kernel's build needs $space for a while. Free some space or set CUBE_CACHE to a larger disk"
say "  building the small guest kernel takes about 13 CPU-minutes, once"
step "guest kernel's sources and tools" unpack_all
TICK=60 step "small guest kernel" compile
stamp kernel "$key"
