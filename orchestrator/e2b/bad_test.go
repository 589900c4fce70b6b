package e2b

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// refused checks that an answer is E2B's JSON of an error.
func refused(t *testing.T, w *httptest.ResponseRecorder, status int, says string) {
	t.Helper()
	var body errorBody
	if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil || w.Header().Get("Content-Type") != "application/json" {
		t.Errorf("it isn't JSON: %d %s %v", w.Code, w.Body, err)
	}
	if w.Code != status || body.Code != status || !strings.Contains(body.Message, says) || strings.Contains(body.Message, "\n") || len(body.Message) > 400 {
		t.Errorf("it is %d %s, not %d %s", w.Code, w.Body, status, says)
	}
}

// TestBadBodies: every rule of bodies, with the field that breaks it.
func TestBadBodies(t *testing.T) {
	s, engine := newTestServer(t, nil)
	h := s.Handler()
	const box = "/sandboxes/iabc"
	long := strings.Repeat("x", 200)
	for _, tc := range []struct{ method, path, body, says string }{
		{"POST", "/v2/sandboxes", ``, "templateID: it is required"},
		{"POST", "/v2/sandboxes", `{}`, "templateID: it is required"},
		{"POST", "/v2/sandboxes", `{"templateID":7}`, "templateID: it is a number, it must be a string"},
		{"POST", "/v2/sandboxes", `{"templateID":""}`, "templateID: "},
		{"POST", "/v2/sandboxes", `{"templateID":"../etc"}`, "templateID: "},
		{"POST", "/v2/sandboxes", `{"templateID":"a/b/c"}`, "templateID: "},
		{"POST", "/v2/sandboxes", `{"templateID":"base:"}`, "templateID: "},
		{"POST", "/v2/sandboxes", `{"templateID":"base:a b"}`, "templateID: "},
		{"POST", "/v2/sandboxes", `{"templateID":"ba se"}`, "templateID: "},
		{"POST", "/v2/sandboxes", `{"templateID":"image:a/b"}`, `templateID: "image:a/b" has no registry`},
		{"POST", "/v2/sandboxes", `{"templateID":"image:docker.io/Library/x"}`, "isn't an image's full name"},
		{"POST", "/v2/sandboxes", `{"templateID":"image:docker.io/x y"}`, "isn't an image's full name"},
		{"POST", "/v2/sandboxes", `{"templateID":"image:docker.io/` + strings.Repeat("x", 400) + `"}`, "templateID: it has 416 characters"},
		{"POST", "/v2/sandboxes", `{"templateID":"` + strings.Repeat(long, 3) + `"}`, "templateID: it has 600 characters"},
		{"POST", "/v2/sandboxes", `{"templateID":"base"`, "isn't JSON"},
		{"POST", "/v2/sandboxes", `{"templateID":"base",}`, "at byte 22"},
		{"POST", "/v2/sandboxes", `{"templateID":"base"} {}`, "after top-level value"},
		{"POST", "/v2/sandboxes", `["base"]`, "it must be an object"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","templateID":"x"}`, "more than one"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","colour":"red"}`, "colour: unknown field"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"colour":"red"}}`, "network.colour: unknown field"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","timeout":0}`, "timeout: 0 is too small, it must be at least 1"},
		{"POST", "/sandboxes", `{"templateID":"base","timeout":-1}`, "timeout: -1 is too small"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","timeout":1.5}`, "timeout: "},
		{"POST", "/v2/sandboxes", `{"templateID":"base","timeout":"60"}`, "timeout: it is a string, it must be a number"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","timeout":99999999999}`, "timeout: "},
		{"POST", "/v2/sandboxes", `{"templateID":"base","autoPause":1}`, "autoPause: it is a number, it must be a boolean"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","autoPauseMemory":false}`, "autoPauseMemory: "},
		{"POST", "/v2/sandboxes", `{"templateID":"base","autoPauseMemory":false,"autoPause":true,"autoResume":{"enabled":true}}`, "autoResume.enabled can't be true"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","autoResume":true}`, "autoResume: it is a boolean, it must be an object"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","autoResume":{}}`, "autoResume.enabled: it is required"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","secure":false}`, "secure: "},
		{"POST", "/sandboxes", `{"templateID":"base","network":{"allowPublicTraffic":false}}`, securePublic},
		{"POST", "/sandboxes", `{"templateID":"base","secure":false,"network":{"allowPublicTraffic":false}}`, securePublic},
		{"POST", "/v2/sandboxes", `{"templateID":"base","metadata":[]}`, "metadata: it is an array, it must be an object"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","metadata":{"a":1}}`, `metadata["a"]: it is a number, it must be a string`},
		{"POST", "/v2/sandboxes", `{"templateID":"base","metadata":{"a":"` + strings.Repeat("x", maxMetadata) + `"}}`, "metadata: it has 65537 bytes"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","metadata":{"a\u0000b":"x"}}`, `metadata["a\x00b"]: a key can't have NUL`},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"denyOut":[` + strings.Repeat(`1,`, 100_000) + `1]}}`, "more than 65536 values"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","envVars":{"E2B_SANDBOX_ID":"x"}}`, `envVars["E2B_SANDBOX_ID"]: it is the sandbox's own, which nobody can set`},
		{"POST", "/v2/sandboxes", `{"templateID":"base","envVars":{"A":true}}`, `envVars["A"]: `},
		{"POST", "/v2/sandboxes", `{"templateID":"base","envVars":{"":"x"}}`, `envVars[""]: `},
		{"POST", "/v2/sandboxes", `{"templateID":"base","envVars":{"A=B":"x"}}`, `envVars["A=B"]: `},
		{"POST", "/v2/sandboxes", `{"templateID":"base","envVars":{"A":"x\u0000y"}}`, `envVars["A"]: `},
		{"POST", "/v2/sandboxes", `{"templateID":"base","envVars":{"A":"` + strings.Repeat("x", maxEnv-2) + `"}}`, `envVars["A"]: no process`},
		{"POST", "/v2/sandboxes", `{"templateID":"base","mcp":{"browserbase":{"apiKey":"x"}}}`, "mcp: it isn't supported here"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","iam":{"tokens":{"a":{"audience":"b","tokenType":"JWT-SVID"}}}}`, "iam: it isn't supported here"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","volumeMounts":[{"name":"vol1","path":"/mnt/d"}]}`, "volumeMounts: it isn't supported here"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"egressProxy":{"address":"1.2.3.4:1080"}}}`, "network.egressProxy: it isn't supported here"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"rules":{"example.com":[{"transform":{"headers":{"a":"b"}}}]}}}`, "network.rules: it isn't supported here"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"allowOut":"1.1.1.1"}}`, "network.allowOut: it is a string, it must be an array"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"allowOut":["1.1.1.1",null]}}`, "network.allowOut[1]: it is null"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"allowOut":["example.com"]}}`, `network.allowOut[0]: "example.com" is a domain, and those aren't supported here`},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"allowOut":["*.example.com"],"denyOut":["0.0.0.0/0"]}}`, "network.allowOut[0]: \"*.example.com\" is a domain"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"denyOut":["localhost"]}}`, "network.denyOut[0]: \"localhost\" is a domain"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"denyOut":["1.1.1.1/33"]}}`, `network.denyOut[0]: "1.1.1.1/33" isn't an IPv4 address or CIDR`},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"denyOut":["1.1.1.300"]}}`, "network.denyOut[0]: "},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"denyOut":["::/0"]}}`, "network.denyOut[0]: \"::/0\" isn't IPv4"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"denyOut":["10.1.0.0/8"]}}`, "10.0.0.0/8 would be right"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"denyOut":["` + strings.Repeat(`1.1.1.1","`, maxDestinations) + `1.1.1.1"]}}`, "network.denyOut: there are 1001 entries"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"httpsPorts":[443,65536]}}`, "network.httpsPorts[1]: 65536 is out of range"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"httpsPorts":["443"]}}`, "network.httpsPorts[0]: it is a string"},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"maskRequestHost":"a\r\nb"}}`, "network.maskRequestHost: "},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"maskRequestHost":"a/b"}}`, "network.maskRequestHost: "},
		{"POST", box + "/timeout", ``, "timeout: it is required"},
		{"POST", box + "/timeout", `{"timeout":null}`, "timeout: it is required"},
		{"POST", box + "/timeout", `{"timeout":"1"}`, "timeout: it is a string"},
		{"POST", box + "/refreshes", `{"duration":3601}`, "duration: 3601 is out of range, it must be from 0 to 3600"},
		{"POST", box + "/refreshes", `{"duration":-1}`, "duration: -1"},
		{"POST", box + "/connect", ``, "timeout: it is required"},
		{"POST", box + "/connect", `{"timeout":-1}`, "timeout: -1 is too small"},
		{"POST", "/v2" + box + "/connect", `{"memory":"no"}`, "memory: it is a string"},
		{"POST", box + "/resume", `{"timeout":0}`, "timeout: 0 is too small"},
		{"POST", box + "/resume", `{"autoPause":true}`, "autoPause: "},
		{"POST", box + "/pause", `{"memory":0}`, "memory: it is a number"},
		{"POST", box + "/pause", `{"memroy":false}`, "memroy: unknown field"},
		{"POST", box + "/fork", `{"count":0}`, "count: 0 is out of range, it must be from 1 to 100"},
		{"POST", box + "/fork", `{"count":101}`, "count: 101 is out of range"},
		{"POST", box + "/fork", `{"timeout":0}`, "timeout: 0"},
		{"POST", box + "/snapshots", `{"name":"a b"}`, "name: "},
		{"POST", box + "/snapshots", `{"name":""}`, "name: "},
		{"POST", box + "/snapshots", `{"name":"green/a"}`, "name: \"green/a\" is of another team"},
		{"PUT", box + "/network", `{"allowPublicTraffic":true}`, "allowPublicTraffic: unknown field"},
		{"PUT", box + "/network", `{"allowOut":["a.b"]}`, "allowOut[0]: "},
		{"PUT", box + "/network", `{"allow_internet_access":"yes"}`, "allow_internet_access: "},
		{"POST", box + "/rollback", `{}`, "snapshotID: it is required"},
		{"POST", box + "/rollback", `{"snapshotID":"../x"}`, "snapshotID: "},
		{"POST", box + "/init", `{}`, "envVars: it is required"},
		{"POST", box + "/init", `{"envVars":{"A=":"x"}}`, `envVars["A="]: `},
		{"POST", box + "/init", `{"envVars":{},"sandboxId":"iother"}`, "sandboxId: unknown field"},
		{"POST", "/v3/templates", ``, "name: it is required"},
		{"POST", "/v3/templates", `{"name":""}`, "name: "},
		{"POST", "/v3/templates", `{"name":"a b"}`, "name: "},
		{"POST", "/v3/templates", `{"name":"a","alias":"a"}`, "alias: it is the former word"},
		{"POST", "/v3/templates", `{"name":"` + strings.Repeat("x", 129) + `"}`, "name: "},
		{"POST", "/v3/templates", `{"name":"a","tags":"v1"}`, "tags: it is a string"},
		{"POST", "/v3/templates", `{"name":"a","cpuCount":0}`, "cpuCount: 0 is too small"},
		{"POST", "/v3/templates", `{"name":"a","memoryMB":"1"}`, "memoryMB: it is a string"},
		{"POST", "/v3/templates", `{"name":"a","minFreeDiskMb":-1}`, "minFreeDiskMb: -1 is too small"},
		{"POST", "/v3/templates", `{"name":"a","dockerfile":"FROM x"}`, "dockerfile: unknown field"},
		{"POST", "/v2/templates", `{"name":"a"}`, "alias: it is required"},
		{"POST", "/v2/templates", `{"alias":"a","tags":["b"]}`, "tags: unknown field"},
		{"POST", "/v2/templates/t/builds/b", `{"steps":{}}`, "steps: it is an object"},
		{"POST", "/v2/templates/t/builds/b", `{"steps":[{"args":[]}]}`, "steps[0].type: it is required"},
		{"POST", "/v2/templates/t/builds/b", `{"steps":[{"type":"RUN","args":[1]}]}`, "steps[0].args[0]: it is a number"},
		{"POST", "/v2/templates/t/builds/b", `{"steps":[{"type":"RUN","colour":1}]}`, "steps[0].colour: unknown field"},
		{"POST", "/v2/templates/t/builds/b", `{"steps":[{"type":"RUN","args":["x"],"force":"yes"}]}`, "steps[0].force: it is a string"},
		{"POST", "/v2/templates/t/builds/b", `{"fromImage":7}`, "fromImage: it is a number"},
		{"POST", "/v2/templates/t/builds/b", `{"fromImage":"x","fromImageRegistry":{}}`, "fromImageRegistry.type: it is required"},
		{"POST", "/v2/templates/t/builds/b", `{"fromImage":"x","fromImageRegistry":{"type":"quay"}}`, `fromImageRegistry.type: "quay" isn't one of registry, gcp`},
		{"POST", "/v2/templates/t/builds/b", `{"fromImage":"x","fromImageRegistry":{"type":"aws","awsAccessKeyId":"a","awsSecretAccessKey":"b","awsRegion":"c"}}`, `fromImageRegistry.type: "aws" isn't supported here`},
		{"POST", "/v2/templates/t/builds/b", `{"fromImage":"x","fromImageRegistry":{"type":"registry","username":"a"}}`, "fromImageRegistry.password: it is required"},
		{"POST", "/v2/templates/t/builds/b", `{"fromImage":"x","fromImageRegistry":{"type":"gcp"}}`, "fromImageRegistry.serviceAccountJson: it is required"},
		{"POST", "/v2/templates/a%20b/builds/b", `{"fromImage":"x"}`, "templateID: "},
		{"POST", "/templates/tags", `{"tags":["a"]}`, "target: it is required"},
		{"POST", "/templates/tags", `{"target":"a"}`, "tags: it is required"},
		{"POST", "/templates/tags", `{"target":"a","tags":[]}`, "tags: there are none"},
		{"POST", "/templates/tags", `{"target":"a","tags":["A b"]}`, "tags[0]: "},
		{"POST", "/templates/tags", `{"target":"a","tags":["b"` + strings.Repeat(`,"b"`, 100) + `]}`, "tags: there are 101"},
		{"DELETE", "/templates/tags", `{"tags":["a"]}`, "name: it is required"},
		{"DELETE", "/templates/tags", `{"name":"a:b","tags":["a"]}`, "name: \"a:b\" has a tag"},
		{"PATCH", "/templates/base", `{"public":"yes"}`, "public: it is a string"},
		{"GET", box, `{"x":1}`, "x: unknown field"},
		{"DELETE", box, `{"force":true}`, "force: unknown field"},
	} {
		w := ask(h, tc.method, tc.path, tc.body)
		if w.Code != 400 {
			t.Errorf("%s %s %.100s:", tc.method, tc.path, tc.body)
		}
		refused(t, w, 400, tc.says)
	}
	if engine.last != nil {
		t.Errorf("the engine was asked %+v", engine.last)
	}
	refused(t, ask(h, "POST", "/v2/sandboxes", `{"templateID":"nope"}`), 404, "template 'nope' not found")
	refused(t, ask(h, "POST", "/v2/sandboxes", strings.Repeat(" ", bodyLimit)+" "), 413, "larger than 1048576 bytes")
	if w := ask(h, "POST", "/v2/sandboxes", `{"templateID":"base"}`+strings.Repeat(" ", bodyLimit-21)); w.Code != 201 {
		t.Errorf("a body of the largest size: %d %s", w.Code, w.Body)
	}
}

