#!/usr/bin/env bash
# Runs the tests and prints the time of each suite.
#   test.sh unit     all packages but integration
#   test.sh all      unit, then every package below integration as a suite of its own, two at a time
#   test.sh long     as all, with the race detector for unit and the long form of the others, one after the other
. "$(dirname "${BASH_SOURCE[0]}")/setup/lib.sh"
cd "$tree"
module=$(go list -m)
failed=0
results=()
failures=()
log=$(mktemp -d)
trap 'stop_ticker; rm -rf "$log"' EXIT

# suites WHAT GO-TEST-ARGUMENTS…: runs tests, and notes the time of all of them, and of each of integration's suites.
suites() {
	local what=$1 start=$SECONDS line
	shift
	say "$what"
	TICK=60 start_ticker "$what"
	go test "$@" 2>&1 | tee "$log/out" || failed=1
	stop_ticker
	# Failures, with what they say, are told again at the end: between them and it are the logs of their stacks.
	mapfile -t -O "${#failures[@]}" failures < <(
		grep -E '^ *--- FAIL|^FAIL	|^panic: |^ +[a-z0-9_]+\.go:[0-9]+: ' "$log/out" | cut -c -600)
	while read -r line; do results+=("$line"); done < <(
		awk -v module="$module/" -F '\t' '
			$1 ~ /^(ok  |FAIL)$/ && NF >= 3 {
				sub(module, "", $2)
				if ($1 == "FAIL" || $2 ~ /^integration/) printf "%-40s %-6s %5d s\n", $2, $1, $3
			}' "$log/out")
	results+=("$(printf '%-47s %5d s' "$what, all" "$((SECONDS - start))")")
}

mapfile -t unit < <(go list ./... | grep -v "^$module/integration")
mapfile -t integration < <(go list -f '{{if .TestGoFiles}}{{.ImportPath}}{{end}}' ./integration/...)

case ${1:-all} in
unit)
	suites unit -timeout 10m "${unit[@]}"
	;;
all)
	suites unit -timeout 10m "${unit[@]}"
	# An emulated guest has one processor busy.
	suites integration -count=1 -p 2 -timeout 30m "${integration[@]}"
	;;
long)
	export CUBE_TEST_LONG=1
	deploy/setup/image.sh docker browser
	CGO_ENABLED=1 suites unit -race -timeout 30m "${unit[@]}"
	suites integration -count=1 -p 1 -timeout 120m "${integration[@]}"
	;;
*)
	fail "usage: test.sh unit|all|long"
	;;
esac

[ "$failed" -eq 0 ] || printf '%s\n' "" "${failures[@]:0:100}"
printf '\n%s\n' "$(printf '%s\n' "${results[@]}")"
printf '%d s in all, %s\n' "$SECONDS" "$([ "$failed" -eq 0 ] && echo 'all passed' || echo 'see above for what has failed')"
[ "$failed" -eq 0 ]
