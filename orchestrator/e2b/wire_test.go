package e2b

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// ask does a request of the test's team.
func ask(h http.Handler, method, target, body string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, target, strings.NewReader(body))
	r.Header.Set("X-API-KEY", testKey)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// same compares JSON.
func same(t *testing.T, got, want string) {
	t.Helper()
	var g, w any
	if err := json.Unmarshal([]byte(got), &g); err != nil {
		t.Fatalf("%s: %v", got, err)
	}
	if err := json.Unmarshal([]byte(want), &w); err != nil {
		t.Fatalf("%s: %v", want, err)
	}
	if !reflect.DeepEqual(g, w) {
		t.Errorf("it is\n%s, not\n%s", got, want)
	}
}

// TestCapturedCreate has the bytes of creates as SDK 2.51 has been seen to send them, but for fields that are refused here.
func TestCapturedCreate(t *testing.T) {
	s, engine := newTestServer(t, nil)
	srv := httptest.NewServer(s.Handler())
	defer srv.Close()
	send := func(path, body string) (*http.Response, string) {
		conn, err := net.Dial("tcp", srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nhost: 127.0.0.1:3000\r\nconnection: keep-alive\r\nX-API-KEY: %s\r\nUser-Agent: e2b-js-sdk/2.51.0\r\nbrowser: unknown\r\nlang: js\r\nlang_version: 20.20.2\r\npackage_version: 2.51.0\r\npublisher: e2b\r\nsdk_runtime: node\r\nsystem: linux\r\nContent-Type: application/json\r\naccept: */*\r\naccept-encoding: gzip, deflate\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", path, testKey, len(body), body)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp, string(b)
	}
	no := false
	for _, tc := range []struct {
		path, body string
		want       lifecycle.Create
		answer     string
	}{
		{"/v2/sandboxes", `{"templateID":"base"}`,
			lifecycle.Create{Template: "base", Timeout: 5 * time.Minute, AutoPauseMemory: true, Secure: true},
			`{"sandboxID":"i00000000000000000001","templateID":"tplbase","alias":"base","clientID":"00000000","envdVersion":"0.6.13","envdAccessToken":"envd-secret","trafficAccessToken":null,"domain":"sandbox.localhost:3002"}`},
		{"/sandboxes", `{"templateID":"base"}`,
			lifecycle.Create{Template: "base", Timeout: 15 * time.Second, AutoPauseMemory: true},
			`{"sandboxID":"i00000000000000000002","templateID":"tplbase","alias":"base","clientID":"00000000","envdVersion":"0.6.13","trafficAccessToken":null,"domain":"sandbox.localhost:3002"}`},
		{"/v2/sandboxes", `{"templateID":"Blue/Base:v1.2","metadata":{"a":"b c"},"envVars":{"X":"1"},"timeout":2,"network":{"allowOut":["1.1.1.1"],"denyOut":["0.0.0.0/0"],"allowPublicTraffic":false,"httpsPorts":[3000]},"autoPause":true,"autoResume":{"enabled":true}}`,
			lifecycle.Create{Template: "blue/base:v1.2", Timeout: 2 * time.Second, AutoPause: true, AutoPauseMemory: true, AutoResume: true, Secure: true,
				Network:  lifecycle.Network{AllowPublicTraffic: &no, AllowOut: []string{"1.1.1.1"}, DenyOut: []string{"0.0.0.0/0"}, HTTPSPorts: []int{3000}},
				Metadata: map[string]string{"a": "b c"}, Env: map[string]string{"X": "1"}},
			`{"sandboxID":"i00000000000000000003","templateID":"tplbase","alias":"blue/base:v1.2","clientID":"00000000","envdVersion":"0.6.13","envdAccessToken":"envd-secret","trafficAccessToken":"traffic-secret","domain":"sandbox.localhost:3002"}`},
		{"/sandboxes", `{"templateID":"base","timeout":300,"secure":true,"allow_internet_access":false,"autoPause":true,"autoPauseMemory":false,"metadata":null,"mcp":null,"volumeMounts":[],"iam":{},"network":{"maskRequestHost":"localhost:${PORT}","rules":{},"egressProxy":null}}`,
			lifecycle.Create{Template: "base", Timeout: 5 * time.Minute, AutoPause: true, Secure: true, AllowInternet: &no, Network: lifecycle.Network{MaskRequestHost: "localhost:${PORT}"}},
			`{"sandboxID":"i00000000000000000004","templateID":"tplbase","alias":"base","clientID":"00000000","envdVersion":"0.6.13","envdAccessToken":"envd-secret","trafficAccessToken":null,"domain":"sandbox.localhost:3002"}`},
	} {
		resp, body := send(tc.path, tc.body)
		if resp.StatusCode != 201 || resp.Header.Get("Content-Type") != "application/json" || resp.ContentLength < 0 {
			t.Fatalf("%s: %s %v %s", tc.body, resp.Status, resp.Header, body)
		}
		same(t, body, tc.answer)
		got := engine.last.(lifecycle.Create)
		if got.Team != testTeam || got.RequestID != resp.Header.Get("X-Request-Id") || got.RequestID == "" {
			t.Errorf("%+v", got)
		}
		got.Team, got.RequestID = "", ""
		if !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%s: it is\n%+v, not\n%+v", tc.body, got, tc.want)
		}
	}
}

// TestAnswers goes through what there is, with the answers that SDKs look for: status, body and what the engine was asked.
func TestAnswers(t *testing.T) {
	s, engine := newTestServer(t, nil)
	h := s.Handler()
	ask(h, "POST", "/v2/sandboxes", `{"templateID":"base","metadata":{"a":"b"},"autoPause":true,"network":{"allowPublicTraffic":false}}`)
	const id = "i00000000000000000001"
	const listed = `"templateID":"tplbase","alias":"base","sandboxID":"i00000000000000000001","clientID":"00000000","startedAt":"2026-01-31T12:00:01Z","endAt":"2026-01-31T12:05:01Z","cpuCount":2,"memoryMB":1024,"diskSizeMB":512,"metadata":{"a":"b"},"envdVersion":"0.6.13","volumeMounts":[]`
	const sandbox = `{"sandboxID":"i00000000000000000001","templateID":"tplbase","alias":"base","clientID":"00000000","envdVersion":"0.6.13","envdAccessToken":"envd-secret","trafficAccessToken":"traffic-secret","domain":"sandbox.localhost:3002"}`
	for _, tc := range []struct {
		method, path, body string
		status             int
		answer             string // "" is none
		asked              string // "" isn't looked at
	}{
		{"GET", "/sandboxes/" + id, ``, 200, `{` + listed + `,"state":"running","envdAccessToken":"envd-secret","domain":"sandbox.localhost:3002","allowInternetAccess":null,"network":{"allowPublicTraffic":false},"lifecycle":{"autoResume":false,"onTimeout":"pause"}}`, "get blue " + id},
		{"GET", "/sandboxes/" + id + "-00000000", ``, 200, ``, "get blue " + id},
		{"GET", "/sandboxes", ``, 200, `[{` + listed + `,"state":"running"}]`, ""},
		{"GET", "/v2/sandboxes", ``, 200, `[{` + listed + `,"state":"running"}]`, ""},
		{"GET", "/v2/sandboxes?state=paused", ``, 200, `[]`, ""},
		{"POST", "/sandboxes/" + id + "/timeout", `{"timeout":60}`, 204, ``, "timeout blue " + id + " 1m0s"},
		{"POST", "/sandboxes/" + id + "/timeout", `{"timeout":-5}`, 204, ``, "timeout blue " + id + " 0s"},
		{"POST", "/sandboxes/" + id + "/timeout", `{"timeout":1000000}`, 204, ``, "timeout blue " + id + " 277h46m40s"},
		{"POST", "/sandboxes/" + id + "/timeout", `{"timeout":301}`, 204, ``, ""},
		{"POST", "/sandboxes/" + id + "/refreshes", ``, 204, ``, "refresh blue " + id + " 0s"},
		{"POST", "/sandboxes/" + id + "/refreshes", `{"duration":20}`, 204, ``, "refresh blue " + id + " 20s"},
		{"POST", "/sandboxes/" + id + "/refreshes", `{"duration":3600}`, 204, ``, "refresh blue " + id + " 1h0m0s"},
		{"POST", "/sandboxes/" + id + "/resume", `{}`, 409, `{"code":409,"message":"sandbox ` + id + ` is running already"}`, ""},
		{"POST", "/sandboxes/" + id + "/connect", `{"timeout":0}`, 200, sandbox, "connect blue " + id + " 0s -"},
		{"POST", "/v2/sandboxes/" + id + "/connect", ``, 200, sandbox, "connect blue " + id + " 5m0s -"},
		{"POST", "/sandboxes/" + id + "/pause", ``, 204, ``, "pause blue " + id + " true"},
		{"POST", "/sandboxes/" + id + "/pause", `{"memory":false}`, 409, `{"code":409,"message":"sandbox ` + id + ` is paused already"}`, "pause blue " + id + " false"},
		{"GET", "/sandboxes/" + id, ``, 200, `{` + listed + `,"state":"paused","envdAccessToken":"envd-secret","domain":null,"allowInternetAccess":null,"network":{"allowPublicTraffic":false},"lifecycle":{"autoResume":false,"onTimeout":"pause"}}`, ""},
		{"POST", "/v2/sandboxes/" + id + "/connect", `{"timeout":10,"memory":false}`, 201, sandbox, "connect blue " + id + " 10s false"},
		{"POST", "/sandboxes/" + id + "/pause", `{}`, 204, ``, ""},
		{"POST", "/sandboxes/" + id + "/resume", `{"autoPause":false}`, 201, sandbox, "resume blue " + id + " 15s -"},
		{"PUT", "/sandboxes/" + id + "/network", `{"allowOut":["10.0.0.0/8"],"allow_internet_access":false}`, 204, ``, "network blue " + id + " [10.0.0.0/8] [] false"},
		{"PUT", "/sandboxes/" + id + "/network", `{}`, 204, ``, "network blue " + id + " [] [] -"},
		{"POST", "/sandboxes/" + id + "/fork", `{"count":3,"timeout":20}`, 201, `[{"sandbox":{"sandboxID":"i00000000000000000002","templateID":"tplbase","alias":"base","clientID":"00000000","envdVersion":"0.6.13","envdAccessToken":"envd-secret","trafficAccessToken":null,"domain":"sandbox.localhost:3002"}},
			{"sandbox":{"sandboxID":"i00000000000000000003","templateID":"tplbase","alias":"base","clientID":"00000000","envdVersion":"0.6.13","envdAccessToken":"envd-secret","trafficAccessToken":null,"domain":"sandbox.localhost:3002"}},
			{"error":{"code":429,"message":"no memory is left"}}]`, "fork blue " + id + " 20s 3"},
		{"POST", "/sandboxes/" + id + "/fork", ``, 201, ``, "fork blue " + id + " 15s 1"},
		{"POST", "/sandboxes/" + id + "/snapshots", ``, 201, `{"snapshotID":"tplsnap0:default","names":[]}`, ""},
		{"POST", "/sandboxes/" + id + "/rollback", `{"snapshotID":"tplsnap0:default"}`, 204, ``, "rollback blue " + id + " tplsnap0:default"},
		{"POST", "/sandboxes/" + id + "/snapshots", `{"name":"Mine"}`, 201, `{"snapshotID":"blue/mine:default","names":["blue/mine:default"]}`, "snapshot blue " + id + " mine"},
		{"POST", "/sandboxes/" + id + "/snapshots", `{"name":"blue/mine:v1"}`, 201, ``, "snapshot blue " + id + " mine:v1"},
		{"GET", "/snapshots?limit=1&sandboxID=" + id, ``, 200, ``, ""},
		{"DELETE", "/templates/tplsnap0%3Adefault", ``, 204, ``, "delete snapshot blue tplsnap0:default"},
		{"DELETE", "/templates/blue%2Fmine:default", ``, 204, ``, "delete snapshot blue blue/mine:default"},
		{"DELETE", "/templates/tplsnap0%3Adefault", ``, 404, `{"code":404,"message":"template 'tplsnap0:default' not found"}`, ""},
		{"DELETE", "/templates/base", ``, 400, `{"code":400,"message":"sandboxes are made of it"}`, ""},
		{"GET", "/sandboxes/" + id + "/metrics?start=1&end=2", ``, 200, ``, "metrics blue " + id + " 1 2"},
		{"GET", "/sandboxes/metrics?sandbox_ids=" + id + ",inone", ``, 200, `{"sandboxes":{"` + id + `":{"timestamp":"2026-01-31T12:00:10Z","timestampUnix":1769860810,"cpuCount":2,"cpuUsedPct":12.5,"memUsed":100,"memTotal":1073741824,"memCache":0,"diskUsed":5,"diskTotal":8589934592}}}`, ""},
		{"GET", "/sandboxes/" + id + "/logs?start=1500&limit=5", ``, 200, `{"logs":[{"timestamp":"2026-01-31T12:00:00Z","line":"{\"level\":\"info\",\"logger\":\"cube\",\"message\":\"it is \\\"up\\\"\",\"pid\":\"7\"}"},{"timestamp":"2026-01-31T12:00:00Z","line":"{\"level\":\"warn\",\"logger\":\"cube\",\"message\":\"hm\"}"}],
			"logEntries":[{"timestamp":"2026-01-31T12:00:00Z","message":"it is \"up\"","level":"info","fields":{"pid":"7"}},{"timestamp":"2026-01-31T12:00:00Z","message":"hm","level":"warn","fields":{}}]}`, "logs blue " + id + " 1500 false 5"},
		{"GET", "/v2/sandboxes/" + id + "/logs?cursor=2000&direction=backward&level=warn&search=a%20b&limit=10", ``, 200, ``, "logs blue " + id + " 2000 true 10 warn a b"},
		{"GET", "/v2/sandboxes/" + id + "/logs?limit=0", ``, 200, `{"logs":[]}`, "get blue " + id},
		{"GET", "/teams", ``, 200, `[{"teamID":"blue","name":"blue","apiKey":"` + testKey + `","isDefault":true}]`, ""},
		{"GET", "/templates/aliases/name2", ``, 200, `{"templateID":"tpl2","public":false}`, ""},
		{"GET", "/templates/aliases/none", ``, 404, `{"code":404,"message":"template 'none' not found"}`, ""},
		{"GET", "/templates/tpl1/tags", ``, 200, `[{"tag":"default","buildID":"00000000-0000-4000-8000-000000000001","createdAt":"1970-01-01T00:00:00Z"}]`, ""},
		{"GET", "/templates/name1", ``, 200, `{"templateID":"tpl1","public":false,"aliases":["name1"],"names":["blue/name1"],"createdAt":"2026-01-01T00:00:00Z","updatedAt":"2026-01-01T00:00:00Z","lastSpawnedAt":null,"spawnCount":0,
			"builds":[{"buildID":"00000000-0000-4000-8000-000000000001","status":"ready","createdAt":"2026-02-01T01:00:00Z","updatedAt":"2026-02-01T01:00:00Z","finishedAt":"2026-02-01T01:00:00Z","cpuCount":2,"memoryMB":512,"diskSizeMB":1024,"envdVersion":"0.6.13"}]}`, ""},
		{"GET", "/v2/templates?limit=2&teamID=blue", ``, 200, ``, ""},
		{"DELETE", "/sandboxes/" + id, ``, 204, ``, "kill blue " + id},
		{"DELETE", "/sandboxes/" + id, ``, 404, `{"code":404,"message":"sandbox ` + id + ` not found"}`, ""},
		{"GET", "/sandboxes/" + id, ``, 404, `{"code":404,"message":"sandbox ` + id + ` not found"}`, ""},
	} {
		w := ask(h, tc.method, tc.path, tc.body)
		if w.Code != tc.status {
			t.Fatalf("%s %s %s: %d %s", tc.method, tc.path, tc.body, w.Code, w.Body)
		}
		if tc.status == 204 && (w.Body.Len() > 0 || w.Header().Get("Content-Type") != "") {
			t.Errorf("%s %s: %q", tc.method, tc.path, w.Body)
		}
		if tc.answer != "" {
			same(t, w.Body.String(), tc.answer)
		}
		if tc.asked != "" && engine.last != tc.asked {
			t.Errorf("%s %s %s: the engine was asked %q", tc.method, tc.path, tc.body, engine.last)
		}
	}
	// Another team's isn't there.
	ask(h, "POST", "/sandboxes", `{"templateID":"base"}`)
	r := httptest.NewRequest("DELETE", "/sandboxes/i00000000000000000005", nil)
	r.Header.Set("Authorization", "Bearer "+otherKey)
	w := httptest.NewRecorder()
	if h.ServeHTTP(w, r); w.Code != 404 {
		t.Errorf("another team's: %d %s", w.Code, w.Body)
	}
}

// TestEmpty: answers without a body say so, on the wire.
func TestEmpty(t *testing.T) {
	s, _ := newTestServer(t, nil)
	srv := httptest.NewServer(s.Handler())
	defer srv.Close()
	ask(s.Handler(), "POST", "/sandboxes", `{"templateID":"base"}`)
	conn, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "DELETE /sandboxes/i00000000000000000001 HTTP/1.1\r\nHost: x\r\nX-API-KEY: %s\r\nConnection: close\r\n\r\n", testKey)
	all, err := io.ReadAll(conn)
	if err != nil {
		t.Fatal(err)
	}
	head, body, _ := strings.Cut(string(all), "\r\n\r\n")
	if !strings.HasPrefix(head, "HTTP/1.1 204 ") || body != "" || strings.Contains(strings.ToLower(head), "chunked") {
		t.Errorf("%q", all)
	}
}