// TestBadRequests: ids, queries, paths and methods.
func TestBadRequests(t *testing.T) {
	s, engine := newTestServer(t, nil)
	h := s.Handler()
	for _, tc := range []struct {
		method, target string
		status         int
		says           string
	}{
		{"GET", "/sandboxes/IABC", 400, `sandboxID: "IABC" can't be a sandbox's id`},
		{"GET", "/sandboxes/..%2F..%2Fetc", 400, "sandboxID: "},
		{"GET", "/sandboxes/%2e%2e", 400, "sandboxID: "},
		{"GET", "/sandboxes/a%00b", 400, "sandboxID: "},
		{"GET", "/sandboxes/a%0Ab", 400, "sandboxID: "},
		{"GET", "/sandboxes/-x", 400, "sandboxID: "},
		{"GET", "/sandboxes/" + strings.Repeat("a", 65), 400, "sandboxID: "},
		{"GET", "/sandboxes/" + strings.Repeat("a", 5000), 400, "sandboxID: "},
		{"DELETE", "/sandboxes/a.b", 400, "sandboxID: "},
		{"DELETE", "/templates/..%2Fx", 400, "templateID: "},
		{"DELETE", "/templates/a%3Ab%3Ac", 400, "templateID: "},
		{"GET", "/templates/aliases/a%2Fb%2Fc", 400, "alias: "},
		{"GET", "/templates/a%20b", 400, "templateID: "},
		{"GET", "/sandboxes/../teams", 404, "the API has no"},
		{"GET", "//sandboxes", 404, "the API has no"},
		{"GET", "/sandboxes/", 404, "the API has no"},
		{"GET", "/nothing", 404, "the API has no GET"},
		{"GET", "/templates/a/b", 404, "there is only /tags"},
		{"PATCH", "/sandboxes", 405, "PATCH isn't possible"},
		{"OPTIONS", "/v2/sandboxes", 405, "OPTIONS isn't possible"},
		{"TRACE", "/health", 405, "TRACE isn't possible"},
		{"POST", "/templates", 501, "POST /v3/templates"},
		{"POST", "/templates/base", 501, "POST /v3/templates"},
		{"POST", "/templates/base/builds/b", 501, "POST /v3/templates"},
		{"PUT", "/templates/base", 405, "PUT isn't possible"},
		{"GET", "/templates/base/builds/b/status?limit=101", 400, "limit: "},
		{"GET", "/templates/base/builds/b/status?logsOffset=-1", 400, "logsOffset: "},
		{"GET", "/templates/base/builds/b/status?level=fatal", 400, "level: "},
		{"GET", "/templates/a%20b/builds/b/status", 400, "templateID: "},
		{"GET", "/templates/base/builds/b/logs?direction=up", 400, "direction: "},
		{"GET", "/templates/base/builds/b/logs?source=tape", 400, "source: "},
		{"GET", "/templates/base/builds/b/logs?cursor=-1", 400, "cursor: "},
		{"GET", "/templates/a%20b/files/x", 400, "templateID: "},
		{"GET", "/volumes", 501, "volumes"},
		{"GET", "/api-keys", 501, "cube key create"},
		{"PATCH", "/v2/templates/base", 400, "public: it is required"},
		{"POST", "/access-tokens", 410, "cube key create"},
		{"DELETE", "/access-tokens/x", 501, "no access tokens"},
		{"GET", "/nodes", 501, "this machine"},
		{"POST", "/admin/teams/blue/sandboxes/kill", 501, "administrator"},
		{"GET", "/v2/sandboxes?colour=red", 400, `"colour": unknown parameter`},
		{"GET", "/v2/sandboxes?limit=0", 400, "limit: "},
		{"GET", "/v2/sandboxes?limit=101", 400, "limit: "},
		{"GET", "/v2/sandboxes?limit=1e1", 400, "limit: "},
		{"GET", "/v2/sandboxes?limit=1&limit=2", 400, "limit: it is there more than once"},
		{"GET", "/v2/sandboxes?state=dead", 400, "state: \"dead\" isn't one"},
		{"GET", "/v2/sandboxes?state=running,dead", 400, "state: "},
		{"GET", "/v2/sandboxes?order=up", 400, "order: "},
		{"GET", "/v2/sandboxes?startedAfter=yesterday", 400, "startedAfter: "},
		{"GET", "/v2/sandboxes?template=base:v1", 400, "template: \"base:v1\" has a tag"},
		{"GET", "/v2/sandboxes?template=a%20b", 400, "template: "},
		{"GET", "/v2/sandboxes?metadata=novalue", 400, "metadata: \"novalue\" isn't key=value"},
		{"GET", "/v2/sandboxes?metadata=a%3D1%26a%3D2", 400, "metadata: \"a\" is there more than once"},
		{"GET", "/v2/sandboxes?metadata=" + strings.Repeat("a%3D%26", 3000) + "a%3D", 400, "metadata: there are 3001 pairs, there can be 100"},
		{"GET", "/v2/sandboxes?nextToken=x", 400, "nextToken: it isn't one"},
		{"GET", "/v2/sandboxes?nextToken=" + strings.Repeat("A", 300), 400, "nextToken: it isn't one"},
		{"GET", "/v2/sandboxes?metadata=%zz", 400, "the query can't be read"},
		{"GET", "/v2/sandboxes?a;b", 400, "the query can't be read"},
		{"GET", "/sandboxes?state=running", 400, `"state": unknown parameter`},
		{"GET", "/snapshots?sandboxID=A", 400, "sandboxID: "},
		{"GET", "/snapshots?name=a%20b", 400, "name: "},
		{"GET", "/sandboxes/metrics", 400, "sandbox_ids: it is required"},
		{"GET", "/sandboxes/metrics?sandbox_ids=" + strings.Repeat("a,", 100) + "a", 400, "sandbox_ids: there are 101 ids"},
		{"GET", "/sandboxes/metrics?sandbox_ids=a,B", 400, "sandbox_ids: \"B\" can't be"},
		{"GET", "/sandboxes/iabc/metrics?start=5&end=4", 400, "start: it is after end"},
		{"GET", "/sandboxes/iabc/metrics?start=-1", 400, "start: "},
		{"GET", "/sandboxes/iabc/metrics?start=9999999999999", 400, "start: "},
		{"GET", "/sandboxes/iabc/logs?limit=10001", 400, "limit: "},
		{"GET", "/v2/sandboxes/iabc/logs?limit=1001", 400, "limit: "},
		{"GET", "/v2/sandboxes/iabc/logs?direction=up", 400, "direction: "},
		{"GET", "/v2/sandboxes/iabc/logs?level=fatal", 400, "level: "},
		{"GET", "/v2/sandboxes/iabc/logs?search=" + strings.Repeat("x", 257), 400, "search: it has 257 characters"},
		{"GET", "/v2/templates?teamID=green", 403, "teamID: "},
		{"POST", "/sandboxes/iabc/pause?memory=false", 400, `"memory": unknown parameter`},
	} {
		w := ask(h, tc.method, tc.target, "")
		if w.Code != tc.status {
			t.Errorf("%s %.100s:", tc.method, tc.target)
		}
		refused(t, w, tc.status, tc.says)
		if tc.status == 405 && w.Header().Get("Allow") == "" {
			t.Errorf("%s %s: there is no Allow", tc.method, tc.target)
		}
	}
	if engine.last != nil {
		t.Errorf("the engine was asked %+v", engine.last)
	}
}

