package sandbox

import (
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/remotes/docker"
)

// TestPublic: what is the host's or its networks' is nobody's registry.
func TestPublic(t *testing.T) {
	own := []net.Addr{&net.IPNet{IP: net.IPv4(9, 9, 9, 9), Mask: net.CIDRMask(24, 32)}, &net.IPNet{IP: net.ParseIP("2620:fe::9"), Mask: net.CIDRMask(64, 128)}}
	for address, want := range map[string]bool{
		"1.1.1.1": true, "2606:4700::1111": true, "127.0.0.1": false, "::1": false, "10.0.0.1": false, "192.168.1.1": false, "169.254.169.254": false,
		"fe80::1": false, "fd00::1": false, "100.64.0.1": false, "0.0.0.0": false, "::": false, "::ffff:127.0.0.1": false, "::ffff:10.1.1.1": false, "224.0.0.1": false, "255.255.255.255": false,
		"0.1.2.3": false, "240.0.0.1": false, "198.18.0.1": false, "::127.0.0.1": false, "64:ff9b::7f00:1": false, "64:ff9b:1::a00:1": false, "2002:7f00:1::": false, "fec0::1": false,
		"9.9.9.9": false, "::ffff:9.9.9.9": false, "9.9.9.10": true, "2620:fe::9": false, "2620:fe::a": true,
	} {
		if got := public(netip.MustParseAddr(address), own); got != want {
			t.Errorf("%s: %v", address, got)
		}
	}
}

// TestOutside: a registry that a team names is not one of this host, by whatever name, but for the proxy of the host's environment.
func TestOutside(t *testing.T) {
	asked := 0
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked++ }))
	defer srv.Close()
	_, port, err := net.SplitHostPort(srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ proxy, mirror string }{{"", ""}, {srv.URL, ""}, {"", srv.Listener.Addr().String()}} {
		t.Setenv("HTTPS_PROXY", c.proxy)
		for _, host := range []string{"127.0.0.1", "localhost"} {
			asked = 0
			client := &http.Client{Transport: docker.DefaultHTTPTransport(nil)}
			client.Transport.(*http.Transport).Proxy = nil
			if err := outside(client, map[string]bool{c.mirror: true}); err != nil {
				t.Fatal(err)
			}
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+net.JoinHostPort(host, port)+"/v2/", nil)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := client.Do(req)
			if err == nil {
				resp.Body.Close()
			}
			if allowed := c.proxy+c.mirror != "" && host == "127.0.0.1"; (asked == 1) != allowed || !allowed && (err == nil || !strings.Contains(err.Error(), "describe the registry in")) {
				t.Errorf("%s with %+v: asked %d times, %v", host, c, asked, err)
			}
		}
	}
	// And so are those that pulls ask.
	t.Setenv("HTTPS_PROXY", "")
	registry := net.JoinHostPort("localhost", port)
	for _, outside := range []bool{false, true} {
		asked = 0
		hosts, err := PullOptions{Outside: outside}.Hosts(t.Context(), registry+"/a:b")(registry)
		if err != nil || len(hosts) != 1 {
			t.Fatalf("%+v, %v", hosts, err)
		}
		resp, err := hosts[0].Client.Get("http://" + registry + "/v2/")
		if err == nil {
			resp.Body.Close()
		}
		if (asked == 0) != outside {
			t.Errorf("outside %v: asked %d times, %v", outside, asked, err)
		}
	}
}

// TestMirrors: those that the host's configuration has for any registry are reached, the registry itself as ever.
func TestMirrors(t *testing.T) {
	hosts := []docker.RegistryHost{{Scheme: "https", Host: "mirror.internal"}, {Scheme: "http", Host: "10.0.0.5:5000"}, {Scheme: "https", Host: "registry-1.docker.io"}}
	got, err := mirrors(hosts, "docker.io")
	if want := []string{"10.0.0.5:5000", "mirror.internal:443"}; err != nil || !slices.Equal(slices.Sorted(maps.Keys(got)), want) {
		t.Errorf("%v, %v", got, err)
	}
	if got, err = mirrors([]docker.RegistryHost{{Scheme: "https", Host: "192.168.0.1:5000"}}, "192.168.0.1:5000"); err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
}

func TestProxies(t *testing.T) {
	env := map[string]string{"HTTP_PROXY": "http://proxy.example:3128", "https_proxy": "other.example", "HTTPS_PROXY": "https://user:secret@third.example/", "http_proxy": "fourth:8080"}
	got := slices.Sorted(maps.Keys(proxies(func(name string) string { return env[name] })))
	if want := []string{"fourth:8080", "other.example:80", "proxy.example:3128", "third.example:443"}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}
