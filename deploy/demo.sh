#!/usr/bin/env bash
# Shows a real image in a microVM, on the running stack (cube up -d).
. "$(dirname "${BASH_SOURCE[0]}")/setup/lib.sh"

image=cube.local/debian:bookworm
archive=$CUBE_CACHE/images/debian-bookworm.tar
socket=${CUBE_CONTAINERD:-/run/cube/containerd.sock}
times=()

# timed WHAT COMMAND…: shows what is run, its output, and notes the time.
timed() {
	local what=$1 start end ms word line=
	shift
	for word in "${@//$tree\//}"; do
		case $word in
		*[!a-zA-Z0-9_./:@=-]*) line+=" ${word@Q}" ;;
		*) line+=" $word" ;;
		esac
	done
	printf '\n# %s\n$%s\n' "$what" "$line"
	start=$EPOCHREALTIME
	"$@" || fail "the demo's step \"$what\" failed (exit $?)"
	end=$EPOCHREALTIME
	ms=$(((${end/[.,]/} - ${start/[.,]/}) / 1000))
	times+=("$(printf '%-58s %4d.%03d s' "$what" $((ms / 1000)) $((ms % 1000)))")
}

printf '\nHost kernel: %s\n' "$(uname -r)"
timed "image import" "$tree/bin/cube" image import "$archive"
timed "first run (boots a machine and saves it, if none is saved)" "$tree/bin/cube" run --rm $image uname -r
timed "second run (restores it)" "$tree/bin/cube" run --rm $image uname -r
timed "Python" "$tree/bin/cube" run --rm $image python3 -c \
	'import platform; print("Python", platform.python_version(), "on Linux", platform.release())'
# shellcheck disable=SC2016 # the guest's shell expands it
timed "the same by containerd's own client" "$tree/bin/ctr" -a "$socket" run --rm --runtime io.cube.v2 \
	--snapshotter cube $image "demo-$$" sh -c 'echo "hello from Linux $(uname -r)"'

timed "import of the image for E2B's sandboxes" "$tree/bin/cube" image import "$CUBE_CACHE/images/base-bookworm.tar"
timed "the template base: a machine with envd, saved and tried" "$tree/bin/cube" template build --public base cube.local/base:bookworm

printf '\n%s\n' "$(printf '%s\n' "${times[@]}")"

# E2B's own SDK, from npm.
printf '\n# What E2B'"'"'s SDK does with it: deploy/demo.mjs\n'
cp "$tree/deploy/demo.mjs" "$CUBE_CACHE/sdk/demo.mjs"
key=$("$tree/bin/cube" key create)
trap 'stop_ticker; "$tree/bin/cube" key revoke "$key" >/dev/null' EXIT
E2B_API_KEY=$key E2B_API_URL=http://127.0.0.1:3000 E2B_SANDBOX_URL=http://127.0.0.1:3002 "$CUBE_CACHE/sdk/node" "$CUBE_CACHE/sdk/demo.mjs" ||
	fail "the demo with E2B's SDK failed"

cat <<END

The stack goes on running; \`make down\` stops it. E2B's SDKs, unmodified, take
  export E2B_API_KEY=\$(bin/cube key create) E2B_API_URL=http://127.0.0.1:3000 E2B_SANDBOX_URL=http://127.0.0.1:3002
or, by host names and TLS, what docs/ingress.md says. A first sandbox of your own, and where to go next, is in README.md. Containers:
  bin/cube run --rm -it $image bash
  bin/ctr -a $socket run --rm -t --runtime io.cube.v2 --snapshotter cube $image box bash
END