// TestKeys: without a good key nothing is told and nothing done, and how to send one is said.
func TestKeys(t *testing.T) {
	s, engine := newTestServer(t, nil)
	h := s.Handler()
	for _, tc := range []struct {
		headers []string
		status  int
		says    string
	}{
		{nil, 401, "X-API-KEY: e2b_"},
		{[]string{"X-API-KEY", ""}, 401, "there is no API key"},
		{[]string{"X-API-KEY", "e2b_0"}, 401, "isn't valid: send a header X-API-KEY: e2b_"},
		{[]string{"X-API-KEY", "wrong"}, 401, "X-API-KEY: e2b_"},
		{[]string{"Authorization", "Basic " + testKey}, 401, "Bearer"},
		{[]string{"Authorization", "Bearer"}, 401, "Bearer"},
		{[]string{"Authorization", "Bearer sk_e2b_abc"}, 401, "Bearer"},
		{[]string{"X-Admin-Token", testKey}, 401, "X-API-KEY"},
		{[]string{"X-API-KEY", testKey, "X-Team-ID", "green"}, 403, `X-Team-Id: the key isn't one of team "green"`},
		{[]string{"X-API-KEY", testKey, "X-Team-ID", "blue"}, 404, ""},
		{[]string{"x-api-key", testKey}, 404, ""},
		{[]string{"Authorization", "bearer " + testKey}, 404, ""},
	} {
		for _, target := range []string{"/sandboxes/iabc", "/v2/sandboxes/iabc/logs"} {
			r := httptest.NewRequest("GET", target, nil)
			for i := 0; i < len(tc.headers); i += 2 {
				r.Header.Set(tc.headers[i], tc.headers[i+1])
			}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			says := strings.Replace(tc.says, "isn't valid", "is not valid", 1)
			refused(t, w, tc.status, says)
			if tc.status == 401 && (engine.last != nil || w.Header().Get("WWW-Authenticate") == "") {
				t.Errorf("%v: %v, the engine was asked %v", tc.headers, w.Header(), engine.last)
			}
			engine.last = nil
		}
	}
	// A body isn't read for whom has no key.
	r := httptest.NewRequest("POST", "/sandboxes", strings.NewReader(strings.Repeat("x", bodyLimit+1)))
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	refused(t, w, 401, "no API key")
	s.keys.(*fakeKeys).fails = errdefs.ErrUnavailable.WithMessage("the database isn't there")
	w = ask(h, "GET", "/sandboxes", "")
	refused(t, w, 503, "the database isn't there")
}

