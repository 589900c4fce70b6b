package target

import (
	"net/http"
	"net/url"
	"path"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

const (
	domain = "sandbox.localhost"
	id     = "i0123456789abcdefghij"
)

func headers(kv ...string) http.Header {
	h := http.Header{}
	for i := 0; i < len(kv); i += 2 {
		h.Add(kv[i], kv[i+1])
	}
	return h
}

func TestOf(t *testing.T) {
	routing := headers(HeaderID, id, HeaderPort, "3000")
	for _, tc := range []struct {
		host   string
		header http.Header
		port   uint16 // 0 = refused
	}{
		{host: "49983-" + id + "." + domain, port: 49983},
		{host: "49983-" + id + "." + domain + ":3002", port: 49983},
		{host: "49983-" + id + "." + domain + ".", port: 49983},
		{host: "49983-" + strings.ToUpper(id) + ".Sandbox.LOCALHOST:3002", port: 49983},
		{host: "1-" + id + "-00000000." + domain, port: 1},
		{host: "65535-" + id + "-a-b." + domain, port: 65535},
		{host: "8080-" + id + "." + domain, header: routing, port: 8080}, // the host goes first
		{host: "127.0.0.1", header: routing, port: 3000},
		{host: "127.0.0.1:3002", header: routing, port: 3000},
		{host: "localhost:3002", header: routing, port: 3000},
		{host: "LOCALHOST", header: routing, port: 3000},
		{host: "[::1]:3002", header: routing, port: 3000},
		{host: "[::1]", header: routing, port: 3000},
		{host: "sandbox." + domain, header: routing, port: 3000},
		{host: "localhost", header: headers(HeaderID, id+"-00000000", HeaderPort, "3000"), port: 3000},

		{host: ""},
		{host: "."},
		{host: ":3002", header: routing},
		{host: "localhost:x", header: routing},
		{host: "localhost:99999", header: routing},
		{host: "localhost:1:2", header: routing},
		{host: "[::1", header: routing},
		{host: "[::1]x", header: routing},
		{host: "[127.0.0.1]", header: routing},
		{host: "example.com", header: routing},
		{host: domain, header: routing},
		{host: "x." + domain, header: routing},
		{host: "evil.sandbox." + domain, header: routing},
		{host: "a.49983-" + id + "." + domain},
		{host: "49983-" + id + ".evil.com"},
		{host: "49983-" + id + "." + domain + ".evil.com"},
		{host: "49983-" + id + "x" + domain},
		{host: "0-" + id + "." + domain},
		{host: "65536-" + id + "." + domain},
		{host: "080-" + id + "." + domain},
		{host: "+80-" + id + "." + domain},
		{host: "-80-" + id + "." + domain},
		{host: "80." + domain},
		{host: "80-." + domain},
		{host: "80--x." + domain},
		{host: "80-a_b." + domain},
		{host: "80-" + id + "-a_b." + domain},
		{host: "80-" + strings.Repeat("a", 70) + "." + domain},
		{host: strings.Repeat("a.", 200) + domain},
		{host: "localhost"},
		{host: "localhost", header: headers(HeaderID, id)},
		{host: "localhost", header: headers(HeaderPort, "80")},
		{host: "localhost", header: headers(HeaderID, id, HeaderID, id, HeaderPort, "80")},
		{host: "localhost", header: headers(HeaderID, id, HeaderPort, "80", HeaderPort, "81")},
		{host: "localhost", header: headers(HeaderID, "../"+id, HeaderPort, "80")},
		{host: "localhost", header: headers(HeaderID, "I"+id, HeaderPort, "80")},
		{host: "localhost", header: headers(HeaderID, id, HeaderPort, "80 ")},
		{host: "localhost", header: headers(HeaderID, id, HeaderPort, "-1")},
		{host: "localhost", header: headers(HeaderID, "", HeaderPort, "80")},
	} {
		got, err := Of(tc.host, tc.header, domain)
		switch {
		case tc.port == 0 && !errdefs.IsInvalidArgument(err):
			t.Errorf("%q %v: %+v, %v", tc.host, tc.header, got, err)
		case tc.port != 0 && (err != nil || got != Target{id, tc.port}):
			t.Errorf("%q %v: %+v, %v", tc.host, tc.header, got, err)
		}
	}
}

func TestAPI(t *testing.T) {
	for host, want := range map[string]bool{
		"api." + domain: true, "API." + domain + ":3002": true, "api." + domain + ".": true,
		domain: false, "api": false, "api.api." + domain: false, "80-api." + domain: false, "api." + domain + ".evil.com": false, "": false,
	} {
		if API(host, domain) != want {
			t.Errorf("%q: %v", host, !want)
		}
	}
}

func TestReserved(t *testing.T) {
	for _, tc := range []struct {
		path string
		want bool
	}{
		{"/init", true}, {"//init", true}, {"/./init", true}, {"/x/../init", true}, {"/%69nit", true}, {"/init/", true},
		{"/x%2F..%2Finit", true}, {"/INIT", true}, {`/\init`, true}, {"/init/x", true}, {"init", true}, {"/upgrade", true},
		{"/fsfreeze", true}, {"/fsthaw", true}, {"/freeze", true}, {"/unfreeze", true}, {"/collapse", true},
		{"/", false}, {"/initial", false}, {"/health", false}, {"/files", false}, {"/x/init", false}, {"*", false}, {"", false},
	} {
		decoded, err := url.PathUnescape(tc.path)
		if err != nil {
			t.Fatal(err)
		}
		if got := (Target{id, 49983}).Reserved(decoded); got != tc.want {
			t.Errorf("%q: %v", tc.path, got)
		}
		if (Target{id, 8080}).Reserved(decoded) {
			t.Errorf("%q is another port's", tc.path)
		}
	}
}

func FuzzOf(f *testing.F) {
	f.Add("49983-"+id+"."+domain+":3002", "", "")
	f.Add("localhost:3002", id, "49983")
	f.Add("[::1]:3002", id+"-0", "1")
	f.Add("sandbox."+domain, "x", "65536")
	f.Fuzz(func(t *testing.T, host, byID, byPort string) {
		h := headers(HeaderID, byID, HeaderPort, byPort)
		got, err := Of(host, h, domain)
		if err != nil {
			if !errdefs.IsInvalidArgument(err) || got != (Target{}) {
				t.Fatalf("%+v, %v", got, err)
			}
			return
		}
		if got.Port == 0 || !ValidID(got.SandboxID) {
			t.Fatalf("%q, %q, %q: %+v", host, byID, byPort, got)
		}
		// Where the host isn't everybody's the headers must count for nothing.
		if without, err := Of(host, nil, domain); err == nil && without != got {
			t.Fatalf("%q: headers turn %+v into %+v", host, without, got)
		} else if name, herr := hostname(host); err != nil && (herr != nil || !Shared(name, domain)) {
			t.Fatalf("%q: headers are taken at a sandbox's host", host)
		}
	})
}

func FuzzReserved(f *testing.F) {
	f.Add("/init")
	f.Add("//x/..//init/")
	f.Fuzz(func(t *testing.T, p string) {
		mux := path.Clean("/" + p) // what a router in the sandbox may make of it
		if strings.HasPrefix(mux+"/", "/init/") && !(Target{id, 49983}).Reserved(p) {
			t.Fatalf("%q reaches %q", p, mux)
		}
	})
}