// TestClasses: what the engine fails with has E2B's code, and a time after which it is worth another try.
func TestClasses(t *testing.T) {
	s, engine := newTestServer(t, nil)
	h := s.Handler()
	for _, tc := range []struct {
		err    error
		status int
		retry  bool
		says   string
	}{
		{errdefs.ErrNotFound.WithMessage("it isn't there"), 404, false, "it isn't there"},
		{errdefs.ErrInvalidArgument.WithMessage("it is wrong"), 400, false, "it is wrong"},
		{errdefs.ErrAlreadyExists.WithMessage("it is there"), 409, false, "it is there"},
		{errdefs.ErrFailedPrecondition.WithMessage("it is killed"), 409, false, "it is killed"},
		{errdefs.ErrPermissionDenied.WithMessage("it is another's"), 403, false, "it is another's"},
		{errdefs.ErrResourceExhausted.WithMessage("memory: 1 GiB is short"), 429, true, "memory"},
		{errdefs.ErrUnavailable.WithMessage("containerd doesn't answer"), 503, true, "containerd"},
		{errdefs.ErrNotImplemented.WithMessage("not here"), 501, false, "not here"},
		{fmt.Errorf("it took too long: %w", context.DeadlineExceeded), 504, false, "it took too long"},
		{context.Canceled, 503, true, "being stopped"},
		{fmt.Errorf("make it: %w", errdefs.ErrNotFound.WithMessage("it isn't there")), 404, false, "make it: it isn't there"},
		{errors.New("open /var/lib/cube/secret: no such file"), 500, false, "internal error: the log of cube up has it under request my-request"},
		{errors.Join(errdefs.ErrUnavailable.WithMessage("one"), errors.New("two")), 503, true, "one; two"},
	} {
		engine.fails = tc.err
		r := httptest.NewRequest("POST", "/v2/sandboxes", strings.NewReader(`{"templateID":"base"}`))
		r.Header.Set("X-API-KEY", testKey)
		r.Header.Set("X-Request-Id", "my-request")
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		refused(t, w, tc.status, tc.says)
		n, err := strconv.Atoi(w.Header().Get("Retry-After"))
		if tc.retry != (err == nil && n > 0) {
			t.Errorf("%v: Retry-After is %q", tc.err, w.Header().Get("Retry-After"))
		}
		if w.Header().Get("X-Request-Id") != "my-request" || strings.Contains(w.Body.String(), "/var/lib") {
			t.Errorf("%v: %v %s", tc.err, w.Header(), w.Body)
		}
	}
}

// TestMethods: HEAD is GET without the body, and what is for anybody needs no key.
func TestMethods(t *testing.T) {
	s, _ := newTestServer(t, nil)
	srv := httptest.NewServer(s.Handler())
	defer srv.Close()
	for _, tc := range []struct {
		method, path string
		status       int
	}{
		{"HEAD", "/health", 200}, {"GET", "/health", 200}, {"HEAD", "/sandboxes", 401}, {"HEAD", "/nothing", 404}, {"GET", "/readyz", 503}, {"GET", "/metrics", 200},
	} {
		r, err := http.NewRequest(tc.method, srv.URL+tc.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := srv.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != tc.status {
			t.Errorf("%s %s: %s", tc.method, tc.path, resp.Status)
		}
	}
}
